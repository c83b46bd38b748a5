//! The other way to patch: on a kernel with address-space generations (`generations/`) each thread sees its own text, and
//! no dispatcher decides.
//!
//! ```text
//! create ── migrate ── decide ── commit           create:  entries are direct jumps, in the new generation only
//!              └── back ── delete                 commit:  the kernel makes that the text of all
//! ```
//! Patches, checks, memory, ledger and unwinders are those of the trampolines, and so is what is left behind: afterwards
//! either way can take the patch back. A thread goes over by a system call that it
//! makes for us while it stands, when nothing that changes is on its stack. One that is born is where its parent is.
//!
//! *Being killed.* Until all threads are over nothing is in the ledger: the kernel itself tells that a generation was left,
//! and threads in it. Then the record `Begin` is written, with a state byte that says "all new" already: whoever finds it
//! goes forward. As long as a thread is in a generation of ours, only this way goes on.

mod crossing;
mod kernel;

use crate::calm::traced;
use crate::fault::{self, FaultPoint};
use crate::ledger::{NamedSpan, Phase, Record, Site, Transition, Version, View};
use crate::operate::{Hooks, Target, call_hooks, committed, expect_old_side, limits, settle_guide};
use crate::plan::Plan;
use crate::report::{Report, now_ns};
use crate::scan::Forbidden;
use crate::{Error, Options, Outcome, Quiescence, guide};
use crossing::{Crossing, who_is_elsewhere};
pub use kernel::Generation;
pub(crate) use kernel::generations;
use std::collections::BTreeMap;
use std::time::Instant;
use stillpoint_events::EventKind;
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::{DISPATCH_LEN, DispatchState, JUMP_LEN, jump5};
use stillpoint_patch_tracee::{Process, Session, Tid};

/// What lets each thread see its version of the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ThreadView {
    /// A jump at each entry, and code behind it that looks at a word of the thread. Every kernel can do that.
    #[default]
    Trampoline,
    /// Pages of its own, by a kernel that has address-space generations.
    Generation,
}

/// Refuses what cannot be done in this way, before anything is touched.
pub(crate) fn refuse(target: &Target, options: &Options) -> Result<(), Error> {
    refuse_among(target, options, &inhabited(&target.process))
}

fn refuse_among(target: &Target, options: &Options, inhabited: &BTreeMap<u32, Tid>) -> Result<(), Error> {
    let pid = target.process.pid();
    let unsuitable = |what: &str| Err(Error::Unsuitable { pid, what: what.to_owned() });
    let (left, own): (Vec<_>, Vec<_>) = inhabited.iter().partition(|(_, tid)| is_of_patches(target, **tid));
    match options.view {
        ThreadView::Trampoline if !left.is_empty() => Err(Error::LeftBehind(pid)),
        ThreadView::Trampoline if inhabited.len() > 1 => unsuitable("has threads in generations of its own"),
        ThreadView::Trampoline => Ok(()),
        ThreadView::Generation if !kernel::has_generations() => Err(Error::NoGenerations),
        ThreadView::Generation if options.quiescence != Quiescence::Probe => {
            Err(Error::OnlyProbed(options.quiescence.to_string()))
        }
        ThreadView::Generation if generations(pid).is_none() => {
            unsuitable("has lost its first thread, and its generations cannot be seen")
        }
        ThreadView::Generation if own.iter().any(|(generation, _)| **generation != 0) => {
            unsuitable("has threads in generations of its own")
        }
        ThreadView::Generation => Ok(()),
    }
}

/// Before an operation: refuses what cannot be done, and ends what a killed tool left.
pub(crate) fn enter(target: &mut Target, options: &Options, report: &mut Report<'_>) -> Result<(), Error> {
    let process = target.process.clone();
    let inhabited = inhabited(&process);
    refuse_among(target, options, &inhabited)?;
    let nothing_left = inhabited.keys().all(|generation| *generation == 0);
    if options.view == ThreadView::Trampoline || options.dry_run || nothing_left {
        return Ok(());
    }
    traced(&process, |session| settle(session, target, options, report))
}

/// The generations, the base among them, that threads are in, with one of each; none when there is only the base.
fn inhabited(process: &Process) -> BTreeMap<u32, Tid> {
    if !generations(process.pid()).is_some_and(|found| found.iter().any(|g| g.threads > 0)) {
        return BTreeMap::new();
    }
    let threads = process.threads().unwrap_or_default().into_iter();
    threads.filter_map(|t| Some((kernel::generation_of(process, t.tid)?, t.tid))).collect()
}

/// Whether what a thread sees differs from the base at an entry: its generation is one of ours then, and not one that the
/// program made for itself.
fn is_of_patches(target: &Target, tid: Tid) -> bool {
    target.view.origins().into_keys().any(|entry| {
        let mut base = [0; JUMP_LEN];
        let readable = target.process.memory().read_base(entry, &mut base).is_ok();
        readable && sees(target, tid, entry).is_some_and(|seen| seen != base)
    })
}

/// Ends what a killed tool left: a generation that was decided on, or in which all threads see what the ledger says,
/// becomes the text of all; threads are taken back out of any other. One that nobody is in stays, for it might be the
/// program's.
fn settle(
    session: &mut Session<'_>,
    target: &mut Target,
    options: &Options,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    target.reload()?;
    let process = target.process.clone();
    let number = target.view.last_transition;
    let unfinished = |source| Error::Unfinished { transition: number, source: Box::new(source) };
    for (left, tid) in inhabited(&process) {
        if left == 0 || !is_of_patches(target, tid) {
            continue;
        }
        report.warn(format!("generation {left} was left by a tool that was killed"));
        if is_decided(target, tid)
            || shows_what_is_in_force(target, tid) && who_is_elsewhere(&process, left)?.is_empty()
        {
            kernel::commit(&process, session, left).map_err(unfinished)?;
            continue;
        }
        report.operation("abort");
        let forbidden = Forbidden::new(&not_in_force(&target.view), &target.view.trampolines(), &[]);
        let deadline = Instant::now() + limits(options).back;
        let back = Crossing::new(target, (0, number), forbidden)?.all(session, report, deadline);
        back.and_then(|_| kernel::delete(&process, session, left)).map_err(|error| stuck(error, number))?;
    }
    Ok(())
}

/// What became of the way back, when that failed.
fn stuck(error: Error, transition: u32) -> Error {
    match error {
        Error::TimedOut { busy } => Error::Stuck { transition, busy },
        Error::Ended(_) => error,
        other => Error::Unfinished { transition, source: Box::new(other) },
    }
}

/// Whether a thread sees the new side of a transition that the ledger says is decided: nothing else is written when a
/// generation is to become the text of all.
fn is_decided(target: &Target, tid: Tid) -> bool {
    let Some(open) = &target.view.unfinished else { return false };
    let mut state = [0];
    let is_new = |site: &Site| sees(target, tid, site.entry) == Some(site.to.bytes);
    target.process.memory().read(open.transition.state, &mut state).is_ok()
        && state == [DispatchState::AllThen as u8]
        && open.transition.sites.iter().all(is_new)
}

/// An entry as a thread sees it.
fn sees(target: &Target, tid: Tid, entry: Avma) -> Option<[u8; JUMP_LEN]> {
    let mut now = [0; JUMP_LEN];
    kernel::read_as(&target.process, tid, entry, &mut now).then_some(now)
}

/// Whether a thread sees every entry as the active patches have it.
fn shows_what_is_in_force(target: &Target, tid: Tid) -> bool {
    let view = &target.view;
    view.origins().into_iter().all(|(entry, origin)| {
        let expected = match view.version(&view.active, entry) {
            Version::Shipped => Some(origin.original),
            Version::Patched(_, function) => jump5(entry, function.new).ok(),
        };
        expected.is_some() && sees(target, tid, entry) == expected
    })
}

/// All code that no thread runs while the active patches are in force.
fn not_in_force(view: &View) -> Vec<NamedSpan> {
    let is_active = |number: usize| view.active.contains(&(number as u32));
    let (active, others): (Vec<_>, Vec<_>) = view.placed.iter().enumerate().partition(|(number, _)| is_active(*number));
    let mut out: Vec<NamedSpan> = others.iter().flat_map(|(_, patch)| patch.text.clone()).collect();
    for function in active.iter().flat_map(|(_, patch)| &patch.functions) {
        let spans = std::iter::once(&function.old).chain(&function.old_parts);
        out.extend(spans.map(|span| NamedSpan { name: function.name.clone(), span: *span }));
    }
    out
}

/// Runs a transition.
#[allow(clippy::too_many_arguments)]
pub(crate) fn run(
    session: &mut Session<'_>,
    target: &mut Target,
    view: &View,
    plan: Plan,
    options: &Options,
    report: &mut Report<'_>,
    (pre, post): Hooks<'_>,
    start: u64,
) -> Result<Outcome, Error> {
    settle(session, target, options, report)?;
    let process = target.process.clone();
    let memory = process.memory();
    let Plan { mut transition, dispatchers } = plan;
    transition.sites.extend(guide::site(memory, view, &transition.after)?);
    expect_old_side(memory, &transition)?;
    guide::settle(target, view, &[&transition.before[..], &transition.after].concat())?;
    if let Err(error) = call_hooks(&process, session, pre, true, report) {
        settle_guide(target, report);
        return Err(error);
    }
    // a dispatcher that is not needed leaves its room for what the calls need
    let nothing = || Error::Unsuitable { pid: process.pid(), what: "has no function that this would change".into() };
    let scratch = dispatchers.first().map(|(at, _)| *at).ok_or_else(nothing)?;
    let moved = cross(session, target, &transition, scratch, options, report);
    settle_guide(target, report);
    let threads = moved?;
    Ok(committed(&process, session, view, &transition, threads, post, report, start))
}

/// Makes the generation, brings every thread there, and makes it the text of all; or takes everybody back.
fn cross(
    session: &mut Session<'_>,
    target: &mut Target,
    transition: &Transition,
    scratch: Avma,
    options: &Options,
    report: &mut Report<'_>,
) -> Result<u32, Error> {
    const { assert!(kernel::SCRATCH_LEN <= DISPATCH_LEN) };
    let process = target.process.clone();
    let deadline = Instant::now() + options.timeout;
    let generation = in_phase(report, "create", |_| kernel::create(&process, session, &transition.sites, scratch))?;
    let mut trampolines = target.view.trampolines();
    trampolines.extend(&transition.trampolines);
    let forbidden = |code: &[NamedSpan]| Forbidden::new(code, &trampolines, &transition.loop_entries);
    let mut there = Crossing::new(target, (generation, transition.number), forbidden(&transition.leave))?;
    let moved = in_phase(report, "migrate", |report| there.all(session, report, deadline));
    let moved = moved.and_then(|threads| fault::reach(&options.faults, FaultPoint::Migrated).map(|()| threads));
    let threads = match moved {
        Ok(threads) => threads,
        Err(error @ Error::Ended(_)) => return Err(error),
        Err(error) => {
            report.operation("abort");
            let until = Instant::now() + limits(options).back;
            let mut home = Crossing::new(target, (0, transition.number), forbidden(&transition.enter))?;
            let back = in_phase(report, "migrate", |report| home.all(session, report, until));
            let back = back.and_then(|_| kernel::delete(&process, session, generation));
            back.map_err(|second| stuck(second, transition.number))?;
            report.event(EventKind::FellBack { transition: transition.number, reason: error.to_string() });
            return Err(match error {
                Error::TimedOut { .. } => error,
                other => Error::FellBack { transition: transition.number, source: Box::new(other) },
            });
        }
    };
    let unfinished = |source| Error::Unfinished { transition: transition.number, source: Box::new(source) };
    in_phase(report, "commit", |_| decide(session, target, transition, generation, options)).map_err(unfinished)?;
    Ok(threads)
}

/// All threads are over. The record is the commit point: whoever finds it goes forward.
fn decide(
    session: &mut Session<'_>,
    target: &mut Target,
    transition: &Transition,
    generation: u32,
    options: &Options,
) -> Result<(), Error> {
    let process = target.process.clone();
    let memory = process.memory();
    let store = target.store.as_mut().ok_or(Error::NoWord(process.pid()))?;
    memory.write(transition.state, &[DispatchState::AllThen as u8])?;
    store.append(memory, Record::Begin(Box::new(transition.clone())))?;
    fault::reach(&options.faults, FaultPoint::Decided)?;
    kernel::commit(&process, session, generation)?;
    store.append(memory, Record::Phase { transition: transition.number, phase: Phase::Committed })
}

fn in_phase<T>(
    report: &mut Report<'_>,
    phase: &str,
    work: impl FnOnce(&mut Report<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    report.started(phase);
    let start = now_ns();
    let result = work(report);
    report.ended(phase, now_ns() - start);
    result
}
