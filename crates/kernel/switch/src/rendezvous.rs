//! Rendezvous of the restores of units with their leader: each sends a line when it has reached a state, and waits
//! for its release.

use crate::journal::Journal;
use crate::stall_limit::StallLimit;
use procfs::process::Process;
use rustix::net::sockopt::socket_peercred;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use stillpoint_host::file::listen;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_checkpoint::process_tree::descendants;
use stillpoint_kernel_checkpoint::{Error, ErrorContext, RESTORE_LOG};

const SOCKET_PATH: &str = "/run/stillpoint/switch.sock";
/// Time between two tests: after the last restore is ready all others wait so long.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Message of a unit's restore when the processes are restored and stopped.
pub(crate) const STOPPED_MESSAGE: &str = "stopped";
/// Message when the processes run.
pub(crate) const RUNNING_MESSAGE: &str = "running";
/// Message when all of its memory is resident.
pub(crate) const FILLED_MESSAGE: &str = "filled";
/// Message when its memory cannot be fetched any more; its processes have been killed.
pub(crate) const LOST_MESSAGE: &str = "lost";
/// Message when it failed, and none of its processes runs; the reason follows.
pub(crate) const FAILED_MESSAGE: &str = "failed";
/// Message when it failed because the image is damaged, as it will each time.
pub(crate) const DAMAGED_MESSAGE: &str = "damaged";
/// State of a restore that ended without a message: it was killed, or its unit stopped.
const MEMBER_GONE: &str = "gone";
/// Message of the leader.
const RELEASE_MESSAGE: &str = "go";

/// The leader's side.
pub(crate) struct Rendezvous {
    listener: UnixListener,
    members: Vec<Member>,
}

/// One unit's restore, as the leader sees it.
struct Member {
    stream: UnixStream,
    pid: i32,
    buffer: Vec<u8>,
}

impl Rendezvous {
    pub(crate) fn begin() -> Result<Self, Error> {
        Rendezvous::at(Path::new(SOCKET_PATH))
    }

    fn at(path: &Path) -> Result<Self, Error> {
        // the exec helper's socket is there too, which every user can reach
        Directory::make_public(path.parent().unwrap_or(Path::new("/")))?;
        let (directory, name) = Directory::of_file(path)?;
        let _ = directory.remove(name);
        let listener = listen(path, 0o600)?;
        listener.set_nonblocking(true).with_action("listen")?;
        Ok(Rendezvous { listener, members: Vec::new() })
    }

    /// Waits until all units are restored and stopped. A restore has no limit while it reads its image or its criu logs
    /// something; one without progress has.
    pub(crate) fn wait_until_stopped(&mut self, journal: &Journal, keepalive: &dyn Fn()) -> Result<(), Error> {
        self.receive_within_limit(STOPPED_MESSAGE, journal, keepalive)
    }

    /// Releases all restores, and waits until they report that they run.
    pub(crate) fn release(&mut self, journal: &Journal, keepalive: &dyn Fn()) -> Result<(), Error> {
        for member in &mut self.members {
            member.stream.write_all(format!("{RELEASE_MESSAGE}\n").as_bytes()).with_action("release a unit")?;
        }
        self.receive_within_limit(RUNNING_MESSAGE, journal, keepalive)
    }

    /// Waits until all memory is resident, without a limit. Returns a line for each unit that has lost its memory. A
    /// unit that is stopped meanwhile has lost nothing, and does not affect the others.
    pub(crate) fn filled(&mut self, journal: &Journal) -> Result<Vec<String>, Error> {
        let lines = self.receive_lines(
            journal.units.len(),
            |line| if line == MEMBER_GONE { Ok(()) } else { failure(line) },
            |_| Ok(()),
        )?;
        Ok(lines.iter().filter_map(|line| text_after(line, LOST_MESSAGE)).map(ToOwned::to_owned).collect())
    }

    fn receive_within_limit(
        &mut self,
        word: &'static str,
        journal: &Journal,
        keepalive: &dyn Fn(),
    ) -> Result<(), Error> {
        let most = journal.config.restore_limit_s;
        let mut limit = StallLimit::new(Duration::from_secs(most), Instant::now());
        let lines = self.receive_lines(journal.units.len(), failure, |rendezvous| {
            keepalive();
            if !limit.is_reached(Instant::now(), || rendezvous.progress(journal)) {
                return Ok(());
            }
            Err(Error::Step {
                what: "restore",
                why: format!("not all units are {word}, and there was no progress for {most} s"),
            })
        })?;
        match lines.into_iter().find(|line| text_after(line, word).is_none()) {
            Some(line) => {
                Err(Error::Step { what: "restore", why: format!("a unit reported {line}, and {word} was expected") })
            }
            None => Ok(()),
        }
    }

    /// Reads one line of each unit.
    fn receive_lines(
        &mut self,
        units: usize,
        check: impl Fn(&str) -> Result<(), Error>,
        mut on_poll: impl FnMut(&Self) -> Result<(), Error>,
    ) -> Result<Vec<String>, Error> {
        let mut lines = vec![None; units];
        loop {
            self.accept()?;
            for (member, line) in self.members.iter_mut().zip(&mut lines) {
                if line.is_none() {
                    *line = member.line()?;
                }
            }
            lines.iter().flatten().try_for_each(|line| check(line))?;
            if lines.iter().all(Option::is_some) {
                return Ok(lines.into_iter().flatten().collect());
            }
            on_poll(self)?;
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn accept(&mut self) -> Result<(), Error> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true).with_action("receive from a unit")?;
                    let pid = socket_peercred(&stream).with_action("receive from a unit")?.pid.as_raw_nonzero().get();
                    self.members.push(Member { stream, pid, buffer: Vec::new() });
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error).with_action("receive from a unit"),
            }
        }
    }

    /// Returns a number that changes when a restore has read or written something, or its criu has logged something.
    fn progress(&self, journal: &Journal) -> u64 {
        let roots: Vec<i32> = self.members.iter().map(|member| member.pid).collect();
        let pids = descendants(&roots).into_iter().chain(roots);
        let io = pids.filter_map(|pid| Process::new(pid).and_then(|process| process.io()).ok());
        let logs = journal.units.iter().map(|unit| journal.image(&unit.name).join(RESTORE_LOG));
        let said = logs.filter_map(|log| log.metadata().ok());
        io.map(|io| io.rchar + io.wchar).sum::<u64>() + said.map(|log| log.len()).sum::<u64>()
    }
}

impl Member {
    /// Returns its message, once that is a whole line.
    fn line(&mut self) -> Result<Option<String>, Error> {
        let mut bytes = [0; 1024];
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line[..end]).into_owned()));
            }
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(Some(MEMBER_GONE.into())),
                Ok(n) => self.buffer.extend_from_slice(&bytes[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // it ended before it had read everything
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(Some(MEMBER_GONE.into())),
                Err(error) => return Err(error).with_action("receive from a unit"),
            }
        }
    }
}

/// Returns the text after a word.
fn text_after<'l>(line: &'l str, word: &str) -> Option<&'l str> {
    line.strip_prefix(word)?.strip_prefix(' ')
}

/// Returns the failure that a line reports, if it does.
fn failure(line: &str) -> Result<(), Error> {
    if line == MEMBER_GONE {
        return Err(Error::Step { what: "restore", why: "the restore of a unit ended without a report".into() });
    }
    if let Some(why) = text_after(line, DAMAGED_MESSAGE) {
        let (unit, why) = why.split_once(": ").unwrap_or((why, "an image"));
        return Err(Error::Damaged { path: unit.into(), why: why.to_owned() });
    }
    let why = text_after(line, FAILED_MESSAGE).map(ToOwned::to_owned);
    why.map_or(Ok(()), |why| Err(Error::Step { what: "restore", why }))
}

/// A unit's side.
pub(crate) struct RendezvousClient {
    unit: String,
    stream: Mutex<BufReader<UnixStream>>,
}

impl RendezvousClient {
    /// Connects to the leader, which may start later than this process.
    pub(crate) fn connect(unit: &str, limit_s: u64) -> Result<Self, Error> {
        RendezvousClient::at(Path::new(SOCKET_PATH), unit, Duration::from_secs(limit_s))
    }

    fn at(path: &Path, unit: &str, most: Duration) -> Result<Self, Error> {
        let mut limit = StallLimit::new(most, Instant::now());
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) if limit.is_reached(Instant::now(), || 0) => {
                    return Err(error).at("connect to the leader at", path);
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        Ok(RendezvousClient { unit: unit.to_owned(), stream: Mutex::new(BufReader::new(stream)) })
    }

    /// Sends the state of the restore to the leader.
    pub(crate) fn report(&self, word: &str) -> Result<(), Error> {
        self.send_line(&format!("{word} {}", self.unit))
    }

    /// Sends the state of the restore and the reason to the leader.
    pub(crate) fn report_reason(&self, word: &str, why: &dyn std::fmt::Display) -> Result<(), Error> {
        self.send_line(&format!("{word} {}: {}", self.unit, why.to_string().replace('\n', "; ")))
    }

    fn send_line(&self, line: &str) -> Result<(), Error> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.get_mut().write_all(format!("{line}\n").as_bytes()).with_action("send to the leader")
    }

    /// Waits until all are released.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        let mut line = String::new();
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.read_line(&mut line).with_action("receive from the leader")?;
        if line.trim_end() == RELEASE_MESSAGE {
            return Ok(());
        }
        Err(Error::Unit { unit: self.unit.clone(), why: "the switch was aborted".into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Unit;
    use std::cell::Cell;
    use std::fs;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Returns a journal of units of these names, whose restores may make no progress for `limit_s`.
    fn journal(dir: &Path, names: &[&str], limit_s: u64) -> Journal {
        let mut journal = Journal::plain("6.1", "6.12");
        (journal.config.state, journal.config.restore_limit_s) = (dir.to_owned(), limit_s);
        journal.units.extend(names.iter().map(|name| Unit::plain(name)));
        journal
    }

    #[test]
    fn all_stand_before_one_is_let_go_and_lines_that_come_early_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (path, journal) = (dir.path().join("meeting"), journal(dir.path(), &["a", "b"], 60));
        let gathered = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut rendezvous = Rendezvous::at(&path).unwrap();
            for name in ["a", "b"] {
                let (path, gathered) = (&path, &gathered);
                scope.spawn(move || {
                    let client = RendezvousClient::at(path, name, Duration::from_secs(60)).unwrap();
                    client.report(STOPPED_MESSAGE).unwrap();
                    client.wait().unwrap();
                    assert!(gathered.load(Ordering::SeqCst));
                    // one has finished when the other one reports that it runs
                    client.report(RUNNING_MESSAGE).unwrap();
                    let lost = name == "b";
                    if lost {
                        client.report_reason(LOST_MESSAGE, &"its\npages").unwrap()
                    } else {
                        client.report(FILLED_MESSAGE).unwrap()
                    }
                });
            }
            rendezvous.wait_until_stopped(&journal, &|| {}).unwrap();
            gathered.store(true, Ordering::SeqCst);
            rendezvous.release(&journal, &|| {}).unwrap();
            assert_eq!(rendezvous.filled(&journal).unwrap(), ["b: its; pages"]);
        });
    }

    #[test]
    fn a_unit_that_is_stopped_while_its_memory_is_fetched_concerns_no_other_unit() {
        let dir = tempfile::tempdir().unwrap();
        let (path, journal) = (dir.path().join("meeting"), journal(dir.path(), &["a", "b"], 600));
        let mut rendezvous = Rendezvous::at(&path).unwrap();
        let [a, b] = ["a", "b"].map(|name| RendezvousClient::at(&path, name, Duration::from_secs(60)).unwrap());
        [&a, &b].iter().for_each(|client| client.report(STOPPED_MESSAGE).unwrap());
        rendezvous.wait_until_stopped(&journal, &|| {}).unwrap();
        [&a, &b].iter().for_each(|client| client.report(RUNNING_MESSAGE).unwrap());
        rendezvous.release(&journal, &|| {}).unwrap();
        drop(a);
        b.report_reason(LOST_MESSAGE, &"its pages").unwrap();
        assert_eq!(rendezvous.filled(&journal).unwrap(), ["b: its pages"]);
        // before the release a failure concerns all
        let mut rendezvous = Rendezvous::at(&path).unwrap();
        let [a, b] = ["a", "b"].map(|name| RendezvousClient::at(&path, name, Duration::from_secs(60)).unwrap());
        drop(a);
        let error = rendezvous.wait_until_stopped(&journal, &|| {}).unwrap_err();
        assert!(error.to_string().contains("ended without a report"));
        drop(b);
    }

    #[test]
    fn one_that_fails_ends_the_meeting_at_once_and_says_why() {
        for (word, expected) in
            [(FAILED_MESSAGE, "could not restore: b: no room"), (DAMAGED_MESSAGE, "b is damaged: no room")]
        {
            let dir = tempfile::tempdir().unwrap();
            let (path, journal) = (dir.path().join("meeting"), journal(dir.path(), &["a", "b"], 600));
            let mut rendezvous = Rendezvous::at(&path).unwrap();
            let clients = ["a", "b"].map(|name| RendezvousClient::at(&path, name, Duration::from_secs(60)).unwrap());
            clients[1].report_reason(word, &"no room").unwrap();
            let error = rendezvous.wait_until_stopped(&journal, &|| {}).unwrap_err();
            assert_eq!(error.to_string(), expected);
            drop(rendezvous);
            // a unit that was not released does not run
            assert!(clients[0].wait().unwrap_err().to_string().contains("the switch was aborted"));
        }
    }

    #[test]
    fn a_restore_whose_criu_says_something_has_no_limit() {
        let dir = tempfile::tempdir().unwrap();
        let (path, journal) = (dir.path().join("meeting"), journal(dir.path(), &["a"], 2));
        fs::create_dir_all(journal.image("a")).unwrap();
        let mut rendezvous = Rendezvous::at(&path).unwrap();
        let client = RendezvousClient::at(&path, "a", Duration::from_secs(60)).unwrap();
        let (begun, keepalives) = (Instant::now(), Cell::new(0));
        let keepalive = || {
            keepalives.set(keepalives.get() + 1);
            fs::write(journal.image("a").join(RESTORE_LOG), "x".repeat(keepalives.get())).unwrap();
            if begun.elapsed() > Duration::from_secs(5) {
                client.report(STOPPED_MESSAGE).unwrap();
            }
        };
        rendezvous.wait_until_stopped(&journal, &keepalive).unwrap();
    }
}
