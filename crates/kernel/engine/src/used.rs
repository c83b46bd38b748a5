//! Whether an image may still be restored: once a process of it has run on, its files are newer than the image, and the image
//! would bring back a program that does not know what it wrote to them.

use crate::Error;
use crate::error::At;
use crate::journal::now_s;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Begins like all that is no part of what the seal names.
const NAME: &str = "foam.used";

/// That, and why, an image is older than the files of its program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    /// Seconds since 1970.
    pub at_s: u64,
    /// What happened.
    pub why: String,
}

impl Used {
    /// The mark of an image, if there is one; one that cannot be read is one.
    pub fn of(dir: &Path) -> Result<Option<Used>, Error> {
        let path = dir.join(NAME);
        match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).at("read", &path),
            Ok(bytes) => {
                let torn = |_| Used { at_s: 0, why: "its mark cannot be read".into() };
                Ok(Some(serde_json::from_slice(&bytes).unwrap_or_else(torn)))
            }
        }
    }
}

/// Marks an image. The mark is on disk when this comes back.
pub(crate) fn mark(dir: &Path, why: &str) -> Result<(), Error> {
    let (path, used) = (dir.join(NAME), Used { at_s: now_s(), why: why.to_owned() });
    let text = serde_json::to_string(&used).map_err(|error| Error::Daemon(error.to_string()))?;
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path).at("make", &path)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).at("write", &path)?;
    File::open(dir).and_then(|dir| dir.sync_all()).at("write to disk", dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_stays_and_a_torn_one_counts() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Used::of(dir.path()).unwrap(), None);
        mark(dir.path(), "it was restored").unwrap();
        assert_eq!(Used::of(dir.path()).unwrap().unwrap().why, "it was restored");
        fs::write(dir.path().join(NAME), "{").unwrap();
        assert!(Used::of(dir.path()).unwrap().is_some());
    }
}
