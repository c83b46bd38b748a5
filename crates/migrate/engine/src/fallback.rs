//! After the switch: roll back to the source, or make the switch final.

use crate::catalogs::{self, Definitions};
use crate::fault::{FaultPoint, reach};
use crate::follow::{Feed, Follower, Plan};
use crate::inventory::Inventory;
use crate::journal::{Journal, Phase, Record};
use crate::link::{Link, Purpose};
use crate::options::{Failure, Options, State};
use crate::owner::{self, Held};
use crate::progress::{Observer, Teller};
use crate::proxy_client::is_served;
use crate::replication_objects::{self, PUBLICATIONS};
use crate::run::{Following, Outcome, catch_up, compare_between, named, with_any_proxy};
use crate::switch::{self, Direction, Side};
use crate::{Error, ddl_changes, fence, multi_target, undo};
use std::time::Duration;
use stillpoint_events::EventKind;

const LOCK_LIMIT: Duration = Duration::from_secs(10);

/// Repeats on the source what was committed on the target since the switch, and moves clients back. A failure before that
/// leaves clients on the target and the way back open. If clients are on the source already, it removes what an earlier command
/// left. If the proxy is lost and another one serves in its place, it begins again.
pub async fn fallback(options: &Options, observer: Observer) -> Result<Outcome, Failure> {
    let teller = Teller::new(observer, "fallback");
    with_any_proxy(async |may_go_on| attempt(options, may_go_on, &teller).await).await
}

/// Makes one attempt; `None` if the proxy was lost with clients on the target, another one serves, and `may_go_on` is true.
async fn attempt(options: &Options, may_go_on: bool, teller: &Teller) -> Result<Option<Outcome>, Failure> {
    let options = &options.recorded().map_err(Failure::untouched)?;
    let mut journal = Journal::open(&options.state, &options.source.database).map_err(Failure::untouched)?;
    let held = owner::hold_if_there(&options.source, &journal.record.migration).await;
    let held = held.map_err(Failure::untouched)?;
    if is_over(held.as_ref(), &journal).map_err(Failure::untouched)? {
        let is_finished = journal.record.phase == Phase::Switched;
        journal.end().map_err(Failure::untouched)?;
        if is_finished {
            let text = "the migration was finished: clients are on the target, and there is no way back";
            return Err(Failure::untouched(Error::WrongPhase(text.into())));
        }
        return Ok(Some(Outcome::AlreadyThere));
    }
    match journal.record.phase {
        Phase::Returned => return taken_away(options, journal, Outcome::AlreadyThere).await.map(Some),
        Phase::Switched | Phase::Returning if journal.record.way_back => {}
        Phase::Switched | Phase::Returning => {
            let text = "this migration keeps no way back: it was told so (--no-fallback), or `finish` has begun";
            return Err(Failure::untouched(Error::WrongPhase(text.into())));
        }
        _ => {
            let text = "clients are on the source: there is nothing to return from";
            return Err(Failure::untouched(Error::WrongPhase(text.into())));
        }
    }
    if journal.record.phase == Phase::Returning {
        // An earlier attempt was interrupted, possibly after clients had moved back.
        let returned = switch::serves(options, &journal.record, Side::Source).await;
        match returned {
            Ok(true) => return taken_away(options, journal, Outcome::AlreadyThere).await.map(Some),
            Ok(false) => {
                let lifted = fence::lift_if_shut(&options.target, journal.record.fenced_target.as_ref()).await;
                lifted.map_err(Failure::on_target)?.into_iter().for_each(|lost| teller.warn(lost));
            }
            Err(error) => return Err(Failure { state: State::Unknown(error.to_string()), error }),
        }
    }
    let definitions = nothing_is_lost(options, teller).await.map_err(|error| match journal.record.phase {
        Phase::Switched => Failure::untouched(error),
        _ => Failure::on_target(error),
    })?;
    let migration = journal.record.migration.clone();
    let mut held = match held {
        Some(held) => held,
        None => owner::hold(&options.source, Some(&migration)).await.map_err(Failure::on_target)?,
    };
    journal.witness = Some(held.witness());
    let ended = tokio::select! {
        ended = steps(options, &mut journal, definitions, teller) => ended,
        () = options.interrupt.notified() => Err(Error::Interrupted),
        lost = held.lost(&migration, teller) => Err(lost),
    };
    let returned = match (&ended, journal.record.phase) {
        (Ok(_), _) | (_, Phase::Returned) => Ok(true),
        (Err(_), Phase::Returning) => switch::serves(options, &journal.record, Side::Source).await,
        _ => Ok(false),
    };
    match (ended, returned) {
        (Ok(paused), _) => taken_away(options, journal, Outcome::Switched { paused }).await.map(Some),
        (Err(error), Ok(true)) => {
            let state = State::OnSourceWithRemains("the migration's own things".into());
            Err(Failure { error, state })
        }
        (Err(error), Ok(false)) => {
            let error = named(error, &options.target).await;
            teller.tell(EventKind::FellBack { transition: 0, reason: error.to_string() });
            stay_on_target(options, &mut journal).await.map_err(Failure::on_target)?;
            if may_go_on && matches!(error, Error::ProxyGone(_)) && is_served(options).await {
                teller.warn("another proxy serves in its place: it begins anew".into());
                return Ok(None);
            }
            Err(Failure::on_target(error))
        }
        (Err(error), Err(unknown)) => Err(Failure { error, state: State::Unknown(unknown.to_string()) }),
    }
}

/// Calls [`Held::is_over`]; false if the source could not be asked.
fn is_over(held: Option<&Held>, journal: &Journal) -> Result<bool, Error> {
    held.map_or(Ok(false), |held| held.is_over(journal))
}

/// Removes what is left of the migration, the target's database included; clients are on the source.
async fn taken_away(options: &Options, journal: Journal, outcome: Outcome) -> Result<Outcome, Failure> {
    match undo::undo(options, journal).await {
        State::OnSource => Ok(outcome),
        state => Err(Failure { error: Error::WrongPhase("not everything could be removed".into()), state }),
    }
}

/// Returns the target's definitions, unless some of them would be lost; they must not change until clients are back.
async fn nothing_is_lost(options: &Options, teller: &Teller) -> Result<Definitions, Error> {
    let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
    let definitions = catalogs::read(&mut target).await?;
    let lost = ddl_changes::the_switch(options, &definitions)?;
    match (lost.is_empty(), options.accepted.definitions_dropped) {
        (true, _) => {}
        (false, true) => teller.warn(format!("with the target's database will be dropped: {}", lost.join("; "))),
        (false, false) => return Err(Error::DefinedSince(lost)),
    }
    Ok(definitions)
}

async fn steps(
    options: &Options,
    journal: &mut Journal,
    definitions: Definitions,
    teller: &Teller,
) -> Result<Duration, Error> {
    let direction = Direction::back(options);
    let following = teller.phase("catch-up", follow_back(options, journal, definitions, teller)).await?;
    let following =
        teller.phase("compare", compare_between(options, following, &direction.from, &direction.to, teller)).await?;
    journal.update(|record| record.phase = Phase::Returning)?;
    // Sessions prepared on a fenced side would stay read-only.
    let lifted = fence::lift_if_shut(&options.source, journal.record.fenced.as_ref()).await?;
    lifted.into_iter().for_each(|lost| teller.warn(lost));
    let prepared = teller.phase("prepare", switch::prepare(options, journal, following, &direction)).await?;
    let switching = switch::switch(options, journal, prepared, &direction, teller);
    let (paused, _) = teller.phase("switch-over", switching).await?;
    reach(&options.faults, FaultPoint::Returned)?;
    Ok(paused)
}

async fn follow_back(
    options: &Options,
    journal: &mut Journal,
    definitions: Definitions,
    teller: &Teller,
) -> Result<Following, Error> {
    fence::open(&options.source).await?;
    let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
    let mut inventory = Inventory::read(&mut target).await?;
    if options.accepted.definitions_dropped {
        let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        inventory.keep_those_of(&Inventory::read(&mut source).await?);
    }
    let slot = journal.record.back_slot();
    let follower = Follower::start(Plan {
        source: &options.target.called("target"),
        target: &options.source.called("source"),
        feed: Feed::Log { slot: &slot, publications: &PUBLICATIONS, from: journal.record.back_from, horizon: 0 },
        inventory: &inventory,
        players: options.players,
        pace: std::sync::Arc::new(crate::throttle::Throttle::free()),
    })
    .await?;
    let mut following = Following { follower, inventory, definitions, guide: None };
    catch_up(&mut following, &mut target, teller).await?;
    Ok(following)
}

/// Keeps clients on the target: enables its connections, in case an interrupted attempt disabled them, and disables those of
/// the source. Until both are done, the journal records that clients are on their way.
pub(crate) async fn stay_on_target(options: &Options, journal: &mut Journal) -> Result<(), Error> {
    fence::lift_if_shut(&options.target, journal.record.fenced_target.as_ref()).await?;
    shut_source(options, &journal.record).await?;
    journal.update(|record| record.phase = Phase::Switched)
}

/// Disables connections to the side that clients have left: otherwise sessions could write to it, or read old rows.
pub(crate) async fn shut_source(options: &Options, record: &Record) -> Result<(), Error> {
    let grants = record.fenced.clone().unwrap_or_default();
    let mut door = fence::at_the_door(&options.source).await?;
    fence::shut_again(&mut door, &options.source.database, &grants).await?;
    fence::clear(&mut door, &options.source.database).await
}

/// Ends a migration after its switch: removes everything of it from the target, so that there is no way back. The source keeps
/// its rows and stays fenced.
pub async fn finish(options: &Options) -> Result<(), Failure> {
    let options = &options.recorded().map_err(Failure::untouched)?;
    let mut journal = Journal::open(&options.state, &options.source.database).map_err(Failure::untouched)?;
    if journal.record.phase != Phase::Switched {
        let text = "clients are not on the target yet: there is nothing to finish";
        return Err(Failure::untouched(Error::WrongPhase(text.into())));
    }
    let held = owner::hold_if_there(&options.source, &journal.record.migration).await;
    let held = held.map_err(Failure::untouched)?;
    if is_over(held.as_ref(), &journal).map_err(Failure::untouched)? {
        return journal.end().map_err(Failure::untouched);
    }
    take_away(options, &mut journal).await.map_err(|error| Failure::after_switch(&journal.record, error))?;
    let record = journal.record.clone();
    undo::released(options, journal).await.map_err(|error| Failure::after_switch(&record, error))
}

async fn take_away(options: &Options, journal: &mut Journal) -> Result<(), Error> {
    let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
    // A command that finds this half done must not return to the source by objects that are gone.
    journal.update(|record| record.way_back = false)?;
    replication_objects::drop_slot(&mut target, &journal.record.back_slot()).await?;
    replication_objects::uninstall(&mut target).await?;
    replication_objects::restore_identities(&mut target, &journal.record.identities, LOCK_LIMIT).await?;
    let mut source = fence::enter(&options.source).await?;
    // Targets that remain from a `run` that was interrupted directly after the switch.
    let left = multi_target::leave_others(options, journal, &mut source).await?;
    if !left.is_empty() {
        return Err(Error::WrongPhase(format!("{}; `finish` goes on without", left.join("; "))));
    }
    replication_objects::drop_slot(&mut source, &journal.record.slot()).await?;
    replication_objects::uninstall(&mut source).await?;
    replication_objects::restore_identities(&mut source, &journal.record.identities, LOCK_LIMIT).await
}
