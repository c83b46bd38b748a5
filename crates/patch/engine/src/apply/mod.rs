//! Operations on one process: apply, revert, and the recovery of a killed one.

mod arena;
mod check;
mod checks;
mod inject;
mod mapping;
mod memory_limit;
pub(crate) mod outcome;
mod phases;
mod placement;
mod placement_reuse;
pub(crate) mod plan;
mod preflight;
mod recovery;
mod resolve;

use crate::event_pump::{ended_or, traced};
use crate::generation::{self, RestRequest, RestResult};
use crate::ledger::{Transition, View};
use crate::mechanism::Context;
use crate::report::{Observer, Report, now_ns};
use crate::target::Target;
use crate::{Error, Options, Outcome, PatchSelection};
pub use check::{Prediction, check};
use checks::{check_view, is_applied, run_checks};
use phases::{PatchOperation, Request};
use recovery::recover;
use stillpoint_events::EventKind;
use stillpoint_patch_format::{BuildId, Signed};
use stillpoint_patch_tracee::{self as tracee, Pid};

/// Applies `signed` to the process `pid`, as one transition.
///
/// # Errors
/// [`Error::service_state`] of the error states if the process is unchanged, rolled back, unfinished or has ended.
pub fn apply(pid: Pid, signed: &Signed, options: &Options, observer: Observer<'_>) -> Result<Outcome, Error> {
    let mut report = Report::new(observer, pid, "apply");
    let mut target = Target::open(pid)?;
    // it is alive now, so the number was its own when the target was opened by number
    if options.process.as_ref().is_some_and(|process| !process.is_alive()) {
        return Err(tracee::Error::Gone(pid).into());
    }
    generation::prepare(&mut target, options, &mut report)?;
    if target.view.unfinished.is_none() && is_applied(&target.view, signed) {
        return Ok(already_applied(&mut report, signed));
    }
    if options.dry_run {
        return Ok(Outcome::DryRun(check::predict(&target, signed, options, &mut report)?.summary()));
    }
    let mut checked = None;
    if target.view.unfinished.is_none() {
        let results = run_checks(&target, signed, options).map_err(|error| ended_or(&target.process, error))?;
        checked = Some((target.ledger_len(), results));
    }
    let process = target.process.clone();
    process.prepare_remote().map_err(|error| ended_or(&process, error.into()))?;
    traced(&process, |session| {
        let start = now_ns();
        let adds_patch = |view: &View, open: &Transition| {
            let mut coming = open.after.iter().filter(|n| !open.before.contains(n)).filter_map(|n| view.patch(*n));
            coming.any(|patch| patch.digest == signed.digest)
        };
        let wanted = |view: &View, open: &Transition| {
            let is_it = |n: &u32| view.patch(*n).is_some_and(|patch| patch.digest == signed.digest);
            match (open.before.iter().any(is_it), open.after.iter().any(is_it)) {
                (false, true) => RestRequest::Forward,
                (true, false) => RestRequest::Back,
                _ => RestRequest::Other,
            }
        };
        let mut cx = Context { session, process: &process, target: &mut target, options, report: &mut report };
        if let RestResult::Forward(outcome) = generation::continue_resting(cx.reborrow(), wanted, start)? {
            return Ok(outcome);
        }
        recover(cx.reborrow(), adds_patch)?;
        if is_applied(&cx.target.view, signed) {
            return Ok(already_applied(cx.report, signed));
        }
        PatchOperation::new(cx, Request::Apply(signed, checked)).run(start)
    })
}

fn already_applied(report: &mut Report<'_>, signed: &Signed) -> Outcome {
    let what = format!("patch {} is already applied", signed.patch.name);
    report.event(EventKind::AlreadyThere { what: what.clone() });
    Outcome::AlreadyThere(what)
}

/// Reverts patches, as one transition for each module concerned.
///
/// # Errors
/// [`Error::service_state`] of the error states if the process is unchanged, rolled back, unfinished or has ended.
pub fn revert(
    pid: Pid,
    selection: &PatchSelection,
    options: &Options,
    observer: Observer<'_>,
) -> Result<Outcome, Error> {
    let mut report = Report::new(observer, pid, "revert");
    let mut target = Target::open(pid)?;
    generation::prepare(&mut target, options, &mut report)?;
    let nothing = || Outcome::AlreadyThere("no patch is active".into());
    if target.view.unfinished.is_none() {
        let dropped = match patches_to_revert(pid, &target.view, selection) {
            Err(Error::NothingActive(_)) => return Ok(nothing()),
            dropped => dropped?,
        };
        check_view(&target.view, dropped.iter(), None, options)?;
        if options.dry_run {
            let names = dropped.iter().filter_map(|n| target.view.patch(*n)).map(|p| p.name.as_str());
            return Ok(Outcome::DryRun(format!("would revert {}", names.collect::<Vec<_>>().join(", "))));
        }
    }
    let process = target.process.clone();
    traced(&process, |session| {
        let start = now_ns();
        let drops_patches = |view: &View, open: &Transition| {
            patches_to_revert(pid, view, selection).is_ok_and(|dropped| {
                let rest = view.active.iter().filter(|n| !dropped.contains(n));
                rest.eq(&open.after)
            })
        };
        let rest_request = |view: &View, open: &Transition| {
            let coming = open.after.iter().filter(|n| !open.before.contains(n)).filter_map(|n| view.patch(*n));
            let named = |name: &String| coming.clone().any(|p| p.name == *name);
            match selection {
                _ if drops_patches(view, open) => RestRequest::Forward,
                PatchSelection::Named(name) if !named(name) => RestRequest::Other,
                _ if coming.clone().next().is_some() => RestRequest::Back,
                _ => RestRequest::Other,
            }
        };
        let mut cx = Context { session, process: &process, target: &mut target, options, report: &mut report };
        let mut outcome = None;
        match generation::continue_resting(cx.reborrow(), rest_request, start)? {
            RestResult::Forward(done @ Outcome::Rests { .. }) => return Ok(done),
            RestResult::Forward(done) | RestResult::Back(done) if *selection != PatchSelection::All => return Ok(done),
            RestResult::Forward(done) | RestResult::Back(done) => outcome = Some(done),
            RestResult::None => {}
        }
        if recover(cx.reborrow(), drops_patches)? && *selection != PatchSelection::All {
            return Ok(Outcome::AlreadyThere("the unfinished revert is complete now".into()));
        }
        loop {
            let dropped = match patches_to_revert(pid, &cx.target.view, selection) {
                Err(Error::NothingActive(_)) => break,
                dropped => dropped?,
            };
            let done = PatchOperation::new(cx.reborrow(), Request::Revert(dropped)).run(start)?;
            let rests = matches!(done, Outcome::Rests { .. });
            outcome = Some(done);
            cx.target.reload()?;
            if rests || *selection != PatchSelection::All {
                break;
            }
        }
        Ok(outcome.unwrap_or_else(nothing))
    })
}

/// Returns the patches to revert, all of one module.
fn patches_to_revert(pid: Pid, view: &View, selection: &PatchSelection) -> Result<Vec<u32>, Error> {
    let top = *view.active.last().ok_or(Error::NothingActive(pid))?;
    let name = |n: u32| view.patch(n).map(|p| p.name.clone()).unwrap_or_default();
    let module = |n: u32| view.patch(n).map(|p| (&p.build_id, p.bias));
    let of_build = |n: &u32, id: &BuildId| view.patch(*n).is_some_and(|p| p.build_id == *id);
    match selection {
        PatchSelection::Newest => Ok(vec![top]),
        PatchSelection::NewestOf(id) => {
            let newest = view.active.iter().copied().rfind(|n| of_build(n, id));
            Ok(vec![newest.ok_or(Error::NothingActive(pid))?])
        }
        PatchSelection::All => Ok(view.active.iter().copied().filter(|n| module(*n) == module(top)).collect()),
        PatchSelection::AllOf(id) => {
            let all: Vec<u32> = view.active.iter().copied().filter(|n| of_build(n, id)).collect();
            if all.is_empty() { Err(Error::NothingActive(pid)) } else { Ok(all) }
        }
        PatchSelection::Named(wanted) => {
            let place = view.active.iter().position(|n| name(*n) == *wanted);
            let active = || view.active.iter().map(|n| name(*n)).collect();
            let place = place.ok_or_else(|| Error::NotActive { name: wanted.clone(), active: active() })?;
            let number = view.active[place];
            // patches of different modules change nothing that the other needs
            if let Some(above) = view.active[place + 1..].iter().rfind(|n| module(**n) == module(number)) {
                return Err(Error::NotOnTop { below: wanted.clone(), above: name(*above) });
            }
            Ok(vec![number])
        }
    }
}
