use crate::Fault;
use std::path::PathBuf;

/// Failure of the skeleton itself.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the journal cannot be opened, read or written, or another user can change it.
    #[error(transparent)]
    Host(#[from] stillpoint_host::Error),
    /// The journal's content is not what its version promises.
    #[error("the journal {path} is damaged: {why}")]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// Message of the decoder.
        why: String,
    },
    /// The journal was written by a newer version of stillpoint.
    #[error("the journal {path} has version {found}; this stillpoint reads versions up to {known}")]
    Newer {
        /// The journal.
        path: PathBuf,
        /// Version of the journal.
        found: u64,
        /// Latest version that this program reads.
        known: u64,
    },
    /// A system call failed.
    #[error("{action}: {source}")]
    System {
        /// Attempted action.
        action: &'static str,
        /// Error of the kernel.
        source: std::io::Error,
    },
    /// The guardian does not answer as it should.
    #[error("the guardian, which rolls the operation back if it is killed, does not answer: {0}")]
    Guardian(String),
    /// A test requested this failure.
    #[error(transparent)]
    Fault(#[from] Fault),
}
