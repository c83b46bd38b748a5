//! Huge pages for memory that was restored page by page.
//!
//! The obvious way is to leave that to the kernel's own thread for it. That thread looks at 16 MiB every ten seconds: a
//! large program would have small pages, which make every access slower, for many minutes.

use super::pace::Pace;
use crate::Error;
use crate::error::At;
use crate::passes::own;
use procfs::process::{MemoryMap, Process};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::unix::fs::FileExt;
use std::time::Instant;
use stillpoint_host::kernel_files;
use stillpoint_kernel_foam::PAGE;
use stillpoint_kernel_sys::uffd::{HUGE_PAGE, Memory, Put, collapse};

/// A process whose memory is resident.
pub(super) struct Owner {
    process: Process,
    descriptor: OwnedFd,
}

impl Owner {
    /// Returns the process with this number, if the memory belongs to it: no other process can have the number while
    /// that one lives. `page` is resident in it.
    pub(super) fn of(pid: u32, memory: Memory, page: u64) -> Option<Owner> {
        let pid = pid.cast_signed();
        let process = Process::new(pid).ok()?;
        let descriptor = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        // a page that it has given up since reads as zeros in any case
        let lives = memory.zero(page, PAGE).is_ok_and(|put| put != Put::Dead);
        lives.then_some(Owner { process, descriptor })
    }

    /// Makes small pages into huge ones where the kernel would do so later, at a rate in bytes a second. Returns the
    /// number of huge pages.
    pub(super) fn collapse(&self, rate: Option<u64>) -> Result<u64, Error> {
        let path = format!("/proc/{}/pagemap", self.process.pid);
        let pagemap = kernel_files::open(&path).at("open", &path)?;
        let Ok(maps) = self.process.smaps() else { return Ok(0) };
        let (mut pace, mut made) = (Pace::new(rate, Instant::now()), 0);
        for start in maps.into_iter().filter(is_eligible).flat_map(|map| whole(map.address)) {
            if !is_full(&pagemap, start) {
                continue;
            }
            if let Some(pause) = pace.wait(HUGE_PAGE, Instant::now()) {
                std::thread::sleep(pause);
            }
            pace.took(HUGE_PAGE);
            match collapse(self.descriptor.as_fd(), start) {
                Ok(()) => made += 1,
                // the search for free memory takes long, and is not likely to succeed soon
                Err(Errno::NOMEM | Errno::SRCH | Errno::PERM | Errno::NOSYS) => break,
                Err(_) => {}
            }
        }
        Ok(made)
    }
}

/// Returns true if the kernel may use huge pages there: the flag includes the settings of the system and of the
/// program.
fn is_eligible(map: &MemoryMap) -> bool {
    map.extension.map.get("THPeligible") == Some(&1)
}

/// Returns the addresses in a range at which huge pages could begin.
fn whole((start, end): (u64, u64)) -> impl Iterator<Item = u64> {
    let first = start.next_multiple_of(HUGE_PAGE);
    (first..end.saturating_sub(HUGE_PAGE - 1)).step_by(HUGE_PAGE as usize)
}

/// Returns true if all small pages of a range are resident, and the process's own: then a huge page needs no more
/// memory.
fn is_full(pagemap: &impl FileExt, start: u64) -> bool {
    let pages = HUGE_PAGE / PAGE;
    let mut entries = vec![0; (pages * 8) as usize];
    pagemap.read_exact_at(&mut entries, start / PAGE * 8).is_ok() && own(&entries) == [(0, pages)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_lie_whole_within_a_range() {
        let of = |start, end| whole((start, end)).collect::<Vec<u64>>();
        let huge = HUGE_PAGE;
        assert_eq!(of(0, 2 * huge), [0, huge]);
        assert_eq!(of(PAGE, 2 * huge), [huge]);
        assert_eq!((of(PAGE, 2 * huge - PAGE).len(), of(0, PAGE).len()), (0, 0));
    }
}
