//! Journal of an image: operations on it, line by line in a file beside it, for the operator and later commands.

use crate::Error;
use crate::error::ErrorContext;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use stillpoint_host::clock::since_1970;
use stillpoint_host::trusted::Directory;

const FILE_NAME: &str = "journal.log";
/// Longest journal that is read.
const BYTES_MAX: u64 = 64 << 20;

/// One line of a journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalEntry {
    /// Seconds since 1970.
    pub at_s: u64,
    /// `checkpoint`, `restore`, `fill`.
    pub operation: String,
    /// The root of its processes, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// The phase that ended, or `done`.
    pub what: String,
    /// Duration of the phase in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_us: Option<u64>,
    /// Reason of the failure, if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The journal of one image.
#[derive(Debug)]
pub(crate) struct Journal {
    dir: PathBuf,
    pid: Option<i32>,
}

impl Journal {
    pub(crate) fn of(dir: &Path) -> Self {
        Journal { dir: dir.to_owned(), pid: None }
    }

    /// Puts this process into every line.
    pub(crate) fn with_pid(self, pid: Option<i32>) -> Self {
        Journal { pid, ..self }
    }

    /// Adds a line. A journal that cannot be written stops no operation: what the line reports has happened.
    pub(crate) fn note(&self, operation: &str, what: &str, duration_ns: Option<u64>, error: Option<&Error>) {
        let line = JournalEntry {
            at_s: since_1970().as_secs(),
            operation: operation.to_owned(),
            pid: self.pid,
            what: what.to_owned(),
            duration_us: duration_ns.map(|ns| ns / 1000),
            error: error.map(Error::with_causes),
        };
        if let Err(error) = self.append(&line) {
            tracing::warn!("{}: {}", self.dir.join(FILE_NAME).display(), error.with_causes());
        }
    }

    fn append(&self, line: &JournalEntry) -> Result<(), Error> {
        let mut text =
            serde_json::to_string(line).map_err(std::io::Error::from).with_action("encode a journal entry")?;
        text.push('\n');
        let mut file = Directory::open(&self.dir)?.append(FILE_NAME)?;
        file.write_all(text.as_bytes()).with_action("append a journal entry")
    }

    /// Returns all complete lines.
    pub(crate) fn lines(&self) -> Vec<JournalEntry> {
        let text = Directory::open(&self.dir).and_then(|dir| dir.read(FILE_NAME, BYTES_MAX)).unwrap_or_default();
        String::from_utf8_lossy(&text).lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn lines_are_read_as_they_were_written_and_torn_ones_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::of(dir.path()).with_pid(Some(7));
        journal.note("checkpoint", "dump", Some(2_000_000), None);
        journal.note("checkpoint", "done", None, Some(&Error::NoProcess(7)));
        let mut text = fs::read_to_string(dir.path().join(FILE_NAME)).unwrap();
        text.push_str("{\"at_s\":1,\"oper");
        fs::write(dir.path().join(FILE_NAME), text).unwrap();
        let lines = journal.lines();
        assert_eq!((lines.len(), lines[1].pid), (2, Some(7)));
        assert_eq!((lines[0].what.as_str(), lines[0].duration_us), ("dump", Some(2000)));
        assert_eq!(lines[1].error.as_deref(), Some("process 7 does not exist"));
    }
}
