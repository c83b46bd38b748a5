//! Process that outlives a switch that is killed, and rolls it back.
//!
//! When the tool dies its criu ends too, and lets the processes run on. After the seal they would run beside images
//! that the next boot would restore: all that they acknowledge until then would be lost. So before the seal this
//! process takes copies of the tool's sockets. criu detects the end of the tool only when these copies are closed. The
//! guardian closes them when the journal says on disk that the images are not valid.

use super::journal::{Journal, State};
use super::port_guard::lower;
use super::system::{Kernel, remount_writable, reset, writable_now};
use crate::error::ErrorContext;
use crate::{Error, host};
use procfs::process::Process;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Request of the tool; the answer is the same byte.
const HOLD_REQUEST: u8 = b'h';
const RELEASE_REQUEST: u8 = b'r';
/// Message of the tool when everything has ended; there is no answer.
const END_MESSAGE: u8 = b'o';
/// Time within which a guardian must answer; after that it counts as absent.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time within which criu undoes what it has begun.
const CRIU_UNDO_TIMEOUT: Duration = Duration::from_secs(60);
/// Reason of the rollback.
const KILLED_REASON: &str = "the switch was killed";

/// The tool's side. If it is dropped without [`Guardian::dismiss`], the guardian detects the end of the tool, and rolls
/// the switch back.
pub(super) struct Guardian {
    child: Child,
    stream: UnixStream,
}

impl Guardian {
    /// Starts a guardian. It keeps the lock as long as it may have work to do.
    pub(super) fn start(state: &Path, lock: &File) -> Result<Self, Error> {
        let (stream, theirs) = UnixStream::pair().with_action("make a socket for the guardian")?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).with_action("make a socket for the guardian")?;
        let lock = lock.try_clone().with_action("pass the lock to the guardian")?;
        // also valid if the file has been replaced meanwhile
        let mut command = Command::new("/proc/self/exe");
        command.args(["kernel", "switch-guardian", "--pid", &std::process::id().to_string(), "--state"]).arg(state);
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::from(lock));
        // an interrupt from the terminal is for the tool alone
        command.process_group(0);
        let mut guardian = Guardian { child: command.spawn().with_action("start the guardian")?, stream };
        // it exists, and watches this process, not a later one with the same number
        guardian.request(RELEASE_REQUEST)?;
        Ok(guardian)
    }

    /// Makes the guardian hold the sockets: from here on processes run on only by this process, or after the journal
    /// allows it on disk.
    pub(super) fn hold(&mut self) -> Result<(), Error> {
        self.request(HOLD_REQUEST)
    }

    /// Makes the guardian close the sockets, as the journal allows it.
    pub(super) fn release(&mut self) {
        if let Err(error) = self.request(RELEASE_REQUEST) {
            // its copies are closed with it
            tracing::error!("{error}");
            let _ = self.child.kill();
        }
    }

    /// Ends the guardian after a complete rollback.
    pub(super) fn dismiss(mut self) {
        // a guardian that is gone does nothing either
        let _ = self.stream.write_all(&[END_MESSAGE]);
        let _ = self.child.wait();
    }

    fn request(&mut self, request: u8) -> Result<(), Error> {
        let mut answer = [0];
        let received = self.stream.write_all(&[request]).and_then(|()| self.stream.read_exact(&mut answer));
        match received {
            Ok(()) if answer == [request] => Ok(()),
            Ok(()) => Err(guardian_error("its answer is wrong")),
            Err(error) => Err(guardian_error(&error.to_string())),
        }
    }
}

fn guardian_error(why: &str) -> Error {
    Error::Step { what: "start the guardian, which rolls back a killed switch", why: why.to_owned() }
}

/// Runs the guardian: waits for the end of process `tool`, with requests on its standard input.
///
/// # Errors
/// The process does not exist, the kernel refuses a call, or the rollback fails.
pub fn run_guardian(state: &Path, tool: i32) -> Result<(), Error> {
    // a shortage of memory must not end both
    let _ = stillpoint_host::kernel_files::write("/proc/self/oom_score_adj", "-1000");
    let requests = std::io::stdin().as_fd().try_clone_to_owned().with_action("receive from the switch")?;
    watch_tool(state, tool, &mut UnixStream::from(requests), &reset_machine)
}

fn reset_machine() {
    reset()
}

fn watch_tool(state: &Path, tool: i32, requests: &mut UnixStream, reset: &dyn Fn()) -> Result<(), Error> {
    let pid = Pid::from_raw(tool).ok_or(Error::NoProcess(tool))?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).with_action("watch the switch")?;
    let mut sockets = Vec::new();
    loop {
        let mut ready = [PollFd::new(&pidfd, PollFlags::IN), PollFd::new(&*requests, PollFlags::IN)];
        match poll(&mut ready, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).with_action("watch the switch"),
        }
        let [ended, received] = ready.map(|fd| !fd.revents().is_empty());
        let mut request = [0];
        match if received { requests.read(&mut request) } else { Ok(0) } {
            Ok(1) => match request[0] {
                END_MESSAGE => return Ok(()),
                HOLD_REQUEST => sockets = copy_sockets(tool, &pidfd)?,
                _ => sockets.clear(),
            },
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            // its end is closed before the tool has ended, or never, as it is held here
            _ if ended => break,
            _ => {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
        }
        if requests.write_all(&request).is_err() {
            continue;
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
fn copy_sockets(pid: i32, process: &OwnedFd) -> Result<Vec<OwnedFd>, Error> {
    let failed = |error: procfs::ProcError| Error::Step { what: "examine the switch", why: error.to_string() };
    let mut sockets = Vec::new();
    for info in Process::new(pid).and_then(|process| process.fd()).map_err(failed)?.flatten() {
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
pub(super) fn is_interrupted(journal: &Journal) -> bool {
    matches!(journal.state, State::Prepared | State::Sealed) && journal.boot.as_deref() == Some(&*host::boot())
}

/// Returns the journal of a switch that was killed on this boot, unless a process rolls it back already: without a
/// guardian the operator or a command must do so.
///
/// # Errors
/// The journal cannot be read, or its lock cannot be opened.
pub fn find_interrupted(state: &Path) -> Result<Option<Journal>, Error> {
    let Some(journal) = Journal::read(state)?.filter(is_interrupted) else { return Ok(None) };
    Ok(Journal::lock(state)?.map(|_| journal))
}

/// Rolls that back. The caller must hold the lock.
pub(super) fn roll_back(journal: &mut Journal) -> Result<(), Error> {
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
    warn("guard", lower());
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
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Starts a tool that holds a socket of criu, and its guardian; `then` gets criu's side of the socket and the
    /// requests. Returns true if the machine was to be reset when everything has ended.
    fn with_tool(journal: &Journal, state: &Path, then: impl FnOnce(Child, UnixStream, UnixStream)) -> bool {
        let (criu, sockets) = UnixStream::pair().unwrap();
        let tool = Command::new("sleep").arg("1000").stdin(OwnedFd::from(sockets)).spawn().unwrap();
        let (requests, mut theirs) = UnixStream::pair().unwrap();
        fs::create_dir_all(journal.config.images()).unwrap_or_default();
        let (reset, pid) = (AtomicBool::new(false), tool.id() as i32);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _ = watch_tool(state, pid, &mut theirs, &|| reset.store(true, Ordering::SeqCst));
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
            requests.write_all(&[END_MESSAGE]).unwrap();
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
        let lock = Journal::lock(dir.path()).unwrap().unwrap();
        assert_eq!(find_interrupted(dir.path()).unwrap(), None);
        drop(lock);
        journal.boot = Some("another".into());
        journal.write().unwrap();
        assert_eq!(find_interrupted(dir.path()).unwrap(), None);
    }
}
