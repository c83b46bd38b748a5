//! Parser of `/proc/PID/maps`.

use crate::{Pid, Stat};
use std::io;
use stillpoint_host::kernel_files;
use stillpoint_patch_format::Avma;

/// One line of `maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// First byte.
    pub start: Avma,
    /// One past the last byte.
    pub end: Avma,
    /// True if it is readable.
    pub read: bool,
    /// True if it is writable.
    pub write: bool,
    /// True if it is executable.
    pub execute: bool,
    /// True if it is shared with other mappings of the same file.
    pub shared: bool,
    /// Offset in the file in bytes.
    pub offset: u64,
    /// Device, major and minor.
    pub device: (u32, u32),
    /// Inode, 0 if there is no file.
    pub inode: u64,
    /// Path as the process's namespace sees it, or a name in brackets; without the kernel's ` (deleted)`.
    pub path: Option<String>,
    /// True if the file was deleted or replaced.
    pub deleted: bool,
}

impl Mapping {
    /// Returns true if it contains an address.
    pub fn contains(&self, at: Avma) -> bool {
        self.start <= at && at < self.end
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.end.0 - self.start.0
    }

    /// Parses the contents of `/proc/PID/maps`.
    ///
    /// # Errors
    /// The first line that has another form.
    pub fn list(text: &str) -> Result<Vec<Mapping>, String> {
        parse(text)
    }

    /// Returns false: mappings are never empty.
    pub fn is_empty(&self) -> bool {
        self.end == self.start
    }
}

/// Reads the mappings of a process that is not opened; none for a kernel thread, and for a process that has ended.
///
/// # Errors
/// The kernel denies the list, or it has an unknown form.
pub fn mappings_of(pid: Pid) -> io::Result<Vec<Mapping>> {
    let read = |path: String| match kernel_files::bytes(path) {
        Ok(bytes) => parse(&String::from_utf8_lossy(&bytes)).map_err(io::Error::other),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(Vec::new()),
        Err(error) => Err(error),
    };
    let mappings = read(format!("/proc/{pid}/maps"))?;
    if !mappings.is_empty() || Stat::of(pid).is_none_or(|stat| stat.threads < 2) {
        return Ok(mappings);
    }
    // the leader has ended, and other threads continue
    for task in kernel_files::names(format!("/proc/{pid}/task")) {
        let mappings = read(format!("/proc/{pid}/task/{}/maps", task.to_string_lossy()))?;
        if !mappings.is_empty() {
            return Ok(mappings);
        }
    }
    Ok(Vec::new())
}

/// Parses the whole file; returns the first bad line as the error.
pub(crate) fn parse(text: &str) -> Result<Vec<Mapping>, String> {
    text.lines().map(|line| parse_line(line).ok_or_else(|| format!("line `{line}`"))).collect()
}

fn parse_line(line: &str) -> Option<Mapping> {
    let hex = |s: &str| u64::from_str_radix(s, 16).ok();
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let (permissions, rest) = rest.split_once(' ')?;
    let (offset, rest) = rest.split_once(' ')?;
    let (device, rest) = rest.split_once(' ')?;
    let (major, minor) = device.split_once(':')?;
    let (inode, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    let raw = rest.trim_start_matches(' ');
    let inode: u64 = inode.parse().ok()?;
    // A file may really have the name "x (deleted)"; only its inode shows it, when the file is opened.
    let deleted = inode != 0 && raw.ends_with(" (deleted)");
    let path = if deleted { &raw[..raw.len() - " (deleted)".len()] } else { raw };
    let (start, end) = (hex(start)?, hex(end)?);
    if start >= end {
        return None;
    }
    let flag = |at: usize, letter: u8| permissions.as_bytes().get(at) == Some(&letter);
    Some(Mapping {
        start: Avma(start),
        end: Avma(end),
        read: flag(0, b'r'),
        write: flag(1, b'w'),
        execute: flag(2, b'x'),
        shared: flag(3, b's'),
        offset: hex(offset)?,
        device: (hex(major)? as u32, hex(minor)? as u32),
        inode,
        path: (!path.is_empty()).then(|| unescape(path)),
        deleted,
    })
}

/// Reverses the kernel's escape: it writes a line feed in a path as `\012` and leaves all other characters unchanged.
fn unescape(path: &str) -> String {
    path.replace("\\012", "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_files_names_and_anonymous_mappings() {
        let text = "\
55d1c0a00000-55d1c0a2c000 r--p 00000000 fe:01 1835046                    /usr/bin/a b (deleted)
7ffd3b5f2000-7ffd3b613000 rw-p 00000000 00:00 0                          [stack]
7f0000000000-7f0000021000 rwxs 0002a000 00:00 0 
";
        let maps = parse(text).unwrap();
        assert_eq!(maps.len(), 3);
        assert_eq!(maps[0].path.as_deref(), Some("/usr/bin/a b"));
        assert!(maps[0].deleted && maps[0].read && !maps[0].write && !maps[0].execute && !maps[0].shared);
        assert_eq!((maps[0].device, maps[0].inode), ((0xfe, 1), 1835046));
        assert_eq!(maps[1].path.as_deref(), Some("[stack]"));
        assert!(maps[1].contains(Avma(0x7ffd3b5f2000)) && !maps[1].contains(Avma(0x7ffd3b613000)));
        assert_eq!(maps[2].path, None);
        assert!(maps[2].execute && maps[2].shared);
        assert_eq!((maps[2].offset, maps[2].len()), (0x2a000, 0x21000));
    }

    #[test]
    fn reads_a_process_that_is_not_opened() {
        let own = mappings_of(Pid(std::process::id() as i32)).unwrap();
        let here = reads_a_process_that_is_not_opened as fn() as usize as u64;
        assert!(own.iter().any(|mapping| mapping.execute && mapping.contains(Avma(here))));
        assert_eq!(mappings_of(Pid(i32::MAX)).unwrap(), []);
        assert_eq!(mappings_of(Pid(2)).unwrap_or_default(), [], "a kernel thread, or no process");
    }

    #[test]
    fn names_the_line_that_is_wrong() {
        assert_eq!(parse("what is this").unwrap_err(), "line `what is this`");
        let line = "2000-1000 r--p 00000000 00:00 0 ";
        assert_eq!(parse(line).unwrap_err(), format!("line `{line}`"));
    }
}
