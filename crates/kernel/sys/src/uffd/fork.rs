//! Two processes with one table of descriptors: when either dies, the other still holds every userfaultfd.
//!
//! The obvious way is to pass descriptors over a socket. A fork of the served process makes a new userfaultfd in the
//! table of the process that reads the event: if that process is killed before it passes the descriptor on, the child's
//! memory is lost. With one table for both there is no such moment.

use super::Error;
use rustix::process::Pid;
use std::time::{Duration, Instant};

/// Time within which the kernel removes a thread that has been joined. On a busy machine it may be long.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Splits this process in two with one table of descriptors; `child` runs in the new one and returns its exit code.
///
/// The new process has a copy of this one's memory, as after `fork`. Only a process with one thread is split: locks
/// that another thread held would stay locked. Threads that have been joined may not have ended yet; this waits for
/// them.
///
/// # Errors
/// The process has several threads, or the kernel makes no process.
pub fn fork_sharing_descriptors(child: impl FnOnce() -> u8) -> Result<Pid, Error> {
    wait_until_single_threaded(THREAD_EXIT_TIMEOUT)?;
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: without CLONE_VM and with no stack this is `fork` with a shared table of descriptors: the child continues
    // here with a copy of this memory. There is no other thread that could hold a lock or be in the middle of an
    // operation.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match pid {
        0 => {
            let code = child();
            // SAFETY: ends the process at once; destructors of the parent's values must not run twice.
            unsafe { libc::_exit(i32::from(code)) }
        }
        pid => Pid::from_raw(pid as i32).filter(|_| pid > 0).ok_or_else(|| Error::call("clone")),
    }
}

/// Waits until this process has one thread.
fn wait_until_single_threaded(timeout: Duration) -> Result<(), Error> {
    let end = Instant::now() + timeout;
    loop {
        let threads =
            std::fs::read_dir("/proc/self/task").map_err(|source| Error::Call { what: "count threads", source })?;
        match threads.count() {
            1 => return Ok(()),
            threads if Instant::now() >= end => return Err(Error::Threads(threads)),
            _ => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_another_thread_is_not_split() {
        // the thread that runs this test is not the first one
        assert!(matches!(wait_until_single_threaded(Duration::from_millis(1)), Err(Error::Threads(2..))));
    }
}
