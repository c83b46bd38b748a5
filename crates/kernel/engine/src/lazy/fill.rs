//! How far the memory of an image has come, in a file beside it that is replaced as a whole.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_host::trusted::Directory;

/// Bytes of the file.
const FILE_MAX: u64 = 64 << 10;
const NAME: &str = "foam.fill";
const EVERY: Duration = Duration::from_millis(200);

/// What a daemon is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Memory still comes.
    Filling,
    /// All of it has come, or is not wanted any more.
    Done,
    /// It could not be brought; the processes were killed.
    Failed,
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    /// Whether it goes on.
    pub state: State,
    /// Bytes that were to come.
    pub total: u64,
    /// Bytes that are still to come; a server that took over counts from the beginning.
    pub left: u64,
    /// Pages that were asked for.
    pub faults: u64,
    /// Bytes that came because of that.
    pub asked: u64,
    /// Bytes that came in the background.
    pub filled: u64,
    /// Processes that ended before all of their memory had come.
    pub ended: u64,
}

/// Writes it, not too often.
#[derive(Debug)]
pub(super) struct Report {
    path: PathBuf,
    last: Option<Instant>,
}

impl Report {
    pub(super) fn of(dir: &Path) -> Self {
        Report { path: dir.join(NAME), last: None }
    }

    pub(super) fn is_due(&self) -> bool {
        self.last.is_none_or(|last| last.elapsed() >= EVERY)
    }

    /// What cannot be written is only not known: memory comes all the same.
    pub(super) fn write(&mut self, fill: &Fill) {
        self.last = Some(Instant::now());
        let text = serde_json::to_string(fill).unwrap_or_default();
        let written =
            Directory::of_file(&self.path).and_then(|(directory, name)| directory.write(name, text.as_bytes()));
        if let Err(error) = written {
            tracing::debug!("{}: {error}", self.path.display());
        }
    }
}

/// Nothing more comes.
pub(super) fn failed(dir: &Path) {
    let none = Fill { state: State::Failed, total: 0, left: 0, faults: 0, asked: 0, filled: 0, ended: 0 };
    let last = read(dir).unwrap_or(none);
    Report::of(dir).write(&Fill { state: State::Failed, ..last });
}

/// What a daemon said last.
pub(crate) fn read(dir: &Path) -> Option<Fill> {
    let bytes = Directory::open(dir).and_then(|directory| directory.read(NAME, FILE_MAX)).ok()?;
    serde_json::from_slice(&bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_until_it_fails() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()), None);
        let mut report = Report::of(dir.path());
        assert!(report.is_due());
        let fill = Fill { state: State::Filling, total: 9, left: 4, faults: 1, asked: 2, filled: 3, ended: 0 };
        report.write(&fill);
        assert!(!report.is_due());
        assert_eq!(read(dir.path()), Some(fill));
        failed(dir.path());
        assert_eq!(read(dir.path()), Some(Fill { state: State::Failed, ..fill }));
    }
}
