//! Ends a migration that any earlier command left: continues it, or removes everything of it.

use crate::journal::{Journal, Phase, SharedJournal};
use crate::options::{Failure, Options, State};
use crate::owner::{self, CommandLock};
use crate::phases::{Migration, phases};
use crate::progress::Reporter;
use crate::removal::end_migration;
use crate::settle::settle;
use crate::state_files;
use crate::switch::{Side, serves};
use crate::{copy_resume, fence};
use std::time::Duration;
use stillpoint_migrate_apply::{Error, replication_objects};
use stillpoint_migrate_postgres::link::{Link, Purpose};
use stillpoint_operation as operation;

/// Result of [`recover`] for a migration that was interrupted.
pub(crate) enum Recovery {
    /// It continues from where the target follows. Holds the journal, and the lock that keeps other commands from the database.
    Following(Box<(Journal, CommandLock)>),
    /// Clients are on the target.
    Switched,
    /// Everything of it was removed.
    Nothing,
}

/// Continues or removes what a crash left: clients were on the source, unless the proxy reports otherwise.
pub(crate) async fn recover(options: &Options, reporter: &Reporter) -> Result<Recovery, Failure> {
    let mut journal = Journal::open(&options.state, &options.source.database).map_err(Failure::untouched)?;
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
    if phase == Phase::Switching {
        let switched = serves(options, &journal.record, Side::Target).await.map_err(Failure::unknown)?;
        if switched {
            journal.update(|record| record.phase = Phase::Switched).map_err(Failure::on_target)?;
        }
    }
    if journal.record.phase == Phase::Switched {
        settle(options, &SharedJournal::new(&mut journal), None, reporter).await.map_err(Failure::on_target)?;
        return Ok(Recovery::Switched);
    }
    if phase == Phase::Switching {
        let lifted = async {
            fence::lift_if_fenced(&options.source, journal.record.fenced.as_ref()).await?;
            journal.update(|record| record.phase = Phase::Following)
        };
        let lifted: Result<(), Error> = lifted.await;
        lifted.map_err(Failure::with_remains)?;
    }
    let follows = journal.record.phase == Phase::Following
        && replication_objects::has_slot_log(&options.source, &journal.record.slot()).await;
    if follows || copy_resume::is_possible(options, &journal).await {
        let lock = lock.map_err(Failure::untouched)?;
        owner::claim(options, &mut journal).await.map_err(Failure::untouched)?;
        reporter.warn(match follows {
            true => "an interrupted migration continues from the point where the target follows".into(),
            false => "an interrupted migration continues with the rows that are not on the target".into(),
        });
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
        state => Err(state.refuse("objects of an earlier migration could not be removed")),
    }
}

/// Runs the inverses of all phases, with clients on the source. A failure of one does not stop the others, so that as little as
/// possible is left; the journal stays until everything is removed.
///
/// The journal records this before the first step, so that no later command continues the migration on a target that is gone.
pub(crate) async fn undo(options: &Options, mut journal: Journal) -> State {
    if let Err(error) = journal.update(|record| record.phase = Phase::Returned) {
        return State::OnSourceWithRemains(error.to_string());
    }
    let target = (journal.record.number, options.to(&options.target));
    let shared = SharedJournal::new(&mut journal);
    let mut migration = Migration::new(options, target, &shared, &Reporter::silent());
    let not_undone = operation::undo(&mut migration, &phases()).await;
    drop(migration);
    if not_undone.is_empty() {
        return match end_migration(options, journal).await {
            Ok(()) => State::OnSource,
            Err(error) => State::OnSourceWithRemains(error.to_string()),
        };
    }
    let problems: Vec<String> = not_undone.into_iter().map(|(_, error)| error.to_string()).collect();
    State::OnSourceWithRemains(problems.join("; "))
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
    let there = state_files::peek(&options.state, &options.source.database).map_err(Failure::untouched)?.is_some();
    state_files::interrupt(&options.state, &options.source.database, INTERRUPT_TIMEOUT)
        .await
        .map_err(Failure::untouched)?;
    let options = &options.recorded().map_err(Failure::untouched)?;
    let journal = match Journal::open(&options.state, &options.source.database) {
        Ok(journal) => journal,
        // The interrupted command has removed everything.
        Err(_) if there && matches!(state_files::peek(&options.state, &options.source.database), Ok(None)) => {
            return Ok(State::OnSource);
        }
        Err(error) => return abort_orphans(options, error).await,
    };
    let lock = owner::acquire_lock_if_reachable(&options.source, &journal.record.migration).await;
    let lock = lock.map_err(Failure::untouched)?;
    let phase = journal.record.phase;
    let switching = matches!(phase, Phase::Switching | Phase::Returning);
    let over = phase == Phase::Switched
        || switching && serves(options, &journal.record, Side::Target).await.map_err(Failure::unknown)?;
    if journal.record.claimed && lock.as_ref().is_some_and(|lock| !lock.is_owned()) {
        journal.end().map_err(Failure::untouched)?;
        if over {
            let text =
                "clients are on the target, and the migration has ended: only its journal was left, and was removed";
            return Err(State::OnTargetForGood.refuse(text));
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
    if state_files::peek(&options.state, &options.source.database).map_err(Failure::untouched)?.is_some() {
        return Err(Failure::untouched(error));
    }
    let lost = options.without_journal.as_deref();
    let lock = owner::acquire_lock(&options.source, lost).await.map_err(Failure::untouched)?;
    let mut link = Link::connect(&options.source, Purpose::Statements, &[]).await.map_err(Failure::untouched)?;
    let orphans =
        replication_objects::our_slots(&mut link, &options.source.database).await.map_err(Failure::untouched)?;
    if orphans.is_empty() && !lock.is_owned() {
        return Err(Failure::untouched(error));
    }
    for orphan in orphans {
        replication_objects::drop_slot(&mut link, &orphan).await.map_err(Failure::with_remains)?;
    }
    replication_objects::uninstall(&mut link).await.map_err(Failure::with_remains)?;
    if let Some(lost) = lost {
        owner::release(&options.source, lost).await.map_err(Failure::with_remains)?;
    }
    Ok(State::OnSource)
}
