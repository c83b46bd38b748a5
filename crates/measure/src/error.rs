//! Errors of a measurement, and their messages.

use std::io;
use std::path::PathBuf;

use crate::record::Damage;

/// Error of a load, of reading a record or of writing a report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The plan contradicts itself; nothing was connected.
    #[error("{option}: {problem}")]
    Plan {
        /// Option at fault, as it is written on the command line.
        option: &'static str,
        /// Problem with the option.
        problem: String,
    },
    /// The server could not be reached before the load began.
    #[error("cannot connect to {target}")]
    Connect {
        /// Address of the server.
        target: String,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
    /// Not every connection was open at the time limit; the load was not started.
    #[error("{open} of {wanted} connections to {target} were open after {waited_s} s")]
    Slow {
        /// Address of the server.
        target: String,
        /// Number of open connections.
        open: usize,
        /// Number of requested connections.
        wanted: usize,
        /// Time limit, in seconds.
        waited_s: u64,
    },
    /// The server answered the filling of the key space with an error or with an unexpected answer.
    #[error("{target} answered `{answer}` while key {key} was loaded")]
    Fill {
        /// Address of the server.
        target: String,
        /// Number of the first key of the batch that failed.
        key: u64,
        /// Answer of the server.
        answer: String,
    },
    /// PostgreSQL returned an error while a workload's tables were made, or when they were read at the end.
    #[error("{target}: {action} failed")]
    Postgres {
        /// Address of the server, without passwords.
        target: String,
        /// Action that failed.
        action: &'static str,
        /// Error of the server.
        #[source]
        source: tokio_postgres::Error,
    },
    /// A system call of the load generator failed.
    #[error("{call} failed")]
    System {
        /// Name of the call.
        call: &'static str,
        /// Error of the kernel.
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
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
    /// A record file is damaged.
    #[error("{} is damaged", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Place and kind of the damage.
        #[source]
        source: Damage,
    },
    /// Two inputs that must belong together do not.
    #[error("{0}")]
    Mismatch(String),
    /// The thread that ran the load panicked.
    #[error("the load generator panicked: {0}")]
    Panicked(String),
}

/// Result of all operations of this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;
