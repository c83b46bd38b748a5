//! Journal of an operation: one JSON file with a version, in a directory that only root and its owner can change.
//!
//! The file is replaced as a whole and is on disk when a write returns. A journal of a newer version is refused and not touched.

use crate::Error;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_host::trusted::Directory;

/// Maximum size in bytes of a journal.
const SIZE_MAX: u64 = 64 << 20;
/// Interval of attempts to take a lock.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Journal file of operations whose state is a `T`. `T` has a field `v` with the version of its format.
#[derive(Debug, Clone)]
pub struct JournalFile<T> {
    directory: PathBuf,
    name: &'static str,
    /// Latest version that this program reads.
    version: u64,
    content: PhantomData<T>,
}

/// Lock on a journal. The kernel releases it when all copies of the descriptor are closed.
#[derive(Debug)]
pub struct JournalLock(File);

impl JournalLock {
    /// Returns the descriptor, to hand it to another process.
    pub fn file(&self) -> &File {
        &self.0
    }
}

#[derive(serde::Deserialize)]
struct Header {
    #[serde(default)]
    v: u64,
}

impl<T: Serialize + DeserializeOwned> JournalFile<T> {
    /// The journal `name` in a directory. `version` is the latest version that this program reads.
    pub fn new(directory: &Path, name: &'static str, version: u64) -> JournalFile<T> {
        JournalFile { directory: directory.to_owned(), name, version, content: PhantomData }
    }

    /// Path of the file.
    pub fn path(&self) -> PathBuf {
        self.directory.join(self.name)
    }

    /// Reads the journal; `None` if there is none.
    ///
    /// # Errors
    ///
    /// Another user can change it, it is damaged, or it is of a newer version.
    pub fn read(&self) -> Result<Option<T>, Error> {
        let bytes = match Directory::open(&self.directory).and_then(|directory| directory.read(self.name, SIZE_MAX)) {
            Err(error) if error.is_not_found() => return Ok(None),
            bytes => bytes?,
        };
        let damaged = |error: serde_json::Error| Error::Damaged { path: self.path(), why: error.to_string() };
        let Header { v } = serde_json::from_slice(&bytes).map_err(damaged)?;
        if v > self.version {
            return Err(Error::Newer { path: self.path(), found: v, known: self.version });
        }
        serde_json::from_slice(&bytes).map(Some).map_err(damaged)
    }

    /// Replaces the journal: after a crash there is the old one or the new one. Missing directories are made, the last for its owner
    /// alone.
    ///
    /// # Errors
    ///
    /// Another user can change the directory, or it cannot be written.
    pub fn write(&self, content: &T) -> Result<(), Error> {
        let why = |error: serde_json::Error| Error::Damaged { path: self.path(), why: error.to_string() };
        let bytes = serde_json::to_vec_pretty(content).map_err(why)?;
        Directory::make(&self.directory)?.write_synced(self.name, &bytes)?;
        Ok(())
    }

    /// Takes the lock `name` beside the journal, and waits up to `limit` for a process that has it; `None` if that one keeps it.
    ///
    /// # Errors
    ///
    /// The lock's file cannot be made or locked.
    pub fn lock(&self, name: &str, limit: Duration) -> Result<Option<JournalLock>, Error> {
        // no existing file is changed: an operation that was killed may have left a read-only disk
        let file = Directory::make(&self.directory)?.lock_file(name)?;
        let end = Instant::now() + limit;
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(JournalLock(file))),
                Err(Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(LOCK_POLL_INTERVAL),
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(Error::System { action: "lock the journal", source: error.into() }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[derive(Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
    struct Content {
        v: u64,
        phase: String,
    }

    fn content(phase: &str) -> Content {
        Content { v: 2, phase: phase.into() }
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let journal = JournalFile::<Content>::new(&dir.path().join("state"), "journal.json", 2);
        assert_eq!(journal.read().unwrap(), None);
        journal.write(&content("copy")).unwrap();
        journal.write(&content("switch")).unwrap();
        assert_eq!(journal.read().unwrap(), Some(content("switch")));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&journal.path()), mode(&dir.path().join("state"))), (0o600, 0o700));
    }

    #[test]
    fn newer_damaged_and_foreign_journals_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.json");
        let journal = JournalFile::<Content>::new(dir.path(), "journal.json", 2);
        fs::write(&path, r#"{"v":3,"phases":["other"]}"#).unwrap();
        assert!(matches!(journal.read(), Err(Error::Newer { found: 3, known: 2, .. })));
        for text in ["", "{", r#"{"v":"x"}"#, r#"{"v":2}"#, "[]", &"[".repeat(100_000)] {
            fs::write(&path, text).unwrap();
            assert!(matches!(journal.read(), Err(Error::Damaged { .. })), "{text:.20}");
        }
        fs::write(&path, serde_json::to_vec(&content("copy")).unwrap()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(matches!(journal.read(), Err(Error::Host(_))));
    }

    #[test]
    fn one_process_at_a_time_has_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let journal = JournalFile::<Content>::new(dir.path(), "journal.json", 2);
        let lock = journal.lock("lock", Duration::ZERO).unwrap().expect("it is free");
        assert!(journal.lock("lock", Duration::from_millis(50)).unwrap().is_none());
        drop(lock);
        assert!(journal.lock("lock", Duration::ZERO).unwrap().is_some());
    }
}
