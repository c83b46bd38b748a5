//! Errors of userfaultfds and of the processes that share them.

use std::io;

/// Reason for the failure of an operation of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a call.
    #[error("{what}")]
    Call {
        /// Name of the call.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A process with several threads cannot be split.
    #[error("a process with {0} threads cannot fork")]
    Threads(usize),
    /// The log is full.
    #[error("the log of {0} records is full")]
    Full(usize),
    /// A userfaultfd sent an event that was not requested.
    #[error("userfaultfd sent event {0:#x}")]
    Event(u8),
}

impl Error {
    pub(crate) fn call(what: &'static str) -> Self {
        Error::Call { what, source: io::Error::last_os_error() }
    }
}
