//! After the switch: roll back to the source, or make the switch final.

use crate::catalogs::{self, Definitions};
use crate::follow_state::{FollowState, catch_up, compare_between};
use crate::journal::{Journal, Phase, Record, SharedJournal};
use crate::large_objects::LargeObjects;
use crate::live_report::LiveReport;
use crate::materialized_views::{refresh_before_switch, refresh_stale};
use crate::options::{Failure, Options, State};
use crate::owner::{self, CommandLock, Witness};
use crate::phases::{state_mut, take_state};
use crate::progress::{Observer, Reporter};
use crate::proxy_client::is_served;
use crate::reactions::{Reactions, complete_foreign_keys};
use crate::removal::{LOCK_TIMEOUT, end_migration, remove_others};
use crate::retry::{Outcome, name_long_rows, retry_with_any_proxy};
use crate::selection::Selection;
use crate::switch::{self, Direction, Prepared, Side};
use crate::{ddl_changes, fence, undo};
use std::sync::Arc;
use std::time::Duration;
use stillpoint_events::EventKind;
use stillpoint_migrate_apply::inventory::Inventory;
use stillpoint_migrate_apply::replication_objects::{self, PUBLICATIONS};
use stillpoint_migrate_apply::throttle::Throttle;
use stillpoint_migrate_apply::{Error, Feed, Follower, Plan};
use stillpoint_migrate_postgres::link::{Link, Purpose};
use stillpoint_operation::{self as operation, Faults, Operation, Step, Undo};

/// The order of a rollback. A failure before clients have moved leaves them on the target, and the way back open.
fn phases<'m, 'j>() -> [operation::Phase<Rollback<'m, 'j>>; 4] {
    use operation::Phase;
    [
        // The source follows, and accepts our connections.
        Phase {
            name: "catch-up",
            forward: Step::Async(|r| Box::pin(r.catch_up())),
            undo: Undo::Inverse(Step::Async(|r| Box::pin(r.stay_on_target()))),
        },
        Phase { name: "compare", forward: Step::Async(|r| Box::pin(r.compare())), undo: Undo::Nothing },
        // The source accepts all connections, and the proxy has sessions there; the inverse of `catch-up` disables them.
        Phase { name: "prepare", forward: Step::Async(|r| Box::pin(r.prepare())), undo: Undo::Nothing },
        // Clients are on the source, and nothing is removed yet; the next command, of any kind, removes it.
        Phase { name: "switch-over", forward: Step::Async(|r| Box::pin(r.switch_over())), undo: Undo::PointOfNoReturn },
    ]
}

/// A rollback.
struct Rollback<'m, 'j> {
    options: &'m Options,
    journal: &'m SharedJournal<'j>,
    reporter: &'m Reporter,
    witness: Option<Witness>,
    /// Definitions on the target, which must not change until clients are back.
    definitions: Definitions,
    direction: Direction,
    following: Option<FollowState>,
    prepared: Option<Prepared>,
    /// Length of the pause.
    paused: Duration,
}

impl Operation for Rollback<'_, '_> {
    type Error = Error;
    const NAME: &'static str = "fallback";

    fn faults(&self) -> &Faults {
        &self.options.faults
    }

    fn report(&mut self, event: EventKind) {
        self.reporter.report_phase(event);
    }

    fn begin(&mut self, phase: &'static str) -> Result<(), Error> {
        match phase {
            "prepare" => self.journal.lock().update(|record| record.phase = Phase::Returning),
            _ => Ok(()),
        }
    }
}

/// Repeats on the source what was committed on the target since the switch, and moves clients back. A failure before that
/// leaves clients on the target and the way back open. If clients are on the source already, it removes what an earlier command
/// left. If the proxy is lost and another one serves in its place, it begins again.
///
/// # Errors
///
/// A [`Failure`] with its reason and the state of the service; [`State::OnTarget`] if clients stay on the target.
pub async fn fallback(options: &Options, observer: Observer) -> Result<Outcome, Failure> {
    let (observer, live) = LiveReport::begin(options, "fallback", observer);
    let reporter = Reporter::new(observer, "fallback");
    let attempts = retry_with_any_proxy(async |may_go_on| attempt(options, may_go_on, &reporter).await);
    let ended = Box::pin(attempts).await;
    live.end(ended.as_ref().map(|_| "clients are on the source")).await;
    ended
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
            return Err(State::Untouched.refuse(text));
        }
        return Ok(Some(Outcome::AlreadyThere));
    }
    match journal.record.phase {
        Phase::Returned => return remove_all(options, journal, Outcome::AlreadyThere).await.map(Some),
        Phase::Switched | Phase::Returning if journal.record.way_back => {}
        Phase::Switched | Phase::Returning => {
            let text = "this migration cannot be rolled back: it was started with --no-fallback, or `finish` has \
                        begun";
            return Err(State::Untouched.refuse(text));
        }
        _ => return Err(State::Untouched.refuse("clients are on the source: there is nothing to roll back")),
    }
    if journal.record.phase == Phase::Returning {
        // An earlier attempt was interrupted, possibly after clients had moved back.
        if switch::serves(options, &journal.record, Side::Source).await.map_err(Failure::unknown)? {
            return remove_all(options, journal, Outcome::AlreadyThere).await.map(Some);
        }
        let lifted = fence::lift_if_fenced(&options.target, journal.record.fenced_target.as_ref()).await;
        lifted.map_err(Failure::on_target)?.into_iter().for_each(|lost| reporter.warn(lost));
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
    let (shared, phases) = (SharedJournal::new(&mut journal), phases());
    let mut rollback = Rollback::new(options, &shared, reporter, definitions, Some(lock.witness()));
    let ended = tokio::select! {
        ended = operation::advance(&mut rollback, &phases) => ended.map_err(|failed| failed.error),
        () = options.interrupt.notified() => Err(Error::Interrupted),
        lost = lock.wait_until_lost(&migration, reporter) => Err(lost),
    };
    let record = shared.record();
    let returned = match (&ended, record.phase) {
        (Ok(()), _) | (_, Phase::Returned) => Ok(true),
        (Err(_), Phase::Returning) => switch::serves(options, &record, Side::Source).await,
        _ => Ok(false),
    };
    match (ended, returned) {
        (Ok(()), _) => {
            let paused = rollback.paused;
            remove_all(options, journal, Outcome::Switched { paused }).await.map(Some)
        }
        (Err(error), Ok(true)) => {
            let state = State::OnSourceWithRemains("objects that the migration created".into());
            Err(Failure { error, state })
        }
        (Err(error), Ok(false)) => {
            let error = name_long_rows(error, &options.target, &Selection::default()).await;
            reporter.report(EventKind::FellBack { transition: None, reason: error.to_string() });
            if let Some((_, error)) = operation::undo(&mut rollback, &phases).await.into_iter().next() {
                return Err(Failure::on_target(error));
            }
            if may_go_on && matches!(error, Error::ProxyGone(_)) && is_served(&options.proxy, &options.tenant).await {
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
        state => Err(state.refuse("some objects of the migration could not be removed")),
    }
}

/// Returns the target's definitions, unless some of them would be lost; they must not change until clients are back.
async fn check_definitions_kept(options: &Options, reporter: &Reporter) -> Result<Definitions, Error> {
    let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
    let definitions = catalogs::read(&mut target, &Selection::default()).await?;
    let lost = ddl_changes::since_switch(options, &definitions)?;
    if !lost.is_empty() && !options.accepted.definitions_dropped {
        return Err(Error::DefinedSince(lost));
    } else if !lost.is_empty() {
        reporter.warn(format!("the following will be dropped with the target's database: {}", lost.join("; ")));
    }
    Ok(definitions)
}

impl<'m, 'j> Rollback<'m, 'j> {
    fn new(
        options: &'m Options,
        journal: &'m SharedJournal<'j>,
        reporter: &'m Reporter,
        definitions: Definitions,
        witness: Option<Witness>,
    ) -> Rollback<'m, 'j> {
        let (direction, following, prepared, paused) = (Direction::back(options), None, None, Duration::ZERO);
        Rollback { options, journal, reporter, witness, definitions, direction, following, prepared, paused }
    }

    /// Lets the source follow the target.
    async fn catch_up(&mut self) -> Result<(), Error> {
        let options = self.options;
        fence::enable_for_us(&options.source).await?;
        let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
        let mut inventory = Inventory::read(&mut target).await?;
        if options.accepted.definitions_dropped {
            let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
            inventory.retain_tables_of(&Inventory::read(&mut source).await?);
        }
        let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        let reactions = Reactions::read(&mut target, &self.direction.selection, source.rights).await?;
        reactions.disable(&mut source).await?;
        let record = self.journal.record();
        let follower = Follower::start(Plan {
            source: &options.target.with_side("target"),
            target: &options.source.with_side("source"),
            feed: Feed::Log {
                slot: &record.back_slot(),
                publications: &PUBLICATIONS,
                from: record.back_from,
                horizon: 0,
            },
            inventory: &inventory,
            players: options.players,
            pace: Arc::new(Throttle::unlimited()),
        })
        .await?;
        let definitions = std::mem::take(&mut self.definitions);
        let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        let large_objects = LargeObjects::present(&mut source).await?;
        let state = FollowState { follower, inventory, definitions, large_objects, controller: None };
        let following = self.following.insert(state);
        catch_up(following, &mut target, self.reporter).await?;
        following.large_objects.bring(&mut target, &mut source).await.map(drop)
    }

    /// Ends the follower, and keeps clients on the target.
    async fn stay_on_target(&mut self) -> Result<(), Error> {
        (self.following, self.prepared) = (None, None);
        if let Err(error) = self.restore_reactions().await {
            self.reporter.warn(format!(
                "triggers and foreign keys of the source are as the next `fallback` needs them: {error}"
            ));
        }
        stay_on_target(self.options, self.journal).await
    }

    /// Lets triggers and foreign keys act on the source again, if they were kept from it one by one.
    async fn restore_reactions(&self) -> Result<(), Error> {
        let mut source = Link::connect(&self.options.source, Purpose::Statements, &[]).await?;
        if source.rights.may_replicate {
            return Ok(());
        }
        let mut target = Link::connect(&self.options.target, Purpose::Statements, &[]).await?;
        let reactions = Reactions::read(&mut target, &self.direction.selection, source.rights).await?;
        Ok(reactions.enable_present(&mut source).await?)
    }

    async fn compare(&mut self) -> Result<(), Error> {
        let Direction { from, to, selection, .. } = &self.direction;
        let following = state_mut(&mut self.following)?;
        compare_between(self.options, following, from, to, selection, self.reporter).await
    }

    async fn prepare(&mut self) -> Result<(), Error> {
        // Sessions prepared on a fenced side would stay read-only.
        let fenced = self.journal.record().fenced;
        let lifted = fence::lift_if_fenced(&self.options.source, fenced.as_ref()).await?;
        lifted.into_iter().for_each(|lost| self.reporter.warn(lost));
        let Direction { from, to, selection, .. } = &self.direction;
        refresh_before_switch(from, to, selection, self.journal, self.reporter).await?;
        let (following, witness) = (take_state(&mut self.following)?, self.witness.clone());
        let prepared =
            switch::prepare(self.options, self.journal, following, &self.direction, witness, self.reporter).await?;
        self.prepared = Some(prepared);
        Ok(())
    }

    async fn switch_over(&mut self) -> Result<(), Error> {
        let prepared = take_state(&mut self.prepared)?;
        let (paused, mut left) =
            switch::switch(self.options, self.journal, prepared, &self.direction, self.reporter).await?;
        self.paused = paused;
        let selection = &self.direction.selection;
        let refreshed = self.journal.record().refreshed;
        refresh_stale(&mut left, &self.direction.to, selection, &refreshed, self.reporter).await;
        // Clients are back: what fails from here on is a warning.
        match Link::connect(&self.direction.to, Purpose::Statements, &[]).await {
            Ok(mut to) => match complete_foreign_keys(&mut left, &mut to, selection).await {
                Ok(failed) => failed.into_iter().for_each(|key| self.reporter.warn(key)),
                Err(error) => self.reporter.warn(format!("foreign keys are not validated: {error}")),
            },
            Err(error) => self.reporter.warn(format!("foreign keys are not validated: {error}")),
        }
        Ok(())
    }
}

/// Keeps clients on the target: enables its connections, in case an interrupted attempt disabled them, and disables those of
/// the source. Until both are done, the journal records that clients are on their way.
pub(crate) async fn stay_on_target(options: &Options, journal: &SharedJournal<'_>) -> Result<(), Error> {
    let record = journal.record();
    fence::lift_if_fenced(&options.target, record.fenced_target.as_ref()).await?;
    fence_source(options, &record).await?;
    journal.lock().update(|record| record.phase = Phase::Switched)
}

/// Disables connections to the side that clients have left: otherwise sessions could write to it, or read old rows.
pub(crate) async fn fence_source(options: &Options, record: &Record) -> Result<(), Error> {
    let grants = record.fenced.clone().unwrap_or_default();
    let mut door = fence::connect_for_fencing(&options.source).await?;
    fence::disable_connections_again(&mut door, &options.source.database, &grants).await?;
    fence::terminate_sessions(&mut door, &options.source.database).await
}

/// Ends a migration after its switch: removes everything of it from the target, so that there is no way back. The source keeps
/// its rows and stays fenced, unless [`Options::reopen_source`].
///
/// # Errors
///
/// A [`Failure`] with its reason and the state of the service: nothing is touched unless clients are on the target.
pub async fn finish(options: &Options) -> Result<(), Failure> {
    let options = &options.recorded().map_err(Failure::untouched)?;
    let mut journal = Journal::open(&options.state, &options.source.database).map_err(Failure::untouched)?;
    if journal.record.phase != Phase::Switched {
        return Err(State::Untouched.refuse("clients are not on the target yet: there is nothing to finish"));
    }
    if options.reopen_source && journal.record.selection.is_all() {
        return Err(
            State::OnTarget.refuse("--reopen-source is for a migration of a part of the database: all of it moved")
        );
    }
    let lock = owner::acquire_lock_if_reachable(&options.source, &journal.record.migration).await;
    let lock = lock.map_err(Failure::untouched)?;
    if is_over(lock.as_ref(), &journal).map_err(Failure::untouched)? {
        return journal.end().map_err(Failure::untouched);
    }
    remove_return_path(options, &mut journal).await.map_err(|error| Failure::after_switch(&journal.record, error))?;
    let record = journal.record.clone();
    if options.reopen_source {
        let lifted = fence::lift_if_fenced(&options.source, record.fenced.as_ref()).await;
        lifted.map_err(|error| Failure::after_switch(&record, error))?;
    }
    end_migration(options, journal).await.map_err(|error| Failure::after_switch(&record, error))
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
    let left = remove_others(options, &SharedJournal::new(journal), &mut source).await?;
    if !left.is_empty() {
        let left = left.join("; ");
        return Err(Error::WrongPhase(format!("{left}; run `finish` again to continue without these targets")));
    }
    replication_objects::drop_slot(&mut source, &journal.record.slot()).await?;
    replication_objects::uninstall(&mut source).await?;
    replication_objects::restore_identities(&mut source, &journal.record.identities, LOCK_TIMEOUT).await?;
    Ok(())
}
