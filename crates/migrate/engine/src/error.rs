//! Errors of a migration.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Reason why an operation of this crate failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A connection string does not parse, or uses something that is not supported.
    #[error("connection string of the {side}: {why}")]
    Conninfo {
        /// `source` or `target`.
        side: String,
        /// Description of the problem.
        why: String,
    },
    /// A server could not be reached.
    #[error("connect to {server}")]
    Connect {
        /// The server.
        server: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A connection could not be encrypted, but must be.
    #[error("encrypt the connection to {server}: {why}")]
    Tls {
        /// The server.
        server: String,
        /// Reason of the failure.
        why: String,
    },
    /// A connection broke.
    #[error("connection to {server} lost while {doing}")]
    Lost {
        /// The server.
        server: String,
        /// Work during which it broke.
        doing: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A server answered with an error.
    #[error("{server}: {message} ({code}) while {doing}")]
    Sql {
        /// The server.
        server: String,
        /// Work during which it answered.
        doing: String,
        /// SQLSTATE of the error.
        code: String,
        /// Message of the server with its detail, without values of rows.
        message: String,
    },
    /// A server sent something that the protocol does not allow at this point.
    #[error("{server} sent {what}")]
    Protocol {
        /// The server.
        server: String,
        /// Description of the message.
        what: String,
    },
    /// The server requires an authentication method that is not supported.
    #[error("{server} requires {method} authentication, which is not supported")]
    Authentication {
        /// The server.
        server: String,
        /// Name of the method.
        method: String,
    },
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
    /// Clients of a server cannot be redirected to the proxy; nothing has been changed.
    #[error("cannot redirect clients to the proxy: {}", .0.join("; "))]
    Attach(Vec<String>),
    /// Clients cannot be directed to the server itself again; nothing has been changed.
    #[error("cannot end the redirection to the proxy: {}", .0.join("; "))]
    Detach(Vec<String>),
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
    pub(crate) fn is_of_target(&self) -> bool {
        match self {
            Error::Connect { server, .. }
            | Error::Tls { server, .. }
            | Error::Lost { server, .. }
            | Error::Sql { server, .. }
            | Error::Protocol { server, .. }
            | Error::Authentication { server, .. } => server.starts_with("target "),
            Error::Program { program, .. } => program == "pg_restore",
            Error::TimedOut { what, .. } => what.starts_with("connecting to target "),
            Error::Differs(_) | Error::Replay(_) => true,
            _ => false,
        }
    }

    /// Returns true if a retry cannot succeed: the caller has to change something first.
    pub fn is_refusal(&self) -> bool {
        match self {
            Error::Conninfo { .. }
            | Error::Tls { .. }
            | Error::Authentication { .. }
            | Error::Refused(_)
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
            // Errors of authentication, of an unknown database, and of missing rights.
            Error::Sql { code, .. } => code.starts_with("28") || code == "3D000" || code == "42501",
            _ => false,
        }
    }

    /// Returns true if a server could not make a text or message because it would be longer than a gigabyte.
    pub(crate) fn is_of_length(&self) -> bool {
        match self {
            // These errors have no code of their own.
            Error::Sql { code, message, .. } => {
                code == "54000"
                    && (message.starts_with("out of memory") || message.starts_with("string buffer exceeds"))
                    || code == "XX000" && message.starts_with("invalid memory alloc request size")
            }
            _ => false,
        }
    }

    /// SQLSTATE of a server's error.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            Error::Sql { code, .. } => Some(code),
            _ => None,
        }
    }
}
