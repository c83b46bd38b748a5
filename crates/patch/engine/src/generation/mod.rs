//! Patching with address-space generations: on a kernel that has them (`crates/patch/generations/`) each thread sees its own text, and no
//! dispatcher decides.
//!
//! ```text
//! create ── migrate ── decide ── commit           create:  entries are direct jumps, in the new generation only
//!              └── back ── delete                 commit:  the kernel makes that the text of all
//! ```
//! Patches, checks, memory, ledger and unwinders are the same as with trampolines, and so is the result: afterwards either way can revert
//! the patch. A thread migrates when no code that changes is on its stack, by a system call that it makes for the tool while it is stopped;
//! or by itself at a quiescence point. A new thread is in the generation of its parent. Threads that change together stay in place, and are
//! blocked, until the generation is the text of all.
//!
//! *A killed tool.* Until all threads have migrated, or are blocked, nothing is in the ledger: the kernel itself shows that a generation
//! was left, and the threads in it. Then the record `Begin` is written, with a state byte that already says "all new". A tool that finds
//! the record goes forward if all threads are in the generation. If some were blocked, they have continued by themselves on the old text.
//! That text is still active if the kernel was not told yet: then all roll back. While a thread is in a generation of a patch, only this
//! view can continue.
//!
//! *Threads that stay.* A patch may name functions that a thread need not leave. When all others have migrated, the transition rests: one
//! record states it, those threads are in the base, which is unchanged, and all others in the generation. A new thread is in the generation
//! of its parent. The same command continues when they have left; the opposite command moves all back.

mod kernel;
mod migration;
mod points;

use crate::barrier::Name;
use crate::barrier::abi::Mode;
use crate::error::Busy;
use crate::event_pump::traced;
use crate::fault::{self, FaultPoint};
use crate::ledger::{NamedSpan, Phase, Record, Transition, Version, View};
use crate::operation::{Hooks, Target, call_hooks, committed, expect_old_side, limits, update_lookup_table};
use crate::plan::Plan;
use crate::report::{Report, now_ns};
use crate::scan::Forbidden;
use crate::store::Store;
use crate::{Error, Options, Outcome, Quiescence, event_pump, lookup_redirect, suspended_frames};
pub use kernel::Generation;
pub(crate) use kernel::{generations, in_base};
use migration::{Migration, MigrationResult, threads_outside};
use points::PointMigration;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use stillpoint_events::EventKind;
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::{DISPATCH_LEN, DispatchState, JUMP_LEN, jump5};
use stillpoint_patch_tracee::{self as tracee, FrozenProcess, Process, Session, Tid};

/// Method by which each thread sees its version of the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ThreadView {
    /// A jump at each entry, and code after it that reads a word of the thread. Every kernel supports it.
    #[default]
    Trampoline,
    /// Pages of the thread's own generation, on a kernel that has address-space generations.
    Generation,
}

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
        ThreadView::Generation if generations(pid).is_none() => {
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

/// Returns the generations that hold threads, including the base, each with its oldest thread, which is the least likely to end meanwhile.
/// Empty if there is only the base.
fn occupied(process: &Process) -> BTreeMap<u32, Tid> {
    if !generations(process.pid()).is_some_and(|found| found.iter().any(|g| g.threads > 0)) {
        return BTreeMap::new();
    }
    // of equal keys the last one stays
    let threads = process.threads().unwrap_or_default().into_iter().rev();
    threads.filter_map(|t| Some((kernel::generation_of(process, t.tid)?, t.tid))).collect()
}

/// Returns true if a thread sees other bytes than the base at an entry: its generation is then one of a patch, and not one of the program.
fn differs_from_base(target: &Target, tid: Tid) -> bool {
    let entries = target.view.origins().into_keys().map(|entry| (entry, JUMP_LEN));
    let constants = target.view.constants().map(|constant| (constant.at, constant.new.len()));
    entries.chain(constants).any(|(at, len)| {
        let mut base = vec![0; len];
        let readable = target.process.memory().read_base(at, &mut base).is_ok();
        readable && read_as_thread(target, tid, at, len).is_some_and(|seen| seen != base)
    })
}

/// Ends the transition of a killed tool. A generation becomes the text of all if that was decided, or if all threads in it see the text
/// that the ledger states. Threads are moved back from any other. An empty generation stays, because it might belong to the program.
fn finish_killed(
    session: &mut Session<'_>,
    target: &mut Target,
    options: &Options,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    target.reload()?;
    let process = target.process.clone();
    let number = target.view.last_transition;
    let unfinished = |source| Error::Unfinished { transition: number, source: Box::new(source) };
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
        let deadline = Instant::now() + limits(options).back;
        let back =
            Migration::new(target, (0, number), forbidden, Forbidden::default())?.run(session, report, None, deadline);
        back.and_then(|_| kernel::delete(&process, session, left)).map_err(|error| rollback_error(error, number))?;
    }
    Ok(())
}

/// Ends a transition that is decided in the ledger, but not in the text of all: the tool was killed in the moment of the commit, while
/// threads were blocked.
pub(crate) fn undo_decision(target: &mut Target, report: &mut Report<'_>) -> Result<(), Error> {
    let process = target.process.clone();
    let Some(open) = target.view.unfinished.clone() else { return Ok(()) };
    if !is_all_new(&process, &open.transition)? || expect_old_side(process.memory(), &open.transition).is_err() {
        return Ok(());
    }
    let number = open.transition.number;
    undo_commit_record(target, &open.transition)?;
    let reason = "the tool that started it was killed".to_owned();
    report.event(EventKind::FellBack { transition: Some(number), reason });
    target.reload()
}

/// Resets the state byte and the ledger to the state before the decision.
fn undo_commit_record(target: &mut Target, transition: &Transition) -> Result<(), Error> {
    let process = target.process.clone();
    let store = target.store.as_mut().ok_or(Error::NoWord(process.pid()))?;
    process.memory().write(transition.state, &[DispatchState::AllOtherwise as u8])?;
    store.append(process.memory(), Record::Phase { transition: transition.number, phase: Phase::Aborted })
}

fn is_all_new(process: &Process, transition: &Transition) -> Result<bool, Error> {
    let mut state = [0];
    process.memory().read(transition.state, &mut state)?;
    Ok(state == [DispatchState::AllThen as u8])
}

/// Converts the error of a failed rollback.
fn rollback_error(error: Error, transition: u32) -> Error {
    match error {
        Error::TimedOut { busy } => Error::Stuck { transition, busy },
        Error::Ended(_) => error,
        other => Error::Unfinished { transition, source: Box::new(other) },
    }
}

/// Returns true if a thread sees the new side of a transition that is decided in the ledger: no other record is written when a generation
/// becomes the text of all.
fn is_decided(target: &Target, tid: Tid) -> bool {
    let Some(open) = &target.view.unfinished else { return false };
    is_all_new(&target.process, &open.transition).unwrap_or(false) && sees_new_side(target, tid, &open.transition)
}

/// Returns true if a thread sees the new side of a transition.
fn sees_new_side(target: &Target, tid: Tid, transition: &Transition) -> bool {
    let holds = |at: Avma, bytes: &[u8]| read_as_thread(target, tid, at, bytes.len()).is_some_and(|seen| seen == bytes);
    transition.sites.iter().all(|site| holds(site.entry, &site.to.bytes))
        && transition.constants.iter().all(|constant| holds(constant.at, &constant.to))
}

/// Returns the transition that rests because threads stay in old code, unless it is decided.
fn resting(target: &Target) -> Option<&Transition> {
    let open = target.view.unfinished.as_ref().filter(|open| open.phase == Some(Phase::Resting))?;
    (!is_all_new(&target.process, &open.transition).unwrap_or(false)).then_some(&open.transition)
}

fn resting_error(target: &Target) -> Error {
    let open = target.view.unfinished.as_ref();
    let patches = open.map(|open| open.transition.before.iter().chain(&open.transition.after));
    let names = patches.into_iter().flatten().filter_map(|n| target.view.patch(*n)).flat_map(|p| p.staying.clone());
    let functions: BTreeSet<String> = names.collect();
    Error::ThreadsStay { pid: target.process.pid(), functions: functions.into_iter().collect::<Vec<_>>().join(", ") }
}

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
    session: &mut Session<'_>,
    target: &mut Target,
    wanted: impl Fn(&View, &Transition) -> RestRequest,
    options: &Options,
    report: &mut Report<'_>,
    start: u64,
) -> Result<RestResult, Error> {
    target.reload()?;
    let process = target.process.clone();
    let Some(transition) = resting(target).cloned() else { return Ok(RestResult::None) };
    let occupied = occupied(&process).into_iter();
    let generation =
        occupied.filter(|(_, tid)| sees_new_side(target, *tid, &transition)).find(|(number, _)| *number != 0);
    let deadline = Instant::now() + options.timeout;
    let number = transition.number;
    let view = target.view.clone();
    let Some((generation, _)) = generation else {
        let mut crossing =
            GenerationTransition { target, transition: &transition, generation: 0, options, deadline, begun: true };
        crossing.record_phase(Phase::Aborted)?;
        target.reload()?;
        return Ok(RestResult::None);
    };
    let wanted = wanted(&view, &transition);
    if wanted == RestRequest::Other {
        return Err(resting_error(target));
    }
    let mut crossing =
        GenerationTransition { target, transition: &transition, generation, options, deadline, begun: true };
    if wanted == RestRequest::Back {
        report.operation("abort");
        let threads = crossing.move_back(session, None, report).map_err(|error| rollback_error(error, number))?;
        crossing.record_phase(Phase::Aborted)?;
        update_lookup_table(target, report);
        target.reload()?;
        let active = transition.before.iter().filter_map(|n| view.patch(*n)).map(|p| p.name.clone()).collect();
        let duration_ns = now_ns() - start;
        return Ok(RestResult::Back(Outcome::Committed { transition: number, active, threads, duration_ns }));
    }
    let migrated = crossing.continue_resting(session, report).map_err(|error| rollback_error(error, number))?;
    update_lookup_table(target, report);
    let coming = transition.after.iter().filter(|n| !transition.before.contains(n)).filter_map(|n| view.patch(*n));
    let leaving = transition.before.iter().rev().filter(|n| !transition.after.contains(n));
    let leaving = leaving.filter_map(|n| view.patch(*n)).flat_map(|p| p.hooks.post_revert.clone());
    let post: Vec<Avma> = if transition.operation == "revert" {
        leaving.collect()
    } else {
        coming.flat_map(|p| p.hooks.post_apply.clone()).collect()
    };
    Ok(RestResult::Forward(outcome(&process, session, &view, &transition, migrated, &post, report, start)))
}

/// Returns the outcome of an operation.
#[allow(clippy::too_many_arguments)]
fn outcome(
    process: &Process,
    session: &mut Session<'_>,
    view: &View,
    transition: &Transition,
    migrated: MigrationResult,
    post: &[Avma],
    report: &mut Report<'_>,
    start: u64,
) -> Outcome {
    let MigrationResult { threads, staying } = migrated;
    if staying.is_empty() {
        return committed(process, session, view, transition, threads, post, report, start);
    }
    for busy in &staying {
        report.warn(format!("thread {} stays in {} and keeps the previous version", busy.tid, busy.function));
    }
    Outcome::Rests { transition: transition.number, threads, staying, duration_ns: now_ns() - start }
}

/// Reads an entry, or a constant, as a thread sees it.
fn read_as_thread(target: &Target, tid: Tid, at: Avma, len: usize) -> Option<Vec<u8>> {
    let mut now = vec![0; len];
    kernel::read_as(&target.process, tid, at, &mut now).then_some(now)
}

/// Returns true if a thread sees every entry, and every constant, as the active patches define it.
fn sees_active_patches(target: &Target, tid: Tid) -> bool {
    let view = &target.view;
    view.origins().into_iter().all(|(entry, origin)| {
        let expected = match view.version(&view.active, entry) {
            Version::Shipped => Some(origin.original),
            Version::Patched(_, function) => jump5(entry, function.new).ok(),
        };
        expected.is_some_and(|bytes| read_as_thread(target, tid, entry, JUMP_LEN).is_some_and(|seen| seen == bytes))
    }) && view.constants().all(|constant| {
        let expected = view.contents(&view.active, constant.at);
        read_as_thread(target, tid, constant.at, constant.new.len()).as_deref() == expected
    })
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
    finish_killed(session, target, options, report)?;
    let process = target.process.clone();
    let memory = process.memory();
    let Plan { mut transition, dispatchers } = plan;
    transition.sites.extend(lookup_redirect::site(memory, view, &transition.after)?);
    expect_old_side(memory, &transition)?;
    lookup_redirect::update_table(target, view, &[&transition.before[..], &transition.after].concat())?;
    if let Err(error) = call_hooks(&process, session, pre, true, report) {
        update_lookup_table(target, report);
        return Err(error);
    }
    // the calls use the room of a dispatcher that is not needed
    let nothing = || Error::Unsuitable { pid: process.pid(), what: "has nothing that this would change".into() };
    let room = transition.trampolines.first().map(|room| room.start);
    let scratch = dispatchers.first().map(|(at, _)| *at).or(room).ok_or_else(nothing)?;
    let moved = run_transition(session, target, &transition, scratch, options, report);
    update_lookup_table(target, report);
    Ok(outcome(&process, session, view, &transition, moved?, post, report, start))
}

/// Makes the generation, migrates every thread to it, and makes it the text of all; or moves all threads back.
fn run_transition(
    session: &mut Session<'_>,
    target: &mut Target,
    transition: &Transition,
    scratch: Avma,
    options: &Options,
    report: &mut Report<'_>,
) -> Result<MigrationResult, Error> {
    const { assert!(kernel::SCRATCH_LEN <= DISPATCH_LEN) };
    let process = target.process.clone();
    let mut points = match options.quiescence {
        Quiescence::Probe | Quiescence::Stop => None,
        _ => PointMigration::find(target)?,
    };
    if options.quiescence != Quiescence::Global {
        points.as_mut().map_or(Ok(()), PointMigration::check_filters)?;
    }
    let deadline = Instant::now() + options.timeout;
    let generation = in_phase(report, "create", |_| kernel::create(&process, session, transition, scratch))?;
    let mut crossing = GenerationTransition { target, transition, generation, options, deadline, begun: false };
    let result = crossing.migrate(session, points.as_mut(), report);
    let Err(error) = result else { return result };
    if matches!(error, Error::Ended(_) | Error::Unfinished { .. }) {
        return Err(error);
    }
    report.operation("abort");
    crossing.move_back(session, points.as_mut(), report).map_err(|second| rollback_error(second, transition.number))?;
    report.event(EventKind::FellBack { transition: Some(transition.number), reason: error.to_string() });
    Err(match error {
        Error::TimedOut { .. } => error,
        other => Error::RolledBack { transition: transition.number, source: Box::new(other) },
    })
}

/// A migration to a generation, and its rollback.
struct GenerationTransition<'w> {
    target: &'w mut Target,
    transition: &'w Transition,
    generation: u32,
    options: &'w Options,
    deadline: Instant,
    /// True if it is recorded in the ledger.
    begun: bool,
}

impl GenerationTransition<'_> {
    fn forbidden(&self, code: &[NamedSpan]) -> Forbidden {
        let mut trampolines = self.target.view.trampolines();
        trampolines.extend(&self.transition.trampolines);
        Forbidden::new(code, &trampolines, &self.transition.loop_entries)
    }

    /// Migrates every thread, or blocks those that change together, and makes the generation the text of all.
    fn migrate(
        &mut self,
        session: &mut Session<'_>,
        points: Option<&mut PointMigration>,
        report: &mut Report<'_>,
    ) -> Result<MigrationResult, Error> {
        let (goal, deadline) = ((self.generation, self.transition.number), self.deadline);
        let Some(points) = points else {
            let migrated = in_phase(report, "migrate", |report| self.migrate_each(session, None, report))?;
            return self.commit_migrated(session, None, migrated, report);
        };
        match self.options.quiescence {
            Quiescence::Group(name) => {
                points.ask(Mode::Others, name, goal, deadline)?;
                in_phase(report, "migrate", |report| self.migrate_each(session, Some(points), report))?;
                points.ask(Mode::Group, name, goal, deadline)?;
                in_phase(report, "gather", |report| self.commit_together(session, points, report))
            }
            Quiescence::Global => {
                points.ask(Mode::Global, Name::default(), goal, deadline)?;
                in_phase(report, "gather", |report| self.commit_together(session, points, report))
            }
            _ => {
                points.ask(Mode::Local, Name::default(), goal, deadline)?;
                let migrated = in_phase(report, "migrate", |report| self.migrate_each(session, Some(points), report))?;
                self.commit_migrated(session, Some(points), migrated, report)
            }
        }
    }

    /// Continues from the resting state: at quiescence points if that is requested, otherwise by probing.
    fn continue_resting(
        &mut self,
        session: &mut Session<'_>,
        report: &mut Report<'_>,
    ) -> Result<MigrationResult, Error> {
        let mut points = match self.options.quiescence {
            Quiescence::Local => PointMigration::find(self.target)?,
            _ => None,
        };
        points.as_mut().map_or(Ok(()), PointMigration::check_filters)?;
        let migrated = self.migrate(session, points.as_mut(), report);
        if let (Some(points), Err(Error::TimedOut { .. })) = (&mut points, &migrated) {
            points.abandon(session, report)?;
        }
        migrated
    }

    /// Migrates each thread by itself.
    fn migrate_each(
        &mut self,
        session: &mut Session<'_>,
        points: Option<&mut PointMigration>,
        report: &mut Report<'_>,
    ) -> Result<MigrationResult, Error> {
        let forbidden = self.forbidden(&self.transition.leave);
        // threads that change together wait for each other
        let by_itself = self.begun || matches!(self.options.quiescence, Quiescence::Probe | Quiescence::Local);
        let staying = if by_itself { &self.transition.staying[..] } else { &[] };
        let may_stay = Forbidden::new(staying, &[], &self.transition.loop_entries);
        let number = self.transition.number;
        let mut migration = Migration::new(self.target, (self.generation, number), forbidden, may_stay)?;
        let migrated = migration.run(session, report, points, self.deadline)?;
        fault::reach(&self.options.faults, FaultPoint::Migrated).map(|()| migrated)
    }

    /// Decides when all threads have migrated except those that may stay. The record is the commit point: a tool that finds it goes
    /// forward.
    fn commit_migrated(
        &mut self,
        session: &mut Session<'_>,
        points: Option<&mut PointMigration>,
        migrated: MigrationResult,
        report: &mut Report<'_>,
    ) -> Result<MigrationResult, Error> {
        let (process, number) = (self.target.process.clone(), self.transition.number);
        let unfinished = |source| Error::Unfinished { transition: number, source: Box::new(source) };
        if !migrated.staying.is_empty() {
            points.map_or(Ok(()), |points| points.abandon(session, report))?;
            return self.record_rest().map(|()| migrated).map_err(unfinished);
        }
        self.await_suspended(session, report)?;
        let decided = in_phase(report, "commit", |_| {
            self.begin()?;
            kernel::commit(&process, session, self.generation)?;
            points.map_or(Ok(()), PointMigration::release)?;
            self.record_phase(Phase::Committed)
        });
        decided.map(|()| migrated).map_err(unfinished)
    }

    /// Returns the reason why the program probably has stacks that must be searched like those of its threads, if there is one.
    fn stack_switch_reason(&self) -> Result<Option<String>, Error> {
        suspended_frames::switches_stacks(&self.target.process, &self.target.modules)
    }

    /// Waits until no frame of code to be left is found on a suspended stack; one may have appeared since the transition began.
    fn await_suspended(&self, session: &mut Session<'_>, report: &mut Report<'_>) -> Result<(), Error> {
        let Some(why) = self.stack_switch_reason()? else { return Ok(()) };
        let process = &self.target.process;
        let (ledger, allowed) = (self.target.store.as_ref().map(Store::at), self.options.allow_suspended_frames);
        let mut wait =
            suspended_frames::SuspendedFrameWait::new((process, why), self.transition, ledger, allowed, self.deadline);
        in_phase(report, "search suspended stacks", |report| {
            while let Some(until) = wait.search(report)? {
                event_pump::serve(process, session, until)?;
            }
            Ok(())
        })
    }

    /// Writes one record; a tool that finds it leaves all threads in place.
    fn record_rest(&mut self) -> Result<(), Error> {
        if self.begun {
            return Ok(());
        }
        let process = self.target.process.clone();
        let store = self.target.store.as_mut().ok_or(Error::NoWord(process.pid()))?;
        process.memory().write(self.transition.state, &[DispatchState::AllOtherwise as u8])?;
        store.append(process.memory(), Record::Rest(Box::new(self.transition.clone())))?;
        fault::reach(&self.options.faults, FaultPoint::Decided)
    }

    /// Commits while the threads that change together are blocked: in that moment the generation becomes the text of all.
    fn commit_together(
        &mut self,
        session: &mut Session<'_>,
        points: &mut PointMigration,
        report: &mut Report<'_>,
    ) -> Result<MigrationResult, Error> {
        let forbidden = self.forbidden(&self.transition.leave);
        let number = self.transition.number;
        let unfinished = |source| Error::Unfinished { transition: number, source: Box::new(source) };
        let modules = self.target.modules.clone();
        let frames = self.target.view.placed.iter().map(|patch| patch.eh_frame).collect();
        let generation = self.generation;
        let search = self.stack_switch_reason()?.is_some() && !self.options.allow_suspended_frames;
        let threads = points
            .gather(session, report, (modules, frames), &forbidden, generation, |frozen| self.decide(frozen, search))?;
        self.record_phase(Phase::Committed).map_err(unfinished)?;
        Ok(MigrationResult { threads, staying: Vec::new() })
    }

    /// Writes the record, and makes the kernel commit; on failure neither is active. Returns the obstacle if it is impossible now; with
    /// `search`, a frame on a suspended stack is one.
    fn decide(&mut self, frozen: &mut FrozenProcess<'_, '_>, search: bool) -> Result<Option<Busy>, Error> {
        if search {
            let (process, ledger) = (&self.target.process, self.target.store.as_ref().map(Store::at));
            let found =
                suspended_frames::search(process, &Forbidden::new(&self.transition.leave, &[], &[]), ledger)?.found;
            if let Some(frame) = found {
                return Ok(Some(Busy { tid: process.pid().leader(), function: frame.describe() }));
            }
        }
        let mut carrier = match frozen.carrier() {
            Err(tracee::Error::NoCarrier { pid, why }) => {
                return Ok(Some(Busy { tid: pid.leader(), function: why }));
            }
            other => other?,
        };
        let number = self.transition.number;
        self.begin().map_err(|source| Error::Unfinished { transition: number, source: Box::new(source) })?;
        if let Err(error) = kernel::commit_wherever(&mut carrier, self.generation) {
            undo_commit_record(self.target, self.transition)?;
            return Err(error.into());
        }
        Ok(None)
    }

    fn begin(&mut self) -> Result<(), Error> {
        let process = self.target.process.clone();
        let store = self.target.store.as_mut().ok_or(Error::NoWord(process.pid()))?;
        process.memory().write(self.transition.state, &[DispatchState::AllThen as u8])?;
        if !self.begun {
            store.append(process.memory(), Record::Begin(Box::new(self.transition.clone())))?;
        }
        fault::reach(&self.options.faults, FaultPoint::Decided)
    }

    fn record_phase(&mut self, phase: Phase) -> Result<(), Error> {
        let process = self.target.process.clone();
        let store = self.target.store.as_mut().ok_or(Error::NoWord(process.pid()))?;
        store.append(process.memory(), Record::Phase { transition: self.transition.number, phase })
    }

    /// Moves all threads back to the text of all, and deletes the generation.
    fn move_back(
        &mut self,
        session: &mut Session<'_>,
        points: Option<&mut PointMigration>,
        report: &mut Report<'_>,
    ) -> Result<u32, Error> {
        let process = self.target.process.clone();
        let until = Instant::now() + limits(self.options).back;
        points.map_or(Ok(()), |points| points.abandon(session, report))?;
        let forbidden = self.forbidden(&self.transition.enter);
        let mut back = Migration::new(self.target, (0, self.transition.number), forbidden, Forbidden::default())?;
        let migrated = in_phase(report, "migrate", |report| back.run(session, report, None, until))?;
        kernel::delete(&process, session, self.generation).map(|()| migrated.threads)
    }
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
