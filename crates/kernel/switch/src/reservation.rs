//! A region of RAM for images: chosen, and requested in the boot loader's configuration. It exists from the next boot
//! on.

use crate::command_line;
use crate::memmap::{Ram, argument, parse_number};
use std::ops::Range;
use std::path::{Path, PathBuf};
use stillpoint_host::kernel_files::Files;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_checkpoint::{Error, ErrorContext};

/// Path of the drop-in for GRUB's configuration.
pub const DROPIN_PATH: &str = "/etc/default/grub.d/stillpoint-memory.cfg";
/// First line of our drop-in: a file without it is neither replaced nor removed.
const DROPIN_MARK: &str = "# stillpoint kernel memory: RAM for images that outlive kernels";
/// Limit in bytes for a drop-in.
const DROPIN_BYTES_MAX: u64 = 1 << 20;
const FIRMWARE_MEMMAP: &str = "/sys/firmware/memmap";

/// Request for a region.
#[derive(Debug, Clone)]
pub struct ReservationRequest {
    /// Size, as a kernel's parameter has it: `4G`.
    pub size: String,
    /// Path of GRUB's drop-in, if it is to be written.
    pub write: Option<PathBuf>,
}

/// Result of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    /// The kernel's parameter.
    pub argument: String,
    /// First address of the region.
    pub start: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Text of the drop-in, whether it is written or not.
    pub text: String,
}

/// Chooses an aligned range, and writes the drop-in if that is requested.
///
/// # Errors
/// The size is not valid, there is no free range, or the drop-in exists already or cannot be written.
pub fn reserve(wanted: &ReservationRequest) -> Result<Reservation, Error> {
    let bytes = parse_number(&wanted.size)
        .ok_or_else(|| Error::refused(format!("{} is not a size; an example is 4G", wanted.size)))?;
    let range =
        ram()?.choose(bytes, &firmware(&Files::of_kernel()), &command_line::running()?).map_err(Error::refused)?;
    let argument = argument(&range);
    let text = dropin(&argument);
    if let Some(path) = &wanted.write {
        write(path, &text)?;
    }
    Ok(Reservation { argument, start: range.start, bytes, text })
}

/// Returns the regions that this kernel has, by first address and length.
///
/// # Errors
/// The kernel does not show its map of memory to this user.
pub fn regions() -> Result<Vec<(u64, u64)>, Error> {
    ram().map(|ram| ram.regions.iter().map(|range| (range.start, range.end - range.start)).collect())
}

fn ram() -> Result<Ram, Error> {
    let path = "/proc/iomem";
    Ram::parse(&Files::of_kernel().text(path).at("read", path)?).map_err(Error::refused)
}

/// Returns the RAM that the firmware reports: other memory is not safe for data, even if a command line makes it RAM.
fn firmware(files: &Files) -> Vec<Range<u64>> {
    let entry = |entry: PathBuf| {
        let value = |name: &str| files.value(entry.join(name));
        let (start, end) = (parse_number(&value("start"))?, parse_number(&value("end"))?);
        (value("type") == "System RAM").then_some(start..end.checked_add(1)?)
    };
    files.names(FIRMWARE_MEMMAP).into_iter().filter_map(|name| entry(Path::new(FIRMWARE_MEMMAP).join(name))).collect()
}

/// Returns the drop-in. A shell reads it, and GRUB reads the result: neither interprets a `!` between double quotes.
fn dropin(argument: &str) -> String {
    format!("{DROPIN_MARK}\nGRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX {argument}\"\n")
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    if !dir.parent().is_some_and(Path::is_dir) || !dir.parent().is_some_and(|above| above.join("grub").exists()) {
        let text = format!(
            "{} does not exist: without GRUB, add the argument to the kernel command line by hand",
            dir.display()
        );
        return Err(Error::refused(text));
    }
    Directory::make_public(dir)?;
    let (directory, name) = Directory::of_file(path)?;
    if directory.write_new(name, text.as_bytes())? {
        return Ok(());
    }
    Err(Error::refused(format!("{} already exists: --remove removes it", path.display())))
}

/// Removes the drop-in; returns false if there is none.
///
/// # Errors
/// The file is not a drop-in of stillpoint, or cannot be removed.
pub fn remove_dropin(path: &Path) -> Result<bool, Error> {
    let read = Directory::of_file(path)
        .and_then(|(directory, name)| Ok((directory.read(name, DROPIN_BYTES_MAX)?, directory, name)));
    match read {
        Ok((text, directory, name)) if text.starts_with(DROPIN_MARK.as_bytes()) => {
            Ok(directory.remove(name).map(|()| true)?)
        }
        Ok(_) => Err(Error::refused(format!("stillpoint did not create {}", path.display()))),
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_drop_in_is_written_once_and_only_ours_is_removed() {
        let etc = tempfile::tempdir().unwrap();
        let path = etc.path().join("grub.d/stillpoint-memory.cfg");
        let text = dropin("memmap=2G!0x100000000");
        assert!(write(&path, &text).unwrap_err().to_string().contains("without GRUB"));
        fs::write(etc.path().join("grub"), "GRUB_CMDLINE_LINUX=\"quiet\"\n").unwrap();
        write(&path, &text).unwrap();
        assert!(write(&path, &text).unwrap_err().to_string().contains("already exists"));
        // in the way update-grub reads it
        let script = format!(". {0}/grub; . {0}/grub.d/*.cfg; printf %s \"$GRUB_CMDLINE_LINUX\"", etc.path().display());
        let said = std::process::Command::new("sh").args(["-c", &script]).output().unwrap().stdout;
        assert_eq!(String::from_utf8(said).unwrap(), "quiet memmap=2G!0x100000000");
        assert_eq!((remove_dropin(&path).unwrap(), remove_dropin(&path).unwrap()), (true, false));
        fs::write(&path, "GRUB_TIMEOUT=1\n").unwrap();
        assert!(remove_dropin(&path).unwrap_err().is_refusal());
    }

    #[test]
    fn the_firmware_s_list_is_read() {
        let dir = tempfile::tempdir().unwrap();
        for (number, start, end, kind) in [(0, "0x0", "0x9fbff", "System RAM"), (1, "0xf0000", "0xfffff", "Reserved")] {
            let entry = dir.path().join("sys/firmware/memmap").join(number.to_string());
            fs::create_dir_all(&entry).unwrap();
            for (name, text) in [("start", start), ("end", end), ("type", kind)] {
                fs::write(entry.join(name), format!("{text}\n")).unwrap();
            }
        }
        let found: Vec<_> = firmware(&Files::below(dir.path())).iter().map(|range| (range.start, range.end)).collect();
        assert_eq!(found, [(0, 0x9_fc00)]);
        assert!(firmware(&Files::below(&dir.path().join("none"))).is_empty());
    }
}
