//! The process that owns a guard.

use super::nftables::{Filter, Nftables};
use super::{of_connections, owned};
use crate::Error;
use crate::error::At;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use stillpoint_host::trusted::Directory;
use stillpoint_host::{file, kernel_files};

/// Line that a keeper prints when its guard is up.
pub const RAISED: &str = "raised";

/// Name of the keeper's log in the directory of an image.
const LOG: &str = "guard.log";
/// Step that failed when a keeper does not start.
const GUARD: &str = "guard the connections";
/// Time within which a keeper lifts its guard; after that it counts as absent.
const ANSWERS: Duration = Duration::from_secs(30);
/// Time within which a connection must send its order.
const ORDERS: Duration = Duration::from_secs(1);
/// The order to lift the guard.
const LIFT: u8 = b'l';
/// The answer after the guard was lifted.
const LIFTED: &str = "lifted";
/// Interval in which a keeper looks for its socket: without it the image has been removed, and the guard has no use.
const LOOK: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// Bytes of the log that are read.
const LOG_MAX: u64 = 1 << 20;
/// Bytes of the record of gaps that are read.
const GAPS_MAX: u64 = 1 << 16;

/// A time in which connections had no guard. Its beginning is not known: no process observed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    /// Time at which the guard was restored, in seconds since 1970.
    pub until_unix_s: u64,
}

impl Gap {
    /// Returns a gap that ends now.
    pub(crate) fn until_now() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Gap { until_unix_s: now.as_secs() }
    }

    /// Returns a sentence for the operator.
    pub fn text(&self) -> String {
        let until = self.until_unix_s;
        format!(
            "the guard was missing for a while, until {until} s after 1970: peers that sent were answered with resets"
        )
    }
}

/// State of a guard that was lifted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// True if one of its tables existed to the end.
    pub(crate) stood: bool,
    /// Times without the guard.
    pub(crate) gaps: Vec<Gap>,
}

/// Starts the keeper of a sealed image's connections in a process of its own, and waits until they are guarded.
///
/// # Errors
/// The keeper does not start, or the kernel does not make its tables.
pub(crate) fn keep_image(image: &Path) -> Result<(), Error> {
    let directory = Directory::open(image)?;
    let log = directory.create(LOG)?;
    // also valid if the file has been replaced meanwhile
    let mut command = Command::new("/proc/self/exe");
    command.args(["kernel", "guard-keeper", "--image"]).arg(image);
    // an interrupt from the terminal is for the tool alone
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).process_group(0);
    let mut child = command.spawn().doing("start the keeper of the guard")?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut line).doing("hear the keeper of the guard")?;
    }
    if line.trim() == RAISED {
        return Ok(());
    }
    let _ = child.wait();
    let said = directory.read(LOG, LOG_MAX).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let why = said.lines().rev().find_map(|line| line.strip_prefix("error: "));
    Err(Error::Step { what: GUARD, why: why.unwrap_or("its keeper did not say why").to_owned() })
}

/// Guards the connections in an image until it gets the order to lift the guard, or the image is removed. `raised` is
/// called when the guard is up.
///
/// # Errors
/// The kernel does not make the tables, or another keeper exists.
pub fn keep_connections(image: &Path, raised: impl FnOnce()) -> Result<(), Error> {
    let (name, filter, socket) = of_connections(image)?;
    keep(Keeper { name, filter, socket, was_raised: false }, raised)
}

/// Guards until it gets the order to lift the guard. `raised` is called when the guard is up.
///
/// # Errors
/// The kernel does not make the tables, or another keeper exists.
pub(crate) fn keep(keeper: Keeper, raised: impl FnOnce()) -> Result<(), Error> {
    // a machine that is short of memory must not lose the guard
    let _ = kernel_files::write("/proc/self/oom_score_adj", "-1000");
    keeper.run(raised)
}

/// A guard, and the process that owns it.
pub(crate) struct Keeper {
    /// Name of the table that stays when the process that made it ends.
    pub(crate) name: String,
    /// Packets that it drops.
    pub(crate) filter: Filter,
    /// Socket that receives the order to lift it.
    pub(crate) socket: PathBuf,
    /// True if the first table was made before this process began.
    pub(crate) was_raised: bool,
}

impl Keeper {
    fn run(&self, raised: impl FnOnce()) -> Result<(), Error> {
        let listener = listen(&self.socket)?;
        let changes = Nftables::listen()?;
        let nftables = Nftables::open()?;
        let is_missing = self.was_raised && !nftables.stands(&self.name)?;
        // first the table that survives a flush
        nftables.replace(&owned(&self.name), true, &self.filter)?;
        nftables.replace(&self.name, false, &self.filter)?;
        if is_missing {
            note(&self.socket, Gap::until_now())?;
        }
        raised();
        loop {
            let mut fds = [PollFd::new(changes.socket(), PollFlags::IN), PollFd::new(&listener, PollFlags::IN)];
            match poll(&mut fds, Some(&LOOK)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).doing("wait for changes of nftables"),
            }
            let [changed, asked] = fds.map(|fd| !fd.revents().is_empty());
            if asked {
                let (mut stream, _) = listener.accept().doing("hear the lifter of the guard")?;
                stream.set_read_timeout(Some(ORDERS)).doing("hear the lifter of the guard")?;
                let mut order = [0];
                // a connection that sends nothing only tests whether a keeper exists
                if matches!(stream.read(&mut order), Ok(1)) && order == [LIFT] {
                    return self.lift(&nftables, stream);
                }
            }
            // the guard of a switch is lifted by order alone
            if !self.was_raised && !self.socket.exists() {
                return self.remove(&nftables);
            }
            if changed {
                changes.drain();
                if !nftables.stands(&self.name)? {
                    tracing::warn!(table = self.name, "taken away by another process, and made again");
                    nftables.replace(&self.name, false, &self.filter)?;
                }
            }
        }
    }

    fn remove(&self, nftables: &Nftables) -> Result<(), Error> {
        nftables.remove(&[(&owned(&self.name), true), (&self.name, false)])
    }

    fn lift(&self, nftables: &Nftables, mut stream: UnixStream) -> Result<(), Error> {
        remove(&self.socket);
        let done = self.remove(nftables);
        let text = done.as_ref().err().map_or_else(|| LIFTED.to_owned(), Error::with_causes);
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
    if is_kept(path) {
        return Err(Error::Step { what: GUARD, why: format!("another keeper listens at {}", path.display()) });
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

/// Returns true if a keeper exists.
pub(super) fn is_kept(socket: &Path) -> bool {
    UnixStream::connect(socket).is_ok()
}

/// Removes a guard, through its keeper if there is one.
///
/// # Errors
/// A table cannot be removed.
pub(crate) fn lift_at(socket: &Path, name: &str) -> Result<Outcome, Error> {
    let nftables = Nftables::open()?;
    let stood = nftables.stands(name)? || nftables.stands(&owned(name))?;
    let gaps = gaps(socket);
    if let Ok(mut stream) = UnixStream::connect(socket) {
        stream.set_read_timeout(Some(ANSWERS)).doing("hear the keeper of the guard")?;
        let mut answer = String::new();
        let heard = stream.write_all(&[LIFT]).and_then(|()| stream.read_to_string(&mut answer));
        if heard.is_err() || answer != LIFTED {
            let why = if answer.is_empty() { "its keeper does not answer".into() } else { answer };
            return Err(Error::Step { what: "lower the guard", why });
        }
    }
    nftables.remove(&[(name, false)])?;
    remove(socket);
    remove(&gaps_beside(socket));
    Ok(Outcome { stood, gaps })
}

fn gaps_beside(socket: &Path) -> PathBuf {
    socket.with_extension("gaps")
}

/// Reads the record of times without a guard.
pub(super) fn gaps(socket: &Path) -> Vec<Gap> {
    let path = gaps_beside(socket);
    let read = Directory::of_file(&path).and_then(|(directory, name)| directory.read(name, GAPS_MAX));
    // a record that does not exist has no gaps
    let bytes = read.unwrap_or_default();
    bytes.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

fn note(socket: &Path, gap: Gap) -> Result<(), Error> {
    let path = gaps_beside(socket);
    let (directory, name) = Directory::of_file(&path)?;
    let mut bytes = directory.read(name, GAPS_MAX).unwrap_or_default();
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
        assert!(gaps(&socket).is_empty() && !is_kept(&socket));
        for until_unix_s in [7, 8] {
            note(&socket, Gap { until_unix_s }).unwrap();
        }
        assert_eq!(gaps(&socket), [7, 8].map(|until_unix_s| Gap { until_unix_s }));
    }

    #[test]
    fn a_keeper_that_was_killed_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("guard.sock");
        let listener = listen(&socket).unwrap();
        assert!(is_kept(&socket) && listen(&socket).is_err());
        drop(listener);
        assert!(!is_kept(&socket));
        listen(&socket).unwrap();
    }
}
