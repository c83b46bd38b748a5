//! Passes over memory while the program runs, so that little is left to write while it is stopped.
//!
//! Where the kernel tracks changes (soft-dirty), criu makes the passes, and sends in each only what has changed.
//! Elsewhere criu cannot learn what has not changed: it sends everything in the last pass. Then this program reads the
//! passes from outside, and compares them with what criu sends, byte by byte: unchanged pages are not written again and
//! do not wait for the disk. A page that was read while it changed does no harm, as it differs from the final one.
//!
//! The obvious way there is a userfaultfd in the program that write-protects its pages and so marks the changed ones.
//! The program itself would have to open it, and criu would still send everything.

use crate::checkpoint::CheckpointOptions;
use crate::criu::read_errors;
use crate::page_server::through_page_server;
use crate::progress::now_ns;
use crate::store::{PASS_PREFIX, Store};
use crate::{Error, process_tree};
use procfs::process::{MMPermissions, MMapPath, MemoryMap, Process};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use stillpoint_base::PAGE;
use stillpoint_host::kernel_files;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::rpc::{Answer, Options, PageServer, Request, RequestType};
use stillpoint_kernel_foam::{LAZY, Object, PRESENT};

/// Bytes read at a time.
const CHUNK_BYTES: u64 = 1 << 20;
/// Entries of a page map that are read at a time: 256 MiB of memory.
const PAGEMAP_ENTRIES_PER_READ: u64 = 1 << 16;
/// Limit in bytes: longer mappings are mostly reserved, and their page map alone would take long. The last pass
/// includes them.
const MAPPING_BYTES_MAX: u64 = 64 << 30;
/// Bytes left at which passes end: they are written in some milliseconds.
const LAST_PASS_BYTES_MAX: u64 = 8 << 20;

/// One pass while the program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Bytes that were written because no earlier pass had stored the same.
    pub written: u64,
    /// Duration in nanoseconds.
    pub duration_ns: u64,
}

/// Returns true if one more pass makes the rest smaller, and `most` allows it.
pub(crate) fn is_due(passes: &[Pass], most: u32) -> bool {
    match passes {
        _ if passes.len() >= most as usize => false,
        [.., last] if last.written <= LAST_PASS_BYTES_MAX => false,
        [.., before, last] => last.written < before.written / 10 * 7,
        _ => true,
    }
}

/// Makes a pass. `parent` is the directory of criu's last pass, if criu makes them.
pub(crate) fn make_pass(
    options: &CheckpointOptions,
    number: usize,
    parent: &mut Option<PathBuf>,
    mut store: Store,
) -> Result<(Store, Pass), Error> {
    let (begun, before) = (now_ns(), store.written().0);
    if options.criu.features()?.mem_track == Some(true) {
        let (done, dir) = pre_dump(options, store, number, parent.as_deref())?;
        *parent = Some(dir);
        store = done;
    } else {
        store.disable_tracking();
        read_from_outside(options.pid, &mut store)?;
    }
    store.sync()?;
    let pass = Pass { written: store.written().0 - before, duration_ns: now_ns() - begun };
    Ok((store, pass))
}

/// Makes a pass by criu: it stops the program for a moment, and sends what has changed.
fn pre_dump(
    options: &CheckpointOptions,
    store: Store,
    number: usize,
    parent: Option<&Path>,
) -> Result<(Store, PathBuf), Error> {
    let dir = options.image.join(format!("{PASS_PREFIX}{number}"));
    let images = Directory::make(&dir)?.opened()?;
    let log = format!("{PASS_PREFIX}{number}.log");
    let request = |pages| {
        let pre_dump_options = Options {
            images_dir_fd: images.as_raw_fd(),
            pid: Some(options.pid),
            track_mem: Some(true),
            // relative to criu's directory of images
            parent_img: parent.and_then(Path::file_name).map(|name| format!("../{}", name.to_string_lossy())),
            log_level: Some(3),
            log_file: Some(log.clone()),
            ps: Some(PageServer { fd: Some(pages) }),
            ..Options::default()
        };
        Request::new(RequestType::PreDump, Some(pre_dump_options))
    };
    let served = through_page_server(options.pid, &options.criu, store, request, |_, _| Ok(()))?;
    match (served.answer?, served.unserved) {
        (Answer::Done { .. }, Some((Ok(_), store))) => Ok((store, dir)),
        (Answer::Done { .. }, Some((Err(error), _))) => Err(error),
        _ if !served.lost_pids.is_empty() => Err(Error::ProcessesLost(served.lost_pids)),
        _ => Err(Error::Failed { what: "make a pass", messages: read_errors(&dir, &log) }),
    }
}

/// Makes a pass by reading from outside. Nothing is stopped.
fn read_from_outside(root: i32, store: &mut Store) -> Result<(), Error> {
    store.begin_pass();
    for process in process_tree::tree(root)? {
        // one that ends meanwhile is also absent at the freeze
        let Ok(maps) = process.maps() else { continue };
        let Ok(memory) = ProcessMemory::of(&process) else { continue };
        let object = Object::Task(process.pid.unsigned_abs());
        store.open(object)?;
        for map in maps.into_iter().filter(is_private) {
            memory.read(map.address, |address, pages| {
                store.add(object, address, pages.len() as u64 / PAGE, LAZY | PRESENT)?;
                store.put(object, address, pages)
            })?;
        }
    }
    store.end_pass()
}

fn is_private(map: &MemoryMap) -> bool {
    let special = matches!(map.pathname, MMapPath::Vdso | MMapPath::Vvar | MMapPath::Vsyscall);
    let bytes = map.address.1 - map.address.0;
    map.perms.contains(MMPermissions::PRIVATE) && !special && bytes <= MAPPING_BYTES_MAX && map.address.1 < 1 << 47
}

/// The memory of a process, read from outside.
struct ProcessMemory {
    memory: File,
    pagemap: File,
}

impl ProcessMemory {
    fn of(process: &Process) -> std::io::Result<Self> {
        let path = |name: &str| format!("/proc/{}/{name}", process.pid);
        Ok(ProcessMemory { memory: kernel_files::open(path("mem"))?, pagemap: kernel_files::open(path("pagemap"))? })
    }

    /// Passes on the pages of a mapping that are the process's own and in memory.
    fn read(
        &self,
        (start, end): (u64, u64),
        mut take: impl FnMut(u64, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (mut entries, mut buffer) =
            (vec![0; (PAGEMAP_ENTRIES_PER_READ * 8) as usize], vec![0; CHUNK_BYTES as usize]);
        let mut at = start;
        while at < end {
            let pages = ((end - at) / PAGE).min(PAGEMAP_ENTRIES_PER_READ);
            let entries = &mut entries[..(pages * 8) as usize];
            // a range that is gone is read no further
            if self.pagemap.read_exact_at(entries, at / PAGE * 8).is_err() {
                return Ok(());
            }
            for (first, count) in private_runs(entries) {
                let (mut from, until) = (at + first * PAGE, at + (first + count) * PAGE);
                while from < until {
                    let part = &mut buffer[..(until - from).min(CHUNK_BYTES) as usize];
                    if self.memory.read_exact_at(part, from).is_ok() {
                        take(from, part)?;
                    }
                    from += part.len() as u64;
                }
            }
            at += pages * PAGE;
        }
        Ok(())
    }
}

/// Returns runs of pages that are in memory, and neither of a file nor shared: first page and number of pages.
pub(crate) fn private_runs(entries: &[u8]) -> Vec<(u64, u64)> {
    const PRESENT: u64 = 1 << 63;
    const SHARED: u64 = 1 << 61;
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (page, entry) in (0..).zip(entries.chunks_exact(8)) {
        let mut word = [0; 8];
        word.copy_from_slice(entry);
        if u64::from_ne_bytes(word) & (PRESENT | SHARED) != PRESENT {
            continue;
        }
        match runs.last_mut() {
            Some((first, count)) if *first + *count == page => *count += 1,
            _ => runs.push((page, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Image, MachineKey};
    use std::io::Read;
    use stillpoint_kernel_foam::{Form, Origin};

    fn pass(written: u64) -> Pass {
        Pass { written, duration_ns: 1 }
    }

    #[test]
    fn passes_end_when_they_bring_little_or_do_not_get_smaller() {
        let mib = |n: u64| pass(n << 20);
        assert!(is_due(&[], 3) && is_due(&[mib(100)], 3) && is_due(&[mib(100), mib(30)], 3));
        assert!(!is_due(&[], 0));
        assert!(!is_due(&[mib(4)], 3), "little is left");
        assert!(!is_due(&[mib(100), mib(90)], 3), "it changes as fast as it is read");
        assert!(!is_due(&[mib(100), mib(50), mib(20)], 3), "that was the last one");
    }

    #[test]
    fn own_pages_are_told_from_shared_and_absent_ones() {
        let entries = [1 << 63, 1 << 63, 0, 1 << 62, (1 << 63) | (1 << 61), 1 << 63u64];
        let bytes: Vec<u8> = entries.iter().flat_map(|entry: &u64| entry.to_ne_bytes()).collect();
        assert_eq!(private_runs(&bytes), [(0, 2), (5, 1)]);
    }

    #[test]
    fn the_memory_of_a_running_process_is_read_and_the_second_pass_writes_only_what_changed() {
        // a shell that holds a long string: its heap changes little while the shell waits
        let mut child = std::process::Command::new("bash")
            .args(["-c", "x=$(head -c 8000000 /dev/zero | tr '\\0' x); echo $$; read"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 1];
        child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
        let (pid, parent) = (child.id() as i32, tempfile::tempdir().unwrap());
        let dir = parent.path().join("image");
        let mut store = Store::create(&dir, Some(Form::Dense)).unwrap();
        store.disable_tracking();
        read_from_outside(pid, &mut store).unwrap();
        let first = store.written().0;
        read_from_outside(pid, &mut store).unwrap();
        let second = store.written().0 - first;
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(first >= 8_000_000, "{first}");
        assert!(second < first / 10, "{second} of {first}");
        let (machine, kernel, processor, criu, name) = Default::default();
        let origin = Origin { machine, kernel, processor, criu, made_s: 0, pid, name };
        store.seal(origin, &MachineKey::plain()).unwrap();
        let image = Image::open(&dir).unwrap();
        assert!(image.verify_pages().unwrap() >= 8_000_000 / PAGE);
        let passes: std::collections::BTreeSet<u32> =
            image.index().memories[0].extents.iter().map(|extent| extent.pass).collect();
        assert!(passes.contains(&1), "what has not changed keeps its pass: {passes:?}");
    }
}
