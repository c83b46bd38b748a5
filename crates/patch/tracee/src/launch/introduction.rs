//! Introduction of a process to a helper that is not its parent and does not trust it.
//!
//! The helper has privileges that the process lacks, so every statement is checked against the kernel. The kernel names the process that
//! connected only by its number, and a number is reused; `SO_PEERPIDFD` names it permanently, from Linux 6.5. Here the process must send
//! bytes that it could not know before. The helper opens a pidfd, then sends random bytes. The message that returns them carries its
//! sender's number, written by the kernel (`SCM_CREDENTIALS`). While the pidfd's process lives, no other process has its number, so that
//! process is the sender. This holds on every supported kernel.
//!
//! ```text
//!  state of the helper          helper                        process              what ends it
//!  Connected::accept            pidfd of the peer      <----  connect              the peer is gone or not visible
//!  Connected::challenge         16 random bytes        ---->
//!  Challenged::answer           checks                 <----  one message:         silence, another length or version, other
//!                                                             version, strict,     bytes, another sender, not one descriptor, a
//!                                                             the 16 bytes, its    descriptor of another connection, one that
//!                                                             end of this          the process does not have above 2
//!                                                             connection
//!  Launch::follow, ready        seizes; "r"            ---->  exec                 the process may not be traced
//! ```
//!
//! Each state is a type whose only continuation is the next one. A message that comes too early is a wrong answer, because it cannot hold
//! the bytes. After its answer nothing more is read from the process.

use super::{Program, credentials::Credentials};
use crate::{Pid, calling_process, sys};
use rustix::net::sockopt::set_socket_passcred;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use stillpoint_host::kernel_files;

/// Time limit for the answer of a process.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for each message of a helper that a process waits for.
pub(super) const HELPER_TIMEOUT: Duration = Duration::from_secs(10);
const VERSION: u8 = 2;
const CHALLENGE_LEN: usize = 16;
/// Length of an answer in bytes: version, strict, challenge.
const ANSWER_LEN: usize = 2 + CHALLENGE_LEN;
/// Largest number of open descriptors of a process that are searched.
const DESCRIPTORS_MAX: usize = 1 << 16;

/// A helper's end of a connection, and the process that connected.
#[derive(Debug)]
pub struct Connected {
    pid: Pid,
    pidfd: OwnedFd,
    channel: UnixStream,
}

impl Connected {
    /// Binds a connection to the process that connected.
    ///
    /// # Errors
    /// The process has ended, or this process's PID namespace does not show it.
    pub fn accept(channel: UnixStream) -> io::Result<Connected> {
        let pid = calling_process::peer(channel.as_raw_fd())?;
        // before anything is sent: every message carries the number of its sender
        set_socket_passcred(&channel, true)?;
        let pidfd = sys::pidfd_open(pid)?;
        Ok(Connected { pid: Pid(pid), pidfd, channel })
    }

    /// Returns the number of the process. Data read by this number belong to this process only if [`Connected::is_alive`] holds afterwards.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns true if the process has not ended.
    pub fn is_alive(&self) -> bool {
        !sys::has_ended(&self.pidfd)
    }

    /// Asks the process to introduce itself.
    ///
    /// # Errors
    /// The process closed the connection, or there are no random numbers.
    pub fn challenge(mut self) -> io::Result<Challenged> {
        let challenge = random()?;
        self.channel.write_all(&challenge)?;
        Ok(Challenged { peer: self, challenge })
    }
}

/// A process that has received a challenge.
#[derive(Debug)]
pub struct Challenged {
    peer: Connected,
    challenge: [u8; CHALLENGE_LEN],
}

/// A process that has introduced itself.
#[derive(Debug)]
pub struct Introduced {
    /// The program that the process will become.
    pub program: Program,
    /// True if the process must not run unless every patch is active.
    pub strict: bool,
}

impl Challenged {
    /// Takes the answer.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] for a wrong answer, with the reason.
    pub fn answer(self) -> io::Result<Introduced> {
        let Challenged { peer: Connected { pid, pidfd, mut channel }, challenge } = self;
        channel.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let mut bytes = [0; ANSWER_LEN + 1];
        let message = calling_process::receive(channel.as_raw_fd(), &mut bytes)?;
        if message.sender != Some(pid.0) || sys::has_ended(&pidfd) {
            return refuse("another process answered");
        }
        let [VERSION, strict @ (0 | 1), answered @ ..] = &bytes[..message.len] else {
            return refuse("it speaks another version");
        };
        if answered != challenge {
            return refuse("it did not answer what it was asked");
        }
        let [end] = <[OwnedFd; 1]>::try_from(message.descriptors)
            .map_err(|sent| wrong(format!("it sent {} descriptors in the place of one", sent.len())))?;
        is_other_end(&end, &mut channel)?;
        channel.set_read_timeout(None)?;
        let descriptor = number_of(pid, &end)?;
        let credentials = Credentials::of(pid)?;
        if sys::has_ended(&pidfd) {
            return refuse("it has ended");
        }
        let program = Program { pid, pidfd: Some(pidfd), channel, descriptor, credentials: Some(credentials) };
        Ok(Introduced { program, strict: *strict == 1 })
    }
}

/// Sends the answer to a challenge, together with the sender's end of the connection.
pub(super) fn introduce(channel: &mut UnixStream, strict: bool) -> io::Result<()> {
    let mut challenge = [0; CHALLENGE_LEN];
    channel.read_exact(&mut challenge)?;
    let mut answer = [0; ANSWER_LEN];
    answer[..2].copy_from_slice(&[VERSION, strict.into()]);
    answer[2..].copy_from_slice(&challenge);
    calling_process::send_with(&*channel, &answer, &*channel)
}

/// Refuses a descriptor that is not the other end of `channel`: bytes written to it must arrive here.
fn is_other_end(end: &OwnedFd, channel: &mut UnixStream) -> io::Result<()> {
    let (sent, mut came) = (random()?, [0; CHALLENGE_LEN]);
    calling_process::send(end, &sent).map_err(|error| wrong(format!("its descriptor is no connection: {error}")))?;
    // bytes arrive at once when they are sent (unix(7)); earlier bytes make the text differ
    channel.set_nonblocking(true)?;
    let read = channel.read(&mut came);
    channel.set_nonblocking(false)?;
    if !read.is_ok_and(|len| len == came.len()) || came != sent {
        return refuse("its descriptor is another connection");
    }
    Ok(())
}

/// Returns the number of a socket in a process: the highest one, and not a standard descriptor. A gate closes it after the C library has
/// made sure that the standard descriptors are open.
fn number_of(pid: Pid, socket: &OwnedFd) -> io::Result<RawFd> {
    let link = kernel_files::link(format!("/proc/self/fd/{}", socket.as_raw_fd()))?;
    let directory = format!("/proc/{pid}/fd");
    let mut found = None;
    for (seen, name) in kernel_files::list(&directory)?.enumerate() {
        if seen >= DESCRIPTORS_MAX {
            return refuse(format!("it has more than {DESCRIPTORS_MAX} open descriptors"));
        }
        let number = name?.to_str().and_then(|name| name.parse::<RawFd>().ok());
        let is_it = |number: &RawFd| {
            *number > 2 && kernel_files::link(Path::new(&directory).join(number.to_string())).is_ok_and(|to| to == link)
        };
        found = found.max(number.filter(is_it));
    }
    found.ok_or_else(|| wrong("it does not have its end of the connection under a number above 2"))
}

fn random() -> io::Result<[u8; CHALLENGE_LEN]> {
    let mut bytes = [0; CHALLENGE_LEN];
    // so few bytes are returned completely or not at all (getrandom(2))
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}

fn wrong(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

fn refuse<T>(why: impl Into<String>) -> io::Result<T> {
    Err(wrong(why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixDatagram;
    use std::process::{Command, Stdio};

    /// Returns a helper that has challenged this very process, and the process's end.
    fn asked() -> (Challenged, UnixStream) {
        let (helper, process) = UnixStream::pair().unwrap();
        (Connected::accept(helper).unwrap().challenge().unwrap(), process)
    }

    /// Returns the right answer; nothing else is read from the connection.
    fn right(process: &mut UnixStream) -> Vec<u8> {
        let mut answer = vec![VERSION, 1];
        answer.resize(ANSWER_LEN, 0);
        process.read_exact(&mut answer[2..]).unwrap();
        answer
    }

    fn why(challenged: Challenged) -> String {
        challenged.answer().err().map_or_else(String::new, |error| error.to_string())
    }

    fn send(process: &UnixStream, answer: &[u8], descriptor: &impl AsFd) {
        calling_process::send_with(process, answer, descriptor).unwrap();
    }

    #[test]
    fn a_process_that_answers_is_followed_by_its_own_descriptor() {
        for strict in [false, true] {
            let (challenged, mut process) = asked();
            introduce(&mut process, strict).unwrap();
            let introduced = challenged.answer().unwrap();
            assert_eq!((introduced.strict, introduced.program.pid.0 as u32), (strict, std::process::id()));
            // the highest number: of the one that the process has, and of the one that the helper received here
            assert!(introduced.program.descriptor >= process.as_raw_fd());
            assert!(introduced.program.credentials.is_some() && introduced.program.pidfd.is_some());
        }
    }

    #[test]
    fn what_comes_in_another_order_is_refused() {
        // before the challenge
        let (helper, process) = UnixStream::pair().unwrap();
        send(&process, &[VERSION; ANSWER_LEN], &process);
        let challenged = Connected::accept(helper).unwrap().challenge().unwrap();
        assert!(why(challenged).contains("another process answered"), "it bears no sender");
        let (helper, process) = UnixStream::pair().unwrap();
        let connected = Connected::accept(helper).unwrap();
        send(&process, &[VERSION, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7], &process);
        assert!(why(connected.challenge().unwrap()).contains("did not answer what it was asked"));
        // the answer to an earlier challenge
        let (_, mut process) = asked();
        let old = right(&mut process);
        let (challenged, process) = asked();
        send(&process, &old, &process);
        assert!(why(challenged).contains("did not answer what it was asked"));
        // a second answer before the helper has finished with the first
        let (challenged, mut process) = asked();
        let answer = right(&mut process);
        send(&process, &answer, &process);
        send(&process, &answer, &process);
        assert!(why(challenged).contains("another connection"));
        // no answer
        let (challenged, process) = asked();
        drop(process);
        assert!(!why(challenged).is_empty());
    }

    #[test]
    fn an_answer_has_one_form() {
        type Change = fn(&mut Vec<u8>);
        let wrong: [(Change, &str); 6] = [
            (|answer| answer[0] = 1, "another version"),
            (|answer| answer[1] = 2, "another version"),
            (|answer| answer.truncate(1), "another version"),
            (|answer| answer.truncate(ANSWER_LEN - 1), "did not answer"),
            (|answer| answer.push(0), "did not answer"),
            (|answer| answer[ANSWER_LEN - 1] ^= 1, "did not answer"),
        ];
        for (change, reason) in wrong {
            let (challenged, mut process) = asked();
            let mut answer = right(&mut process);
            change(&mut answer);
            send(&process, &answer, &process);
            let why = why(challenged);
            assert!(why.contains(reason), "{answer:?}: {why}");
        }
    }

    #[test]
    fn the_descriptor_is_the_other_end_of_the_connection() {
        let (challenged, mut process) = asked();
        let answer = right(&mut process);
        process.write_all(&answer).unwrap();
        assert!(why(challenged).contains("0 descriptors"));

        let (other, _end) = UnixStream::pair().unwrap();
        let (message, _end) = UnixDatagram::pair().unwrap();
        let file = std::fs::File::open("/etc/passwd").unwrap();
        let descriptors: [(&dyn AsFd, &str); 3] =
            [(&other, "another connection"), (&message, "another connection"), (&file, "no connection")];
        for (descriptor, reason) in descriptors {
            let (challenged, mut process) = asked();
            let answer = right(&mut process);
            calling_process::send_with(&process, &answer, descriptor.as_fd()).unwrap();
            let why = why(challenged);
            assert!(why.contains(reason), "{why}");
        }
    }

    #[test]
    fn another_process_cannot_answer() {
        let (challenged, process) = asked();
        let end = || Stdio::from(OwnedFd::from(process.try_clone().unwrap()));
        let mut child = Command::new("head").args(["-c", "16"]).stdin(end()).stdout(end()).spawn().unwrap();
        assert!(child.wait().unwrap().success());
        assert!(why(challenged).contains("another process answered"));
    }

    #[test]
    fn standard_descriptors_are_not_taken() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let pipe = OwnedFd::from(child.stdin.take().unwrap());
        let pid = Pid(child.id() as i32);
        // its standard input is a pipe; this is the other end, with the same name
        let error = number_of(pid, &pipe).unwrap_err().to_string();
        assert!(error.contains("a number above 2"), "{error}");
        drop(pipe);
        child.wait().unwrap();
    }
}
