//! After the switch: roll back to the source, or make the switch final.

use crate::catalogs::{self, Definitions};
use crate::fault::{FaultPoint, reach};
use crate::follow::{Feed, Follower, Plan};
use crate::inventory::Inventory;
use crate::journal::{Journal, Phase, Record};
use crate::link::{Link, Purpose};
use crate::options::{Failure, Options, State};
use crate::owner::{self, CommandLock};
use crate::progress::{Observer, Reporter};
use crate::proxy_client::is_served;
use crate::replication_objects::{self, PUBLICATIONS};
use crate::run::{FollowState, Outcome, catch_up, compare_between, name_long_rows, retry_with_any_proxy};
use crate::switch::{self, Direction, Side};
use crate::{Error, ddl_changes, fence, multi_target, undo};
use std::time::Duration;
use stillpoint_events::EventKind;

const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Repeats on the source what was committed on the target since the switch, and moves clients back. A failure before that
/// leaves clients on the target and the way back open. If clients are on the source already, it removes what an earlier command
/// left. If the proxy is lost and another one serves in its place, it begins again.
///
/// # Errors
///
/// A [`Failure`] with its reason and the state of the service; [`State::OnTarget`] if clients stay on the target.
pub async fn fallback(options: &Options, observer: Observer) -> Result<Outcome, Failure> {
    let reporter = Reporter::new(observer, "fallback");
    retry_with_any_proxy(async |may_go_on| attempt(options, may_go_on, &reporter).await).await
}

/// Makes one attempt; `None` if the proxy was lost with clients on the target, another one serves, and `may_go_on` is true.
async fn attempt(options: &Options, may_go_on: bool, reporter: &Reporter) -> Result<Option<Outcome>, Failure> {
    let options = &options.recorded().map_err(Failure::untouched)?;
    let mut journal = Journal::open(&options.state, &options.source.database).map_err(Failure::untouched)?;
    let lock = owner::acquire_lock_if_reachable(&options.source, &journal.record.migration).await;
    let lock = lock.map_err(Failure::untouched)?;
    if is_over(lock.as_ref(), &journal).map_err(Failure::untouched)? {
        let is_finished = journal.record.phase == Phase::Switched;
        journal.end().map_err(Failure::untouched)?;
        if is_finished {
            let text = "the migration was finished: clients are on the target, and cannot be rolled back to the \
                        source";
            return Err(Failure::untouched(Error::WrongPhase(text.into())));
        }
        return Ok(Some(Outcome::AlreadyThere));
    }
    match journal.record.phase {
        Phase::Returned => return remove_all(options, journal, Outcome::AlreadyThere).await.map(Some),
        Phase::Switched | Phase::Returning if journal.record.way_back => {}
        Phase::Switched | Phase::Returning => {
            let text = "this migration cannot be rolled back: it was started with --no-fallback, or `finish` has \
                        begun";
            return Err(Failure::untouched(Error::WrongPhase(text.into())));
        }
        _ => {
            let text = "clients are on the source: there is nothing to roll back";
            return Err(Failure::untouched(Error::WrongPhase(text.into())));
        }
    }
    if journal.record.phase == Phase::Returning {
        // An earlier attempt was interrupted, possibly after clients had moved back.
        let returned = switch::serves(options, &journal.record, Side::Source).await;
        match returned {
            Ok(true) => return remove_all(options, journal, Outcome::AlreadyThere).await.map(Some),
            Ok(false) => {
                let lifted = fence::lift_if_fenced(&options.target, journal.record.fenced_target.as_ref()).await;
                lifted.map_err(Failure::on_target)?.into_iter().for_each(|lost| reporter.warn(lost));
            }
            Err(error) => return Err(Failure { state: State::Unknown(error.to_string()), error }),
        }
    }
    let definitions = check_definitions_kept(options, reporter).await.map_err(|error| match journal.record.phase {
        Phase::Switched => Failure::untouched(error),
        _ => Failure::on_target(error),
    })?;
    let migration = journal.record.migration.clone();
    let mut lock = match lock {
        Some(lock) => lock,
        None => owner::acquire_lock(&options.source, Some(&migration)).await.map_err(Failure::on_target)?,
    };
    journal.witness = Some(lock.witness());
    let ended = tokio::select! {
        ended = steps(options, &mut journal, definitions, reporter) => ended,
        () = options.interrupt.notified() => Err(Error::Interrupted),
        lost = lock.wait_until_lost(&migration, reporter) => Err(lost),
    };
    let returned = match (&ended, journal.record.phase) {
        (Ok(_), _) | (_, Phase::Returned) => Ok(true),
        (Err(_), Phase::Returning) => switch::serves(options, &journal.record, Side::Source).await,
        _ => Ok(false),
    };
    match (ended, returned) {
        (Ok(paused), _) => remove_all(options, journal, Outcome::Switched { paused }).await.map(Some),
        (Err(error), Ok(true)) => {
            let state = State::OnSourceWithRemains("objects that the migration created".into());
            Err(Failure { error, state })
        }
        (Err(error), Ok(false)) => {
            let error = name_long_rows(error, &options.target).await;
            reporter.report(EventKind::FellBack { transition: None, reason: error.to_string() });
            stay_on_target(options, &mut journal).await.map_err(Failure::on_target)?;
            if may_go_on && matches!(error, Error::ProxyGone(_)) && is_served(options).await {
                reporter.warn("another proxy has taken over: the rollback starts again".into());
                return Ok(None);
            }
            Err(Failure::on_target(error))
        }
        (Err(error), Err(unknown)) => Err(Failure { error, state: State::Unknown(unknown.to_string()) }),
    }
}

/// Calls [`CommandLock::is_over`]; false if the source could not be asked.
fn is_over(lock: Option<&CommandLock>, journal: &Journal) -> Result<bool, Error> {
    lock.map_or(Ok(false), |lock| lock.is_over(journal))
}

/// Removes what is left of the migration, the target's database included; clients are on the source.
async fn remove_all(options: &Options, journal: Journal, outcome: Outcome) -> Result<Outcome, Failure> {
    match undo::undo(options, journal).await {
        State::OnSource => Ok(outcome),
        state => Err(Failure {
            error: Error::WrongPhase("some objects of the migration could not be removed".into()),
            state,
        }),
    }
}

/// Returns the target's definitions, unless some of them would be lost; they must not change until clients are back.
async fn check_definitions_kept(options: &Options, reporter: &Reporter) -> Result<Definitions, Error> {
    let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
    let definitions = catalogs::read(&mut target).await?;
    let lost = ddl_changes::since_switch(options, &definitions)?;
    match (lost.is_empty(), options.accepted.definitions_dropped) {
        (true, _) => {}
        (false, true) => {
            reporter.warn(format!("the following will be dropped with the target's database: {}", lost.join("; ")))
        }
        (false, false) => return Err(Error::DefinedSince(lost)),
    }
    Ok(definitions)
}

async fn steps(
    options: &Options,
    journal: &mut Journal,
    definitions: Definitions,
    reporter: &Reporter,
) -> Result<Duration, Error> {
    let direction = Direction::back(options);
    let following = reporter.phase("catch-up", follow_target(options, journal, definitions, reporter)).await?;
    let following = reporter
        .phase("compare", compare_between(options, following, &direction.from, &direction.to, reporter))
        .await?;
    journal.update(|record| record.phase = Phase::Returning)?;
    // Sessions prepared on a fenced side would stay read-only.
    let lifted = fence::lift_if_fenced(&options.source, journal.record.fenced.as_ref()).await?;
    lifted.into_iter().for_each(|lost| reporter.warn(lost));
    let prepared = reporter.phase("prepare", switch::prepare(options, journal, following, &direction)).await?;
    let switching = switch::switch(options, journal, prepared, &direction, reporter);
    let (paused, _) = reporter.phase("switch-over", switching).await?;
    reach(&options.faults, FaultPoint::Returned)?;
    Ok(paused)
}

async fn follow_target(
    options: &Options,
    journal: &mut Journal,
    definitions: Definitions,
    reporter: &Reporter,
) -> Result<FollowState, Error> {
    fence::enable_for_us(&options.source).await?;
    let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
    let mut inventory = Inventory::read(&mut target).await?;
    if options.accepted.definitions_dropped {
        let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        inventory.retain_tables_of(&Inventory::read(&mut source).await?);
    }
    let slot = journal.record.back_slot();
    let follower = Follower::start(Plan {
        source: &options.target.with_side("target"),
        target: &options.source.with_side("source"),
        feed: Feed::Log { slot: &slot, publications: &PUBLICATIONS, from: journal.record.back_from, horizon: 0 },
        inventory: &inventory,
        players: options.players,
        pace: std::sync::Arc::new(crate::throttle::Throttle::unlimited()),
    })
    .await?;
    let mut following = FollowState { follower, inventory, definitions, controller: None };
    catch_up(&mut following, &mut target, reporter).await?;
    Ok(following)
}

/// Keeps clients on the target: enables its connections, in case an interrupted attempt disabled them, and disables those of
/// the source. Until both are done, the journal records that clients are on their way.
pub(crate) async fn stay_on_target(options: &Options, journal: &mut Journal) -> Result<(), Error> {
    fence::lift_if_fenced(&options.target, journal.record.fenced_target.as_ref()).await?;
    fence_source(options, &journal.record).await?;
    journal.update(|record| record.phase = Phase::Switched)
}

/// Disables connections to the side that clients have left: otherwise sessions could write to it, or read old rows.
pub(crate) async fn fence_source(options: &Options, record: &Record) -> Result<(), Error> {
    let grants = record.fenced.clone().unwrap_or_default();
    let mut door = fence::connect_for_fencing(&options.source).await?;
    fence::disable_connections_again(&mut door, &options.source.database, &grants).await?;
    fence::terminate_sessions(&mut door, &options.source.database).await
}

/// Ends a migration after its switch: removes everything of it from the target, so that there is no way back. The source keeps
/// its rows and stays fenced.
///
/// # Errors
///
/// A [`Failure`] with its reason and the state of the service: nothing is touched unless clients are on the target.
pub async fn finish(options: &Options) -> Result<(), Failure> {
    let options = &options.recorded().map_err(Failure::untouched)?;
    let mut journal = Journal::open(&options.state, &options.source.database).map_err(Failure::untouched)?;
    if journal.record.phase != Phase::Switched {
        let text = "clients are not on the target yet: there is nothing to finish";
        return Err(Failure::untouched(Error::WrongPhase(text.into())));
    }
    let lock = owner::acquire_lock_if_reachable(&options.source, &journal.record.migration).await;
    let lock = lock.map_err(Failure::untouched)?;
    if is_over(lock.as_ref(), &journal).map_err(Failure::untouched)? {
        return journal.end().map_err(Failure::untouched);
    }
    remove_return_path(options, &mut journal).await.map_err(|error| Failure::after_switch(&journal.record, error))?;
    let record = journal.record.clone();
    undo::end_migration(options, journal).await.map_err(|error| Failure::after_switch(&record, error))
}

async fn remove_return_path(options: &Options, journal: &mut Journal) -> Result<(), Error> {
    let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
    // A command that finds this half done must not return to the source by objects that are gone.
    journal.update(|record| record.way_back = false)?;
    replication_objects::drop_slot(&mut target, &journal.record.back_slot()).await?;
    replication_objects::uninstall(&mut target).await?;
    replication_objects::restore_identities(&mut target, &journal.record.identities, LOCK_TIMEOUT).await?;
    let mut source = fence::connect_to_fenced(&options.source).await?;
    // Targets that remain from a `run` that was interrupted directly after the switch.
    let left = multi_target::remove_others(options, journal, &mut source).await?;
    if !left.is_empty() {
        return Err(Error::WrongPhase(format!(
            "{}; run `finish` again to continue without these targets",
            left.join("; ")
        )));
    }
    replication_objects::drop_slot(&mut source, &journal.record.slot()).await?;
    replication_objects::uninstall(&mut source).await?;
    replication_objects::restore_identities(&mut source, &journal.record.identities, LOCK_TIMEOUT).await
}
