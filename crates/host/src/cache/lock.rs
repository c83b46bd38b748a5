//! Advisory locks on files that may be removed while they are unlocked.

use crate::Error;
use crate::error::At;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Lock that is released when it is dropped, or when its process ends in any way.
#[derive(Debug)]
pub struct Lock {
    _file: File,
    path: PathBuf,
}

impl Lock {
    /// Waits until this is the only lock on the file.
    pub(super) fn exclusive(path: &Path) -> Result<Lock, Error> {
        if let Some(lock) = acquire(path, FlockOperation::NonBlockingLockExclusive)? {
            return Ok(lock);
        }
        tracing::info!(lock = %path.display(), "waiting for another process");
        wait(path, FlockOperation::LockExclusive)
    }

    /// Waits until no process holds the lock exclusively.
    pub(super) fn shared(path: &Path) -> Result<Lock, Error> {
        wait(path, FlockOperation::LockShared)
    }

    /// Takes the lock exclusively unless another process, or another lock of this process, holds it.
    pub(super) fn try_exclusive(path: &Path) -> Result<Option<Lock>, Error> {
        acquire(path, FlockOperation::NonBlockingLockExclusive)
    }

    /// Removes the file of an exclusive lock; processes that wait for it notice this and make the file again.
    pub(super) fn remove(self) {
        // after a failure the file only stays: the next process locks it
        let _ = fs::remove_file(&self.path);
    }
}

fn wait(path: &Path, operation: FlockOperation) -> Result<Lock, Error> {
    loop {
        if let Some(lock) = acquire(path, operation)? {
            return Ok(lock);
        }
    }
}

fn acquire(path: &Path, operation: FlockOperation) -> Result<Option<Lock>, Error> {
    loop {
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).mode(0o644).open(path).at("making", path)?;
        loop {
            match flock(&file, operation) {
                Ok(()) => break,
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error).at("locking", path),
            }
        }
        let own = file.metadata().at("reading", path)?;
        // another process may have removed the file between the opening and the lock
        if fs::metadata(path).is_ok_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino())) {
            return Ok(Some(Lock { _file: file, path: path.to_owned() }));
        }
    }
}
