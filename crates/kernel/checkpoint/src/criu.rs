//! criu as a worker: one process for a request, controlled by its RPC.
//!
//! criu takes the socket of its page server by RPC. `post-dump` comes while the processes are stopped, and a negative answer lets them continue:
//! the image is sealed there. `post-restore` comes before anything runs: a switch waits for all units there. A restored process is in a time
//! namespace. criu reads a sparse image through a symbolic link `pages-N.img` only if it restores lazily.

use crate::Error;
use crate::error::ErrorContext;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::{Errno, FdFlags};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use rustix::process::umask;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use stillpoint_host::kernel_files;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::rpc::{Answer, Features, Request, RequestType, Version};

/// The oldest supported version: 4.1 restores memory lazily on the kernels that matter.
const VERSION_MIN: (i32, i32) = (4, 1);
/// Limit in bytes, longer than any message of criu.
const MESSAGE_BYTES_MAX: usize = 1 << 16;
/// Log of criu for a dump.
pub const DUMP_LOG: &str = "dump.log";
/// Log of criu for a restore.
pub const RESTORE_LOG: &str = "restore.log";
/// Longest log of criu, or of a daemon, that is read.
pub(crate) const LOG_BYTES_MAX: u64 = 256 << 20;
/// Makes criu stop what it restores or leaves at system calls, not at a breakpoint. The kernel keeps a breakpoint as an
/// event of perf until its thread ends, and looks at it at each switch to that thread. A thread that hits one after
/// criu has been killed is killed by it. This is one of the "faults" of criu's own tests, and is also what criu does on
/// processors without breakpoints.
const NO_BREAKPOINTS: (&str, &str) = ("CRIU_FAULT", "130");
/// Interval of the test that a criu which sends nothing still has what it depends on.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// An installation of criu.
#[derive(Debug, Clone)]
pub struct Criu {
    program: PathBuf,
    /// Version and features that it reported, shared by all clones.
    capabilities: Arc<OnceLock<(Version, Features)>>,
}

impl Criu {
    /// Names the program by its path, or by a name that is looked up.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Criu { program: program.into(), capabilities: Arc::default() }
    }

    /// Returns its version; refuses versions that lack a needed feature.
    ///
    /// # Errors
    /// criu does not run, gives no valid answer, or is too old.
    pub fn version(&self) -> Result<Version, Error> {
        let mut worker = self.worker(&[])?;
        let version = self.version_of(&mut worker);
        worker.end();
        version
    }

    /// Returns the version of a worker, which takes another request afterwards: no process of criu is started for this
    /// alone.
    pub(crate) fn version_of(&self, worker: &mut Worker) -> Result<Version, Error> {
        let request = Request { keep_open: Some(true), ..Request::new(RequestType::Version, None) };
        let answer = worker.request(&request, |_, _| true).map_err(|_| self.error("gives no valid answer of criu"))?;
        match answer {
            Answer::Done { version: Some(version), .. } if (version.major, version.minor) < VERSION_MIN => {
                let (major, minor) = VERSION_MIN;
                let why = format!("version {}.{} is older than {major}.{minor}", version.major, version.minor);
                Err(Error::Criu { program: self.program.clone(), why })
            }
            Answer::Done { version: Some(version), .. } => Ok(version),
            _ => Err(self.error("does not report its version")),
        }
    }

    /// Returns its features on this kernel; refuses a version that lacks a needed feature.
    ///
    /// # Errors
    /// criu does not run, gives no valid answer, or is too old.
    pub fn features(&self) -> Result<Features, Error> {
        self.capabilities().map(|(_, features)| features)
    }

    /// Returns its version, and its features on this kernel. criu is started for this only once.
    pub(crate) fn capabilities(&self) -> Result<(Version, Features), Error> {
        if let Some(known) = self.capabilities.get() {
            return Ok(*known);
        }
        let mut worker = self.worker(&[])?;
        let known =
            self.version_of(&mut worker).and_then(|version| match worker.request(&Request::features(), |_, _| true) {
                Ok(Answer::Done { features: Some(features), .. }) => Ok((version, features)),
                Ok(_) => Err(self.error("does not report its features on this kernel")),
                Err(_) => Err(self.error("gives no valid answer of criu")),
            });
        worker.end();
        let known = known?;
        Ok(*self.capabilities.get_or_init(|| known))
    }

    /// Starts a worker that inherits descriptors under their numbers.
    pub(crate) fn worker(&self, inherited: &[BorrowedFd<'_>]) -> Result<Worker, Error> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .with_action("make a socket for criu")?;
        let mut command = Command::new(&self.program);
        command.arg("swrk").arg(theirs.as_raw_fd().to_string());
        // it changes its directory; its output besides the log is of no use
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.env(NO_BREAKPOINTS.0, NO_BREAKPOINTS.1);
        // an interrupt from the terminal is for us: criu detects that we are gone, and undoes what it has begun
        command.process_group(0);
        let all = || inherited.iter().copied().chain([theirs.as_fd()]);
        for descriptor in all() {
            rustix::io::fcntl_setfd(descriptor, FdFlags::empty()).with_action("pass a socket to criu")?;
        }
        let child = command.spawn();
        for descriptor in all() {
            rustix::io::fcntl_setfd(descriptor, FdFlags::CLOEXEC)
                .with_action("protect a socket of criu from other programs")?;
        }
        let child = child.map_err(|error| self.error(&error.to_string()))?;
        Ok(Worker { socket: ours, child, died: false })
    }

    /// Starts a worker that makes files which no other user can read. Processes that it restores have the umask of
    /// their image.
    ///
    /// # Errors
    /// The worker cannot be started.
    pub(crate) fn private_worker(&self, inherited: &[BorrowedFd<'_>]) -> Result<Worker, Error> {
        // the umask is that of the process, in which several checkpoints may begin at the same time
        static UMASK: Mutex<()> = Mutex::new(());
        let _one_at_a_time = UMASK.lock().unwrap_or_else(PoisonError::into_inner);
        let before = umask(Mode::RWXG | Mode::RWXO);
        let worker = self.worker(inherited);
        umask(before);
        worker
    }

    fn error(&self, why: &str) -> Error {
        Error::Criu { program: self.program.clone(), why: why.to_owned() }
    }
}

/// One running criu.
#[derive(Debug)]
pub(crate) struct Worker {
    socket: OwnedFd,
    child: Child,
    died: bool,
}

impl Worker {
    /// Sends a request and reads the answers to the end. At each step criu waits until `go_on` returns whether it may
    /// continue.
    pub(crate) fn request(
        &mut self,
        request: &Request,
        may_continue: impl FnMut(&str, Option<i32>) -> bool,
    ) -> Result<Answer, Error> {
        self.request_while(request, None, may_continue)
    }

    /// Sends a request as [`Worker::request`] does, and kills criu once what it depends on is gone: otherwise criu
    /// would wait for that for ever.
    pub(crate) fn request_while(
        &mut self,
        request: &Request,
        mut is_needed: Option<&mut dyn FnMut() -> bool>,
        mut may_continue: impl FnMut(&str, Option<i32>) -> bool,
    ) -> Result<Answer, Error> {
        self.send(request)?;
        let mut message = vec![0; MESSAGE_BYTES_MAX];
        loop {
            if let Some(is_needed) = &mut is_needed {
                self.wait_for_message(is_needed)?;
            }
            let n = match recv(&self.socket, message.as_mut_slice(), RecvFlags::empty()) {
                // it ended before it read the last message
                Err(Errno::CONNRESET) => 0,
                received => received.with_action("receive from criu")?.0,
            };
            if n == 0 {
                self.died = true;
                return Ok(Answer::Failed { errno: None, message: Some("it ended without an answer".into()) });
            }
            match Answer::decode(&message[..n])? {
                Answer::Notify { step, pid } => {
                    let may_continue = may_continue(&step, pid);
                    self.send(&Request::notified(may_continue))?;
                }
                answer => return Ok(answer),
            }
        }
    }

    /// Waits until criu sends a message or ends, and kills it once `there` returns false.
    fn wait_for_message(&mut self, is_needed: &mut dyn FnMut() -> bool) -> Result<(), Error> {
        loop {
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&POLL_INTERVAL)) {
                Ok(0) if !is_needed() => {
                    let _ = self.child.kill();
                    return Ok(());
                }
                Ok(0) | Err(Errno::INTR) => {}
                received => return received.with_action("wait for criu").map(drop),
            }
        }
    }

    /// Sends a request. The end of criu is detected at the next read, after its last messages.
    fn send(&self, request: &Request) -> Result<(), Error> {
        match send(&self.socket, &request.encode(), SendFlags::NOSIGNAL) {
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            sent => sent.with_action("send to criu").map(|_| ()),
        }
    }

    /// Returns true if it ended in the middle of a request.
    pub(crate) fn has_died(&self) -> bool {
        self.died
    }

    /// Protects criu from the OOM killer: a program in which criu runs its own code would not survive criu's death.
    /// Only for dumps, as the processes that criu restores would inherit the protection.
    pub(crate) fn protect_from_oom(&self) {
        let path = format!("/proc/{}/oom_score_adj", self.child.id());
        if let Err(error) = kernel_files::write(path, "-1000") {
            tracing::debug!("criu is not protected from the OOM killer: {error}");
        }
    }

    /// Waits for its end. The processes that it restored live on.
    pub(crate) fn end(mut self) {
        drop(self.socket);
        let _ = self.child.wait();
    }

    /// Kills it at once.
    pub(crate) fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the errors in a log of criu: the first is the reason, most others are its consequences.
pub(crate) fn read_errors(dir: &Path, log: &str) -> Vec<String> {
    let text = Directory::open(dir).and_then(|dir| dir.read(log, LOG_BYTES_MAX)).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let errors = text.lines().filter_map(|line| line.split_once("Error (").map(|(_, error)| error));
    let plain = errors.map(|error| error.split_once("): ").map_or(error, |(_, plain)| plain).trim().to_owned());
    plain.take(3).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_ends_unheard_has_failed() {
        let unread = Criu::new("/bin/true");
        let mut worker = unread.worker(&[]).unwrap();
        let sent = worker.request(&Request::features(), |_, _| true).unwrap();
        assert!(matches!(sent, Answer::Failed { .. }), "{sent:?}");
        // and with a request after it has ended
        worker.child.wait().unwrap();
        let sent = worker.request(&Request::features(), |_, _| true).unwrap();
        assert!(matches!(sent, Answer::Failed { .. }), "{sent:?}");
    }
}
