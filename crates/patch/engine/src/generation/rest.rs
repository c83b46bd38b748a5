//! Transitions that rest, because threads stay in old code.

use super::Generations;
use super::points::PointMigration;
use super::text::{occupied, resting, resting_error, sees_new_side};
use crate::apply::outcome::{outcome, update_lookup_table};
use crate::ledger::{Phase, Record, Transition, View};
use crate::mechanism::{Context, Mechanism, MigrationResult};
use crate::report::now_ns;
use crate::{Error, Outcome, Quiescence};
use stillpoint_patch_format::Avma;

/// Request for a transition that rests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RestRequest {
    /// Continue it.
    Forward,
    /// Move all threads back.
    Back,
    /// Another operation, which has to wait.
    Other,
}

/// Result for a transition that rested.
pub(crate) enum RestResult {
    /// There was none, or its generation held no thread any more.
    None,
    /// It continued, and rests again or is complete.
    Forward(Outcome),
    /// All threads are back.
    Back(Outcome),
}

/// Continues a transition that rests, or moves its threads back.
pub(crate) fn continue_resting(
    cx: Context<'_, '_, '_>,
    wanted: impl Fn(&View, &Transition) -> RestRequest,
    start: u64,
) -> Result<RestResult, Error> {
    cx.target.reload()?;
    let Some(transition) = resting(cx.target).cloned() else { return Ok(RestResult::None) };
    let (view, number) = (cx.target.view.clone(), transition.number);
    let occupied = occupied(cx.process).into_iter();
    let mut holding = occupied.filter(|(_, tid)| sees_new_side(cx.target, *tid, &transition));
    let aborted = Record::Phase { transition: number, phase: Phase::Aborted };
    let Some((generation, _)) = holding.find(|(number, _)| *number != 0) else {
        cx.target.append(aborted)?;
        cx.target.reload()?;
        return Ok(RestResult::None);
    };
    match wanted(&view, &transition) {
        RestRequest::Other => Err(resting_error(cx.target)),
        RestRequest::Back => {
            cx.report.operation("abort");
            let mut resumed = Generations::resume(cx, generation);
            let back = resumed.move_back(&transition).and_then(|threads| resumed.disarm(&transition).map(|()| threads));
            let threads = back.map_err(|error| error.stuck(number).not_undone(number))?;
            let Context { target, report, .. } = resumed.context();
            target.append(aborted)?;
            update_lookup_table(target, report);
            target.reload()?;
            let active = transition.before.iter().filter_map(|n| view.patch(*n)).map(|p| p.name.clone()).collect();
            let duration_ns = now_ns() - start;
            Ok(RestResult::Back(Outcome::Committed { transition: number, active, threads, duration_ns }))
        }
        RestRequest::Forward => {
            let mut resumed = Generations::resume(cx, generation);
            let migrated = resumed.go_on(&transition).map_err(|error| error.stuck(number).not_undone(number))?;
            let cx = resumed.context();
            update_lookup_table(cx.target, cx.report);
            let post = following_hooks(&view, &transition);
            Ok(RestResult::Forward(outcome(cx, &view, &transition, migrated, &post, start)))
        }
    }
}

/// Returns the hooks that follow the commit of a transition.
fn following_hooks(view: &View, transition: &Transition) -> Vec<Avma> {
    let coming = transition.after.iter().filter(|n| !transition.before.contains(n)).filter_map(|n| view.patch(*n));
    let leaving = transition.before.iter().rev().filter(|n| !transition.after.contains(n));
    let leaving = leaving.filter_map(|n| view.patch(*n)).flat_map(|p| p.hooks.post_revert.clone());
    if transition.operation == "revert" {
        leaving.collect()
    } else {
        coming.flat_map(|p| p.hooks.post_apply.clone()).collect()
    }
}

impl Generations<'_, '_, '_> {
    /// Continues from the resting state: at quiescence points if that is requested, otherwise by probing.
    fn go_on(&mut self, transition: &Transition) -> Result<MigrationResult, Error> {
        self.points = match self.cx.options.quiescence {
            Quiescence::Local => PointMigration::find(self.cx.target)?,
            _ => None,
        };
        self.points.as_mut().map_or(Ok(()), PointMigration::check_filters)?;
        let complete = |g: &mut Self| {
            let migrated = g.migrate(transition)?;
            g.decide(transition, &migrated)?;
            g.commit(transition, &migrated).map(|()| migrated)
        };
        let migrated = complete(self);
        if let Err(Error::TimedOut(_)) = &migrated {
            self.abandon_request()?;
        }
        migrated
    }
}
