//! The journal of a migration: one small file, replaced as a whole, on disk before what it tells of is done.

use crate::Error;
use crate::outfit::IdentityChange;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How far a migration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Things are about to be put on the servers.
    Begun,
    /// Step 1 of the paper: the snapshot is taken, changes are kept.
    Snapshotted,
    /// Step 2: the target is being filled.
    Copying,
    /// Step 3: the target holds the snapshot, and follows.
    Following,
    /// Step 4 is under way: the proxy says which side serves.
    Switching,
    /// Clients are on the target; the source can be returned to.
    Switched,
    /// Clients are going back.
    Returning,
    /// Clients are on the source, to stay: again, or because the migration was given up. What is left of it goes; whatever is
    /// called next sees to that.
    Returned,
}

/// Where changes of the source are captured ("Capture" of the design).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Capture {
    /// Its log, by pgoutput (source C).
    #[default]
    Log,
    /// The proxy, as images of the rows that statements write (source A).
    Rows,
}

/// A target that is not the one clients are to go to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Other {
    /// Part of the name of its slot.
    pub(crate) number: usize,
    /// Which server, for people.
    pub server: String,
    /// Whether a database of ours may be there.
    pub made_database: bool,
    /// Why it is no target any more; none while clients may still go to it.
    pub dropped: Option<String>,
}

/// Everything that a later command, or the next run after a crash, must know. No secrets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of the record.
    pub v: u32,
    /// Number of the migration; part of every name that it leaves on a server.
    pub migration: String,
    /// The database.
    pub database: String,
    /// The tenant of the proxy.
    pub tenant: String,
    /// Which servers, for people.
    pub source: String,
    /// The target.
    pub target: String,
    /// Which of the targets that were named this is.
    #[serde(default)]
    pub(crate) number: usize,
    /// The others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Other>,
    /// Where changes are captured.
    #[serde(default)]
    pub capture: Capture,
    /// How far it is.
    pub phase: Phase,
    /// Whether the target's database was made by us, and may be dropped.
    pub made_database: bool,
    /// Whether a way back is kept open.
    pub way_back: bool,
    /// Where in the target's log the way back begins.
    pub back_from: u64,
    /// Behind the switch the source is as it is to stay; where there is a slot, its absence says so.
    #[serde(default)]
    pub(crate) settled: bool,
    /// Of all definitions, as the snapshot saw them.
    pub(crate) fingerprint: String,
    /// Replica identities that were changed.
    pub(crate) identities: Vec<IdentityChange>,
    /// Who could connect to the source before it was fenced; none when it never was.
    #[serde(default)]
    pub(crate) fenced: Option<Vec<String>>,
    /// Who could connect to the target before it was fenced, on the way back; none when it never was.
    #[serde(default)]
    pub(crate) fenced_target: Option<Vec<String>>,
}

impl Record {
    /// Name of the slot on the source.
    pub(crate) fn slot(&self) -> String {
        self.slot_of(self.number)
    }

    /// Name of the slot of one of several targets.
    pub(crate) fn slot_of(&self, number: usize) -> String {
        match number {
            0 => format!("stillpoint_{}", self.migration),
            _ => format!("stillpoint_{}_{}", self.migration, number + 1),
        }
    }

    /// Names of the slots of all targets.
    pub(crate) fn slots(&self) -> impl Iterator<Item = String> {
        std::iter::once(self.slot()).chain(self.others.iter().map(|other| self.slot_of(other.number)))
    }

    /// Name of the slot on the target, for the way back.
    pub(crate) fn back_slot(&self) -> String {
        format!("stillpoint_{}_back", self.migration)
    }
}

/// A journal on disk, held by one process at a time.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    pub(crate) record: Record,
    _lock: File,
}

fn path_of(state: &Path, database: &str) -> PathBuf {
    // A name of a database may hold anything.
    let safe: String =
        database.chars().map(|c| if c.is_alphanumeric() || "-_".contains(c) { c } else { '%' }).collect();
    state.join(format!("{safe}.json"))
}

/// Reads a journal without taking it.
pub(crate) fn peek(state: &Path, database: &str) -> Result<Option<Record>, Error> {
    let path = path_of(state, database);
    let wrong = |source| Error::Journal { path: path.clone(), source };
    match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| wrong(error.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(wrong(error)),
    }
}

/// Reads all journals of a directory without taking them.
pub(crate) fn all(state: &Path) -> Result<Vec<Record>, Error> {
    let wrong = |path: &Path, source| Error::Journal { path: path.into(), source };
    let entries = match fs::read_dir(state) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(wrong(state, error)),
    };
    let mut records = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| wrong(state, error))?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let bytes = fs::read(&path).map_err(|error| wrong(&path, error))?;
            records.push(serde_json::from_slice(&bytes).map_err(|error| wrong(&path, error.into()))?);
        }
    }
    Ok(records)
}

/// For so long a command waits for the one before: its guardian may be at work, which does not take longer.
const PATIENCE: Duration = if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(8) };

/// Takes the lock of a database's migration; a second process is refused.
fn lock(state: &Path, database: &str) -> Result<(PathBuf, File), Error> {
    match try_lock(state, database, PATIENCE)? {
        Some(locked) => Ok(locked),
        None => Err(Error::WrongPhase(format!("another process is at work on the migration of {database}"))),
    }
}

/// The same; none when somebody holds it for longer than `patience`.
fn try_lock(state: &Path, database: &str, patience: Duration) -> Result<Option<(PathBuf, File)>, Error> {
    let path = path_of(state, database);
    let wrong = |source| Error::Journal { path: path.clone(), source };
    fs::create_dir_all(state).map_err(wrong)?;
    let held = path.with_extension("lock");
    let mut options = OpenOptions::new();
    let lock = options.write(true).create(true).truncate(false).mode(0o600).open(&held).map_err(wrong)?;
    let begun = Instant::now();
    loop {
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some((path, lock))),
            Err(rustix::io::Errno::WOULDBLOCK) if begun.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(wrong(error.into())),
        }
    }
}

impl Journal {
    /// Begins a new one; there must be none.
    pub(crate) fn begin(state: &Path, record: Record) -> Result<Journal, Error> {
        let (path, lock) = lock(state, &record.database)?;
        if let Some(there) = peek(state, &record.database)? {
            return Err(Error::WrongPhase(format!(
                "a migration of {} is there already ({:?}); `stillpoint migrate status` tells more",
                there.database, there.phase
            )));
        }
        let journal = Journal { path, record, _lock: lock };
        journal.write()?;
        Ok(journal)
    }

    /// Takes up an existing one.
    pub(crate) fn open(state: &Path, database: &str) -> Result<Journal, Error> {
        let (path, lock) = lock(state, database)?;
        let record =
            peek(state, database)?.ok_or_else(|| Error::WrongPhase(format!("there is no migration of {database}")))?;
        Ok(Journal { path, record, _lock: lock })
    }

    /// Takes up an existing one at once; none when there is none, or when another process is at work on it.
    pub(crate) fn try_open(state: &Path, database: &str) -> Result<Option<Journal>, Error> {
        let Some((path, lock)) = try_lock(state, database, Duration::ZERO)? else { return Ok(None) };
        Ok(peek(state, database)?.map(|record| Journal { path, record, _lock: lock }))
    }

    /// Changes the record; it is on disk when this returns.
    pub(crate) fn update(&mut self, change: impl FnOnce(&mut Record)) -> Result<(), Error> {
        change(&mut self.record);
        self.write()
    }

    /// Writes how far a target has been brought up. Of another than the migration's own only that is kept which must be taken
    /// away again.
    pub(crate) fn reached(&mut self, number: usize, phase: Phase) -> Result<(), Error> {
        let makes = phase == Phase::Copying;
        self.update(|record| {
            if number == record.number {
                record.phase = phase;
                record.made_database |= makes;
            }
            record
                .others
                .iter_mut()
                .filter(|other| other.number == number)
                .for_each(|other| other.made_database |= makes);
        })
    }

    /// A target is dropped. Where it was the migration's own, `next` takes its place: its number, how far it is, and the
    /// fingerprint that it was made with.
    pub(crate) fn drop_target(
        &mut self,
        number: usize,
        reason: String,
        next: Option<(usize, Phase, String)>,
    ) -> Result<(), Error> {
        self.update(|record| {
            let place = |record: &Record, number| record.others.iter().position(|other| other.number == number);
            if let Some(at) = place(record, number) {
                record.others[at].dropped = Some(reason);
            } else if let Some((next, phase, fingerprint)) = next
                && let Some(at) = place(record, next)
            {
                let next = record.others.remove(at);
                let (server, made_database) = (record.target.clone(), record.made_database);
                record.others.push(Other { number, server, made_database, dropped: Some(reason) });
                (record.number, record.target, record.made_database) = (next.number, next.server, next.made_database);
                (record.phase, record.fingerprint) = (phase, fingerprint);
            }
        })
    }

    fn write(&self) -> Result<(), Error> {
        let wrong = |source| Error::Journal { path: self.path.clone(), source };
        let text = serde_json::to_vec_pretty(&self.record).map_err(|error| wrong(error.into()))?;
        let new = self.path.with_extension("new");
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&new).map_err(wrong)?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(wrong)?;
        fs::rename(&new, &self.path).map_err(wrong)?;
        let directory = self.path.parent().unwrap_or(Path::new("."));
        File::open(directory).and_then(|directory| directory.sync_all()).map_err(wrong)
    }

    /// Where a file of this migration lies.
    pub(crate) fn beside(&self, extension: &str) -> PathBuf {
        self.path.with_extension(extension)
    }

    /// The migration is over: nothing of it is left.
    pub(crate) fn end(self) -> Result<(), Error> {
        let _ = fs::remove_file(self.beside("dump"));
        fs::remove_file(&self.path).map_err(|source| Error::Journal { path: self.path.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            v: 1,
            migration: "abc".into(),
            database: "a/b".into(),
            tenant: "a/b".into(),
            source: "s".into(),
            target: "t".into(),
            number: 0,
            others: Vec::new(),
            capture: Capture::Log,
            phase: Phase::Begun,
            made_database: false,
            way_back: true,
            back_from: 0,
            settled: false,
            fingerprint: String::new(),
            identities: Vec::new(),
            fenced: None,
            fenced_target: None,
        }
    }

    #[test]
    fn the_next_target_takes_the_place_of_one_that_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let others =
            [1, 2].map(|number| Other { number, server: format!("t{number}"), made_database: false, dropped: None });
        let mut journal = Journal::begin(dir.path(), Record { others: others.into(), ..record() }).unwrap();
        journal.reached(0, Phase::Following).unwrap();
        journal.reached(2, Phase::Copying).unwrap();
        journal.drop_target(1, "slow".into(), None).unwrap();
        assert_eq!((&journal.record.target[..], journal.record.phase), ("t", Phase::Following));
        journal.drop_target(0, "gone".into(), Some((2, Phase::Following, "f".into()))).unwrap();
        let record = &journal.record;
        assert_eq!((&record.target[..], record.made_database, &record.slot()[..]), ("t2", true, "stillpoint_abc_3"));
        let dropped: Vec<_> =
            record.others.iter().map(|other| (&other.server[..], other.dropped.as_deref().unwrap())).collect();
        assert_eq!(dropped, [("t1", "slow"), ("t", "gone")]);
        assert_eq!(peek(dir.path(), "a/b").unwrap().as_ref(), Some(record), "all of it is on disk");
    }

    #[test]
    fn a_journal_is_one_process_s_and_survives_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::begin(dir.path(), record()).unwrap();
        journal.update(|record| record.phase = Phase::Following).unwrap();
        assert!(Journal::open(dir.path(), "a/b").unwrap_err().to_string().contains("another process"));
        assert!(Journal::try_open(dir.path(), "a/b").unwrap().is_none());
        drop(journal);
        assert!(Journal::begin(dir.path(), record()).unwrap_err().to_string().contains("there already"));
        let journal = Journal::open(dir.path(), "a/b").unwrap();
        assert_eq!(journal.record.phase, Phase::Following);
        journal.end().unwrap();
        assert_eq!(peek(dir.path(), "a/b").unwrap(), None);
    }
}
