//! Removes a migration that any earlier command left, and reports the state of one.

use crate::fault::{FaultPoint, reach};
use crate::inventory::{number, text};
use crate::journal::{self, CopyProgress, Journal, Phase, Record};
use crate::link::{Link, Purpose, identifier, literal};
use crate::options::{Failure, Options, State};
use crate::owner::{self, CommandLock, Owner};
use crate::progress::Reporter;
use crate::proxy_client::ProxyClient;
use crate::run::state_after_cleanup;
use crate::switch::{Side, serves, side_of};
use crate::{Error, Server, ddl_changes, definitions, fence, replication_objects, roles};
use serde::Serialize;
use std::collections::BTreeMap;
use std::error::Error as _;
use std::time::Duration;

const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Result of [`recover`] for a migration that was interrupted.
pub(crate) enum Recovery {
    /// It continues from where the target follows. Holds the journal, and the lock that keeps other commands from the database.
    Following(Box<(Journal, CommandLock)>),
    /// Clients are on the target.
    Switched,
    /// Everything of it was removed.
    Nothing,
}

/// State of a migration, as its journal and both servers report it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The journal's record; `None` if there is no migration.
    pub record: Option<Record>,
    /// `source` or `target`: the side from which the proxy serves the tenant; `None` if the proxy cannot be asked.
    pub serving: Option<&'static str>,
    /// Progress of the copy of rows, by server, while a command copies.
    pub copying: BTreeMap<String, CopyProgress>,
    /// Log that the source keeps for other targets, in bytes, by server.
    pub kept_for_others: BTreeMap<String, u64>,
    /// Log that the slot in use keeps on its server, in bytes.
    pub kept_bytes: Option<u64>,
    /// Names of our slots that this journal does not know.
    pub orphans: Vec<String>,
    /// The migration that owns the database according to the source: that of the record, or one of another journal.
    pub owner: Option<Owner>,
    /// Session on the source of the command that works on the database, possibly with another journal.
    pub at_work: Option<String>,
    /// Error of the server that would know the rest and could not be asked.
    pub unasked: Option<String>,
    /// Definitions made on the target since the switch, which `fallback` would drop.
    pub defined_since: Vec<String>,
}

impl Status {
    /// Returns true if the presence or absence of a migration is certain; false if only a server would know, and it could not
    /// be asked.
    pub fn is_known(&self) -> bool {
        self.record.is_some() || self.unasked.is_none()
    }

    /// Commands that are possible now, as text for the operator; `None` if there is no migration.
    pub fn advice(&self) -> Option<&'static str> {
        let record = self.record.as_ref()?;
        Some(match record.phase {
            Phase::Begun | Phase::Snapshotted | Phase::Copying => {
                "unless a command is running: `run` removes this migration and starts again, `abort` removes it"
            }
            Phase::Following | Phase::Switching => {
                "unless a command is running: `run` continues the migration, `abort` removes it"
            }
            Phase::Switched if record.way_back => "`fallback` rolls back to the source, `finish` ends the migration",
            Phase::Switched => "`finish` ends the migration; `fallback` is not possible",
            Phase::Returning => "unless a command is running: `fallback` continues the rollback",
            Phase::Returned => {
                "unless a command is running: `fallback` or `abort` removes what is left, `run` also starts again"
            }
        })
    }
}

/// Continues or removes what a crash left: clients were on the source, unless the proxy reports otherwise.
pub(crate) async fn recover(options: &Options, reporter: &Reporter) -> Result<Recovery, Failure> {
    let mut journal = Journal::open(&options.state, &options.source.database).map_err(Failure::untouched)?;
    let unknown = |error: Error| Failure { state: State::Unknown(error.to_string()), error };
    let lock = match owner::acquire_lock(&options.source, Some(&journal.record.migration)).await {
        Err(error @ (Error::AtWork { .. } | Error::Owned { .. })) => return Err(Failure::untouched(error)),
        lock => lock,
    };
    if let Ok(lock) = &lock
        && lock.is_over(&journal).map_err(Failure::untouched)?
    {
        journal.end().map_err(Failure::untouched)?;
        return Ok(Recovery::Nothing);
    }
    // Read only now that the lock is held: a guardian may have changed it before.
    let phase = journal.record.phase;
    if phase == Phase::Switched {
        crate::switch::settle(options, &mut journal, None, reporter).await.map_err(Failure::on_target)?;
        return Ok(Recovery::Switched);
    }
    if phase == Phase::Switching {
        let switched = serves(options, &journal.record, Side::Target).await.map_err(unknown)?;
        if switched {
            journal.update(|record| record.phase = Phase::Switched).map_err(Failure::on_target)?;
            crate::switch::settle(options, &mut journal, None, reporter).await.map_err(Failure::on_target)?;
            return Ok(Recovery::Switched);
        }
        let lifted = async {
            fence::lift_if_fenced(&options.source, journal.record.fenced.as_ref()).await?;
            journal.update(|record| record.phase = Phase::Following)
        };
        let lifted: Result<(), Error> = lifted.await;
        lifted.map_err(|error| Failure { state: State::OnSourceWithRemains(error.to_string()), error })?;
    }
    if journal.record.phase == Phase::Following && has_slot_log(options, &journal.record.slot()).await {
        let lock = lock.map_err(Failure::untouched)?;
        owner::claim(options, &mut journal).await.map_err(Failure::untouched)?;
        reporter.warn("an interrupted migration continues from the point where the target follows".into());
        return Ok(Recovery::Following(Box::new((journal, lock))));
    }
    reporter.warn(match phase {
        Phase::Returned => {
            "an aborted migration left objects behind: they are removed, and the migration starts again".into()
        }
        _ => "a migration was interrupted before the target was complete: it starts again".into(),
    });
    match undo(options, journal).await {
        State::OnSource => Ok(Recovery::Nothing),
        state => Err(Failure {
            error: Error::WrongPhase("objects of an earlier migration could not be removed".into()),
            state,
        }),
    }
}

/// Returns true if the source keeps its log for a slot.
pub(crate) async fn has_slot_log(options: &Options, slot: &str) -> bool {
    let asking = async {
        let mut link = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        let sql = format!(
            "SELECT 1 FROM pg_replication_slots WHERE slot_name = {} AND wal_status IS DISTINCT FROM 'lost'",
            literal(slot)
        );
        link.value(&sql).await
    };
    matches!(asking.await, Ok(Some(_)))
}

/// Removes everything, with clients on the source. It continues after a failure, so that as little as possible is left; the
/// journal stays until everything is removed.
///
/// The journal records this before the first step, so that no later command continues the migration on a target that is gone.
pub(crate) async fn undo(options: &Options, mut journal: Journal) -> State {
    if let Err(error) = journal.update(|record| record.phase = Phase::Returned) {
        return state_after_cleanup(vec![error.to_string()]);
    }
    let mut problems = Vec::new();
    let mut note = |result: Result<(), Error>| {
        if let Err(error) = result {
            problems.push(error.to_string());
        }
    };
    if let Ok(mut proxy) = ProxyClient::connect(&options.proxy, &options.tenant).await {
        // It is not an error if nothing was prepared.
        let _ = proxy.abandon().await;
    }
    note(clean_source(options, &journal.record).await);
    if journal.record.made_database {
        note(drop_database(&options.target, &journal.record, journal.record.number).await);
    }
    for other in journal.record.others.iter().filter(|other| other.made_database) {
        let undone = match options.others.iter().find(|server| server.to_string() == other.server) {
            Some(server) => drop_database(server, &journal.record, other.number).await,
            None => Err(Error::WrongPhase(format!("its database at {}: name it with --target", other.server))),
        };
        // For a dropped target, the failure to reach it has been reported already.
        if other.dropped.is_none() {
            note(undone);
        }
    }
    if problems.is_empty()
        && let Err(error) = end_migration(options, journal).await
    {
        problems.push(error.to_string());
    }
    state_after_cleanup(problems)
}

/// Ends a migration of which nothing is left: frees the database for another migration, and removes the journal.
///
/// # Errors
///
/// An error if the source cannot be asked, or the journal cannot be removed.
pub(crate) async fn end_migration(options: &Options, journal: Journal) -> Result<(), Error> {
    owner::release(&options.source, &journal.record.migration).await?;
    reach(&options.faults, FaultPoint::Released)?;
    journal.end()
}

async fn clean_source(options: &Options, record: &Record) -> Result<(), Error> {
    fence::lift_if_fenced(&options.source, record.fenced.as_ref()).await?;
    let mut link = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    for slot in record.slots() {
        replication_objects::drop_slot(&mut link, &slot).await?;
    }
    replication_objects::uninstall(&mut link).await?;
    replication_objects::restore_identities(&mut link, &record.identities, LOCK_TIMEOUT).await
}

/// Drops the database that was made at a target, and the roles made for it.
pub(crate) async fn drop_database(target: &Server, record: &Record, number: usize) -> Result<(), Error> {
    let mut link = Link::connect(&target.database("postgres"), Purpose::Statements, &[]).await?;
    replication_objects::drop_slot(&mut link, &record.back_slot()).await?;
    definitions::terminate_makers(target, &mut link).await?;
    let name = identifier(&target.database);
    link.query(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await?;
    roles::drop_created(&mut link, record.roles_of(number)).await
}

/// Time for an interrupted command to remove what it made; enough to drop the copy of a large database.
const INTERRUPT_TIMEOUT: Duration = Duration::from_secs(120);

/// Ends a migration before its switch: clients stay on the source, and both sides are restored. A command that is at work is
/// interrupted.
///
/// # Errors
///
/// A [`Failure`] with its reason and the state of the service: clients are on the target already, a command does not end,
/// or something could not be removed.
pub async fn abort(options: &Options) -> Result<State, Failure> {
    let there = journal::peek(&options.state, &options.source.database).map_err(Failure::untouched)?.is_some();
    journal::interrupt(&options.state, &options.source.database, INTERRUPT_TIMEOUT)
        .await
        .map_err(Failure::untouched)?;
    let options = &options.recorded().map_err(Failure::untouched)?;
    let journal = match Journal::open(&options.state, &options.source.database) {
        Ok(journal) => journal,
        // The interrupted command has removed everything.
        Err(_) if there && matches!(journal::peek(&options.state, &options.source.database), Ok(None)) => {
            return Ok(State::OnSource);
        }
        Err(error) => return abort_orphans(options, error).await,
    };
    let lock = owner::acquire_lock_if_reachable(&options.source, &journal.record.migration).await;
    let lock = lock.map_err(Failure::untouched)?;
    let phase = journal.record.phase;
    let switching = matches!(phase, Phase::Switching | Phase::Returning);
    let over = phase == Phase::Switched
        || switching
            && serves(options, &journal.record, Side::Target)
                .await
                .map_err(|error| Failure { state: State::Unknown(error.to_string()), error })?;
    if journal.record.claimed && lock.as_ref().is_some_and(|lock| !lock.is_owned()) {
        journal.end().map_err(Failure::untouched)?;
        if over {
            let text =
                "clients are on the target, and the migration has ended: only its journal was left, and was removed";
            return Err(Failure { error: Error::WrongPhase(text.into()), state: State::OnTargetForGood });
        }
        return Ok(State::OnSource);
    }
    if over {
        let text = if journal.record.way_back {
            "clients are already on the target: `fallback` rolls back to the source, `finish` ends the migration"
        } else {
            "clients are already on the target, and `fallback` is not possible: `finish` ends the migration"
        };
        return Err(Failure::after_switch(&journal.record, Error::WrongPhase(text.into())));
    }
    match undo(options, journal).await {
        State::OnSource => Ok(State::OnSource),
        state => Err(Failure {
            error: Error::WrongPhase("some objects of the migration could not be removed".into()),
            state,
        }),
    }
}

/// Removes slots that may exist without a journal, because their owner is lost.
async fn abort_orphans(options: &Options, error: Error) -> Result<State, Failure> {
    let untouched = Failure::untouched;
    if journal::peek(&options.state, &options.source.database).map_err(untouched)?.is_some() {
        return Err(Failure::untouched(error));
    }
    let lost = options.without_journal.as_deref();
    let lock = owner::acquire_lock(&options.source, lost).await.map_err(untouched)?;
    let mut link = Link::connect(&options.source, Purpose::Statements, &[]).await.map_err(untouched)?;
    let orphans = replication_objects::our_slots(&mut link, &options.source.database).await.map_err(untouched)?;
    if orphans.is_empty() && !lock.is_owned() {
        return Err(Failure::untouched(error));
    }
    let remains = |error: Error| Failure { state: State::OnSourceWithRemains(error.to_string()), error };
    for orphan in orphans {
        replication_objects::drop_slot(&mut link, &orphan).await.map_err(remains)?;
    }
    replication_objects::uninstall(&mut link).await.map_err(remains)?;
    if let Some(lost) = lost {
        owner::release(&options.source, lost).await.map_err(remains)?;
    }
    Ok(State::OnSource)
}

/// Reports the state of a migration. It changes nothing, and leaves out what cannot be asked.
///
/// # Errors
///
/// [`Error::Journal`] or [`Error::ForeignJournal`] if the journal cannot be used; a server that cannot be reached is not
/// an error ([`Status::unasked`]).
pub async fn status(options: &Options) -> Result<Status, Error> {
    let options = &options.recorded()?;
    let record = journal::peek(&options.state, &options.source.database)?;
    let serving = match ProxyClient::connect(&options.proxy, &options.tenant).await {
        Ok(mut proxy) => proxy.serving().await.ok().flatten(),
        Err(_) => None,
    };
    let side = |place: (String, u16)| match &record {
        Some(record) => side_of(options, record, &place),
        None if place == options.source.host_and_port() => Some(Side::Source),
        None if place == options.target.host_and_port() => Some(Side::Target),
        None => None,
    };
    let serving = serving.and_then(side).map(|side| if side == Side::Source { "source" } else { "target" });
    let mut status = Status {
        record,
        serving,
        copying: BTreeMap::new(),
        kept_for_others: BTreeMap::new(),
        kept_bytes: None,
        orphans: Vec::new(),
        owner: None,
        at_work: None,
        unasked: None,
        defined_since: Vec::new(),
    };
    if let Some(record) = &status.record {
        let others = record.others.iter().map(|other| (other.number, &other.server));
        for (number, server) in std::iter::once((record.number, &record.target)).chain(others) {
            let told = journal::copying(&options.state, &options.source.database, number);
            status.copying.extend(told.map(|told| (server.clone(), told)));
        }
        status.defined_since = ddl_changes::changes_of(options, record).await.unwrap_or_default();
    }
    // If clients are to stay on the source, both slots only wait to be dropped; the one on the source matters, because it can
    // fill a disk in use.
    let back = status.record.as_ref().is_some_and(|record| matches!(record.phase, Phase::Switched | Phase::Returning));
    let slot = status.record.as_ref().map(|record| if back { record.back_slot() } else { record.slot() });
    let others =
        status.record.as_ref().filter(|_| !back).map(|record| {
            record.others.iter().map(|other| (record.slot_of(other.number), other.server.clone())).collect()
        });
    let others: BTreeMap<String, String> = others.unwrap_or_default();
    let server = if back { &options.target } else { &options.source };
    let mut link = match fence::connect_beside(server).await {
        Ok(link) => link,
        Err(error) => {
            let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
            status.unasked = Some(format!("{error}{cause}"));
            return Ok(status);
        }
    };
    // The lock and the owner are on the source, whichever side serves.
    let mut elsewhere = if back { fence::connect_beside(&options.source).await.ok() } else { None };
    if let Some(source) = if back { elsewhere.as_mut() } else { Some(&mut link) } {
        status.owner = owner::owner(source, options.source.database_name()).await?;
        status.at_work = owner::working_command(source, options.source.database_name()).await?;
    }
    let rows = link
        .query(&format!(
            "SELECT slot_name, pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint FROM pg_replication_slots \
             WHERE slot_name ~ '^stillpoint_' AND database = {}",
            literal(server.database_name())
        ))
        .await?;
    for row in rows {
        if Some(text(&row, 0)) == slot {
            status.kept_bytes = Some(number(&row, 1));
        } else if let Some(server) = others.get(&text(&row, 0)) {
            status.kept_for_others.insert(server.clone(), number(&row, 1));
        } else {
            status.orphans.push(text(&row, 0));
        }
    }
    Ok(status)
}
