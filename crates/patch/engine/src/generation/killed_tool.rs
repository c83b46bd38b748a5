//! Refusal of what generations make impossible, and the end of what a killed tool left.

use super::kernel;
use super::migration::{Migration, threads_outside};
use super::points::PointMigration;
use super::text::{
    differs_from_base, is_all_new, is_decided, occupied, resting, resting_error, sees_active_patches, sees_new_side,
};
use crate::event_pump::traced;
use crate::ledger::{NamedSpan, Phase, Record, Transition, View};
use crate::report::Report;
use crate::scan::Forbidden;
use crate::target::Target;
use crate::{Error, Options, Quiescence, ThreadView};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use stillpoint_events::EventKind;
use stillpoint_patch_insn::DispatchState;
use stillpoint_patch_tracee::{Session, Tid};

/// Refuses an operation that is impossible in this view, before anything is changed.
pub(crate) fn refuse(target: &Target, options: &Options) -> Result<(), Error> {
    refuse_among(target, options, &occupied(&target.process))
}

fn refuse_among(target: &Target, options: &Options, occupied: &BTreeMap<u32, Tid>) -> Result<(), Error> {
    let pid = target.process.pid();
    let unsuitable = |what: &str| Err(Error::Unsuitable { pid, what: what.to_owned() });
    let (left, own): (Vec<_>, Vec<_>) = occupied.iter().partition(|(_, tid)| differs_from_base(target, **tid));
    match options.view {
        ThreadView::Trampoline if !left.is_empty() && resting(target).is_some() => Err(resting_error(target)),
        ThreadView::Trampoline if !left.is_empty() => Err(Error::AbandonedThreads(pid)),
        ThreadView::Trampoline if occupied.len() > 1 => unsuitable("has threads in generations of its own"),
        ThreadView::Trampoline => Ok(()),
        ThreadView::Generation if !kernel::has_generations() => Err(Error::NoGenerations),
        ThreadView::Generation if options.quiescence == Quiescence::Stop => Err(Error::StopUnsupported),
        ThreadView::Generation if kernel::generations(pid).is_none() => {
            unsuitable("has lost its first thread, so its generations are not visible")
        }
        ThreadView::Generation if own.iter().any(|(generation, _)| **generation != 0) => {
            unsuitable("has threads in generations of its own")
        }
        ThreadView::Generation => Ok(()),
    }
}

/// Prepares an operation: refuses an impossible one, and ends the transition of a killed tool.
pub(crate) fn prepare(target: &mut Target, options: &Options, report: &mut Report<'_>) -> Result<(), Error> {
    let process = target.process.clone();
    let occupied = occupied(&process);
    refuse_among(target, options, &occupied)?;
    if options.dry_run || !kernel::has_generations() {
        return Ok(());
    }
    let nothing_left = occupied.keys().all(|generation| *generation == 0);
    let requested = PointMigration::find(target)?.map_or(Ok(false), |points| points.has_pending_request())?;
    if nothing_left && !requested {
        return Ok(());
    }
    traced(&process, |session| match options.view {
        // a thread might still follow a request of a killed tool
        ThreadView::Trampoline => abandon_request(session, target, report),
        ThreadView::Generation => finish_killed(session, target, options, report),
    })
}

/// Abandons the request of a killed tool, so that no thread migrates to its generation any more.
fn abandon_request(session: &mut Session<'_>, target: &Target, report: &mut Report<'_>) -> Result<(), Error> {
    PointMigration::find(target)?.map_or(Ok(()), |mut points| points.abandon(session, report))?;
    // threads that did so meanwhile must be moved back first
    let occupied = occupied(&target.process);
    let left = occupied.iter().any(|(generation, tid)| *generation != 0 && differs_from_base(target, *tid));
    if left { Err(Error::AbandonedThreads(target.process.pid())) } else { Ok(()) }
}

/// Ends the transition of a killed tool. A generation becomes the text of all if that was decided, or if all threads in it see the text
/// that the ledger states. Threads are moved back from any other. An empty generation stays, because it might belong to the program.
pub(super) fn finish_killed(
    session: &mut Session<'_>,
    target: &mut Target,
    options: &Options,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    target.reload()?;
    let process = target.process.clone();
    let number = target.view.last_transition;
    let unfinished = |error: Error| error.unfinished(number);
    // no thread continues to the generation that a killed tool requested
    let mut points = PointMigration::find(target)?;
    points.as_mut().map_or(Ok(()), |points| points.abandon(session, report)).map_err(unfinished)?;
    for (left, tid) in occupied(&process) {
        let rests = resting(target).is_some_and(|transition| sees_new_side(target, tid, transition));
        if left == 0 || rests || !differs_from_base(target, tid) {
            continue;
        }
        report.warn(format!("a tool that was killed left generation {left}"));
        let all_there = threads_outside(&process, left, &BTreeSet::new())?.is_empty();
        if all_there && (is_decided(target, tid) || sees_active_patches(target, tid)) {
            kernel::commit(&process, session, left).map_err(unfinished)?;
            continue;
        }
        report.operation("abort");
        let forbidden = Forbidden::new(&inactive_code(&target.view), &target.view.trampolines(), &[]);
        let deadline = Instant::now() + options.back_timeout();
        let back =
            Migration::new(target, (0, number), forbidden, Forbidden::default())?.run(session, report, None, deadline);
        back.and_then(|_| kernel::delete(&process, session, left))
            .map_err(|error| error.stuck(number).not_undone(number))?;
    }
    Ok(())
}

/// Ends a transition that is decided in the ledger, but not in the text of all: the tool was killed in the moment of the commit, while
/// threads were blocked.
pub(crate) fn undo_decision(target: &mut Target, report: &mut Report<'_>) -> Result<(), Error> {
    let process = target.process.clone();
    let Some(open) = target.view.unfinished.clone() else { return Ok(()) };
    if !is_all_new(&process, &open.transition)? || target.expect_old_side(&open.transition).is_err() {
        return Ok(());
    }
    let number = open.transition.number;
    undo_commit_record(target, &open.transition)?;
    let reason = "the tool that started it was killed".to_owned();
    report.event(EventKind::FellBack { transition: Some(number), reason });
    target.reload()
}

/// Resets the state byte and the ledger to the state before the decision.
pub(super) fn undo_commit_record(target: &mut Target, transition: &Transition) -> Result<(), Error> {
    target.process.memory().write(transition.state, &[DispatchState::AllOtherwise as u8])?;
    target.append(Record::Phase { transition: transition.number, phase: Phase::Aborted })
}

/// Returns all code that no thread executes while the active patches are active.
fn inactive_code(view: &View) -> Vec<NamedSpan> {
    let is_active = |number: usize| view.active.contains(&(number as u32));
    let (active, others): (Vec<_>, Vec<_>) = view.placed.iter().enumerate().partition(|(number, _)| is_active(*number));
    let mut out: Vec<NamedSpan> = others.iter().flat_map(|(_, patch)| patch.text.clone()).collect();
    for function in active.iter().flat_map(|(_, patch)| &patch.functions) {
        let spans = std::iter::once(&function.old).chain(&function.old_parts);
        out.extend(spans.map(|span| NamedSpan { name: function.name.clone(), span: *span }));
    }
    // code that changes in place, and code that uses it
    let in_place = view.placed.iter().filter(|patch| !patch.constants.is_empty()).flat_map(|patch| &patch.off_stack);
    out.extend(in_place.map(|code| NamedSpan { name: code.name.clone(), span: code.span }));
    out
}
