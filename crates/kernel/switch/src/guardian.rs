//! Process that outlives a switch that is killed, and rolls it back.
//!
//! When the tool dies its criu ends too, and lets the processes run on. After the seal they would run beside images
//! that the next boot would restore: all that they acknowledge until then would be lost. So before the seal this
//! process takes copies of the tool's sockets. criu detects the end of the tool only when these copies are closed. The
//! guardian closes them when the journal says on disk that the images are not valid.

use crate::journal::{Journal, State};
use crate::kernel::Kernel;
use crate::port_guard::{lower, port_guard};
use crate::system::{remount_writable, reset_machine, writable_now};
use procfs::process::Process;
use rustix::process::{Pid, PidfdGetfdFlags, pidfd_getfd};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use stillpoint_kernel_checkpoint::{Error, ErrorContext, host};
use stillpoint_operation::{self as operation, JournalLock, Request, Requests};

/// Request of the tool; the answer is the same byte.
const HOLD_REQUEST: u8 = b'h';
const RELEASE_REQUEST: u8 = b'r';
/// Time within which criu undoes what it has begun.
const CRIU_UNDO_TIMEOUT: Duration = Duration::from_secs(60);
/// Reason of the rollback.
const KILLED_REASON: &str = "the switch was killed";

/// The tool's side. If it is dropped without [`Guardian::dismiss`], the guardian rolls the switch back.
pub(crate) struct Guardian(operation::Guardian);

impl Guardian {
    /// Starts a guardian. It keeps the lock as long as it may have work to do.
    pub(crate) fn start(state: &Path, lock: &JournalLock) -> Result<Self, Error> {
        let task = state.as_os_str().as_bytes();
        let arguments = ["kernel", "switch-guardian"];
        Ok(Guardian(operation::Guardian::start(&arguments, task, Some(lock.file()), Stdio::inherit())?))
    }

    /// Makes the guardian hold the sockets: from here on processes run on only by this process, or after the journal
    /// allows it on disk.
    pub(crate) fn hold(&mut self) -> Result<(), Error> {
        Ok(self.0.ask(HOLD_REQUEST)?)
    }

    /// Makes the guardian close the sockets, as the journal allows it.
    pub(crate) fn release(&mut self) {
        if let Err(error) = self.0.ask(RELEASE_REQUEST) {
            // its copies are closed with it
            tracing::error!("{error}");
            self.0.kill();
        }
    }

    /// Ends the guardian after a complete rollback.
    pub(crate) fn dismiss(self) {
        self.0.dismiss();
    }
}

/// Runs the guardian of a switch, which started this process.
///
/// # Errors
///
/// The journal cannot be read, or the switch cannot be rolled back.
pub fn run_guardian() -> Result<(), Error> {
    // a shortage of memory must not end both
    let _ = stillpoint_host::kernel_files::write("/proc/self/oom_score_adj", "-1000");
    let (mut requests, task) = Requests::from_stdin()?;
    watch_tool(Path::new(OsStr::from_bytes(&task)), &mut requests, &reset_machine)
}

fn watch_tool(state: &Path, requests: &mut Requests, reset: &dyn Fn()) -> Result<(), Error> {
    let mut sockets = Vec::new();
    loop {
        match requests.wait()? {
            Request::Dismissed => return Ok(()),
            Request::Killed => break,
            Request::Asked(request) => {
                match request {
                    HOLD_REQUEST => sockets = copy_sockets(requests.tool())?,
                    _ => sockets.clear(),
                }
                requests.answer(request);
            }
        }
    }
    let journal = Journal::read(state);
    match journal {
        Ok(Some(mut journal)) => undo_phases(&mut journal, || sockets.clear(), reset),
        Ok(None) => Ok(()),
        Err(error) if sockets.is_empty() => Err(error),
        // it may say that the images hold the units
        Err(error) => {
            tracing::error!("the journal cannot be read, so the guardian resets the machine: {error}");
            reset();
            Err(error)
        }
    }
}

/// Returns copies of all sockets of a process.
fn copy_sockets((pid, process): (Pid, &OwnedFd)) -> Result<Vec<OwnedFd>, Error> {
    let failed = |error: procfs::ProcError| Error::Step { what: "examine the switch", why: error.to_string() };
    let mut sockets = Vec::new();
    for info in Process::new(pid.as_raw_nonzero().get()).and_then(|process| process.fd()).map_err(failed)?.flatten() {
        if matches!(info.target, procfs::process::FDTarget::Socket(_)) {
            match pidfd_getfd(process, info.fd, PidfdGetfdFlags::empty()) {
                Ok(socket) => sockets.push(socket),
                // closed since
                Err(rustix::io::Errno::BADF) => {}
                Err(error) => return Err(error).with_action("hold the switch's sockets"),
            }
        }
    }
    Ok(sockets)
}

/// Returns true if the switch of a journal was killed, or ended without a trace, on this boot. Only the process that
/// holds the lock can distinguish it from an active one.
pub(crate) fn is_interrupted(journal: &Journal) -> bool {
    matches!(journal.state, State::Prepared | State::Sealed) && journal.boot.as_deref() == Some(&*host::boot())
}

/// Returns the journal of a switch that was killed on this boot, unless a process rolls it back already: without a
/// guardian the operator or a command must do so.
///
/// # Errors
/// The journal cannot be read, or its lock cannot be opened.
pub fn find_interrupted(state: &Path) -> Result<Option<Journal>, Error> {
    let Some(journal) = Journal::read(state)?.filter(is_interrupted) else { return Ok(None) };
    Ok(Journal::lock(state, Duration::ZERO)?.map(|_| journal))
}

/// Rolls that back. The caller must hold the lock.
pub(crate) fn roll_back(journal: &mut Journal) -> Result<(), Error> {
    undo_phases(journal, || {}, &reset_machine)
}

/// Undoes all phases, in a process that did not run them. `release_processes` is called as soon as the journal says on disk that
/// the images are not valid; if it cannot be written, no process may run on.
fn undo_phases(journal: &mut Journal, release_processes: impl FnOnce(), reset: &dyn Fn()) -> Result<(), Error> {
    let sealed = journal.state == State::Sealed;
    let warn = |step: &str, done: Result<(), Error>| {
        if let Err(error) = done {
            tracing::error!(step, "could not be rolled back: {}", error.with_causes());
        }
    };
    warn("still", restore_writable(&journal.mounts));
    if is_interrupted(journal) {
        journal.add_reason(KILLED_REASON);
        if let Err(error) = journal.advance(State::Aborted) {
            if sealed {
                tracing::error!("the seal cannot be revoked, so the machine is reset and restores the units: {error}");
                reset();
            }
            return Err(error);
        }
    }
    release_processes();
    if let (true, Some(watchdog)) = (sealed, &journal.watchdog) {
        warn("watch", watchdog.arm().and_then(super::watchdog::Armed::disarm));
    }
    let end = Instant::now() + CRIU_UNDO_TIMEOUT;
    while journal.units.iter().any(|unit| is_traced(unit.pid)) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    // the switch may have made the disks read-only when the tool was killed
    warn("still", restore_writable(&journal.mounts));
    warn("guard", lower(&mut port_guard()));
    if journal.has_stopped {
        warn("stop", journal.remaining.start(journal.stop_limit()));
    }
    warn("preload", Kernel::unload());
    let _ = journal.drop_images();
    Ok(())
}

/// Makes the mount points writable again that were writable before the kexec and are not now.
fn restore_writable(mounts: &[String]) -> Result<(), Error> {
    let now = writable_now()?;
    let closed: Vec<String> = mounts.iter().filter(|at| !now.contains(at)).cloned().collect();
    remount_writable(&closed)
}

/// Returns true if criu has not released the process.
fn is_traced(pid: i32) -> bool {
    Process::new(pid).and_then(|process| process.status()).is_ok_and(|status| status.tracerpid != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::process::{Child, Command};
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Starts a tool that holds a socket of criu, and its guardian; `then` gets criu's side of the socket and the
    /// requests. Returns true if the machine was to be reset when everything has ended.
    fn with_tool(journal: &Journal, state: &Path, then: impl FnOnce(Child, UnixStream, UnixStream)) -> bool {
        let (criu, sockets) = UnixStream::pair().unwrap();
        let tool = Command::new("sleep").arg("1000").stdin(OwnedFd::from(sockets)).spawn().unwrap();
        let (mut requests, theirs) = UnixStream::pair().unwrap();
        fs::create_dir_all(journal.config.images()).unwrap_or_default();
        let reset = AtomicBool::new(false);
        // an empty task
        requests.write_all(&0u32.to_be_bytes()).unwrap();
        let (mut theirs, _) = Requests::new(theirs, Pid::from_child(&tool)).unwrap();
        requests.read_exact(&mut [0]).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _ = watch_tool(state, &mut theirs, &|| reset.store(true, Ordering::SeqCst));
            });
            then(tool, criu, requests);
        });
        reset.into_inner()
    }

    fn send_request(requests: &mut UnixStream, request: u8) {
        let mut answer = [0];
        requests.write_all(&[request]).unwrap();
        requests.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [request]);
    }

    fn kill(mut tool: Child) {
        tool.kill().unwrap();
        tool.wait().unwrap();
    }

    fn sealed(state: &Path) -> Journal {
        let mut journal = Journal::plain(&host::kernel(), "6.99");
        (journal.config.state, journal.boot) = (state.to_owned(), Some(host::boot()));
        journal.advance(State::Sealed).unwrap();
        journal
    }

    #[test]
    fn processes_are_let_go_when_the_disk_says_that_images_are_none() {
        let dir = tempfile::tempdir().unwrap();
        let journal = sealed(dir.path());
        let was_reset = with_tool(&journal, dir.path(), |tool, mut criu, mut requests| {
            send_request(&mut requests, HOLD_REQUEST);
            kill(tool);
            // criu detects that the tool is gone
            assert_eq!(criu.read(&mut [0]).unwrap(), 0);
            let found = Journal::read(dir.path()).unwrap().unwrap();
            assert_eq!((found.state, found.why.as_deref()), (State::Aborted, Some(KILLED_REASON)));
        });
        assert!(!was_reset && !journal.config.images().exists());
    }

    #[test]
    fn a_journal_that_cannot_be_written_releases_no_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = sealed(dir.path());
        // where it is read it names a directory in which nothing can be written
        fs::write(dir.path().join("file"), "").unwrap();
        journal.config.state = dir.path().join("file/state");
        fs::write(dir.path().join("journal.json"), serde_json::to_vec(&journal).unwrap()).unwrap();
        assert!(with_tool(&journal, dir.path(), |tool, _criu, mut requests| {
            send_request(&mut requests, HOLD_REQUEST);
            kill(tool);
        }));
    }

    #[test]
    fn a_switch_that_ended_well_is_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let journal = sealed(dir.path());
        let was_reset = with_tool(&journal, dir.path(), |tool, mut criu, mut requests| {
            send_request(&mut requests, HOLD_REQUEST);
            send_request(&mut requests, RELEASE_REQUEST);
            requests.write_all(&[operation::DISMISS]).unwrap();
            kill(tool);
            assert_eq!(criu.read(&mut [0]).unwrap(), 0);
        });
        assert!(!was_reset && journal.config.images().exists());
        assert_eq!(Journal::read(dir.path()).unwrap(), Some(journal));
    }

    #[test]
    fn what_was_left_is_told_from_what_is_under_way_and_from_other_boots() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = sealed(dir.path());
        assert_eq!(find_interrupted(dir.path()).unwrap(), Some(journal.clone()));
        let lock = Journal::lock(dir.path(), Duration::ZERO).unwrap().unwrap();
        assert_eq!(find_interrupted(dir.path()).unwrap(), None);
        drop(lock);
        journal.boot = Some("another".into());
        journal.write().unwrap();
        assert_eq!(find_interrupted(dir.path()).unwrap(), None);
    }
}
