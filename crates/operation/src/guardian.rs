//! Guardian: the process that outlives a tool that is killed, and acts in its place.
//!
//! It is this program again with a command of its own, in a process group of its own, so that an interrupt from the terminal is for the
//! tool alone. Both hold one end of a socket. A tool that ends in order sends [`DISMISS`] before. The guardian watches the process by a
//! pidfd, and not the socket alone: it may hold copies of the tool's descriptors, this socket among them.

use crate::Error;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Message of a tool that has ended in order; there is no answer.
pub const DISMISS: u8 = 0;
/// Message of a guardian that watches the tool.
const READY: u8 = 1;
/// Interval of another look at a tool that is ending.
const END_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Time within which a guardian must answer; after that it counts as absent.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size in bytes of a task.
const TASK_MAX: u32 = 16 << 20;

/// The tool's side. Dropping it without [`Guardian::dismiss`] counts as the death of the tool.
#[derive(Debug)]
pub struct Guardian {
    child: Child,
    stream: UnixStream,
}

impl Guardian {
    /// Starts this program with `arguments` as a guardian. `task` goes through its socket, and may hold secrets. `lock` stays locked as
    /// long as the guardian lives. It writes its own errors to `errors`.
    ///
    /// # Errors
    ///
    /// The process cannot be started.
    pub fn start(arguments: &[&str], task: &[u8], lock: Option<&File>, errors: Stdio) -> Result<Guardian, Error> {
        let system = |action| move |source| Error::System { action, source };
        let length = u32::try_from(task.len()).ok().filter(|length| *length <= TASK_MAX);
        let length = length.ok_or_else(|| Error::Guardian("its task is too long".into()))?;
        let (mut stream, theirs) = UnixStream::pair().map_err(system("make a socket for the guardian"))?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(system("make a socket for the guardian"))?;
        let lock = lock.map(File::try_clone).transpose().map_err(system("hand the lock to the guardian"))?;
        // this path is also valid if the file has been replaced meanwhile
        let mut command = Command::new("/proc/self/exe");
        command.args(arguments).stdin(OwnedFd::from(theirs)).stdout(lock.map_or_else(Stdio::null, Stdio::from));
        command.stderr(errors).process_group(0);
        let child = command.spawn().map_err(system("start the guardian"))?;
        let sent = stream.write_all(&length.to_be_bytes()).and_then(|()| stream.write_all(task));
        sent.map_err(system("give the guardian its task"))?;
        let mut guardian = Guardian { child, stream };
        // it exists, and watches this process, not a later one with the same number
        guardian.hear(READY)?;
        Ok(guardian)
    }

    /// Sends a request, and waits for the answer, which is the same byte. `request` is above 1.
    ///
    /// # Errors
    ///
    /// The guardian has ended, or gives another answer or none.
    pub fn ask(&mut self, request: u8) -> Result<(), Error> {
        self.stream.write_all(&[request]).map_err(|error| Error::Guardian(error.to_string()))?;
        self.hear(request)
    }

    fn hear(&mut self, expected: u8) -> Result<(), Error> {
        let mut answer = [0];
        match self.stream.read_exact(&mut answer) {
            Ok(()) if answer == [expected] => Ok(()),
            Ok(()) => Err(Error::Guardian(format!("{} instead of {expected}", answer[0]))),
            Err(error) => Err(Error::Guardian(error.to_string())),
        }
    }

    /// Kills the guardian: what it held is released.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
    }

    /// Ends the guardian: the tool has ended in order, and there is nothing to do in its place.
    pub fn dismiss(mut self) {
        // a guardian that is gone does nothing either
        let _ = self.stream.write_all(&[DISMISS]);
        let _ = self.child.wait();
    }
}

/// The guardian's side.
#[derive(Debug)]
pub struct Requests {
    stream: UnixStream,
    tool: Pid,
    process: OwnedFd,
}

/// Message of the tool, or its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// A request, to be answered by [`Requests::answer`].
    Asked(u8),
    /// The tool has ended in order.
    Dismissed,
    /// The tool was killed.
    Killed,
}

impl Requests {
    /// Takes the socket from the standard input of a process that was started by [`Guardian::start`]; returns it with the task.
    ///
    /// # Errors
    ///
    /// The standard input is no such socket, or the tool has ended.
    pub fn from_stdin() -> Result<(Requests, Vec<u8>), Error> {
        let failed = |source| Error::System { action: "read the guardian's task", source };
        let descriptor = std::io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
        let tool = rustix::net::sockopt::socket_peercred(&descriptor).map_err(|error| failed(error.into()))?.pid;
        Requests::new(UnixStream::from(descriptor), tool)
    }

    /// The guardian's side of a socket, for the process `tool`; returns it with the task.
    ///
    /// # Errors
    ///
    /// There is no such process, or the other side of the socket sends no task.
    pub fn new(mut stream: UnixStream, tool: Pid) -> Result<(Requests, Vec<u8>), Error> {
        let failed = |source| Error::System { action: "read the guardian's task", source };
        let process = pidfd_open(tool, PidfdFlags::empty())
            .map_err(|error| Error::System { action: "watch the tool", source: error.into() })?;
        let mut length = [0; 4];
        stream.read_exact(&mut length).map_err(failed)?;
        let length = u32::from_be_bytes(length);
        if length > TASK_MAX {
            return Err(Error::Guardian("the task is too long".into()));
        }
        let mut task = vec![0; length as usize];
        stream.read_exact(&mut task).map_err(failed)?;
        let mut requests = Requests { stream, tool, process };
        requests.answer(READY);
        Ok((requests, task))
    }

    /// Number of the tool's process, and a pidfd of it.
    pub fn tool(&self) -> (Pid, &OwnedFd) {
        (self.tool, &self.process)
    }

    /// Waits for the next request, or the end of the tool.
    ///
    /// # Errors
    ///
    /// The kernel refuses to wait.
    pub fn wait(&mut self) -> Result<Request, Error> {
        loop {
            let mut ready = [PollFd::new(&self.process, PollFlags::IN), PollFd::new(&self.stream, PollFlags::IN)];
            match poll(&mut ready, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Error::System { action: "watch the tool", source: error.into() }),
            }
            let [has_ended, has_asked] = ready.map(|fd| !fd.revents().is_empty());
            let mut request = [0];
            match if has_asked { self.stream.read(&mut request) } else { Ok(0) } {
                Ok(1) if request == [DISMISS] => return Ok(Request::Dismissed),
                Ok(1) => return Ok(Request::Asked(request[0])),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // what it sent before its end has been read
                _ if has_ended => return Ok(Request::Killed),
                // its end of the socket is closed shortly before the process ends
                _ => std::thread::sleep(END_POLL_INTERVAL),
            }
        }
    }

    /// Answers a request. A tool that is gone needs no answer.
    pub fn answer(&mut self, request: u8) {
        let _ = self.stream.write_all(&[request]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that stands for the tool, and both ends of its guardian's socket.
    fn pair(task: &[u8]) -> (Child, UnixStream, Requests) {
        let (mut tool, guardian) = UnixStream::pair().unwrap();
        let process = Command::new("sleep").arg("1000").spawn().unwrap();
        tool.write_all(&(task.len() as u32).to_be_bytes()).unwrap();
        tool.write_all(task).unwrap();
        let (requests, read) = Requests::new(guardian, Pid::from_child(&process)).unwrap();
        assert_eq!(read, task);
        assert_eq!(answer(&mut tool), READY);
        (process, tool, requests)
    }

    fn answer(tool: &mut UnixStream) -> u8 {
        let mut answer = [0];
        tool.read_exact(&mut answer).unwrap();
        answer[0]
    }

    fn kill(mut process: Child) {
        process.kill().unwrap();
        process.wait().unwrap();
    }

    #[test]
    fn an_end_without_dismissal_is_a_death_also_while_the_socket_is_open() {
        let (process, mut tool, mut requests) = pair(b"task");
        tool.write_all(b"h").unwrap();
        kill(process);
        assert_eq!(requests.wait().unwrap(), Request::Asked(b'h'));
        assert_eq!(requests.wait().unwrap(), Request::Killed);
        drop(tool);
        assert_eq!(requests.wait().unwrap(), Request::Killed);
    }

    #[test]
    fn requests_are_answered_until_the_dismissal() {
        let (process, mut tool, mut requests) = pair(b"");
        tool.write_all(&[b'h', DISMISS]).unwrap();
        assert_eq!(requests.wait().unwrap(), Request::Asked(b'h'));
        requests.answer(b'h');
        assert_eq!(answer(&mut tool), b'h');
        assert_eq!(requests.wait().unwrap(), Request::Dismissed);
        kill(process);
    }

    #[test]
    fn a_task_without_limit_is_refused() {
        let (mut tool, guardian) = UnixStream::pair().unwrap();
        tool.write_all(&u32::MAX.to_be_bytes()).unwrap();
        assert!(matches!(Requests::new(guardian, rustix::process::getpid()), Err(Error::Guardian(_))));
    }
}
