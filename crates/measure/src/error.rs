//! What can go wrong while measuring, and what the user reads then.

use std::io;
use std::path::PathBuf;

use crate::record::Damage;

/// Why a load could not be run, a record not be read or a report not be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The plan contradicts itself; nothing was connected.
    #[error("{option}: {problem}")]
    Plan {
        /// The option at fault, as it is written on the command line.
        option: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The server could not be reached before the load began.
    #[error("cannot connect to {target}")]
    Connect {
        /// Where the connection was to go.
        target: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Not every connection was open when the patience ran out; the load was not begun.
    #[error("{open} of {wanted} connections to {target} were open after {waited_s} s")]
    Slow {
        /// Where the connections were to go.
        target: String,
        /// How many were open.
        open: usize,
        /// How many were wanted.
        wanted: usize,
        /// For how long they were awaited.
        waited_s: u64,
    },
    /// The server answered the filling of the key space with an error or with nonsense.
    #[error("{target} answered `{answer}` while key {key} was loaded")]
    Fill {
        /// The server.
        target: String,
        /// First key of the batch that failed.
        key: u64,
        /// What it answered.
        answer: String,
    },
    /// PostgreSQL answered the making of a workload's tables, or the last look at them, with an error.
    #[error("{target}: {action} failed")]
    Postgres {
        /// The server, without passwords.
        target: String,
        /// What was being done.
        action: &'static str,
        /// What it answered.
        #[source]
        source: tokio_postgres::Error,
    },
    /// A system call of the load generator failed.
    #[error("{call} failed")]
    System {
        /// The call.
        call: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A file could not be opened, read or written.
    #[error("cannot {action} {}", path.display())]
    File {
        /// `open`, `read`, `write` or `create`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A record file is not what it should be.
    #[error("{} is damaged", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Where and how.
        #[source]
        source: Damage,
    },
    /// Two things that must belong together do not.
    #[error("{0}")]
    Mismatch(String),
    /// The thread that ran the load panicked.
    #[error("the load generator panicked: {0}")]
    Panicked(String),
}

/// Result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;
