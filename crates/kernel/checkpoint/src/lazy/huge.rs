//! Huge pages for memory that was restored page by page.
//!
//! The obvious way is to leave that to the kernel's own thread for it. That thread looks at 16 MiB every ten seconds: a
//! large program would have small pages, which make every access slower, for many minutes.

use super::rate_limit::RateLimiter;
use crate::Error;
use crate::error::ErrorContext;
use crate::precopy::private_runs;
use procfs::process::{MemoryMap, Process};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use stillpoint_base::PAGE;
use stillpoint_host::kernel_files;
use stillpoint_kernel_sys::uffd::{HUGE_PAGE, Memory, PutOutcome, collapse};

/// Attempts for a range: the kernel makes free memory contiguous in the background after the first.
const ATTEMPTS_MAX: usize = 6;
/// Time between two attempts.
const ATTEMPT_INTERVAL: Duration = Duration::from_secs(1);

/// Counts of huge pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct CollapseCounts {
    /// Huge pages that were made.
    pub(super) made: u64,
    /// Ranges that stay in small pages, since the kernel found no free memory for them or their pages were in use.
    pub(super) left: u64,
}

/// A process whose memory is resident.
pub(super) struct RestoredProcess {
    process: Process,
    descriptor: OwnedFd,
}

impl RestoredProcess {
    /// Returns the process with this number, if the memory belongs to it: no other process can have the number while
    /// that one lives. `page` is resident in it.
    pub(super) fn of(pid: u32, memory: Memory, page: u64) -> Option<RestoredProcess> {
        let pid = pid.cast_signed();
        let process = Process::new(pid).ok()?;
        let descriptor = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        // a page that it has given up since reads as zeros in any case
        let is_alive = memory.zero(page, PAGE).is_ok_and(|put| put != PutOutcome::ProcessEnded);
        is_alive.then_some(RestoredProcess { process, descriptor })
    }

    /// Makes small pages into huge ones where the kernel would do so later, at a rate in bytes a second.
    ///
    /// # Errors
    ///
    /// [`Error`] if the process's page map cannot be opened.
    pub(super) fn collapse(&self, rate: Option<u64>) -> Result<CollapseCounts, Error> {
        let path = format!("/proc/{}/pagemap", self.process.pid);
        let pagemap = kernel_files::open(&path).at("open", &path)?;
        let Ok(maps) = self.process.smaps() else { return Ok(CollapseCounts::default()) };
        let mut limiter = RateLimiter::new(rate, Instant::now());
        let mut collapsed = CollapseCounts::default();
        let mut ranges: Vec<u64> =
            maps.into_iter().filter(is_eligible).flat_map(|map| huge_page_starts(map.address)).collect();
        for attempt in 0..ATTEMPTS_MAX {
            if attempt > 0 {
                std::thread::sleep(ATTEMPT_INTERVAL);
            }
            let made = self.attempt(&mut ranges, &pagemap, &mut limiter);
            collapsed.made += made;
            collapsed.left = ranges.len() as u64;
            if ranges.is_empty() {
                break;
            }
        }
        Ok(collapsed)
    }

    /// Tries each range once, and keeps those for which the kernel may have memory later. Returns the number of huge
    /// pages.
    fn attempt(&self, ranges: &mut Vec<u64>, pagemap: &impl FileExt, limiter: &mut RateLimiter) -> u64 {
        let (mut made, mut is_short, mut has_ended) = (0, false, false);
        ranges.retain(|start| {
            if has_ended || !is_full(pagemap, *start) {
                return false;
            }
            // the search for free memory takes long, and is not likely to succeed for the next range
            if is_short {
                return true;
            }
            if let Some(pause) = limiter.wait(HUGE_PAGE, Instant::now()) {
                std::thread::sleep(pause);
            }
            limiter.consume(HUGE_PAGE);
            let result = collapse(self.descriptor.as_fd(), *start);
            made += u64::from(result.is_ok());
            is_short = result == Err(Errno::NOMEM);
            has_ended = matches!(result, Err(Errno::SRCH | Errno::PERM | Errno::NOSYS));
            matches!(result, Err(Errno::NOMEM | Errno::AGAIN | Errno::BUSY))
        });
        made
    }
}

/// Returns true if the kernel may use huge pages there: the flag includes the settings of the system and of the
/// program.
fn is_eligible(map: &MemoryMap) -> bool {
    map.extension.map.get("THPeligible") == Some(&1)
}

/// Returns the addresses in a range at which huge pages could begin.
fn huge_page_starts((start, end): (u64, u64)) -> impl Iterator<Item = u64> {
    let first = start.next_multiple_of(HUGE_PAGE);
    (first..end.saturating_sub(HUGE_PAGE - 1)).step_by(HUGE_PAGE as usize)
}

/// Returns true if all small pages of a range are resident, and the process's own: then a huge page needs no more
/// memory.
fn is_full(pagemap: &impl FileExt, start: u64) -> bool {
    let pages = HUGE_PAGE / PAGE;
    let mut entries = vec![0; (pages * 8) as usize];
    pagemap.read_exact_at(&mut entries, start / PAGE * 8).is_ok() && private_runs(&entries) == [(0, pages)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_lie_whole_within_a_range() {
        let of = |start, end| huge_page_starts((start, end)).collect::<Vec<u64>>();
        let huge = HUGE_PAGE;
        assert_eq!(of(0, 2 * huge), [0, huge]);
        assert_eq!(of(PAGE, 2 * huge), [huge]);
        assert_eq!((of(PAGE, 2 * huge - PAGE).len(), of(0, PAGE).len()), (0, 0));
    }
}
