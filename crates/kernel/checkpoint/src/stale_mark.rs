//! Mark of an image that must not be restored again: once a process of it has run on, its files are newer than the
//! image, and the image would restore a program that does not know what it wrote to them.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::path::Path;
use stillpoint_host::clock::since_1970;
use stillpoint_host::trusted::Directory;

/// Limit in bytes for a mark.
const MARK_BYTES_MAX: u64 = 64 << 10;
/// Name of the file: it begins like all files that the seal does not name.
const FILE_NAME: &str = "foam.used";

/// Record that an image is older than the files of its program, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StaleMark {
    /// Seconds since 1970.
    pub at_s: u64,
    /// Event that made it so.
    pub why: String,
}

impl StaleMark {
    /// Returns the mark of an image, if there is one; an unreadable mark also counts as one.
    ///
    /// # Errors
    /// Another user can change the image.
    pub fn of(dir: &Path) -> Result<Option<StaleMark>, Error> {
        match Directory::open(dir).and_then(|directory| directory.read(FILE_NAME, MARK_BYTES_MAX)) {
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error.into()),
            Ok(bytes) => {
                let torn = |_| StaleMark { at_s: 0, why: "its mark cannot be read".into() };
                Ok(Some(serde_json::from_slice(&bytes).unwrap_or_else(torn)))
            }
        }
    }
}

/// Marks an image. The mark is on disk when this returns.
pub(crate) fn mark(dir: &Path, why: &str) -> Result<(), Error> {
    let used = StaleMark { at_s: since_1970().as_secs(), why: why.to_owned() };
    let text = serde_json::to_string(&used).map_err(|error| Error::Daemon(error.to_string()))?;
    Directory::open(dir)?.write_synced(FILE_NAME, text.as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_mark_stays_and_a_torn_one_counts() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(StaleMark::of(dir.path()).unwrap(), None);
        mark(dir.path(), "it was restored").unwrap();
        assert_eq!(StaleMark::of(dir.path()).unwrap().unwrap().why, "it was restored");
        fs::write(dir.path().join(FILE_NAME), "{").unwrap();
        assert!(StaleMark::of(dir.path()).unwrap().is_some());
    }
}
