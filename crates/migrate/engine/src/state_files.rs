//! Files of the state directory, by database: the journal, what is beside it, and its lock.

use crate::catalogs::Definitions;
use crate::journal::Record;
use rustix::process::{Pid, Signal};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_host::trusted::Directory;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::Server;

/// Maximum size in bytes of a journal or a file beside it; definitions of very many tables are large.
pub(crate) const FILE_BYTES_MAX: u64 = 1 << 30;
/// Maximum size in bytes of a lock file, which holds a process id.
const HOLDER_BYTES_MAX: u64 = 64;
/// Extension of the file beside a journal that holds definitions.
pub(crate) const DEFINITIONS_EXTENSION: &str = "definitions";
/// Extensions of the files of a command that holds: its state, and the order that it gets.
pub(crate) const HOLDING: &str = "holding";
pub(crate) const ORDER: &str = "order";
/// Maximum age of a progress file; an older one is from a copy that ended without removing it.
pub(crate) const PROGRESS_AGE_MAX: Duration = Duration::from_secs(10);

/// Progress of the copy of rows to one target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyProgress {
    /// Size of the copied rows so far, in bytes.
    pub bytes: u64,
    /// Size in bytes of the tables on the source; the copy may take fewer or more.
    pub bytes_total: u64,
    /// Bytes copied a second at present.
    pub bytes_per_s: u64,
    /// Estimated seconds for the rest at the recent speed; `None` before anything has been measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimate_s: Option<u64>,
}

/// Publishes the progress of a copy for other processes. Errors are ignored, because nothing depends on it.
pub(crate) fn publish_copying(state: &Path, database: &str, number: usize, copying: &CopyProgress) {
    let _ = write_beside(state, database, &copying_name(number), copying);
}

/// Writes a file beside a database's journal.
pub(crate) fn write_beside(state: &Path, database: &str, name: &str, value: &impl Serialize) -> Result<(), Error> {
    let path = journal_path(state, database)?.with_extension(name);
    let wrong = |error: serde_json::Error| Error::Journal { path: path.clone(), source: error.into() };
    let text = serde_json::to_vec(value).map_err(wrong)?;
    let (directory, name) = Directory::of_file(&path)?;
    directory.write(name, &text)?;
    Ok(())
}

/// Reads such a file; `None` if there is none, or if it `must_be_fresh` and its writer is gone.
pub(crate) fn read_beside<T: DeserializeOwned>(
    state: &Path,
    database: &str,
    name: &str,
    must_be_fresh: bool,
) -> Result<Option<T>, Error> {
    let path = journal_path(state, database)?.with_extension(name);
    if must_be_fresh && !is_fresh(&path) { Ok(None) } else { read(&path) }
}

/// Returns true if there is such a file.
pub(crate) fn is_beside(state: &Path, database: &str, name: &str) -> Result<bool, Error> {
    Ok(read_beside::<serde_json::Value>(state, database, name, false)?.is_some())
}

/// Removes such a file.
pub(crate) fn remove_beside(state: &Path, database: &str, name: &str) -> Result<(), Error> {
    Ok(remove(&journal_path(state, database)?.with_extension(name))?)
}

/// Returns true if a file that is written again and again is not from a command that is gone.
fn is_fresh(path: &Path) -> bool {
    let Ok(written) = path.metadata().and_then(|told| told.modified()) else { return false };
    // If the clock was set back, the file counts as fresh.
    written.elapsed().map_or(true, |age| age < PROGRESS_AGE_MAX)
}

/// Removes the published progress when a copy has ended.
pub(crate) fn remove_copying(state: &Path, database: &str, number: usize) {
    let _ = remove_beside(state, database, &copying_name(number));
}

/// Published progress of a copy; `None` if no running copy publishes it.
pub(crate) fn copying(state: &Path, database: &str, number: usize) -> Option<CopyProgress> {
    read_beside(state, database, &copying_name(number), true).ok().flatten()
}

/// Extension of the file with the progress of the copy to a target.
pub(crate) fn copying_name(number: usize) -> String {
    format!("copying-{}", number + 1)
}

/// The file name for a database: a byte other than an ASCII letter, digit, `-` or `_` becomes `%` and two hexadecimal digits.
/// Two databases have two names, and no name leads to another directory.
pub(crate) fn file_name(database: &str) -> String {
    let mut name = String::with_capacity(database.len());
    for byte in database.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => name.push(char::from(byte)),
            _ => name += &format!("%{byte:02X}"),
        }
    }
    name
}

/// The file name as earlier versions made it: several databases had the same one.
pub(crate) fn old_file_name(database: &str) -> String {
    database.chars().map(|c| if c.is_alphanumeric() || "-_".contains(c) { c } else { '%' }).collect()
}

/// Path of a database's journal, present or future: under its old name while that file exists and is this database's.
pub(crate) fn journal_path(state: &Path, database: &str) -> Result<PathBuf, Error> {
    let named = |name: String| state.join(format!("{name}.json"));
    let (path, old) = (named(file_name(database)), named(old_file_name(database)));
    if old == path || path.exists() {
        return Ok(path);
    }
    let is_ours = read::<Record>(&old)?.is_some_and(|record| record.database == database);
    Ok(if is_ours { old } else { path })
}

/// Reads a journal without locking it.
pub(crate) fn peek(state: &Path, database: &str) -> Result<Option<Record>, Error> {
    let path = journal_path(state, database)?;
    match read::<Record>(&path)? {
        Some(record) if record.database != database => {
            Err(Error::ForeignJournal { path, database: record.database, wanted: database.into() })
        }
        record => Ok(record),
    }
}

/// Definitions on the target when clients moved there; `None` if no command recorded them.
pub(crate) fn definitions(state: &Path, database: &str) -> Result<Option<Definitions>, Error> {
    read(&journal_path(state, database)?.with_extension(DEFINITIONS_EXTENSION))
}

pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, Error> {
    let wrong = |source| Error::Journal { path: path.into(), source };
    match Directory::of_file(path).and_then(|(directory, name)| directory.read(name, FILE_BYTES_MAX)) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| wrong(error.into())),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Reads all journals of a directory without locking them.
pub(crate) fn all(state: &Path) -> Result<Vec<Record>, Error> {
    let directory = match Directory::open(state) {
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        opened => opened?,
    };
    let mut records = Vec::new();
    for name in directory.names()?.into_iter().filter(|name| name.ends_with(".json")) {
        let wrong = |source| Error::Journal { path: state.join(&name), source };
        let bytes = directory.read(&name, FILE_BYTES_MAX)?;
        records.push(serde_json::from_slice(&bytes).map_err(|error| wrong(error.into()))?);
    }
    Ok(records)
}

/// Returns descriptions of the migrations of databases of a server, whose journals are in the directory.
///
/// # Errors
///
/// [`Error::Journal`] or [`Error::Host`] if a journal cannot be read.
pub fn running_migrations(state: &Path, source: &Server) -> Result<Vec<String>, Error> {
    let (host, port) = source.host_and_port();
    let place = format!("source {host}:{port}/");
    let ours = all(state)?.into_iter().filter(|record| record.source.starts_with(&place));
    Ok(ours.map(|record| format!("a migration of {} is under way ({:?})", record.database, record.phase)).collect())
}

/// Maximum time that a command waits for the one before; a guardian may be at work, and takes no longer.
const LOCK_TIMEOUT: Duration = if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(8) };

/// Locks a database's migration; a second process is refused.
pub(crate) fn lock(state: &Path, database: &str) -> Result<(PathBuf, File), Error> {
    match try_lock(state, database, LOCK_TIMEOUT)? {
        Some((path, mut lock)) => {
            // The process id is for a command that wants to interrupt this one.
            let told = lock.write_all(std::process::id().to_string().as_bytes());
            told.map_err(|source| Error::Journal { path: path.clone(), source })?;
            Ok((path, lock))
        }
        None => Err(Error::WrongPhase(format!("another process is working on the migration of {database}"))),
    }
}

/// Locks a database's migration; `None` if another process holds the lock for longer than `limit`.
pub(crate) fn try_lock(state: &Path, database: &str, limit: Duration) -> Result<Option<(PathBuf, File)>, Error> {
    let begun = Instant::now();
    loop {
        let path = journal_path(state, database)?;
        let Some(lock) = lock_file(state, &path, limit.saturating_sub(begun.elapsed()))? else { return Ok(None) };
        // The previous process may have ended a migration whose journal had the old name.
        if journal_path(state, database)? == path {
            return Ok(Some((path, lock)));
        }
    }
}

fn lock_file(state: &Path, path: &Path, limit: Duration) -> Result<Option<File>, Error> {
    let wrong = |source| Error::Journal { path: path.into(), source };
    Directory::make(state)?;
    let held = path.with_extension("lock");
    let (directory, name) = Directory::of_file(&held)?;
    directory.lock_file(name)?;
    let lock = directory.file_to_change(name)?;
    let begun = Instant::now();
    loop {
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                lock.set_len(0).map_err(wrong)?;
                return Ok(Some(lock));
            }
            Err(rustix::io::Errno::WOULDBLOCK) if begun.elapsed() < limit => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(wrong(error.into())),
        }
    }
}

/// Asks the command that works on the migration to end (SIGINT), and waits for that; does nothing if there is none.
pub(crate) async fn interrupt(state: &Path, database: &str, limit: Duration) -> Result<(), Error> {
    let begun = Instant::now();
    let mut asked = None;
    while try_lock(state, database, Duration::ZERO)?.is_none() {
        let path = journal_path(state, database)?.with_extension("lock");
        let (directory, name) = Directory::of_file(&path)?;
        let holder = String::from_utf8_lossy(&directory.read(name, HOLDER_BYTES_MAX)?).into_owned();
        // A guardian writes no process id, and is done soon.
        if let Some(pid) = holder.parse().ok().and_then(Pid::from_raw).filter(|pid| asked != Some(*pid)) {
            asked = Some(pid);
            match rustix::process::kill_process(pid, Signal::INT) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(Error::Journal { path, source: error.into() }),
            }
        }
        if begun.elapsed() > limit {
            let who = asked.map(|pid| format!("process {}", pid.as_raw_nonzero())).into_iter().collect();
            return Err(Error::TimedOut { what: "interrupting the running command".into(), limit, who });
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Removes a file of a state directory.
pub(crate) fn remove(path: &Path) -> Result<(), stillpoint_host::Error> {
    let (directory, name) = Directory::of_file(path)?;
    directory.remove(name)
}
