//! Options of a migration, and its state after a failure.

use crate::journal::Record;
use crate::placement::Placement;
use crate::rendezvous::Member;
use crate::{Capture, ClientPasswords, Roles, Selection, Settings};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::Server;
use stillpoint_migrate_replay::Mode as Schedule;
use stillpoint_operation::Faults;
use tokio::sync::Notify;

/// Restrictions that the user accepts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AcceptedRestrictions {
    /// Accepts that unlogged tables arrive empty.
    pub unlogged_empty: bool,
    /// Accepts that there is no way back, because the target keeps no logical log.
    pub no_fallback: bool,
    /// Accepts that the way back drops what was defined on the target since the switch.
    pub definitions_dropped: bool,
}

/// Shell commands that run around the switch, with a description of the migration in JSON on their standard input.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SwitchHooks {
    /// Before clients are paused. If it fails, they stay.
    pub before_switch: Option<String>,
    /// After clients have changed sides.
    pub after_switch: Option<String>,
}

/// Options of a migration.
#[derive(Debug, Clone)]
pub struct Options {
    /// Server from which the database moves.
    pub source: Server,
    /// Server to which the database moves.
    pub target: Server,
    /// Alternative targets, in order: all are brought up at the same time. If the target fails before clients are there, the
    /// next one takes its place.
    pub others: Vec<Server>,
    /// Name of the proxy's tenant.
    pub tenant: String,
    /// Path of the proxy's control socket.
    pub proxy: PathBuf,
    /// Directory of the journal.
    pub state: PathBuf,
    /// Number of connections that copy at the same time, and of indexes that are created at the same time.
    pub copy_jobs: usize,
    /// Number of connections that replay at the same time.
    pub players: usize,
    /// Share of their throughput, as the proxy counts it, that clients keep until they move; 0 runs at full speed.
    pub share: f64,
    /// Maximum time that the snapshot waits for older transactions.
    pub snapshot_limit: Duration,
    /// Maximum time to prepare sessions on the target.
    pub prepare_limit: Duration,
    /// Maximum length of a pause; after it clients continue where they were.
    pub pause_limit: Duration,
    /// Number of pauses that are tried before the migration is aborted.
    pub pause_attempts: u32,
    /// True if both sides are compared, row by row, before the switch-over.
    pub compare: bool,
    /// True if targets follow until the switch is ordered ([`crate::order_switch`]).
    pub hold: bool,
    /// Commands that run around the switch.
    pub hooks: SwitchHooks,
    /// True if materialized views are refreshed once more inside the pause.
    pub refresh_at_switch: bool,
    /// True if logical slots of other readers are made on the target too.
    pub move_slots: bool,
    /// Source of captured changes; `None` lets the check decide.
    pub capture: Option<Capture>,
    /// Order in which statements are repeated, if they are captured.
    pub schedule: Schedule,
    /// Handling of the roles that the database needs.
    pub roles: Roles,
    /// Passwords of clients' roles, if a server does not show the stored ones.
    pub client_passwords: ClientPasswords,
    /// Handling of the server's settings.
    pub settings: Settings,
    /// The part of the database that is moved.
    pub selection: Selection,
    /// Properties of the target's database that are not the source's.
    pub placement: Placement,
    /// Makes [`crate::finish`] enable connections to the source again, for the part of the database that was left out.
    pub reopen_source: bool,
    /// Number of a migration whose journal is lost, and that [`crate::abort`] removes without the journal.
    pub without_journal: Option<String>,
    /// Makes the check create the definitions on each target as a trial, and examine rows.
    pub rehearse: bool,
    /// Databases that change sides together with this one.
    pub together: Option<Member>,
    /// Restrictions that the user accepts.
    pub accepted: AcceptedRestrictions,
    /// Notified when the user wants to interrupt the operation.
    pub interrupt: Arc<Notify>,
    /// Requested faults, for tests.
    pub faults: Faults,
}

impl Options {
    /// Makes options with defaults, for a tenant that has the name of the database.
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
            hold: false,
            hooks: SwitchHooks::default(),
            refresh_at_switch: false,
            move_slots: false,
            capture: None,
            schedule: Schedule::Lsir,
            roles: Roles::default(),
            client_passwords: ClientPasswords::default(),
            settings: Settings::default(),
            selection: Selection::default(),
            placement: Placement::default(),
            reopen_source: false,
            without_journal: None,
            rehearse: false,
            together: None,
            accepted: AcceptedRestrictions::default(),
            interrupt: Arc::default(),
            faults: Faults::none(),
        }
    }

    /// The target, and then those that may take its place.
    pub(crate) fn targets(&self) -> impl Iterator<Item = &Server> {
        std::iter::once(&self.target).chain(&self.others)
    }

    /// Returns the same options for one of the targets alone.
    pub(crate) fn to(&self, target: &Server) -> Options {
        Options { target: target.clone(), others: Vec::new(), ..self.clone() }
    }

    /// Returns the same options with the journal's target, if there is a journal: another target may have taken the place of
    /// the first.
    pub(crate) fn recorded(&self) -> Result<Options, Error> {
        match crate::state_files::peek(&self.state, &self.source.database)? {
            Some(record) => self.recorded_in(&record),
            None => Ok(self.clone()),
        }
    }

    /// Returns the same options with the record's target, its handling of roles, its selection and its placement.
    pub(crate) fn recorded_in(&self, record: &crate::Record) -> Result<Options, Error> {
        let Some(at) = self.targets().position(|server| server.to_string() == record.target) else {
            // A single target is unambiguous, independent of the spelling of its address.
            let known = record.others.is_empty() && self.others.is_empty();
            let (selection, placement) = (record.selection.clone(), record.placement.clone());
            let options = known.then(|| Options { roles: record.roles, selection, placement, ..self.clone() });
            let why = || format!("clients move, or moved, to {}: name it with --target", record.target);
            return options.ok_or_else(|| Error::WrongPhase(why()));
        };
        let mut others: Vec<Server> = self.targets().cloned().collect();
        let target = others.remove(at);
        let (selection, placement) = (record.selection.clone(), record.placement.clone());
        Ok(Options { target, others, roles: record.roles, selection, placement, ..self.clone() })
    }
}

/// State of the service after an operation that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Nothing was touched.
    Untouched,
    /// Clients are on the source, and nothing of the migration is left on either server.
    OnSource,
    /// Clients are on the source; something of the migration could not be removed.
    OnSourceWithRemains(String),
    /// Clients are on the target; a return to the source is possible.
    OnTarget,
    /// Clients are on the target, and a return to the source is not possible.
    OnTargetForGood,
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
                write!(f, "clients are on the source; something of the migration could not be removed: {what}")
            }
            State::OnTarget => f.write_str("clients are on the target; `fallback` can roll back to the source"),
            State::OnTargetForGood => f.write_str("clients are on the target; `fallback` is not possible"),
            State::Unknown(why) => write!(f, "the side that serves clients is not known: {why}"),
        }
    }
}

/// An operation that failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Failure {
    /// Reason of the failure.
    #[source]
    pub error: Error,
    /// State of the service now.
    pub state: State,
}

impl State {
    /// A failure in this state, because the phase of the migration does not permit the command.
    pub(crate) fn refuse(self, why: &str) -> Failure {
        Failure { error: Error::WrongPhase(why.into()), state: self }
    }
}

impl Failure {
    pub(crate) fn untouched(error: impl Into<Error>) -> Failure {
        Failure { error: error.into(), state: State::Untouched }
    }

    pub(crate) fn on_target(error: Error) -> Failure {
        Failure { error, state: State::OnTarget }
    }

    /// A failure after which the proxy cannot be asked which side serves.
    pub(crate) fn unknown(error: Error) -> Failure {
        Failure { state: State::Unknown(error.to_string()), error }
    }

    /// A failure to remove something of the migration, with clients on the source.
    pub(crate) fn with_remains(error: impl Into<Error>) -> Failure {
        let error = error.into();
        Failure { state: State::OnSourceWithRemains(error.to_string()), error }
    }

    /// A failure with clients on the target.
    pub(crate) fn after_switch(record: &Record, error: Error) -> Failure {
        Failure { error, state: if record.way_back { State::OnTarget } else { State::OnTargetForGood } }
    }

    /// The next step for the operator.
    pub fn hint(&self) -> &'static str {
        match (&self.error, &self.state) {
            (_, State::Unknown(_)) => "check that the proxy runs, then run `stillpoint migrate status`",
            (_, State::OnSourceWithRemains(_)) => "run `stillpoint migrate abort` when both servers can be reached",
            (Error::Refused(_), _) => "`stillpoint migrate check` lists everything that was found",
            (Error::DefinedSince(_), _) => {
                "create these definitions on the source after the rollback, and run `fallback` again with \
                 --drop-definitions"
            }
            (error, State::OnTarget) if error.is_time_out() => {
                "end the sessions or transactions named above, and run the command again"
            }
            (error, _) if error.is_time_out() => {
                "end the sessions or transactions named above, or raise the time limit, and run the command again"
            }
            (Error::SchemaChanged(_) | Error::CatalogsChanged(_) | Error::InTheWay(_), _) => {
                "run the command again when no session changes definitions"
            }
            (Error::TooLong { .. }, State::OnTarget) => {
                "the log cannot report that row later either: `finish` ends the migration with clients on the target"
            }
            (Error::TooLong { .. }, _) => "run the command again when no client writes such rows",
            (Error::Capture(_), _) => {
                "remove the cause named above, or set wal_level=logical on the source, and run the command again"
            }
            (Error::Proxy(_) | Error::ProxyGone(_), _) => {
                "check that the proxy runs, that --proxy names its control socket, and that its configuration has the \
                 tenant"
            }
            (Error::ForeignJournal { .. }, _) => {
                "end the migration of that database, or give another directory with --state"
            }
            (Error::Host(_), _) => {
                "give --state a directory that only you and root can write to, such as /var/lib/stillpoint/migrate"
            }
            (Error::AtWork { .. }, _) => {
                "wait for that command, or end it on the machine where it runs; its session on the source shows the \
                 address"
            }
            (Error::Owned { .. }, _) => {
                "run the command where that journal is; if the journal is lost, run `stillpoint migrate abort \
                 --migration NUMBER`"
            }
            (Error::LockLost { .. }, _) => {
                "run `stillpoint migrate status`, which names a running command; then run this command again"
            }
            (Error::NoMigration(_), _) => {
                "`stillpoint migrate run` starts one; --state names the directory of its journal, if that is another one"
            }
            (Error::WrongPhase(_), _) => "`stillpoint migrate status`",
            (_, State::OnTargetForGood) => "run `stillpoint migrate status`, then `finish`",
            (_, State::OnTarget) => "run `stillpoint migrate status`, then `fallback` or `finish`",
            _ => "correct the cause named above, and run the command again",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_migration_the_command_that_starts_one_is_named() {
        let failure = Failure::untouched(Error::NoMigration("shop".into()));
        assert_eq!(failure.to_string(), "no migration of shop is under way");
        assert!(failure.error.is_refusal() && failure.hint().contains("stillpoint migrate run"), "{}", failure.hint());
    }
}
