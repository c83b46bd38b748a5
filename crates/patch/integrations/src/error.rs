use std::io;
use std::path::PathBuf;

/// Why an integration cannot be placed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A line of an `.edits` file that is none.
    #[error("{file}:{line}: {problem}")]
    Syntax {
        /// The `.edits` file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// An anchor that is not where, or not as often, as the edit says.
    #[error("{file}: anchor `{anchor}` ({edits}): {problem}")]
    Anchor {
        /// The file of the source tree.
        file: String,
        /// The anchor with its scope.
        anchor: String,
        /// Where the edit is written down.
        edits: String,
        /// What is wrong.
        problem: String,
    },
    /// An edit of a file that is not there, or an integration without edits.
    #[error("{0}")]
    Integration(String),
    /// What the system said.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was being done.
        what: &'static str,
        /// To which path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}
