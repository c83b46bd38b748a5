//! The phases of a migration: the four steps of the paper (section 4.3) in one list, each phase with its inverse.
//!
//! ```text
//!  snapshot --> copy --> catch-up --> foreign keys --> compare | --> prepare --> switch-over --> settle
//!   (step 1)  (step 2)               (step 3)                  |    (step 4)   no return from here
//!     |          |           |              |             |    |        |
//!     +----------+-----------+---- undo: clients on the source +--------+
//! ```
//!
//! Every target runs the list up to `compare` at the same time; the rest is for the target to which clients go. The inverses
//! concern the migration as a whole, with all its targets, and need nothing but its journal: the next command runs them for a
//! command that was killed. The removal of one target of several is no inverse, and is in
//! [`multi_target`](crate::multi_target).
//!
//! Two loops are not in the list. A pause that ends too late is repeated inside `switch-over`, because clients continue in
//! between as if it had not begun. A lost proxy ends the list without undoing it, and [`run`](crate::run) begins another one,
//! which continues from the journal.
//!
//! The journal records `copy`, `catch-up` and `switch-over` inside these phases, each before the action that its inverse undoes:
//! what precedes that action (a dump, the indexes, the last look at definitions) may fail without a trace.
//!
//! The parts of phases that have fault points too: `definitions` and `rows` of `copy`, `fence` and `drain` of `switch-over`, and
//! `release` of the removal of the journal, the last action of every migration.

use crate::clients::Clients;
use crate::copied_pages::CopiedPages;
use crate::copy_resume;
use crate::create::{CreatedTarget, create, create_foreign_keys};
use crate::follow_state::{FollowState, compare_between, follow, load};
use crate::journal::{Capture, Phase as Stage, SharedJournal};
use crate::materialized_views::refresh_before_switch;
use crate::options::Options;
use crate::owner::Witness;
use crate::progress::Reporter;
use crate::redefine::{self, Redefinition};
use crate::snapshot::{SnapshotState, snapshot};
use crate::switch::{self, Direction, Prepared};
use crate::switch_order::FollowLoad;
use crate::{removal, settle};
use std::time::Duration;
use stillpoint_events::EventKind;
use stillpoint_migrate_apply::replication_objects::PUBLICATIONS;
use stillpoint_migrate_apply::{Error, Feed};
use stillpoint_migrate_postgres::link::{Link, Purpose};
use stillpoint_operation::{Faults, Operation, Phase, Step, Undo, advance};

/// Names of phases at which a part of the list begins: all of it, for a target that holds the snapshot already, for the target
/// that clients go to, and after the switch.
const SNAPSHOT: &str = "snapshot";
const COPY: &str = "copy";
const CATCH_UP: &str = "catch-up";
const PREPARE: &str = "prepare";
const SETTLE: &str = "settle";

/// The order of a migration. A failure at any point before the switch leaves clients on the source and nothing on either server.
pub(crate) fn phases<'m, 'j>() -> [Phase<Migration<'m, 'j>>; 8] {
    [
        // Publication and slot exist on the source; the inverse of `catch-up` drops both.
        Phase { name: SNAPSHOT, forward: Step::Async(|m| Box::pin(m.snapshot())), undo: Undo::Nothing },
        // The target has definitions and rows; its database is dropped again.
        Phase {
            name: COPY,
            forward: Step::Async(|m| Box::pin(m.copy())),
            undo: Undo::Inverse(Step::Async(|m| Box::pin(m.drop_databases()))),
        },
        // The target follows. The source is cleaned before databases are dropped, so that it keeps no log meanwhile.
        Phase {
            name: CATCH_UP,
            forward: Step::Async(|m| Box::pin(m.catch_up())),
            undo: Undo::Inverse(Step::Async(|m| Box::pin(m.clean_source()))),
        },
        Phase {
            name: "foreign keys",
            forward: Step::Async(|m| Box::pin(m.create_foreign_keys())),
            undo: Undo::Nothing,
        },
        Phase { name: "compare", forward: Step::Async(|m| Box::pin(m.compare())), undo: Undo::Nothing },
        // The proxy has sessions on the target; they are closed, and clients continue where they are.
        Phase {
            name: PREPARE,
            forward: Step::Async(|m| Box::pin(m.prepare())),
            undo: Undo::Inverse(Step::Async(|m| Box::pin(m.abandon()))),
        },
        // After `fence`, clients are paused, connections to the source are disabled and direct sessions are gone: the fence is
        // lifted, and clients continue on the source. After `drain`, the last change is on the target and on disk there, and the
        // proxy has not been told to switch: the same, and nothing is lost. If it is interrupted, only the proxy knows which
        // side serves, and nothing is undone before it has been asked.
        Phase { name: "switch-over", forward: Step::Async(|m| Box::pin(m.switch_over())), undo: Undo::PointOfNoReturn },
        // Clients are on the target, and stay there; the next command completes this phase.
        Phase { name: SETTLE, forward: Step::Async(|m| Box::pin(m.settle())), undo: Undo::Nothing },
    ]
}

/// Times that a copy goes on in a row after a server was restarted.
const COPY_ATTEMPTS_MAX: u32 = 10;

/// Times that definitions are repeated in a row while others follow directly after them.
const REDEFINITIONS_MAX: usize = 20;

/// Attempts to move clients while definitions change again and again.
const SWITCHES_MAX: usize = 5;

/// A migration, as the move of one of its targets: its inverses concern all of them.
pub(crate) struct Migration<'m, 'j> {
    /// Options of the command, with all targets.
    command: &'m Options,
    /// The same options for this target alone.
    pub(crate) options: Options,
    /// Number of the target.
    pub(crate) number: usize,
    journal: &'m SharedJournal<'j>,
    reporter: Reporter,
    /// Measurement of the clients that the phases adjust to.
    pub(crate) clients: Option<Clients>,
    /// Reports if the command still holds its lock on the source.
    pub(crate) witness: Option<Witness>,
    snapshotted: Option<SnapshotState>,
    /// Pages that are on the target, if the copy of an earlier command goes on.
    copied: Option<CopiedPages>,
    created: Option<CreatedTarget>,
    horizon: u64,
    following: Option<FollowState>,
    /// Reason why definitions that changed could not be repeated; then the target does not follow any more.
    pub(crate) failed: Option<Error>,
    prepared: Option<Prepared>,
    /// Length of the pause, and a connection to the source made before connections to it were disabled.
    switched: Option<(Duration, Link)>,
}

impl Operation for Migration<'_, '_> {
    type Error = Error;
    const NAME: &'static str = "migrate";

    fn faults(&self) -> &Faults {
        &self.options.faults
    }

    fn report(&mut self, event: EventKind) {
        // It reports itself, if there are foreign keys.
        let is_silent = matches!(&event, EventKind::PhaseStarted { phase, .. } | EventKind::PhaseEnded { phase, .. }
            if phase == "foreign keys");
        if !is_silent {
            self.reporter.report_phase(event);
        }
    }

    fn begin(&mut self, phase: &'static str) -> Result<(), Error> {
        if phase == PREPARE { self.journal.lock().choose_target(self.number) } else { Ok(()) }
    }
}

impl<'m, 'j> Migration<'m, 'j> {
    /// A migration of which no phase has begun.
    pub(crate) fn new(
        command: &'m Options,
        (number, options): (usize, Options),
        journal: &'m SharedJournal<'j>,
        reporter: &Reporter,
    ) -> Migration<'m, 'j> {
        Migration {
            command,
            options,
            number,
            journal,
            reporter: reporter.of_target(number),
            clients: None,
            witness: None,
            snapshotted: None,
            copied: None,
            created: None,
            horizon: 0,
            following: None,
            failed: None,
            prepared: None,
            switched: None,
        }
    }

    /// Runs the phases from one on; `end` is the first that is left out.
    async fn advance(&mut self, start: &str, end: Option<&str>) -> Result<(), Error> {
        let phases = phases();
        let place = |name: &str| phases.iter().position(|phase| phase.name == name).ok_or_else(out_of_order);
        let part = place(start)?..end.map_or(Ok(phases.len()), place)?;
        advance(self, &phases[part]).await.map_err(|failed| failed.error)
    }

    /// Runs the phases up to `compare`, without those that the journal records as done: then the target follows, and holds the
    /// same data as the source.
    ///
    /// # Errors
    ///
    /// The error of the phase that failed; nothing is undone.
    pub(crate) async fn set_up(&mut self) -> Result<(), Error> {
        let record = self.journal.record();
        if record.copy.is_some() && record.phase == Stage::Copying {
            let (state, copied) = Box::pin(copy_resume::take_up(&self.options, self.number, self.journal)).await?;
            (self.snapshotted, self.copied) = (Some(state), Some(copied));
            return self.advance(COPY, Some(PREPARE)).await;
        }
        if !record.is_followed_by(self.number) {
            return self.advance(SNAPSHOT, Some(PREPARE)).await;
        }
        let definitions = self.journal.lock().definitions_of(self.number)?;
        let mut source = Link::connect(&self.options.source, Purpose::Statements, &[]).await?;
        let inventory = self.options.selection.inventory(&mut source).await?;
        drop(source);
        let horizon = record.horizon_of(self.number);
        self.created = Some(CreatedTarget { inventory, definitions, captured: None, horizon });
        self.advance(CATCH_UP, Some(PREPARE)).await
    }

    /// Moves clients to the target.
    ///
    /// # Errors
    ///
    /// The error of the phase that failed; nothing is undone.
    pub(crate) async fn move_clients(&mut self) -> Result<(), Error> {
        for _ in 1..SWITCHES_MAX {
            match self.advance(PREPARE, Some(SETTLE)).await {
                // Clients are on the source, and what was prepared is given up.
                Err(error) if redefine::may_be_cause(&error) && self.journal.record().phase == Stage::Following => {
                    self.abandon().await?;
                    self.redefine(error).await?;
                    self.advance("compare", Some(PREPARE)).await?;
                }
                moved => return moved,
            }
        }
        self.advance(PREPARE, Some(SETTLE)).await
    }

    /// Cleans up after the switch. Returns the length of the pause.
    ///
    /// # Errors
    ///
    /// The error of the phase; clients are on the target.
    pub(crate) async fn clean_up(&mut self) -> Result<Duration, Error> {
        // Its events are those of the migration.
        self.reporter = self.reporter.of_target(0);
        let paused = self.switched.as_ref().map(|(paused, _)| *paused).unwrap_or_default();
        self.advance(SETTLE, None).await.map(|()| paused)
    }

    /// Measures the load, and how far the target is behind.
    pub(crate) async fn load(&mut self) -> Result<FollowLoad, Error> {
        let mut source = Link::connect(&self.options.source, Purpose::Statements, &[]).await?;
        let following = state_mut(&mut self.following)?;
        let measured = load(following, &mut source).await;
        if following.follower.has_ended()
            && let Err(error) = measured
        {
            self.failed = Some(error);
            return Err(Error::WrongPhase("the target does not follow any more".into()));
        }
        measured
    }

    /// Reason why the target does not follow any more; `None` as long as it follows.
    pub(crate) async fn failure(&mut self) -> Option<Error> {
        if let Some(error) = self.failed.take() {
            return Some(error);
        }
        self.following.as_mut()?.follower.failure().await
    }

    async fn snapshot(&mut self) -> Result<(), Error> {
        self.snapshotted = Some(snapshot(&self.options, self.number, self.journal).await?);
        Ok(())
    }

    async fn copy(&mut self) -> Result<(), Error> {
        let (mut snapshotted, mut copied) = (take_state(&mut self.snapshotted)?, self.copied.take());
        let mut attempt = 1;
        loop {
            let (options, reporter, number) = (&self.options, &self.reporter, self.number);
            let created = create(options, number, self.journal, snapshotted, copied, self.clients.as_mut(), reporter);
            let error = match Box::pin(created).await {
                Err(error) if attempt < COPY_ATTEMPTS_MAX => error,
                created => {
                    self.created = Some(created?);
                    return Ok(());
                }
            };
            let taken_up = copy_resume::wait_and_take_up(options, number, self.journal, &error, reporter);
            let (state, pages) = Box::pin(taken_up).await.ok_or(error)?;
            (snapshotted, copied) = (state, Some(pages));
            attempt += 1;
        }
    }

    async fn catch_up(&mut self) -> Result<(), Error> {
        let CreatedTarget { inventory, definitions, captured, horizon } = take_state(&mut self.created)?;
        let record = self.journal.record();
        let slot = record.slot_of(self.number);
        let schedule = (record.capture == Capture::Statements).then_some(self.options.schedule);
        let feed = match captured {
            Some((recording, seen)) => Feed::Proxy(recording, seen, schedule),
            None => Feed::Log { slot: &slot, publications: &PUBLICATIONS, from: 0, horizon },
        };
        let clients = self.clients.take();
        self.horizon = horizon;
        match follow(&self.options, feed, inventory, definitions, clients, &self.reporter).await {
            Ok(following) => self.following = Some(following),
            Err(error) => self.redefine(error).await?,
        }
        // They may have changed while rows were copied, or an earlier command was ended while it repeated them.
        self.redefine_if_changed().await
    }

    /// Repeats definitions that changed on the source, if `error` may come from that; returns the error otherwise.
    pub(crate) async fn redefine(&mut self, error: Error) -> Result<(), Error> {
        if !redefine::may_be_cause(&error) {
            return Err(error);
        }
        match self.look_for_definitions().await? {
            Some(found) => self.make_redefinition(found).await,
            None => Err(error),
        }
    }

    /// Looks for definitions that changed on the source, and repeats them.
    pub(crate) async fn redefine_if_changed(&mut self) -> Result<(), Error> {
        match self.look_for_definitions().await? {
            Some(found) => self.make_redefinition(found).await,
            None => Ok(()),
        }
    }

    async fn look_for_definitions(&self) -> Result<Option<Redefinition<'m, 'j>>, Error> {
        Box::pin(Redefinition::find(&self.options, self.number, self.journal, &self.reporter)).await
    }

    async fn make_redefinition(&mut self, mut redefinition: Redefinition<'m, 'j>) -> Result<(), Error> {
        // Its connections end first.
        let mut large_objects = self.following.take().map(|following| following.large_objects);
        let horizon = self.journal.record().horizon_of(self.number);
        let reporter = self.reporter.clone();
        let mut attempt = 1;
        loop {
            // Its state is large, and is part of the state of each caller.
            let made = Box::pin(redefinition.make(horizon, horizon == 0, large_objects.take()));
            match reporter.phase("definitions", made).await {
                // The target followed on, and met a definition that is later still.
                Err(error) if attempt < REDEFINITIONS_MAX && redefine::may_be_cause(&error) => {
                    redefinition = self.look_for_definitions().await?.ok_or(error)?;
                }
                made => {
                    self.following = Some(made?);
                    return Ok(());
                }
            }
            attempt += 1;
        }
    }

    async fn create_foreign_keys(&mut self) -> Result<(), Error> {
        if self.horizon == 0 {
            return Ok(());
        }
        let dump = self.journal.lock().dump_path(self.number);
        loop {
            let following = state_mut(&mut self.following)?;
            match Box::pin(create_foreign_keys(&self.options, following, &dump, &self.reporter)).await {
                Ok(()) => break,
                Err(error) => self.redefine(error).await?,
            }
        }
        self.journal.lock().record_horizon_passed(self.number)
    }

    async fn compare(&mut self) -> Result<(), Error> {
        loop {
            let (options, following) = (&self.options, state_mut(&mut self.following)?);
            match compare_between(
                options,
                following,
                &options.source,
                &options.target,
                &options.selection,
                &self.reporter,
            )
            .await
            {
                Ok(()) => return Ok(()),
                Err(error) => self.redefine(error).await?,
            }
        }
    }

    async fn prepare(&mut self) -> Result<(), Error> {
        if let Some(error) = self.failure().await {
            self.redefine(error).await?;
        }
        let direction = Direction::forward(&self.options);
        refresh_before_switch(&direction.from, &direction.to, &direction.selection, self.journal, &self.reporter)
            .await?;
        let following = take_state(&mut self.following)?;
        let witness = self.witness.clone();
        self.prepared =
            Some(switch::prepare(&self.options, self.journal, following, &direction, witness, &self.reporter).await?);
        Ok(())
    }

    async fn switch_over(&mut self) -> Result<(), Error> {
        let (prepared, direction) = (take_state(&mut self.prepared)?, Direction::forward(&self.options));
        self.switched = Some(switch::switch(&self.options, self.journal, prepared, &direction, &self.reporter).await?);
        Ok(())
    }

    async fn settle(&mut self) -> Result<(), Error> {
        let options = self.command.recorded_in(&self.journal.record())?;
        let left = self.switched.take().map(|(_, left)| left);
        settle::settle(&options, self.journal, left, &self.reporter).await
    }

    /// Closes the proxy's sessions on a target.
    async fn abandon(&mut self) -> Result<(), Error> {
        removal::abandon_sessions(self.command).await;
        Ok(())
    }

    async fn clean_source(&mut self) -> Result<(), Error> {
        removal::clean_source(self.command, &self.journal.record()).await
    }

    async fn drop_databases(&mut self) -> Result<(), Error> {
        removal::drop_databases(self.command, &self.journal.record()).await
    }
}

/// Takes the state that an earlier phase left.
///
/// # Errors
///
/// That phase has not run.
pub(crate) fn take_state<T>(state: &mut Option<T>) -> Result<T, Error> {
    state.take().ok_or_else(out_of_order)
}

/// Borrows the state that an earlier phase left.
///
/// # Errors
///
/// That phase has not run.
pub(crate) fn state_mut<T>(state: &mut Option<T>) -> Result<&mut T, Error> {
    state.as_mut().ok_or_else(out_of_order)
}

fn out_of_order() -> Error {
    Error::WrongPhase("a phase of the migration runs before the one that it needs".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_move_after_all_that_can_be_taken_back() {
        let phases = phases();
        let names: Vec<&str> = phases.iter().map(|phase| phase.name).collect();
        let place = |name| names.iter().position(|known| *known == name).unwrap();
        assert!(place(SNAPSHOT) < place("copy") && place("copy") < place(CATCH_UP));
        // keys that refer to rows are made once all rows are there, and the comparison sees them
        assert!(place(CATCH_UP) < place("foreign keys") && place("foreign keys") < place("compare"));
        assert!(place("compare") < place(PREPARE) && place(PREPARE) < place("switch-over"));
        assert_eq!((names.first(), names.last()), (Some(&SNAPSHOT), Some(&SETTLE)));
        let is_final = |phase: &&Phase<_>| matches!(phase.undo, Undo::PointOfNoReturn);
        assert_eq!(phases.iter().filter(is_final).map(|phase| phase.name).collect::<Vec<_>>(), ["switch-over"]);
        assert_eq!(place(SETTLE), place("switch-over") + 1);
    }
}
