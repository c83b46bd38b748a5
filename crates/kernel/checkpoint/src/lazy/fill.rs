//! Progress of the restore of an image's memory, in a file beside it that is replaced as a whole.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_host::trusted::Directory;

/// Limit in bytes for the file.
const FILE_BYTES_MAX: u64 = 64 << 10;
const FILE_NAME: &str = "foam.fill";
const WRITE_INTERVAL: Duration = Duration::from_millis(200);

/// State of a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Memory is not all resident yet.
    Filling,
    /// All of it is resident, or is not needed any more.
    Done,
    /// It could not be fetched; the processes were killed.
    Failed,
}

/// Progress of one daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    /// State of the daemon.
    pub state: State,
    /// Bytes to be fetched in all.
    pub total: u64,
    /// Bytes that are still to be fetched; a server that took over counts from the beginning.
    pub left: u64,
    /// Counts of what has been fetched.
    #[serde(flatten)]
    pub counts: FetchCounts,
}

/// Counts of what has been fetched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchCounts {
    /// Pages that were faulted in.
    pub faults: u64,
    /// Bytes that were fetched because of faults, including neighbours.
    pub asked: u64,
    /// Bytes that were fetched in the background.
    pub filled: u64,
    /// Number of processes that ended before all of their memory was resident.
    pub ended: u64,
}

impl Fill {
    /// Reads the last report of the daemon of an image.
    pub fn read(image: &Path) -> Option<Fill> {
        let bytes = Directory::open(image).and_then(|directory| directory.read(FILE_NAME, FILE_BYTES_MAX)).ok()?;
        serde_json::from_slice(&bytes).ok()
    }
}

/// Writer of the file, at limited intervals.
#[derive(Debug)]
pub(super) struct ProgressFile {
    path: PathBuf,
    last: Option<Instant>,
}

impl ProgressFile {
    pub(super) fn of(dir: &Path) -> Self {
        ProgressFile { path: dir.join(FILE_NAME), last: None }
    }

    pub(super) fn is_due(&self) -> bool {
        self.last.is_none_or(|last| last.elapsed() >= WRITE_INTERVAL)
    }

    /// Writes the file. A failure only hides the progress: memory is fetched all the same.
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

/// Records that nothing more will be fetched.
pub(super) fn record_failure(dir: &Path) {
    let none = Fill { state: State::Failed, total: 0, left: 0, counts: FetchCounts::default() };
    let last = Fill::read(dir).unwrap_or(none);
    ProgressFile::of(dir).write(&Fill { state: State::Failed, ..last });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_until_it_fails() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Fill::read(dir.path()), None);
        let mut report = ProgressFile::of(dir.path());
        assert!(report.is_due());
        let counts = FetchCounts { faults: 1, asked: 2, filled: 3, ended: 0 };
        let fill = Fill { state: State::Filling, total: 9, left: 4, counts };
        report.write(&fill);
        assert!(!report.is_due());
        assert_eq!(Fill::read(dir.path()), Some(fill));
        record_failure(dir.path());
        assert_eq!(Fill::read(dir.path()), Some(Fill { state: State::Failed, ..fill }));
    }
}
