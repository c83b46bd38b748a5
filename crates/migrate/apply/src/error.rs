//! Errors of a migration.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use stillpoint_migrate_control::ControlError;
use stillpoint_migrate_postgres::link::ServerError;

/// Reason why an operation failed: one type for the replay and for the migration around it, because the second decides by
/// the first.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A server could not do what it was asked for.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// A stream of changes held bytes that are not a pgoutput message.
    #[error("change stream: {0}")]
    Pgoutput(String),
    /// A program could not be run, or failed.
    #[error("{program}: {why}")]
    Program {
        /// Name of the program.
        program: String,
        /// Its message, or the system's.
        why: String,
    },
    /// The check found something that is not supported; nothing has been changed.
    #[error("{} not supported: {}", if .0.len() == 1 { "something is".into() } else { format!("{} things are", .0.len()) }, .0.join("; "))]
    Refused(Vec<String>),
    /// The way back would drop definitions that were made on the target; nothing has been changed.
    #[error("`fallback` would drop definitions made on the target since the switch-over: {}", .0.join("; "))]
    DefinedSince(Vec<String>),
    /// The proxy serves the tenant from another server than the source: clients' writes there would not be moved.
    #[error(
        "the proxy's sessions are not on {server}, which has no process {pid} for this database: the proxy serves \
         another server"
    )]
    ServedElsewhere {
        /// The server that was named.
        server: String,
        /// Process id of one session's server process, according to the proxy.
        pid: u32,
    },
    /// A limit ran out.
    #[error("{what} took longer than {:.1} s{}", .limit.as_secs_f64(), if .who.is_empty() { String::new() } else { format!(": {}", .who.join(", ")) })]
    TimedOut {
        /// The work that took too long.
        what: String,
        /// The limit.
        limit: Duration,
        /// Sessions or transactions that caused it, if known.
        who: Vec<String>,
    },
    /// Definitions on the source have changed since the migration began.
    #[error("definitions changed during the migration: {0}")]
    SchemaChanged(String),
    /// Catalogs of the side that clients leave have changed since before the pause.
    #[error("definitions changed while clients were paused, in {}", .0.join(", "))]
    CatalogsChanged(Vec<String>),
    /// A session waits for a lock that the copy holds.
    #[error("the copy's locks block {0}")]
    InTheWay(String),
    /// A command of the operator failed.
    #[error("the hook {hook} vetoed: {why}")]
    Vetoed {
        /// Moment at which it ran.
        hook: String,
        /// Its status.
        why: String,
    },
    /// The two sides hold different rows.
    #[error("source and target differ in {}", .0.join(", "))]
    Differs(Vec<String>),
    /// The log cannot report a change, because a row's text is longer than a gigabyte.
    #[error("{message}: a client wrote a row whose text is longer than 1 GiB, the maximum of a message{}", if .tables.is_empty() { String::new() } else { format!("; such rows are in {}", .tables.join(", ")) })]
    TooLong {
        /// The server's message.
        message: String,
        /// Tables in which such rows were found.
        tables: Vec<String>,
    },
    /// Commits of clients are no longer captured.
    #[error("the capture in the proxy ended: {0}")]
    Capture(String),
    /// The proxy refused, or does not answer.
    #[error("proxy: {0}")]
    Proxy(String),
    /// The proxy is not present or has ended: another one may serve in its place.
    #[error("proxy: {0}")]
    ProxyGone(String),
    /// The journal cannot be read or written.
    #[error("journal {path}")]
    Journal {
        /// Path of the journal.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Another user can change the place of a migration's files, or the proxy's configuration.
    #[error(transparent)]
    Host(#[from] stillpoint_host::Error),
    /// A journal is of another database than its file name says.
    #[error("journal {path} is of database {database:?}, not of {wanted:?}")]
    ForeignJournal {
        /// Path of the journal.
        path: PathBuf,
        /// The database in the journal.
        database: String,
        /// The database that was looked up.
        wanted: String,
    },
    /// A command works on the migration of a database, possibly with a journal in another directory.
    #[error("another command is working on the migration of {server}: {who}")]
    AtWork {
        /// The source of that migration.
        server: String,
        /// The command's session there.
        who: String,
    },
    /// The database has a migration with another journal.
    #[error("{server} belongs to a migration with another journal: {owner}")]
    Owned {
        /// The source of that migration.
        server: String,
        /// Number, beginning and journal of that migration.
        owner: String,
    },
    /// The lock that keeps other commands from the database is no longer held.
    #[error("the command's lock on {server} is lost: {why}")]
    LockLost {
        /// The source of the migration.
        server: String,
        /// Cause of the loss, and the reason why the lock is not taken again.
        why: String,
    },
    /// No migration of a database has a journal.
    #[error("no migration of {0} is under way")]
    NoMigration(String),
    /// A migration is in a phase that the command cannot work with.
    #[error("{0}")]
    WrongPhase(String),
    /// Changes cannot be replayed in an order that the scheduler allows.
    #[error("replay")]
    Replay(#[source] stillpoint_migrate_replay::Error),
    /// The user interrupted the operation.
    #[error("interrupted")]
    Interrupted,
    /// A test made a phase fail.
    #[error(transparent)]
    Fault(#[from] stillpoint_operation::Fault),
}

impl Error {
    /// Returns true if the error concerns only the target, so that another target may succeed.
    pub fn is_of_target(&self) -> bool {
        match self {
            Error::Server(error) => error.server().is_some_and(|server| server.starts_with("target ")),
            Error::Program { program, .. } => program == "pg_restore",
            Error::Differs(_) | Error::Replay(_) => true,
            _ => false,
        }
    }

    /// Returns true if a retry cannot succeed: the caller has to change something first.
    pub fn is_refusal(&self) -> bool {
        match self {
            Error::Refused(_)
            | Error::DefinedSince(_)
            | Error::ServedElsewhere { .. }
            | Error::ForeignJournal { .. }
            | Error::Host(stillpoint_host::Error::Untrusted { .. })
            | Error::AtWork { .. }
            | Error::Owned { .. }
            | Error::NoMigration(_)
            | Error::WrongPhase(_)
            | Error::Proxy(_)
            | Error::ProxyGone(_) => true,
            Error::Server(error) => error.is_refusal(),
            _ => false,
        }
    }

    /// Returns true if a limit ran out.
    pub fn is_time_out(&self) -> bool {
        matches!(self, Error::TimedOut { .. } | Error::Server(ServerError::TimedOut { .. }))
    }

    /// SQLSTATE of a server's error.
    pub fn sqlstate(&self) -> Option<&str> {
        if let Error::Server(error) = self { error.sqlstate() } else { None }
    }
}

impl From<ControlError> for Error {
    fn from(error: ControlError) -> Error {
        let text = error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {source}"));
        match error {
            ControlError::Connect { .. } | ControlError::Closed | ControlError::Io(_) => Error::ProxyGone(text),
            ControlError::NotUnderstood(_) | ControlError::Refused(_) => Error::Proxy(text),
        }
    }
}
