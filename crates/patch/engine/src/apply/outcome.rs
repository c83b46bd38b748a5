//! End of an operation: hooks, the outcome, unwind data that is not needed any more.

use crate::event_pump::{self, ended_or};
use crate::ledger::{Transition, View};
use crate::mechanism::{Context, MigrationResult};
use crate::report::{Report, now_ns};
use crate::target::Target;
use crate::{Error, Outcome, lookup_redirect};
use std::time::Duration;
use stillpoint_events::patch;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::Stopped;

/// Time limit of one hook.
const HOOK_TIMEOUT: Duration = Duration::from_secs(5);

/// Calls the hooks that follow the commit if all threads have migrated, and reports the outcome of an operation.
pub(crate) fn outcome(
    cx: &mut Context<'_, '_, '_>,
    view: &View,
    transition: &Transition,
    migrated: MigrationResult,
    post: &[Avma],
    start: u64,
) -> Outcome {
    let (number, MigrationResult { threads, staying }) = (transition.number, migrated);
    if !staying.is_empty() {
        for busy in &staying {
            cx.report.warn(format!("thread {} stays in {} and keeps the previous version", busy.tid, busy.function));
        }
        return Outcome::Rests { transition: number, threads, staying, duration_ns: now_ns() - start };
    }
    if let Err(error) = call_hooks(cx, post, false) {
        cx.report.warn(format!("a hook after the commit failed: {error}"));
    }
    let names = transition.after.iter().filter_map(|n| view.patch(*n)).map(|p| p.name.clone());
    let active: Vec<String> = names.collect();
    let duration_ns = now_ns() - start;
    cx.report.event(patch::Event::Committed { transition: number, active: active.clone(), duration_ns, threads });
    Outcome::Committed { transition: number, active, threads, duration_ns }
}

/// Deactivates the unwind data of code that no thread can be in any more. Data that stays active too long does no harm.
pub(crate) fn update_lookup_table(target: &mut Target, report: &mut Report<'_>) {
    let settled = target.reload().and_then(|()| {
        let view = &target.view;
        let open = view.unfinished.iter().flat_map(|u| u.transition.before.iter().chain(&u.transition.after));
        lookup_redirect::update_table(target, view, &view.active.iter().chain(open).copied().collect::<Vec<_>>())
    });
    if let Err(error) = settled.map_err(|error| ended_or(&target.process, error))
        && !matches!(error, Error::Ended(_))
    {
        report.warn(format!("unwind data of inactive code could not be withdrawn: {error}"));
    }
}

/// Makes a thread of the process call hooks, one after another.
pub(crate) fn call_hooks(cx: &mut Context<'_, '_, '_>, hooks: &[Avma], must_be_zero: bool) -> Result<(), Error> {
    let Context { session, process, report, .. } = cx;
    for hook in hooks {
        let call = |carrier: &mut Stopped<'_>| Ok(carrier.call_function(*hook, HOOK_TIMEOUT)?);
        let returned =
            event_pump::with_carrier(process, session, call, &mut |tid, ns| report.stopped(tid, "hook", ns))?;
        if must_be_zero && returned != 0 {
            return Err(Error::Hook { at: *hook, returned });
        }
    }
    Ok(())
}
