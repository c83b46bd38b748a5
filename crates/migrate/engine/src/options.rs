//! What a migration is told, and how it ends when it does not succeed.

use crate::{Accepted, Capture, Error, FaultPoint, Roles, Server};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use stillpoint_migrate_replay::Mode as Schedule;
use tokio::sync::Notify;

/// How a database is moved.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where it is.
    pub source: Server,
    /// Where it goes.
    pub target: Server,
    /// Where it may go instead, in order: all are brought up at the same time, and should the target fail before clients are
    /// there, the next takes its place.
    pub others: Vec<Server>,
    /// The proxy's name for it.
    pub tenant: String,
    /// The proxy's control socket.
    pub proxy: PathBuf,
    /// Where the journal lies.
    pub state: PathBuf,
    /// Connections that copy at the same time, and indexes that are made at the same time.
    pub copy_jobs: usize,
    /// Connections that replay at the same time.
    pub players: usize,
    /// The part of their throughput, as the proxy counts it, that clients keep until they are sent over; 0 goes as fast as
    /// it can.
    pub share: f64,
    /// How long the snapshot may wait for older transactions.
    pub snapshot_limit: Duration,
    /// How long sessions may take to be prepared on the target.
    pub prepare_limit: Duration,
    /// The longest pause; after it clients go on where they were.
    pub pause_limit: Duration,
    /// Pauses that are tried before the migration is given up.
    pub pause_attempts: u32,
    /// Whether both sides are compared, row by row, before the switch-over.
    pub compare: bool,
    /// Where changes are captured; none leaves it to the check.
    pub capture: Option<Capture>,
    /// In which order statements are repeated, where these are captured.
    pub schedule: Schedule,
    /// Handling of the roles that go with the database.
    pub roles: Roles,
    /// Number of a migration whose journal is lost, and that [`crate::abort`] takes away without.
    pub without_journal: Option<String>,
    /// Makes the check bring the definitions to each target for a trial, and look into rows.
    pub rehearse: bool,
    /// What the user accepts knowingly.
    pub accepted: Accepted,
    /// Wakes when the user wants it ended.
    pub interrupt: Arc<Notify>,
    /// Where to fail; for tests.
    pub faults: Vec<FaultPoint>,
}

impl Options {
    /// The defaults for a database that the proxy knows by its own name.
    pub fn new(source: Server, target: Server, proxy: PathBuf, state: PathBuf) -> Options {
        Options {
            tenant: source.database.clone(),
            source,
            target,
            others: Vec::new(),
            proxy,
            state,
            copy_jobs: 2,
            players: 4,
            share: 0.85,
            snapshot_limit: Duration::from_secs(60),
            prepare_limit: Duration::from_secs(20),
            pause_limit: Duration::from_millis(500),
            pause_attempts: 10,
            compare: true,
            capture: None,
            schedule: Schedule::Lsir,
            roles: Roles::default(),
            without_journal: None,
            rehearse: false,
            accepted: Accepted::default(),
            interrupt: Arc::default(),
            faults: Vec::new(),
        }
    }

    /// The target, and those that may take its place.
    pub(crate) fn targets(&self) -> impl Iterator<Item = &Server> {
        std::iter::once(&self.target).chain(&self.others)
    }

    /// The same for one of the targets, alone.
    pub(crate) fn to(&self, target: &Server) -> Options {
        Options { target: target.clone(), others: Vec::new(), ..self.clone() }
    }

    /// The same with the target of the journal, when there is one: another may have taken the place of the first.
    pub(crate) fn recorded(&self) -> Result<Options, Error> {
        match crate::journal::peek(&self.state, &self.source.database)? {
            Some(record) => self.recorded_in(&record),
            None => Ok(self.clone()),
        }
    }

    /// The same with the target that the record names, and what becomes of its roles.
    pub(crate) fn recorded_in(&self, record: &crate::Record) -> Result<Options, Error> {
        let Some(at) = self.targets().position(|server| server.to_string() == record.target) else {
            // Of one alone it is known which is meant, however its address is written.
            let known = record.others.is_empty() && self.others.is_empty();
            let text = || format!("clients go, or went, to {}: name it with --target", record.target);
            return if known {
                Ok(Options { roles: record.roles, ..self.clone() })
            } else {
                Err(Error::WrongPhase(text()))
            };
        };
        let mut others: Vec<Server> = self.targets().cloned().collect();
        let target = others.remove(at);
        Ok(Options { target, others, roles: record.roles, ..self.clone() })
    }
}

/// Where the service is after an operation that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Nothing was touched.
    Untouched,
    /// Clients are on the source, and nothing of the migration is left on either server.
    OnSource,
    /// Clients are on the source; something of the migration could not be removed.
    OnSourceWithRemains(String),
    /// Clients are on the target; the source can be returned to.
    OnTarget,
    /// The proxy cannot be asked which side serves.
    Unknown(String),
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            State::Untouched => f.write_str("nothing was touched"),
            State::OnSource => {
                f.write_str("clients are on the source; nothing of the migration is left on either server")
            }
            State::OnSourceWithRemains(what) => {
                write!(f, "clients are on the source; something of the migration is left: {what}")
            }
            State::OnTarget => f.write_str("clients are on the target; the way back to the source is open"),
            State::Unknown(why) => write!(f, "which side serves is not known: {why}"),
        }
    }
}

/// An operation that did not succeed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Failure {
    /// Why.
    #[source]
    pub error: Error,
    /// Where the service is now.
    pub state: State,
}

impl Failure {
    pub(crate) fn untouched(error: Error) -> Failure {
        Failure { error, state: State::Untouched }
    }

    pub(crate) fn on_target(error: Error) -> Failure {
        Failure { error, state: State::OnTarget }
    }

    /// What to do next.
    pub fn hint(&self) -> &'static str {
        match (&self.error, &self.state) {
            (_, State::Unknown(_)) => "see that the proxy runs, then `stillpoint migrate status`",
            (_, State::OnSourceWithRemains(_)) => "`stillpoint migrate abort`, when both servers can be reached",
            (Error::Refused(_), _) => "`stillpoint migrate check` lists everything that was found",
            (Error::DefinedSince(_), _) => {
                "define it on the source yourself once clients are there, and call it again with --drop-definitions"
            }
            (Error::TimedOut { .. }, State::OnTarget) => "end what is named, and call it again",
            (Error::TimedOut { .. }, _) => "end what is named, or give it longer, and run it again",
            (Error::SchemaChanged(_) | Error::CatalogsChanged(_) | Error::InTheWay(_), _) => {
                "run it again when definitions rest"
            }
            (Error::TooLong { .. }, State::OnTarget) => {
                "the log tells of that row at no later time either: `finish` ends the migration, with clients on the target"
            }
            (Error::TooLong { .. }, _) => "run it again when no such row is written",
            (Error::Outrun { .. }, _) => "more players (--players), or run it when there is less load",
            (Error::Capture(_), _) => "run it again without what is named, or with wal_level=logical on the source",
            (Error::Proxy(_) | Error::ProxyGone(_), _) => "see that the proxy runs and knows the tenant",
            (Error::ForeignJournal { .. }, _) => {
                "end the migration of the database that it is of, or give --state another directory"
            }
            (Error::Host(_), _) => {
                "--state with a directory that only you and root can change, as /var/lib/stillpoint/migrate"
            }
            (Error::AtWork { .. }, _) => {
                "wait for it, or end it where it runs; its session on the source tells from where it came"
            }
            (Error::Owned { .. }, _) => {
                "call it where that journal is; where it is lost, `stillpoint migrate abort --migration NUMBER`"
            }
            (Error::LockLost { .. }, _) => {
                "`stillpoint migrate status` names a command that is at work; then run it again"
            }
            (Error::WrongPhase(_), _) => "`stillpoint migrate status`",
            (_, State::OnTarget) => "`stillpoint migrate status`, then `fallback` or `finish`",
            _ => "mend what is named, and run it again",
        }
    }
}
