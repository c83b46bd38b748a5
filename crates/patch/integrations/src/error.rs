/// Reason why an integration cannot be placed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An invalid line of an `.edits` file.
    #[error("{file}:{line}: {problem}")]
    Syntax {
        /// The `.edits` file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// The fault.
        problem: String,
    },
    /// An anchor that is not found, or not as often as the edit states.
    #[error("{file}: anchor `{anchor}` ({edits}): {problem}")]
    Anchor {
        /// The file of the source tree.
        file: String,
        /// The anchor with its scope.
        anchor: String,
        /// The `.edits` file and line of the edit.
        edits: String,
        /// The fault.
        problem: String,
    },
    /// An edit of an absent file, or an integration without edits.
    #[error("{0}")]
    Integration(String),
    /// A file cannot be read or written.
    #[error(transparent)]
    Host(#[from] stillpoint_host::Error),
}
