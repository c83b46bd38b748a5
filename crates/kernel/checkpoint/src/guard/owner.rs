//! The process that owns a guard.

use super::nftables::{Filter, Nftables};
use crate::Error;
use crate::error::ErrorContext;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use stillpoint_host::clock::since_1970;
use stillpoint_host::trusted::Directory;
use stillpoint_host::{file, kernel_files};

/// Line that an owner prints when its guard is up.
pub const GUARD_READY_LINE: &str = "raised";

/// Name of the owner's log in the directory of an image.
const LOG_NAME: &str = "guard.log";
/// Step that failed when an owner does not start.
const GUARD_STEP: &str = "guard the connections";
/// Time within which an owner lifts its guard; after that it counts as absent.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time within which a connection must send its order.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// The order to lift the guard.
const LIFT_REQUEST: u8 = b'l';
/// The answer after the guard was lifted.
const LIFTED_ANSWER: &str = "lifted";
/// Interval in which an owner looks for its socket: without it the image has been removed, and the guard has no use.
const SOCKET_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// Bytes of the log that are read.
const LOG_BYTES_MAX: u64 = 1 << 20;
/// Bytes of the record of gaps that are read.
const GAPS_BYTES_MAX: u64 = 1 << 16;

/// A time in which connections had no guard. Its beginning is not known: no process observed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    /// Time at which the guard was restored, in seconds since 1970.
    pub until_unix_s: u64,
}

impl Gap {
    /// Returns a gap that ends now.
    pub fn until_now() -> Self {
        Gap { until_unix_s: since_1970().as_secs() }
    }

    /// Returns a sentence for the operator.
    pub fn text(&self) -> String {
        let until = self.until_unix_s;
        format!(
            "the guard was missing until {until} (seconds since 1970): the kernel answered packets of peers with resets"
        )
    }
}

/// State of a guard that was lifted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiftedGuard {
    /// True if one of its tables existed to the end.
    pub was_active: bool,
    /// Times without the guard.
    pub gaps: Vec<Gap>,
}

/// Starts the owner of a sealed image's connections in a process of its own, and waits until they are guarded.
///
/// # Errors
/// The owner does not start, or the kernel does not make its tables.
pub(crate) fn start_owner(image: &Path) -> Result<(), Error> {
    let directory = Directory::open(image)?;
    let log = directory.create(LOG_NAME)?;
    // also valid if the file has been replaced meanwhile
    let mut command = Command::new("/proc/self/exe");
    command.args(["kernel", "guard-keeper", "--image"]).arg(image);
    // an interrupt from the terminal is for the tool alone
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).process_group(0);
    let mut child = command.spawn().with_action("start the owner process of the guard")?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut line).with_action("receive from the owner process of the guard")?;
    }
    if line.trim() == GUARD_READY_LINE {
        return Ok(());
    }
    let _ = child.wait();
    let said = directory.read(LOG_NAME, LOG_BYTES_MAX).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let why = said.lines().rev().find_map(|line| line.strip_prefix("error: "));
    Err(Error::Step { what: GUARD_STEP, why: why.unwrap_or("its owner process reported no reason").to_owned() })
}

/// Guards until it gets the order to lift the guard. `raised` is called when the guard is up.
///
/// # Errors
/// The kernel does not make the tables, or another owner exists.
pub(super) fn run_owner(owner: GuardOwner, on_ready: impl FnOnce()) -> Result<(), Error> {
    // a machine that is short of memory must not lose the guard
    let _ = kernel_files::write("/proc/self/oom_score_adj", "-1000");
    owner.run(on_ready)
}

/// A guard, and the process that owns it.
pub(super) struct GuardOwner {
    /// Name of the table that stays when the process that made it ends.
    pub(super) name: String,
    /// Packets that it drops.
    pub(super) filter: Filter,
    /// Socket that receives the order to lift it.
    pub(super) socket: PathBuf,
    /// True if the first table was made before this process began.
    pub(super) was_raised: bool,
}

impl GuardOwner {
    fn run(&self, on_ready: impl FnOnce()) -> Result<(), Error> {
        let listener = listen(&self.socket)?;
        let changes = Nftables::listen()?;
        let nftables = Nftables::open()?;
        let is_missing = self.was_raised && !nftables.is_active(&self.name)?;
        // first the table that survives a flush
        nftables.replace(&owned_name(&self.name), true, &self.filter)?;
        nftables.replace(&self.name, false, &self.filter)?;
        if is_missing {
            record_gap(&self.socket, Gap::until_now())?;
        }
        on_ready();
        loop {
            let mut fds = [PollFd::new(changes.socket(), PollFlags::IN), PollFd::new(&listener, PollFlags::IN)];
            match poll(&mut fds, Some(&SOCKET_CHECK_INTERVAL)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).with_action("wait for changes of nftables"),
            }
            let [changed, requested] = fds.map(|fd| !fd.revents().is_empty());
            if requested {
                let (mut stream, _) = listener.accept().with_action("receive the request to lift the guard")?;
                stream.set_read_timeout(Some(REQUEST_TIMEOUT)).with_action("receive the request to lift the guard")?;
                let mut request = [0];
                // a connection that sends nothing only tests whether an owner exists
                if matches!(stream.read(&mut request), Ok(1)) && request == [LIFT_REQUEST] {
                    return self.lift(&nftables, stream);
                }
            }
            // the guard of a switch is lifted by order alone
            if !self.was_raised && !self.socket.exists() {
                return self.remove(&nftables);
            }
            if changed {
                changes.drain();
                if !nftables.is_active(&self.name)? {
                    tracing::warn!(table = self.name, "removed by another process, and created again");
                    nftables.replace(&self.name, false, &self.filter)?;
                }
            }
        }
    }

    fn remove(&self, nftables: &Nftables) -> Result<(), Error> {
        nftables.remove(&[(&owned_name(&self.name), true), (&self.name, false)])
    }

    fn lift(&self, nftables: &Nftables, mut stream: UnixStream) -> Result<(), Error> {
        remove(&self.socket);
        let done = self.remove(nftables);
        let text = done.as_ref().err().map_or_else(|| LIFTED_ANSWER.to_owned(), Error::with_causes);
        // a client that has gone meanwhile looks at the tables again
        let _ = stream.write_all(text.as_bytes());
        done
    }
}

/// Listens for the order to lift the guard; only root and this user can send it.
fn listen(path: &Path) -> Result<UnixListener, Error> {
    if let Some(directory) = path.parent() {
        Directory::make_public(directory)?;
    }
    if has_owner(path) {
        return Err(Error::Step {
            what: GUARD_STEP,
            why: format!("another owner process listens at {}", path.display()),
        });
    }
    remove(path);
    Ok(file::listen(path, 0o600)?)
}

/// Removes a file, if it is there.
fn remove(path: &Path) {
    if let Ok((directory, name)) = Directory::of_file(path) {
        let _ = directory.remove(name);
    }
}

/// Returns the name of the table that ends with its owner, beside the one of this name.
pub(super) fn owned_name(name: &str) -> String {
    format!("{name}_owned")
}

/// Returns true if an owner exists.
pub(super) fn has_owner(socket: &Path) -> bool {
    UnixStream::connect(socket).is_ok()
}

/// Removes a guard, through its owner if there is one.
///
/// # Errors
/// A table cannot be removed.
pub(super) fn lift_guard(socket: &Path, name: &str) -> Result<LiftedGuard, Error> {
    let nftables = Nftables::open()?;
    let was_active = nftables.is_active(name)? || nftables.is_active(&owned_name(name))?;
    let gaps = read_gaps(socket);
    if let Ok(mut stream) = UnixStream::connect(socket) {
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).with_action("receive from the owner process of the guard")?;
        let mut answer = String::new();
        let received = stream.write_all(&[LIFT_REQUEST]).and_then(|()| stream.read_to_string(&mut answer));
        if received.is_err() || answer != LIFTED_ANSWER {
            let why = if answer.is_empty() { "its owner process does not answer".into() } else { answer };
            return Err(Error::Step { what: "lower the guard", why });
        }
    }
    nftables.remove(&[(name, false)])?;
    remove(socket);
    remove(&gaps_path(socket));
    Ok(LiftedGuard { was_active, gaps })
}

fn gaps_path(socket: &Path) -> PathBuf {
    socket.with_extension("gaps")
}

/// Reads the record of times without a guard.
pub(super) fn read_gaps(socket: &Path) -> Vec<Gap> {
    let path = gaps_path(socket);
    let read = Directory::of_file(&path).and_then(|(directory, name)| directory.read(name, GAPS_BYTES_MAX));
    // a record that does not exist has no gaps
    let bytes = read.unwrap_or_default();
    bytes.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

fn record_gap(socket: &Path, gap: Gap) -> Result<(), Error> {
    let path = gaps_path(socket);
    let (directory, name) = Directory::of_file(&path)?;
    let mut bytes = directory.read(name, GAPS_BYTES_MAX).unwrap_or_default();
    bytes.extend_from_slice(format!("{{\"until_unix_s\":{}}}\n", gap.until_unix_s).as_bytes());
    directory.write(name, &bytes)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_without_a_guard_are_remembered_by_the_next_keeper() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("guard.sock");
        assert!(read_gaps(&socket).is_empty() && !has_owner(&socket));
        for until_unix_s in [7, 8] {
            record_gap(&socket, Gap { until_unix_s }).unwrap();
        }
        assert_eq!(read_gaps(&socket), [7, 8].map(|until_unix_s| Gap { until_unix_s }));
    }

    #[test]
    fn a_keeper_that_was_killed_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("guard.sock");
        let listener = listen(&socket).unwrap();
        assert!(has_owner(&socket) && listen(&socket).is_err());
        drop(listener);
        assert!(!has_owner(&socket));
        listen(&socket).unwrap();
    }
}
