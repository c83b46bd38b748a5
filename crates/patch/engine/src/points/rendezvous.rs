//! A request at which threads block, for both ways of changing code: awaited threads, blocked threads, abandoning.

use super::Library;
use super::abi::{GatherOutcome, Request, Slot};
use crate::Error;
use crate::error::Busy;
use crate::probe::{Prober, ThreadSnapshot};
use crate::report::{Report, now_ns};
use crate::scan::Forbidden;
use crate::walk::Walker;
use std::collections::BTreeSet;
use std::time::Duration;
use stillpoint_patch_tracee::{self as tracee, FrozenProcess, Process, Session, Tid};

const LOCK_DESCRIPTION: &str = "code that holds the lock of libstillpoint";
/// Time limit for the lock; it is held for some instructions.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Describes the location of a thread for which a request still waits.
pub(crate) fn describe(slot: &Slot) -> String {
    format!("its own code, before the next quiescence point of {:?} (priority {})", slot.name, slot.priority)
}

/// Describes the library's lock, which a thread holds.
pub(crate) fn lock_holder(process: &Process) -> Busy {
    Busy { tid: process.pid().leader(), function: LOCK_DESCRIPTION.into() }
}

/// Returns true if the blocked threads have continued, or will not be asked any more.
pub(crate) fn is_over(process: &Process, library: &Library, request: &Request) -> Result<bool, Error> {
    let control = library.control(process.memory())?;
    Ok(now_ns() >= request.deadline_ns
        || control.answered != request.number
        || control.outcome == GatherOutcome::Abandoned)
}

/// Returns the threads for which the request still waits, by the slots.
pub(crate) fn awaited(
    process: &Process,
    library: &mut Library,
    request: &Request,
    threads: &[Tid],
) -> Result<Vec<Busy>, Error> {
    let slots = library.slots(process.memory())?;
    library.update_tids(process, threads);
    Ok(busy_of(library, request, &slots))
}

fn busy_of(library: &Library, request: &Request, slots: &[Slot]) -> Vec<Busy> {
    let awaited = slots.iter().filter(|slot| request.awaits(slot));
    awaited.map(|slot| Busy { tid: library.thread(slot).unwrap_or(Tid(slot.tid)), function: describe(slot) }).collect()
}

/// Tools to search the stacks of threads that the library does not know.
pub(crate) struct StackExaminer<'e, 'p> {
    pub(crate) prober: &'e mut Prober,
    pub(crate) walker: &'e Walker<'p>,
    pub(crate) forbidden: &'e Forbidden,
}

/// Returns the threads that prevent the release of a request while the process is frozen. Such a thread holds the library's lock or is not
/// blocked. Or the library does not know it, it is not `over`, and it has code that changes on its stack.
pub(crate) fn blocking_threads(
    frozen: &mut FrozenProcess<'_, '_>,
    process: &Process,
    library: &Library,
    request: &Request,
    examiner: StackExaminer<'_, '_>,
    over: impl Fn(Tid, &ThreadSnapshot<'_>) -> bool,
) -> Result<Vec<Busy>, Error> {
    let memory = process.memory();
    let control = library.control(memory)?;
    let slots = library.slots(memory)?;
    let mut busy = Vec::new();
    if control.busy || control.pending() != Some(request) || now_ns() >= request.deadline_ns {
        busy.push(lock_holder(process));
    }
    busy.extend(busy_of(library, request, &slots));
    if !busy.is_empty() {
        return Ok(busy);
    }
    let known: BTreeSet<Tid> = slots.iter().map(|slot| library.thread(slot).unwrap_or(Tid(slot.tid))).collect();
    for tid in frozen.threads().into_iter().filter(|tid| !known.contains(tid)) {
        let snapshot = examiner.prober.snapshot(process, &mut frozen.thread(tid)?)?;
        if over(tid, &snapshot) {
            continue;
        }
        let verdict = examiner.walker.judge(&snapshot, examiner.forbidden);
        if !verdict.is_free() {
            busy.push(Busy { tid, function: verdict.describe() });
        }
    }
    Ok(busy)
}

/// Abandons the library's request. Returns `false` if that is impossible now: only while the process is stopped and no thread holds the
/// library's lock, no thread is about to take the transition.
pub(crate) fn abandon(
    process: &Process,
    session: &mut Session<'_>,
    library: &mut Library,
    report: &mut Report<'_>,
) -> Result<bool, Error> {
    let frozen = match session.freeze() {
        Err(tracee::Error::Unstoppable { .. }) => return Ok(false),
        other => other?,
    };
    let memory = process.memory();
    let busy = library.control(memory)?.busy;
    if !busy {
        library.write_outcome(memory, GatherOutcome::Abandoned)?;
    }
    for (tid, stopped_ns) in frozen.thaw()? {
        report.stopped(tid, "freeze: abandon", stopped_ns);
    }
    if !busy {
        library.wake(process);
    }
    Ok(!busy)
}
