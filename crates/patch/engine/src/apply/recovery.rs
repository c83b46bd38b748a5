//! The transition of a killed tool, or one that a process inherited from a parent in the middle of it.

use super::outcome::update_lookup_table;
use super::phases::{BEGIN, Change, PatchOperation, phases};
use super::plan::Plan;
use crate::ledger::{Phase, Transition, View};
use crate::mechanism::Context;
use crate::trampoline::Trampolines;
use crate::{Error, generation};
use stillpoint_events::EventKind;
use stillpoint_operation::{run_blocking, undo_blocking};
use stillpoint_patch_format::Scope;
use stillpoint_patch_insn::DispatchState;

/// End of a transition that a killed tool left.
enum Direction {
    /// The deciding byte was written: only the last phase is missing.
    Complete,
    /// Threads that have migrated keep the new side, and the others follow.
    Forward,
    /// Every phase is undone.
    Back,
}

/// Completes or rolls back an unfinished transition. Returns true if it did what is `wanted`. It goes forward only in that case: threads that
/// have migrated keep the new side.
///
/// # Errors
/// Those of [`apply`](crate::apply()); an entry may hold bytes that no transition wrote.
pub(super) fn recover(cx: Context<'_, '_, '_>, wanted: impl Fn(&View, &Transition) -> bool) -> Result<bool, Error> {
    cx.target.reload()?;
    generation::undo_decision(cx.target, cx.report)?;
    let Some(open) = cx.target.view.unfinished.clone() else { return Ok(false) };
    let (view, transition) = (cx.target.view.clone(), Transition::clone(&open.transition));
    // probing completes a transition in which each thread may migrate by itself; any other has to begin again
    let forward = wanted(&view, &transition) && allows_mixed_versions(&view, &transition);
    cx.report.warn(format!("a tool that was killed left transition {} unfinished", transition.number));
    let faults = &cx.options.faults;
    let mut trampolines = Trampolines::resume(cx, &view, &transition)?;
    let direction = trampolines.state_left(&transition).and_then(|state| match (open.phase, state) {
        (_, DispatchState::AllThen) => Ok(Direction::Complete),
        (Some(Phase::Migrating), DispatchState::PerThread) if forward => {
            trampolines.abandon_request().map(|()| Direction::Forward)
        }
        _ => Ok(Direction::Back),
    });
    let number = transition.number;
    let plan = Plan { transition, dispatchers: Vec::new(), data: Vec::new() };
    let mut operation = PatchOperation::resume(trampolines, faults, Change { view, plan, hooks: Default::default() });
    let completed = direction.and_then(|direction| finish(&mut operation, direction, number));
    let Context { target, report, .. } = operation.mechanism.context();
    update_lookup_table(target, report);
    Ok(completed? && forward)
}

/// Returns true if the new side is active afterwards.
fn finish<'o, 's: 'o, 'r: 'o>(
    operation: &mut PatchOperation<'o, 's, 'r>,
    direction: Direction,
    number: u32,
) -> Result<bool, Error> {
    let recorded = &phases()[BEGIN..];
    match direction {
        Direction::Complete => {
            let last = &recorded[recorded.len() - 1..];
            run_blocking(operation, last).map(|()| true).map_err(|failed| failed.error)
        }
        Direction::Forward => {
            let done = run_blocking(operation, recorded);
            done.map(|()| true).map_err(|failed| operation.failure(failed))
        }
        Direction::Back => {
            operation.mechanism.context().report.operation("abort");
            if let Some((_, error)) = undo_blocking(operation, recorded).into_iter().next() {
                return Err(error);
            }
            let reason = "the tool that started it was killed".to_owned();
            operation.mechanism.context().report.event(EventKind::FellBack { transition: Some(number), reason });
            Ok(false)
        }
    }
}

/// Returns true if all patches that come or go allow threads of old and new code side by side.
fn allows_mixed_versions(view: &View, transition: &Transition) -> bool {
    let moved = |n: &&u32| transition.before.contains(n) != transition.after.contains(n);
    let patches = transition.before.iter().chain(&transition.after).filter(moved).filter_map(|n| view.patch(*n));
    patches.into_iter().all(|p| p.scope == Scope::ThreadLocal)
}
