//! criu as a worker: one process for a request, asked over its RPC.

use crate::Error;
use crate::error::At;
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

/// The oldest version that is driven: 4.1 restores memory lazily on the kernels that matter.
const OLDEST: (i32, i32) = (4, 1);
/// Longer than any message of criu's.
const MESSAGE: usize = 1 << 16;
/// Longest log of criu's, or of a daemon, that is read.
pub(crate) const LOG_BYTES_MAX: u64 = 256 << 20;
/// Has criu stop what it restores or leaves at system calls and not at a breakpoint. The kernel keeps a breakpoint as an event of
/// perf until its thread ends, and looks at it whenever it switches to that; and a thread that comes to one when criu has been
/// killed is killed by it. It is one of the "faults" of criu's own tests, and what criu does on processors without breakpoints.
const NO_BREAKPOINTS: (&str, &str) = ("CRIU_FAULT", "130");
/// How often it is looked whether what criu depends on is there, while it says nothing.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// An installation of criu.
#[derive(Debug, Clone)]
pub struct Criu {
    program: PathBuf,
    /// What it said when it was asked, which its clones know as well.
    abilities: Arc<OnceLock<(Version, Features)>>,
}

impl Criu {
    /// The program at a path, or the one that is found by name.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Criu { program: program.into(), abilities: Arc::default() }
    }

    /// Which version it is; versions that cannot do what is needed are refused.
    pub fn version(&self) -> Result<Version, Error> {
        let mut worker = self.worker(&[])?;
        let version = self.version_of(&mut worker);
        worker.end();
        version
    }

    /// The same of one that runs, and takes another request then: a process of criu's is not started for it alone.
    pub(crate) fn version_of(&self, worker: &mut Worker) -> Result<Version, Error> {
        let request = Request { keep_open: Some(true), ..Request::new(RequestType::Version, None) };
        let answer = worker.request(&request, |_, _| true).map_err(|_| self.wrong("does not answer as criu does"))?;
        match answer {
            Answer::Done { version: Some(version), .. } if (version.major, version.minor) < OLDEST => {
                let (major, minor) = OLDEST;
                let why = format!("version {}.{} is older than {major}.{minor}", version.major, version.minor);
                Err(Error::Criu { program: self.program.clone(), why })
            }
            Answer::Done { version: Some(version), .. } => Ok(version),
            _ => Err(self.wrong("does not say which version it is")),
        }
    }

    /// What it can do on this kernel; one that cannot do what is needed is refused by its version.
    pub fn features(&self) -> Result<Features, Error> {
        self.abilities().map(|(_, features)| features)
    }

    /// Its version, and what it can do on this kernel. It is asked once.
    pub(crate) fn abilities(&self) -> Result<(Version, Features), Error> {
        if let Some(known) = self.abilities.get() {
            return Ok(*known);
        }
        let mut worker = self.worker(&[])?;
        let known =
            self.version_of(&mut worker).and_then(|version| match worker.request(&Request::features(), |_, _| true) {
                Ok(Answer::Done { features: Some(features), .. }) => Ok((version, features)),
                Ok(_) => Err(self.wrong("does not say what it can do on this kernel")),
                Err(_) => Err(self.wrong("does not answer as criu does")),
            });
        worker.end();
        let known = known?;
        Ok(*self.abilities.get_or_init(|| known))
    }

    /// Starts a worker that inherits descriptors under their numbers.
    pub(crate) fn worker(&self, inherited: &[BorrowedFd<'_>]) -> Result<Worker, Error> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .doing("make a socket for criu")?;
        let mut command = Command::new(&self.program);
        command.arg("swrk").arg(theirs.as_raw_fd().to_string());
        // it changes its directory; what it prints besides its log is of no use
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.env(NO_BREAKPOINTS.0, NO_BREAKPOINTS.1);
        // an interrupt from the terminal is for us: criu hears that we are gone, and undoes what it has begun
        command.process_group(0);
        let all = || inherited.iter().copied().chain([theirs.as_fd()]);
        for descriptor in all() {
            rustix::io::fcntl_setfd(descriptor, FdFlags::empty()).doing("hand a socket to criu")?;
        }
        let child = command.spawn();
        for descriptor in all() {
            rustix::io::fcntl_setfd(descriptor, FdFlags::CLOEXEC).doing("take a socket back from criu")?;
        }
        let child = child.map_err(|error| self.wrong(&error.to_string()))?;
        Ok(Worker { socket: ours, child, died: false })
    }

    /// The same for one that makes files: no other user can read them. Processes that it restores have the umask of their image.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn private_worker(&self, inherited: &[BorrowedFd<'_>]) -> Result<Worker, Error> {
        // the umask is the process's, in which several checkpoints may begin at the same time
        static UMASK: Mutex<()> = Mutex::new(());
        let _one_at_a_time = UMASK.lock().unwrap_or_else(PoisonError::into_inner);
        let before = umask(Mode::RWXG | Mode::RWXO);
        let worker = self.worker(inherited);
        umask(before);
        worker
    }

    fn wrong(&self, why: &str) -> Error {
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
    /// Sends a request and hears it to its end. At each step criu waits for `go_on` to say whether it may.
    pub(crate) fn request(
        &mut self,
        request: &Request,
        go_on: impl FnMut(&str, Option<i32>) -> bool,
    ) -> Result<Answer, Error> {
        self.send(request)?;
        self.hear(None, go_on)
    }

    /// The same, and criu is killed once what it depends on is not there any more: it would wait for that for ever.
    pub(crate) fn request_while(
        &mut self,
        request: &Request,
        there: &mut dyn FnMut() -> bool,
        go_on: impl FnMut(&str, Option<i32>) -> bool,
    ) -> Result<Answer, Error> {
        self.send(request)?;
        self.hear(Some(there), go_on)
    }

    fn hear(
        &mut self,
        mut there: Option<&mut dyn FnMut() -> bool>,
        mut go_on: impl FnMut(&str, Option<i32>) -> bool,
    ) -> Result<Answer, Error> {
        let mut message = vec![0; MESSAGE];
        loop {
            if let Some(there) = &mut there {
                self.until_it_speaks(there)?;
            }
            let n = match recv(&self.socket, message.as_mut_slice(), RecvFlags::empty()) {
                // it ended before it read what it was told
                Err(Errno::CONNRESET) => 0,
                heard => heard.doing("hear criu")?.0,
            };
            if n == 0 {
                self.died = true;
                return Ok(Answer::Failed { errno: None, message: Some("it ended without an answer".into()) });
            }
            match Answer::decode(&message[..n])? {
                Answer::Notify { step, pid } => {
                    let go_on = go_on(&step, pid);
                    self.send(&Request::notified(go_on))?;
                }
                answer => return Ok(answer),
            }
        }
    }

    /// Waits until it says something or ends, and ends it once something is not there any more.
    fn until_it_speaks(&mut self, there: &mut dyn FnMut() -> bool) -> Result<(), Error> {
        loop {
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&LOOK)) {
                Ok(0) if !there() => {
                    let _ = self.child.kill();
                    return Ok(());
                }
                Ok(0) | Err(Errno::INTR) => {}
                heard => return heard.doing("wait for criu").map(drop),
            }
        }
    }

    /// That it has ended is found when it is heard next, behind what it said before.
    fn send(&self, request: &Request) -> Result<(), Error> {
        match send(&self.socket, &request.encode(), SendFlags::NOSIGNAL) {
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            sent => sent.doing("ask criu").map(|_| ()),
        }
    }

    /// Whether it ended in the middle of a request.
    pub(crate) fn died(&self) -> bool {
        self.died
    }

    /// Has the system look elsewhere when memory runs out: while criu runs its own code in a program, that would not outlive it.
    /// Only for dumps, as what criu restores would inherit it.
    pub(crate) fn spare(&self) {
        let path = format!("/proc/{}/oom_score_adj", self.child.id());
        if let Err(error) = kernel_files::write(path, "-1000") {
            tracing::debug!("criu is no more protected than others when memory runs out: {error}");
        }
    }

    /// Waits for it to end. What it restored lives on.
    pub(crate) fn end(mut self) {
        drop(self.socket);
        let _ = self.child.wait();
    }

    /// Ends it at once.
    pub(crate) fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The errors that stand in a log of criu's: the first is the reason, most others are its consequences.
pub(crate) fn errors_in(dir: &Path, log: &str) -> Vec<String> {
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
        // and asked when it has ended already
        worker.child.wait().unwrap();
        let sent = worker.request(&Request::features(), |_, _| true).unwrap();
        assert!(matches!(sent, Answer::Failed { .. }), "{sent:?}");
    }
}
