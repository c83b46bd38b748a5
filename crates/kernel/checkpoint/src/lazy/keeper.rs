//! Two processes that watch each other: the keeper and the server.

use super::fill::record_failure;
use super::huge::CollapseCounts;
use super::server::{NOTE_DONE, NOTE_FAILED, Server, ServerEnd};
use crate::error::ErrorContext;
use crate::journal::Journal;
use crate::{Error, Image};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, getpid, kill_process, pidfd_open, waitpid};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;
use stillpoint_host::file::listen;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_sys::uffd::{Log, Record, fork_sharing_descriptors};

/// Number of events of all memories while they are filled: 48 MiB if all are used.
const LOG_RECORDS_MAX: usize = 1 << 20;
/// Number of servers that may die without progress in between; then the keeper kills the processes, because the cause is
/// not one server alone.
const DEATHS_MAX: u32 = 100;
/// Number of attempts to make another process, and the time between two: a shortage may be over in a moment.
const FORK_ATTEMPTS_MAX: u32 = 100;
const FORK_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Options of a lazy-pages daemon.
#[derive(Debug, Clone)]
pub struct LazyOptions {
    /// Directory of the image.
    pub image: PathBuf,
    /// Path at which criu looks for the socket.
    pub socket: PathBuf,
    /// Bytes a second in the background; unlimited if `None`.
    pub rate: Option<u64>,
}

/// Serves one restore: waits for criu on the socket, fetches memory, and returns when all of it is resident. `ready` is
/// called when criu can be started. Returns an error if standard input is a pipe whose other end is closed before criu
/// has connected.
///
/// The process must have one thread: it is split in two.
///
/// # Errors
/// The image cannot be opened, criu does not connect or ends too early, or memory cannot be fetched; the processes are
/// then killed.
pub fn serve(options: &LazyOptions, ready: impl FnOnce()) -> Result<(), Error> {
    let image = Image::open(&options.image)?;
    let log = Log::new(LOG_RECORDS_MAX)?;
    let (directory, name) = Directory::of_file(&options.socket)?;
    let _ = directory.remove(name);
    let listener = listen(&options.socket, 0o600)?;
    ready();
    wait_for_criu(&listener)?;
    let (criu, _) = listener.accept().at("wait for criu on", &options.socket)?;
    drop(listener);
    let _ = directory.remove(name);
    let journal = Journal::of(image.dir());
    let done = ProcessPair { image, log, criu, rate: options.rate }.run_keeper(None);
    journal.note("fill", "done", None, done.as_ref().err());
    done
}

/// Waits for a connection, and not for ever: if the process that started this one is gone, no connection will come.
fn wait_for_criu(listener: &UnixListener) -> Result<(), Error> {
    let starter = std::io::stdin();
    loop {
        let mut ready = [PollFd::new(listener, PollFlags::IN), PollFd::new(&starter, PollFlags::empty())];
        match poll(&mut ready, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).with_action("wait for criu"),
        }
        let [connected, hung_up] = ready.map(|fd| fd.revents());
        if !connected.is_empty() {
            return Ok(());
        }
        if hung_up.contains(PollFlags::HUP) {
            return Err(Error::Daemon("the process that started it has ended, and criu has not connected".into()));
        }
    }
}

/// Progress of all servers together: it changes when one of them has recorded an event, or made memory resident.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Progress {
    /// Number of records in the log.
    records: usize,
    /// Bytes that servers have made resident.
    resident: u64,
}

/// Count of servers that died since the last progress.
#[derive(Debug, Default)]
struct DeathCount {
    deaths: u32,
    progress: Progress,
}

impl DeathCount {
    /// Counts the death of a server, at which the servers had made this progress; returns true if the limit is reached.
    fn add(&mut self, progress: Progress) -> bool {
        if progress != self.progress {
            *self = DeathCount { deaths: 0, progress };
        }
        self.deaths += 1;
        self.deaths >= DEATHS_MAX
    }
}

struct ProcessPair {
    image: Image,
    log: Log,
    criu: UnixStream,
    rate: Option<u64>,
}

impl ProcessPair {
    /// Runs the keeper: it ensures that there is a server, which is `other` if it has begun already, until all is done.
    fn run_keeper(&self, other: Option<Pid>) -> Result<(), Error> {
        let mut server = other;
        let mut deaths = DeathCount::default();
        loop {
            let pid = match server.take() {
                Some(pid) => pid,
                // no other process holds the userfaultfds
                None => self.spawn_server().or_else(|error| self.kill_all().and(Err(error)))?,
            };
            wait_for(pid)?;
            match self.outcome()? {
                Some(NOTE_DONE) => return Ok(()),
                Some(_) => {
                    self.kill_all()?;
                    return Err(Error::Daemon("memory cannot be fetched any more; the processes were killed".into()));
                }
                None => tracing::warn!(pid = pid.as_raw_nonzero().get(), "the server died; a new server continues"),
            }
            if deaths.add(Progress { records: self.log.len(), resident: self.log.resident() }) {
                self.kill_all()?;
                let text = format!("{DEATHS_MAX} servers died without progress; the processes were killed");
                return Err(Error::Daemon(text));
            }
        }
    }

    fn spawn_server(&self) -> Result<Pid, Error> {
        let keeper = getpid();
        fork_with_retry(|| {
            let mut keeper = keeper;
            match self.run_server(&mut keeper) {
                Ok(()) => 0,
                Err(error) => {
                    tracing::error!("{}", error.with_causes());
                    // The keeper kills the processes before the last userfaultfd closes. A log that is full has no room for
                    // the note: then the keeper counts deaths.
                    let _ = self.log.append(Record::Note { kind: NOTE_FAILED, value: 0 });
                    if has_ended(keeper) {
                        let _ = self.kill_all();
                    }
                    1
                }
            }
        })
    }

    /// Runs the server. When its keeper dies the server makes another one, and continues.
    fn run_server(&self, keeper: &mut Pid) -> Result<(), Error> {
        loop {
            let pidfd = match pidfd_open(*keeper, PidfdFlags::empty()) {
                Ok(pidfd) => pidfd,
                Err(rustix::io::Errno::SRCH) => {
                    *keeper = self.spawn_keeper()?;
                    continue;
                }
                Err(error) => return Err(error).with_action("watch the keeper"),
            };
            let mut server = Server::new(&self.image, &self.log, self.rate)?;
            match server.run(self.criu.as_fd(), &pidfd)? {
                ServerEnd::Done(counts) => {
                    tracing::info!(counts.faults, counts.asked, counts.filled, counts.ended, "all memory is resident");
                    self.log.append(Record::Note { kind: NOTE_DONE, value: counts.faults })?;
                    match server.collapse(self.rate) {
                        Ok(CollapseCounts { made, left }) => tracing::info!(made, left, "huge pages"),
                        Err(error) => tracing::warn!("memory remains in small pages: {}", error.with_causes()),
                    }
                    return Ok(());
                }
                ServerEnd::Abandoned => {
                    self.log.append(Record::Note { kind: NOTE_FAILED, value: 0 })?;
                    return Err(Error::Daemon("criu ended before it had restored everything".into()));
                }
                ServerEnd::KeeperDied => *keeper = self.spawn_keeper()?,
            }
        }
    }

    fn spawn_keeper(&self) -> Result<Pid, Error> {
        let server = getpid();
        tracing::warn!("the keeper died; a new keeper replaces it");
        fork_with_retry(|| match self.run_keeper(Some(server)) {
            Ok(()) => 0,
            Err(error) => {
                tracing::error!("{error}");
                1
            }
        })
    }

    /// Returns the last record of an end in the log, if there is one.
    fn outcome(&self) -> Result<Option<u32>, Error> {
        let ends = |record: &Record| match record {
            Record::Note { kind, .. } if *kind == NOTE_DONE || *kind == NOTE_FAILED => Some(*kind),
            _ => None,
        };
        Ok(self.log.records()?.iter().find_map(ends))
    }

    /// Kills all processes: memory that will never be fetched must not read as zeros.
    fn kill_all(&self) -> Result<(), Error> {
        record_failure(self.image.dir());
        let records = self.log.records()?;
        let roots = records.iter().filter_map(|record| match record {
            Record::Memory { pid, .. } => Some(*pid as i32),
            _ => None,
        });
        let mut pids: Vec<i32> = roots.collect();
        // children that were forked since have memories of their own
        let children = crate::process_tree::descendants(&pids);
        pids.extend(children);
        for pid in pids.into_iter().filter_map(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
        Ok(())
    }
}

/// Splits this process in two. If that fails this process alone holds the userfaultfds, so it retries for a while.
fn fork_with_retry(child: impl Fn() -> u8) -> Result<Pid, Error> {
    let mut attempts = 0;
    loop {
        match fork_sharing_descriptors(&child) {
            Err(error) if attempts == FORK_ATTEMPTS_MAX => return Err(error.into()),
            Err(error) => tracing::warn!("fork: {error}"),
            Ok(pid) => return Ok(pid),
        }
        attempts += 1;
        std::thread::sleep(FORK_RETRY_INTERVAL);
    }
}

fn has_ended(pid: Pid) -> bool {
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&Timespec::default())) == Ok(1),
        Err(error) => error == rustix::io::Errno::SRCH,
    }
}

/// Waits for the end of a process, which need not be a child.
pub(crate) fn wait_for(pid: Pid) -> Result<(), Error> {
    let pidfd: OwnedFd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error).with_action("watch the server"),
    };
    loop {
        match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], None) {
            Ok(1..) => break,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    let _ = waitpid(Some(pid), WaitOptions::NOHANG);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_deaths_without_progress_are_counted() {
        let mut deaths = DeathCount::default();
        let progress = |records, resident| Progress { records, resident };
        // a long fetch with many deaths goes on as long as there is progress between them
        for round in 1..=2 * u64::from(DEATHS_MAX) {
            assert!(!deaths.add(progress(0, round * 4096)));
        }
        for records in 1..=2 * DEATHS_MAX as usize {
            assert!(!deaths.add(progress(records, 0)));
        }
        let last = progress(7, 7);
        assert!((1..DEATHS_MAX).all(|_| !deaths.add(last)));
        assert!(deaths.add(last));
        assert!(!deaths.add(progress(7, 8)));
    }
}
