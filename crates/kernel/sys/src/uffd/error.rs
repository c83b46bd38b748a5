//! What can go wrong with userfaultfds and with the processes that share them.

use std::io;

/// Why an operation of this crate did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a call.
    #[error("{what}")]
    Call {
        /// What was tried.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A process with several threads cannot be split.
    #[error("a process with {0} threads cannot be split")]
    Threads(usize),
    /// The log is full.
    #[error("the log of {0} records is full")]
    Full(usize),
    /// A userfaultfd brought an event that was not asked for.
    #[error("userfaultfd brought event {0:#x}")]
    Event(u8),
}

impl Error {
    pub(crate) fn call(what: &'static str) -> Self {
        Error::Call { what, source: io::Error::last_os_error() }
    }
}
