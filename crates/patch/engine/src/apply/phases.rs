//! The way of a patch through the engine: one list of phases, each with its inverse.
//!
//! ```text
//! check ── inject ── begin ── arm ── migrate ── decide ── commit
//!                    abort ── disarm ── move back ┘
//! ```
//! Apply, revert and replace are this list, with either mechanism. The journal of the operation is the ledger in the target: each phase
//! writes its record there before it acts, in the order that its mechanism documents, so a tool killed at any system call leaves the
//! target on one side for every thread, and the next tool continues from the ledger ([`recovery`](super::recovery)).
//!
//! A phase reports what it does by itself: `migrate` may consist of `migrate` and `gather`, and `decide` takes no time.

use super::checks::{CheckResult, check_view, remaining_patches, run_checks};
use super::inject::{inject, room};
use super::outcome::{call_hooks, outcome, update_lookup_table};
use super::plan::{Plan, free_state, plan};
use crate::event_pump::has_ended;
use crate::generation::Generations;
use crate::ledger::{LedgerError, View};
use crate::mechanism::{Context, Mechanism, MigrationResult};
use crate::options::{Outcome, ThreadView};
use crate::report::now_ns;
use crate::trampoline::Trampolines;
use crate::{Error, data_change, points};
use stillpoint_events::EventKind;
use stillpoint_operation::{Failed, Faults, Operation, Phase, run_blocking};
use stillpoint_patch_format::{Avma, Signed};
use stillpoint_patch_tracee::Module;

/// The phases.
pub(super) fn phases<'o, 's: 'o, 'r: 'o>() -> [Phase<PatchOperation<'o, 's, 'r>>; 7] {
    [
        // refuses; nothing is touched
        Phase::without_inverse("check", PatchOperation::check),
        // The memory of a patch stays mapped, and a later call may reuse it. No jump leads there: every thread runs the old side.
        Phase::without_inverse("inject", PatchOperation::inject_and_plan),
        // The intent is recorded, and every thread runs the old side. The inverse records that nothing came of it.
        Phase::new("begin", PatchOperation::begin, |o| o.undo(|m, change| m.abort(&change.plan.transition))),
        // Entries lead to the dispatchers, all of which choose the old side; or the new side is a generation without threads. The inverse
        // restores the entries, or deletes the generation: if it fails, every thread runs the old side, and the next operation does it.
        Phase::new("arm", PatchOperation::arm, |o| o.undo(|m, change| m.disarm(&change.plan.transition))),
        // Threads change to the new side. The inverse moves all back, and leaves the entries as `arm` wrote them.
        Phase::new("migrate", PatchOperation::migrate, |o| {
            o.undo(|m, change| m.move_back(&change.plan.transition).map(drop))
        }),
        // The deciding byte: from it on every thread runs the new side, and only the next phase, or the next operation, can continue.
        Phase::point_of_no_return("decide", PatchOperation::decide),
        // Entries become direct jumps, or the generation the text of all.
        Phase::without_inverse("commit", PatchOperation::commit),
    ]
}

/// Index of the phase from which on a transition is recorded in the target.
pub(super) const BEGIN: usize = 2;

/// Task of an operation.
pub(super) enum Request<'o> {
    /// Apply this patch; with the results of checks that were made when the ledger had this length.
    Apply(&'o Signed, Option<(usize, CheckResult)>),
    /// Revert these patches, all of one module.
    Revert(Vec<u32>),
    /// Go on with what a killed tool left.
    Recover,
}

/// A transition, and what surrounds it.
pub(super) struct Change {
    /// The ledger's view when it was planned.
    pub(super) view: View,
    pub(super) plan: Plan,
    /// Hooks before and after it.
    pub(super) hooks: [Vec<Avma>; 2],
}

/// State of an operation while its phases run.
pub(super) struct PatchOperation<'o, 's, 'r> {
    pub(super) mechanism: Box<dyn Mechanism<'o, 's, 'r> + 'o>,
    request: Request<'o>,
    change: Option<Change>,
    migrated: MigrationResult,
    /// True if the lookup table holds entries of both sides.
    widened_table: bool,
    faults: &'o Faults,
}

impl<'o, 's: 'o, 'r: 'o> Operation for PatchOperation<'o, 's, 'r> {
    type Error = Error;
    const NAME: &'static str = "patch";
    const UNDO_STOPS_AT_FAILURE: bool = true;

    fn faults(&self) -> &Faults {
        self.faults
    }

    /// Drops the events of the phases: the steps report in detail what they do.
    fn report(&mut self, _event: EventKind) {}

    fn may_undo(&mut self, error: &Error) -> bool {
        let is_decided = self.change.as_ref().is_some_and(|change| self.mechanism.is_decided(&change.plan.transition));
        let has_ended = has_ended(self.mechanism.context().process, error);
        if is_decided || has_ended || matches!(error, Error::Unfinished { .. }) {
            return false;
        }
        if self.mechanism.has_begun() {
            self.mechanism.context().report.operation("abort");
        }
        true
    }
}

impl<'o, 's: 'o, 'r: 'o> PatchOperation<'o, 's, 'r> {
    /// Prepares an operation, with the mechanism that its options select.
    pub(super) fn new(cx: Context<'o, 's, 'r>, request: Request<'o>) -> Self {
        let faults = &cx.options.faults;
        let mechanism: Box<dyn Mechanism<'o, 's, 'r> + 'o> = match cx.options.view {
            ThreadView::Trampoline => Box::new(Trampolines::new(cx)),
            ThreadView::Generation => Box::new(Generations::new(cx)),
        };
        PatchOperation {
            mechanism,
            request,
            change: None,
            migrated: MigrationResult::default(),
            widened_table: false,
            faults,
        }
    }

    /// Takes over the transition of a killed tool.
    pub(super) fn resume(mechanism: Trampolines<'o, 's, 'r>, faults: &'o Faults, change: Change) -> Self {
        let (mechanism, change) = (Box::new(mechanism), Some(change));
        let (request, migrated) = (Request::Recover, MigrationResult::default());
        PatchOperation { mechanism, request, change, migrated, widened_table: false, faults }
    }

    /// Runs all phases; `start` is the time at which the operation began.
    ///
    /// # Errors
    /// Those of [`apply`](crate::apply()).
    pub(super) fn run(mut self, start: u64) -> Result<Outcome, Error> {
        let result = run_blocking(&mut self, &phases()).map_err(|failed| self.failure(failed));
        if self.widened_table {
            let Context { target, report, .. } = self.mechanism.context();
            update_lookup_table(target, report);
        }
        result?;
        let PatchOperation { mut mechanism, change, migrated, .. } = self;
        let Change { view, plan, hooks: [_, post] } = change.ok_or_else(unplanned)?;
        Ok(outcome(mechanism.context(), &view, &plan.transition, migrated, &post, start))
    }

    /// Returns the error that describes the result of a failed operation; reports a rollback.
    pub(super) fn failure(&mut self, failed: Failed<Error>) -> Error {
        let Failed { error, is_final, not_undone, .. } = failed;
        let number = match &self.change {
            Some(change) if self.mechanism.has_begun() => change.plan.transition.number,
            _ => return error,
        };
        if is_final {
            return match error {
                Error::Ended(_) | Error::Unfinished { .. } => error,
                other => other.unfinished(number),
            };
        }
        if let Some((_, second)) = not_undone.into_iter().next() {
            tracing::warn!(%error, "a transition failed, and so did its rollback");
            return second.not_undone(number);
        }
        let reason = error.to_string();
        self.mechanism.context().report.event(EventKind::FellBack { transition: Some(number), reason });
        match error {
            Error::TimedOut(_) => error,
            other => Error::RolledBack { transition: number, source: Box::new(other) },
        }
    }

    /// Runs an inverse of the mechanism; nothing is to be undone before the transition is planned, nor in a process that has ended.
    fn undo(
        &mut self,
        inverse: impl FnOnce(&mut (dyn Mechanism<'o, 's, 'r> + 'o), &Change) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some(change) = &self.change else { return Ok(()) };
        match inverse(&mut *self.mechanism, change) {
            Err(error) if has_ended(self.mechanism.context().process, &error) => Ok(()),
            result => result,
        }
    }

    /// Runs the checks that were not run before the process was traced, or whose results are out of date.
    fn check(&mut self) -> Result<(), Error> {
        let Context { target, options, report, .. } = self.mechanism.context();
        match &mut self.request {
            Request::Apply(signed, checked) => {
                // the results hold as long as no other tool has changed the ledger
                if checked.as_ref().is_none_or(|(len, _)| *len != target.ledger_len()) {
                    *checked = Some((target.ledger_len(), run_checks(target, signed, options)?));
                }
            }
            Request::Revert(dropped) => {
                check_view(&target.view, dropped.iter(), None, options)?;
                let after: Vec<u32> = target.view.active.iter().copied().filter(|n| !dropped.contains(n)).collect();
                let changes = data_change::changes(&target.view, &target.view.active, &after);
                data_change::expect_all(target.process.memory(), &target.view, &changes)?;
                let patches = || dropped.iter().filter_map(|n| target.view.patch(*n));
                for patch in patches() {
                    points::check_scope(&patch.name, patch.scope, options.quiescence)?;
                }
                points::check_points(&target.process, &target.modules, options.quiescence)?;
                for patch in patches().filter(|p| !p.escaping.is_empty()) {
                    let names = patch.escaping.join(", ");
                    report.warn(format!(
                        "addresses of {} may remain in data: {names}; its memory stays mapped",
                        patch.name
                    ));
                }
            }
            Request::Recover => {}
        }
        Ok(())
    }

    /// Maps and fills the memory that the transition needs, and plans it.
    fn inject_and_plan(&mut self) -> Result<(), Error> {
        let cx = self.mechanism.context();
        self.change = match &mut self.request {
            Request::Apply(signed, checked) => {
                let (_, ready) = checked.take().ok_or_else(unplanned)?;
                Some(plan_apply(cx, signed, ready)?)
            }
            Request::Revert(dropped) => Some(plan_revert(cx, dropped)?),
            Request::Recover => return Ok(()),
        };
        Ok(())
    }

    /// Records the intent and calls the hooks, which may refuse. The transition of a killed tool has begun already.
    fn begin(&mut self) -> Result<(), Error> {
        if matches!(self.request, Request::Recover) {
            return Ok(());
        }
        let Change { view, plan, hooks: [pre, _] } = self.change.as_mut().ok_or_else(unplanned)?;
        self.mechanism.begin(view, plan)?;
        self.widened_table = true;
        call_hooks(self.mechanism.context(), pre, true)
    }

    fn arm(&mut self) -> Result<(), Error> {
        let change = self.change.as_ref().ok_or_else(unplanned)?;
        self.mechanism.arm(&change.plan.transition)
    }

    fn migrate(&mut self) -> Result<(), Error> {
        let change = self.change.as_ref().ok_or_else(unplanned)?;
        self.migrated = self.mechanism.migrate(&change.plan.transition)?;
        Ok(())
    }

    fn decide(&mut self) -> Result<(), Error> {
        let change = self.change.as_ref().ok_or_else(unplanned)?;
        self.mechanism.decide(&change.plan.transition, &self.migrated)
    }

    fn commit(&mut self) -> Result<(), Error> {
        let change = self.change.as_ref().ok_or_else(unplanned)?;
        self.mechanism.commit(&change.plan.transition, &self.migrated)
    }
}

fn unplanned() -> Error {
    LedgerError::Inconsistent("no transition is planned".into()).into()
}

fn plan_apply(cx: &mut Context<'_, '_, '_>, signed: &Signed, ready: CheckResult) -> Result<Change, Error> {
    let mut after = remaining_patches(&cx.target.view, signed, cx.options);
    let module = cx.target.modules[ready.prepared.module].clone();
    cx.report.started("inject");
    let begun = now_ns();
    let number = inject(cx, signed, &module, ready)?;
    let store = cx.target.store.as_ref().ok_or(Error::NoWord(cx.process.pid()))?;
    let view = store.view().clone();
    after.push(number);
    let operation = if after.len() <= view.active.len() { "replace" } else { "apply" };
    let room = room(cx, &module, &view, &after, free_state(&view, &[number]))?;
    cx.report.ended("inject", now_ns() - begun);
    let plan = plan(&view, operation, &after, room, cx.target.word_offset())?;
    let hooks = view.patch(number).map(|p| p.hooks.clone()).unwrap_or_default();
    Ok(Change { view, plan, hooks: [hooks.pre_apply, hooks.post_apply] })
}

fn plan_revert(cx: &mut Context<'_, '_, '_>, dropped: &[u32]) -> Result<Change, Error> {
    let view = cx.target.view.clone();
    let after: Vec<u32> = view.active.iter().copied().filter(|n| !dropped.contains(n)).collect();
    let module = module_of(cx, &view, dropped)?;
    let room = room(cx, &module, &view, &after, free_state(&view, dropped))?;
    let plan = plan(&view, "revert", &after, room, cx.target.word_offset())?;
    let patches = || dropped.iter().rev().filter_map(|n| view.patch(*n));
    let pre = patches().flat_map(|p| p.hooks.pre_revert.clone()).collect();
    let post = patches().flat_map(|p| p.hooks.post_revert.clone()).collect();
    Ok(Change { view, plan, hooks: [pre, post] })
}

/// Returns the module of the patches to revert, or the executable.
fn module_of(cx: &Context<'_, '_, '_>, view: &View, dropped: &[u32]) -> Result<Module, Error> {
    let nothing = || Error::NothingActive(cx.process.pid());
    let first = dropped.iter().find_map(|n| view.patch(*n)).ok_or_else(nothing)?;
    let modules = &cx.target.modules;
    let module = modules.iter().find(|m| m.bias == first.bias && m.build_id.as_ref() == Some(&first.build_id));
    module.or_else(|| modules.iter().find(|m| m.executable)).cloned().ok_or_else(nothing)
}
