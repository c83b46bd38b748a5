//! What can go wrong while a database is moved.

use crate::fault::FaultPoint;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why an operation of this crate did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A connection string does not parse, or asks for what there is not.
    #[error("connection string of the {side}: {why}")]
    Conninfo {
        /// `source` or `target`.
        side: String,
        /// What is wrong with it.
        why: String,
    },
    /// A server could not be reached.
    #[error("connect to {server}")]
    Connect {
        /// Which one.
        server: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A connection could not be encrypted, and must be.
    #[error("encrypt the connection to {server}: {why}")]
    Tls {
        /// To which server.
        server: String,
        /// Why not.
        why: String,
    },
    /// A connection broke.
    #[error("connection to {server} lost while {doing}")]
    Lost {
        /// To which server.
        server: String,
        /// What was going on.
        doing: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A server answered with an error.
    #[error("{server}: {message} ({code}) while {doing}")]
    Sql {
        /// Which one.
        server: String,
        /// What was going on.
        doing: String,
        /// SQLSTATE.
        code: String,
        /// The server's message, with its detail, without values of rows.
        message: String,
    },
    /// A server sent what the protocol does not allow here.
    #[error("{server} sent {what}")]
    Protocol {
        /// Which one.
        server: String,
        /// What it sent.
        what: String,
    },
    /// The server asks for a way to log in that is not supported.
    #[error("{server} asks for {method} authentication, which is not supported")]
    Authentication {
        /// Which one.
        server: String,
        /// What it asks for.
        method: String,
    },
    /// A stream of changes held bytes that are no message of pgoutput.
    #[error("change stream: {0}")]
    Pgoutput(String),
    /// A program could not be run, or failed.
    #[error("{program}: {why}")]
    Program {
        /// Which one.
        program: String,
        /// What it said.
        why: String,
    },
    /// Preflight found what is not supported; nothing has been touched.
    #[error("{} not supported: {}", if .0.len() == 1 { "something is".into() } else { format!("{} things are", .0.len()) }, .0.join("; "))]
    Refused(Vec<String>),
    /// Definitions were made on the target that the way back would drop; nothing has been touched.
    #[error("what was defined on the target since the switch would be dropped: {}", .0.join("; "))]
    DefinedSince(Vec<String>),
    /// The proxy serves the tenant from another server than the source: what clients write there would not be moved.
    #[error(
        "the proxy's sessions are not at {server}, which has no process {pid} for this database: another server is served"
    )]
    ServedElsewhere {
        /// What was named.
        server: String,
        /// A server process of a session.
        pid: u32,
    },
    /// A limit ran out.
    #[error("{what} took longer than {:.1} s{}", .limit.as_secs_f64(), if .who.is_empty() { String::new() } else { format!(": {}", .who.join(", ")) })]
    TimedOut {
        /// What did.
        what: String,
        /// The limit.
        limit: Duration,
        /// Who held it up, where that is known.
        who: Vec<String>,
    },
    /// Definitions on the source are not what they were when the migration began.
    #[error("definitions changed during the migration: {0}")]
    SchemaChanged(String),
    /// Catalogs of the side that is left are not what they were before the pause.
    #[error("definitions changed while clients were paused, in {}", .0.join(", "))]
    CatalogsChanged(Vec<String>),
    /// Somebody waits for a lock that the copy holds.
    #[error("the copy stands in the way of {0}")]
    InTheWay(String),
    /// The two sides do not hold the same.
    #[error("source and target differ in {}", .0.join(", "))]
    Differs(Vec<String>),
    /// The log cannot tell of a change, as a row's text is longer than a gigabyte.
    #[error("{message}: a row was written whose text is longer than the gigabyte that a message holds{}", if .tables.is_empty() { String::new() } else { format!("; there are such in {}", .tables.join(", ")) })]
    TooLong {
        /// The server's message.
        message: String,
        /// Tables in which such rows were found.
        tables: Vec<String>,
    },
    /// The source makes changes faster than the target takes them.
    #[error(
        "the source outruns the target: {made:.0} transactions a second against {applied:.0}, {lag_bytes} bytes behind"
    )]
    Outrun {
        /// Made a second.
        made: f64,
        /// Applied a second.
        applied: f64,
        /// How far behind.
        lag_bytes: u64,
    },
    /// Clients of a server cannot be led to the proxy; nothing has been touched.
    #[error("clients cannot be led to the proxy: {}", .0.join("; "))]
    Attach(Vec<String>),
    /// Clients cannot be led to the server itself again; nothing has been touched.
    #[error("clients are not led back to the server: {}", .0.join("; "))]
    Detach(Vec<String>),
    /// What clients commit is not captured any more.
    #[error("the capture in the proxy ended: {0}")]
    Capture(String),
    /// The proxy refused, or does not answer.
    #[error("proxy: {0}")]
    Proxy(String),
    /// The proxy is not there, or went away: another one may serve in its place.
    #[error("proxy: {0}")]
    ProxyGone(String),
    /// The journal cannot be read or written.
    #[error("journal {path}")]
    Journal {
        /// Where it is.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Another user can change where files of a migration lie, or the proxy's configuration.
    #[error(transparent)]
    Host(#[from] stillpoint_host::Error),
    /// A journal tells of another database than the one whose name its file has.
    #[error("journal {path} is of database {database:?}, not of {wanted:?}")]
    ForeignJournal {
        /// Where it is.
        path: PathBuf,
        /// The database that it tells of.
        database: String,
        /// The one that was looked for.
        wanted: String,
    },
    /// A command is at work on the migration of a database, perhaps with a journal in another directory.
    #[error("another command is at work on the migration of {server}: {who}")]
    AtWork {
        /// The source of that migration.
        server: String,
        /// The command's session there.
        who: String,
    },
    /// The database has a migration, whose journal is another one.
    #[error("{server} has a migration of another journal: {owner}")]
    Owned {
        /// The source of that migration.
        server: String,
        /// Its number, beginning and journal.
        owner: String,
    },
    /// The lock that keeps other commands from the database is held no more.
    #[error("the command's lock on {server} is lost: {why}")]
    LockLost {
        /// The source of the migration.
        server: String,
        /// How it was lost, and why it is not taken again.
        why: String,
    },
    /// A migration is, or is not, in the phase that a command needs.
    #[error("{0}")]
    WrongPhase(String),
    /// Changes cannot be replayed in an order that the scheduler allows.
    #[error("replay")]
    Replay(#[source] stillpoint_migrate_replay::Error),
    /// The user wants it ended.
    #[error("interrupted")]
    Interrupted,
    /// A test made a phase fail.
    #[error("fault injected at {0:?}")]
    Fault(FaultPoint),
}

impl Error {
    /// Whether it is about the target alone, so that another one may fare better.
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

    /// Whether what was asked for cannot be had, however often it is tried: the caller has to change something first.
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
            | Error::WrongPhase(_)
            | Error::Proxy(_)
            | Error::ProxyGone(_) => true,
            // Who it is, which database, what he may.
            Error::Sql { code, .. } => code.starts_with("28") || code == "3D000" || code == "42501",
            _ => false,
        }
    }

    /// Returns true if a server could not make a text or message, as it would be longer than a gigabyte.
    pub(crate) fn is_of_length(&self) -> bool {
        match self {
            // Neither has a code of its own.
            Error::Sql { code, message, .. } => {
                code == "54000"
                    && (message.starts_with("out of memory") || message.starts_with("string buffer exceeds"))
                    || code == "XX000" && message.starts_with("invalid memory alloc request size")
            }
            _ => false,
        }
    }

    /// SQLSTATE, when a server answered with an error.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            Error::Sql { code, .. } => Some(code),
            _ => None,
        }
    }
}
