//! Operations on one process: apply, revert, check; each runs checks, then one transition.

use crate::barrier::{self, Name};
use crate::error::Busy;
use crate::event_pump::{ended_or, traced};
use crate::fault::{self, FaultPoint};
use crate::generation::{self, RestRequest, RestResult, ThreadView};
use crate::inject::{self, MemoryRequest};
use crate::ledger::{OpenTransition, Phase, Record, Span, Transition, View};
use crate::link::{DISPATCHER_LEN, Layout, link, make_visible};
use crate::plan::{Plan, Room, changed_entries, dispatchers_missing, free_state, plan};
use crate::preflight::{Preflight, check_based_on, check_process, prepare};
use crate::probe::Prober;
use crate::report::{Observer, Report, now_ns};
use crate::resolve::resolve;
use crate::store::{self, Store};
use crate::suspended_frames;
use crate::transition::{Limits, Migrator};
use crate::walk::Walker;
use crate::{Error, arena, check, event_pump, lookup_redirect, memory_limit, placement, placement_reuse};
use std::time::Duration;
use stillpoint_events::{EventKind, patch};
use stillpoint_patch_format::{Avma, Patch, Scope, Signed};
use stillpoint_patch_insn::{DispatchState, JUMP_LEN};
use stillpoint_patch_tracee::{Mapping, Memory, Module, Pid, Process, Session, Stopped};

/// Way in which threads migrate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quiescence {
    /// Each by itself, when no patched function is on its stack; the other threads continue.
    Probe,
    /// Each by itself at its next quiescence point; threads without points are probed.
    Local,
    /// The threads of one group together, while they are blocked at their points; all others as `Local`.
    Group(Name),
    /// All together, while all are blocked at their points.
    Global,
    /// All at once, while all are stopped.
    Stop,
}

/// Options of an operation.
#[derive(Debug, Clone)]
pub struct Options {
    /// Way in which threads migrate.
    pub quiescence: Quiescence,
    /// Method by which each thread sees its version.
    pub view: ThreadView,
    /// Time limit for the migration of all threads; after it all are moved back.
    pub timeout: Duration,
    /// True if the patch supersedes all older ones of the same module.
    pub replace: bool,
    /// True for a dry run: all checks, no change.
    pub dry_run: bool,
    /// Key that signed the patch, if the signature was verified.
    pub signer: Option<String>,
    /// The intended process, if the caller has opened it: another process that has its number by now is refused.
    pub process: Option<Process>,
    /// True to continue although frames on suspended stacks may run old code, or cannot be searched for.
    pub allow_suspended_frames: bool,
    /// Points at which the operation fails, for tests.
    pub faults: Vec<FaultPoint>,
}

impl Default for Options {
    fn default() -> Self {
        let timeout = Duration::from_secs(10);
        Options {
            quiescence: Quiescence::Probe,
            view: ThreadView::default(),
            timeout,
            replace: false,
            dry_run: false,
            signer: None,
            process: None,
            allow_suspended_frames: false,
            faults: Vec::new(),
        }
    }
}

/// Result of a successful operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Every thread runs the new side.
    Committed {
        /// Number of the transition.
        transition: u32,
        /// Names of the patches active from now on, oldest first.
        active: Vec<String>,
        /// Number of threads moved.
        threads: u32,
        /// Duration of the operation in nanoseconds.
        duration_ns: u64,
    },
    /// Every thread runs the new side except those that stay in functions that the patch names.
    Rests {
        /// Number of the transition.
        transition: u32,
        /// Number of all threads.
        threads: u32,
        /// Threads that keep the old version, each with the code in which it stays.
        staying: Vec<Busy>,
        /// Duration of the operation in nanoseconds.
        duration_ns: u64,
    },
    /// The target was already in the requested state.
    AlreadyThere(String),
    /// Nothing was changed because of the dry run; the operation would succeed.
    DryRun(String),
}

/// Selection of patches to revert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PatchSelection {
    /// The newest active patch.
    Newest,
    /// The patch of this name; it must be the newest.
    Named(String),
    /// All active patches.
    All,
}

/// A process in its state before an operation changes it.
pub(crate) struct Target {
    pub(crate) process: Process,
    pub(crate) modules: Vec<Module>,
    pub(crate) mappings: Vec<Mapping>,
    pub(crate) store: Option<Store>,
    pub(crate) view: View,
}

impl Target {
    pub(crate) fn open(pid: Pid) -> Result<Self, Error> {
        let process = Process::open(pid)?;
        Target::inspect(process.clone()).map_err(|error| ended_or(&process, error))
    }

    fn inspect(process: Process) -> Result<Self, Error> {
        let mappings = process.mappings()?;
        let modules = process.modules_among(&mappings);
        check_process(&process, &mappings, &modules)?;
        let store = store::find_in(&process, &mappings)?;
        let view = store.as_ref().map(|s| s.view().clone()).unwrap_or_default();
        // it takes long: not while a thread is stopped
        process.signal_returns()?;
        Ok(Target { process, modules, mappings, store, view })
    }

    pub(crate) fn reload(&mut self) -> Result<(), Error> {
        self.mappings = self.process.mappings()?;
        self.store = store::refresh(&self.process, &self.mappings, self.store.take())?;
        self.view = self.store.as_ref().map(|s| s.view().clone()).unwrap_or_default();
        Ok(())
    }

    /// Returns the used bytes of the ledger: while their number is unchanged, no tool has changed anything.
    fn ledger_len(&self) -> usize {
        self.store.as_ref().map_or(0, |s| s.ledger.end)
    }
}

/// First distance in bytes below a library, when memory directly below it was mapped meanwhile: some stacks; it doubles each time.
const DISTANCE_MIN: u64 = 32 << 20;
/// Largest such distance in bytes, well within reach.
const DISTANCE_MAX: u64 = 1 << 30;

pub(crate) fn limits(options: &Options) -> Limits {
    Limits { migrate: options.timeout, back: options.timeout.max(Duration::from_secs(10)) }
}

/// Applies `signed` to the process `pid`, as one transition.
///
/// # Errors
/// [`Error::service_state`] of the error states if the process is unchanged, rolled back, unfinished or has ended.
pub fn apply(pid: Pid, signed: &Signed, options: &Options, observer: Observer<'_>) -> Result<Outcome, Error> {
    let mut report = Report::new(observer, pid, "apply");
    let mut target = Target::open(pid)?;
    // it is alive now, so the number was its own when the target was opened by number
    if options.process.as_ref().is_some_and(|process| !process.is_alive()) {
        return Err(stillpoint_patch_tracee::Error::Gone(pid).into());
    }
    generation::prepare(&mut target, options, &mut report)?;
    if target.view.unfinished.is_none() && is_applied(&target.view, signed) {
        return Ok(already_applied(&mut report, signed));
    }
    if options.dry_run {
        return Ok(Outcome::DryRun(check::predict(&target, signed, options, &mut report)?.summary()));
    }
    // The results from before the trace hold as long as no other tool has changed the ledger.
    let mut earlier_checks = None;
    if target.view.unfinished.is_none() {
        let checked = run_checks(&target, signed, options).map_err(|error| ended_or(&target.process, error))?;
        earlier_checks = Some((target.ledger_len(), checked));
    }
    let process = target.process.clone();
    process.prepare_remote().map_err(|error| ended_or(&process, error.into()))?;
    traced(&process, move |session| {
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
        if let RestResult::Forward(outcome) =
            generation::continue_resting(session, &mut target, wanted, options, &mut report, start)?
        {
            return Ok(outcome);
        }
        recover(session, &mut target, adds_patch, options, &mut report)?;
        if is_applied(&target.view, signed) {
            return Ok(already_applied(&mut report, signed));
        }
        let ready = match earlier_checks {
            Some((len, ready)) if len == target.ledger_len() => ready,
            _ => run_checks(&target, signed, options)?,
        };
        apply_in(session, &mut target, signed, ready, options, &mut report, start)
    })
}

pub(crate) fn is_applied(view: &View, signed: &Signed) -> bool {
    view.active.iter().filter_map(|n| view.patch(*n)).any(|p| p.digest == signed.digest)
}

fn already_applied(report: &mut Report<'_>, signed: &Signed) -> Outcome {
    let what = format!("patch {} is already applied", signed.patch.name);
    report.event(EventKind::AlreadyThere { what: what.clone() });
    Outcome::AlreadyThere(what)
}

/// Returns the patches that stay active below a new one.
pub(crate) fn remaining_patches(view: &View, signed: &Signed, options: &Options) -> Vec<u32> {
    let patch = &signed.patch;
    let stays = |n: &u32| {
        view.patch(*n).is_some_and(|p| {
            p.build_id != patch.target.build_id || !(options.replace || patch.replaces.contains(&p.name))
        })
    };
    view.active.iter().copied().filter(stays).collect()
}

/// Results of the checks that need no stopped thread.
pub(crate) struct CheckResult {
    pub(crate) prepared: Preflight,
    /// Values of the patch's symbols.
    pub(crate) values: Vec<Option<u64>>,
    /// The placed patch that can be reused.
    pub(crate) reused: Option<u32>,
    /// Number of bytes of memory needed.
    pub(crate) len: u64,
    /// Way to make the code visible to unwinders.
    pub(crate) unwind_support: lookup_redirect::UnwindSupport,
}

/// Runs all checks that need no stopped thread.
pub(crate) fn run_checks(target: &Target, signed: &Signed, options: &Options) -> Result<CheckResult, Error> {
    let patch = &signed.patch;
    let view = &target.view;
    let below = remaining_patches(view, signed, options);
    if below.iter().filter_map(|n| view.patch(*n)).any(|p| p.name == patch.name) {
        return Err(Error::NameTaken(patch.name.clone()));
    }
    check_view(view, view.active.iter().filter(|n| !below.contains(n)), Some(patch), options)?;
    suspended_frames::refuse_contexts(target, options)?;
    let prepared = prepare(&target.process, &target.modules, view, patch, options.quiescence)?;
    barrier::check_points(&target.process, &target.modules, options.quiescence)?;
    check_based_on(view, &below, patch)?;
    let module = &target.modules[prepared.module];
    let values = resolve(&target.process, &target.modules, module, view, patch)?;
    let layout = Layout::of(patch);
    let reused = placement_reuse::find(target, signed, options.signer.as_ref(), &prepared, &layout, &values);
    if reused.is_none() {
        let at = find_room(&target.mappings, module, layout.len(), 0)?;
        let linked = link(patch, &layout, at, &values).and_then(|mut image| make_visible(&layout, at, &mut image));
        linked.map_err(|source| Error::Link { patch: patch.name.clone(), source })?;
    }
    let unwind_support = lookup_redirect::unwind_support(&target.process, &target.modules, view, patch)?;
    let len = if reused.is_some() { 0 } else { layout.len() };
    memory_limit::check(target.process.pid(), len)?;
    Ok(CheckResult { prepared, values, reused, len, unwind_support })
}

/// Refuses to apply or revert by trampolines a patch that only generations support.
fn check_view<'n>(
    view: &View,
    dropped: impl Iterator<Item = &'n u32>,
    coming: Option<&Patch>,
    options: &Options,
) -> Result<(), Error> {
    if options.view != ThreadView::Trampoline {
        return Ok(());
    }
    let dropped = dropped.filter_map(|n| view.patch(*n)).filter(|p| !p.constants.is_empty()).map(|p| &p.name);
    let in_place = coming.filter(|p| !p.constants.is_empty()).map(|p| &p.name);
    if let Some(name) = in_place.into_iter().chain(dropped).next() {
        return Err(Error::ByGenerationsOnly(name.clone()));
    }
    match coming.filter(|p| !p.staying.is_empty()) {
        Some(p) => Err(Error::StayingByGenerationsOnly { patch: p.name.clone(), functions: p.staying.join(", ") }),
        None => Ok(()),
    }
}

fn module_span(module: &Module) -> Span {
    let start = module.mappings.iter().map(|m| m.start).min().unwrap_or(Avma(0));
    let end = module.mappings.iter().map(|m| m.end).max().unwrap_or(Avma(0));
    Span::new(start, end.0 - start.0)
}

pub(crate) fn find_room(mappings: &[Mapping], module: &Module, len: u64, distance: u64) -> Result<Avma, Error> {
    let found = arena::find(mappings, module_span(module), len, distance);
    found.ok_or_else(|| Error::NoRoom { len, module: module.path.clone() })
}

fn apply_in(
    session: &mut Session<'_>,
    target: &mut Target,
    signed: &Signed,
    ready: CheckResult,
    options: &Options,
    report: &mut Report<'_>,
    start: u64,
) -> Result<Outcome, Error> {
    let below = remaining_patches(&target.view, signed, options);
    let module = target.modules[ready.prepared.module].clone();
    report.started("inject");
    let injecting = now_ns();
    let number = match ready.reused {
        Some(number) => {
            place_lookup_redirect(session, target, &module, ready.unwind_support, report)?;
            number
        }
        None => place_in(session, target, signed, &module, ready, options, report)?,
    };
    fault::reach(&options.faults, FaultPoint::Placed)?;
    let store = target.store.as_ref().ok_or(Error::NoWord(target.process.pid()))?;
    let (view, word_offset) = (store.view().clone(), store.ledger.word_offset);
    let mut after = below;
    after.push(number);
    let operation = if after.len() <= view.active.len() { "replace" } else { "apply" };
    let state = free_state(&view, &[number]);
    let room = room(session, target, &module, &view, &after, state, report)?;
    report.ended("inject", now_ns() - injecting);
    let plan = plan(&view, operation, &after, room, word_offset)?;
    let hooks = view.patch(number).map(|p| p.hooks.clone()).unwrap_or_default();
    run(session, target, &view, plan, options, report, (&hooks.pre_apply, &hooks.post_apply), start)
}

/// Writes the patch and its unwind data into the target, where no jump leads to them yet; returns its number.
fn place_in(
    session: &mut Session<'_>,
    target: &mut Target,
    signed: &Signed,
    module: &Module,
    ready: CheckResult,
    options: &Options,
    report: &mut Report<'_>,
) -> Result<u32, Error> {
    let patch = &signed.patch;
    let CheckResult { prepared, values, unwind_support, .. } = ready;
    let layout = Layout::of(patch);
    let word_offset = match &target.store {
        Some(store) => store.ledger.word_offset,
        None => match barrier::own_word(&target.process, &target.modules)? {
            Some(offset) => offset,
            None => crate::generation_word::choose(&target.process, session, &mut |tid, ns| {
                report.stopped(tid, "check", ns)
            })?,
        },
    };
    let at = map_arena(session, target, module, layout.lens, word_offset, report)?;
    let unlinkable = |source| Error::Link { patch: patch.name.clone(), source };
    let mut image = link(patch, &layout, at, &values).map_err(unlinkable)?;
    let placed = placement::place(signed, options.signer.clone(), module, &prepared, &layout, at, &mut image)?;
    make_visible(&layout, at, &mut image).map_err(unlinkable)?;
    place_lookup_redirect(session, target, module, unwind_support, report)?;
    let memory = target.process.memory();
    for (segment, offset) in image.segments.iter().zip([0, layout.lens[0], layout.lens[0] + layout.lens[1]]) {
        if !segment.is_empty() {
            memory.write(Avma(at.0 + offset), segment)?;
        }
    }
    let store = target.store.as_mut().ok_or(Error::NoWord(target.process.pid()))?;
    store.append(memory, Record::Placed(Box::new(placed)))?;
    Ok(store.view().placed.len() as u32 - 1)
}

/// Places the lookup redirect near the C library, unless it is in memory.
fn place_lookup_redirect(
    session: &mut Session<'_>,
    target: &mut Target,
    module: &Module,
    unwind_support: lookup_redirect::UnwindSupport,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let entry = match unwind_support {
        lookup_redirect::UnwindSupport::Installed => return Ok(()),
        lookup_redirect::UnwindSupport::Place(entry) => entry,
        lookup_redirect::UnwindSupport::Unavailable(why) => {
            report.warn(format!("exceptions, thread cancellation and backtraces cannot pass through new code: {why}"));
            return Ok(());
        }
    };
    let library = target.modules[entry.module].clone();
    let word_offset = target.store.as_ref().map_or(0, |s| s.ledger.word_offset);
    let area = map_arena(session, target, &library, lookup_redirect::LENS, word_offset, report)?;
    let record = lookup_redirect::place(target, &entry, area, module_span(module))?;
    let store = target.store.as_mut().ok_or(Error::NoWord(target.process.pid()))?;
    store.append(target.process.memory(), Record::LookupRedirect(Box::new(record)))
}

/// Maps an arena near `module`, and the ledger if there is none yet.
fn map_arena(
    session: &mut Session<'_>,
    target: &mut Target,
    module: &Module,
    lens: [u64; 3],
    word_offset: i32,
    report: &mut Report<'_>,
) -> Result<Avma, Error> {
    let mut distance = 0;
    loop {
        target.mappings = target.process.mappings()?;
        let at = find_room(&target.mappings, module, lens.iter().sum(), distance)?;
        let wanted = MemoryRequest { arena: Some((at, lens)), ledger: target.store.is_none() };
        match inject::map(&target.process, session, wanted, &mut |tid, ns| report.stopped(tid, "carrier", ns)) {
            Ok(ledger) => {
                if let Some(ledger) = ledger {
                    target.store = Some(Store::create(target.process.memory(), ledger, word_offset)?);
                }
                return Ok(at);
            }
            // the target has mapped memory there meanwhile; a program that makes threads will do so again
            Err(Error::Tracee(stillpoint_patch_tracee::Error::RemoteSyscall { source, .. }))
                if distance < DISTANCE_MAX && source.kind() == std::io::ErrorKind::AlreadyExists =>
            {
                distance = (distance * 2).max(DISTANCE_MIN);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Returns room for the needs of a transition beyond the patches' own memory; maps it only if some is missing.
fn room(
    session: &mut Session<'_>,
    target: &mut Target,
    module: &Module,
    view: &View,
    after: &[u32],
    state: Option<Avma>,
    report: &mut Report<'_>,
) -> Result<Room, Error> {
    // the calls that change generations also need room
    let without = changed_entries(view, &view.active, after).is_empty();
    let missing = (dispatchers_missing(view, &view.active, after) as u64).max(without.into());
    if let (Some(state), 0) = (state, missing) {
        return Ok(Room { state, dispatchers: None });
    }
    let text = (missing.max(1) * DISPATCHER_LEN).next_multiple_of(4096);
    let word_offset = target.store.as_ref().map_or(0, |s| s.ledger.word_offset);
    let at = map_arena(session, target, module, [text, 4096, 0], word_offset, report)?;
    Ok(Room { state: state.unwrap_or(Avma(at.0 + text)), dispatchers: Some(Span::new(at, text)) })
}

fn migrator<'m, 's, 'p, 'r>(
    session: &'m mut Session<'s>,
    process: &'p Process,
    modules: Vec<Module>,
    store: &'m mut Store,
    view: &View,
    transition_trampolines: &[Span],
    report: &'m mut Report<'r>,
) -> Result<Migrator<'m, 's, 'p, 'r>, Error> {
    let switches_stacks = suspended_frames::switches_stacks(process, &modules)?;
    let prober = Prober::new(process.mappings()?);
    let frames = view.placed.iter().map(|p| p.eh_frame).collect();
    let walker = Walker::new(process, modules, frames);
    let mut trampolines = view.trampolines();
    trampolines.extend(transition_trampolines);
    Ok(Migrator {
        session,
        process,
        store,
        report,
        prober,
        walker,
        trampolines,
        new_thread_word: None,
        at_stop: Vec::new(),
        window: event_pump::Window::new(),
        initialised: Vec::new(),
        library: None,
        followed_request: Default::default(),
        faults: Vec::new(),
        switches_stacks,
        allow_suspended: false,
    })
}

pub(crate) type Hooks<'h> = (&'h [Avma], &'h [Avma]);

/// Writes the dispatchers and the intent, and runs the transition.
#[allow(clippy::too_many_arguments)]
fn run(
    session: &mut Session<'_>,
    target: &mut Target,
    view: &View,
    plan: Plan,
    options: &Options,
    report: &mut Report<'_>,
    (pre, post): Hooks<'_>,
    start: u64,
) -> Result<Outcome, Error> {
    if options.view == ThreadView::Generation {
        suspended_frames::refuse(target, &plan.transition, options)?;
        return generation::run(session, target, view, plan, options, report, (pre, post), start);
    }
    let process = target.process.clone();
    let Plan { mut transition, dispatchers } = plan;
    let memory = process.memory();
    transition.sites.extend(lookup_redirect::site(memory, view, &transition.after)?);
    lookup_redirect::update_table(target, view, &[&transition.before[..], &transition.after].concat())?;
    let store = target.store.as_mut().ok_or(Error::NoWord(process.pid()))?;
    expect_old_side(memory, &transition)?;
    memory.write(transition.state, &[DispatchState::AllOtherwise as u8])?;
    for (at, code) in &dispatchers {
        memory.write(*at, code)?;
    }
    store.append(memory, Record::Begin(Box::new(transition.clone())))?;
    if let Err(error) = call_hooks(&process, session, pre, true, report) {
        store.append(memory, Record::Phase { transition: transition.number, phase: Phase::Aborted })?;
        report.event(EventKind::FellBack { transition: Some(transition.number), reason: error.to_string() });
        update_lookup_table(target, report);
        return Err(Error::RolledBack { transition: transition.number, source: Box::new(error) });
    }
    let modules = target.modules.clone();
    let mut migrator = migrator(session, &process, modules, store, view, &transition.trampolines, report)?;
    migrator.faults.clone_from(&options.faults);
    migrator.allow_suspended = options.allow_suspended_frames;
    let moved = migrator.run(&transition, options.quiescence, limits(options));
    update_lookup_table(target, report);
    let threads = moved?;
    Ok(committed(&process, session, view, &transition, threads, post, report, start))
}

/// Checks that every entry and constant holds the bytes that the transition replaces.
pub(crate) fn expect_old_side(memory: &Memory, transition: &Transition) -> Result<(), Error> {
    for site in &transition.sites {
        let mut now = [0; JUMP_LEN];
        memory.read(site.entry, &mut now)?;
        if let Some(offset) = (0..JUMP_LEN).find(|i| now[*i] != site.from.bytes[*i]) {
            return Err(Error::BytesDiffer { function: site.name.clone(), at: site.entry, offset });
        }
    }
    for constant in &transition.constants {
        let now = memory.read_vec(constant.at, constant.from.len())?;
        if let Some(offset) = now.iter().zip(&constant.from).position(|(a, b)| a != b) {
            return Err(Error::BytesDiffer { function: constant.name.clone(), at: constant.at, offset });
        }
    }
    Ok(())
}

/// Calls the hooks that follow the commit, and reports it: all threads have migrated.
#[allow(clippy::too_many_arguments)]
pub(crate) fn committed(
    process: &Process,
    session: &mut Session<'_>,
    view: &View,
    transition: &Transition,
    threads: u32,
    post: &[Avma],
    report: &mut Report<'_>,
    start: u64,
) -> Outcome {
    if let Err(error) = call_hooks(process, session, post, false, report) {
        report.warn(format!("a hook after the commit failed: {error}"));
    }
    let names = transition.after.iter().filter_map(|n| view.patch(*n)).map(|p| p.name.clone());
    let active: Vec<String> = names.collect();
    let duration_ns = now_ns() - start;
    let number = transition.number;
    report.event(patch::Event::Committed { transition: number, active: active.clone(), duration_ns, threads });
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

const HOOK_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn call_hooks(
    process: &Process,
    session: &mut Session<'_>,
    hooks: &[Avma],
    must_be_zero: bool,
    report: &mut Report<'_>,
) -> Result<(), Error> {
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

/// Completes or rolls back the transition of a killed tool, or one that a process inherited from a parent in the middle of it. Returns true
/// if it did what is `wanted`. It goes forward only in that case: threads that have migrated keep the new side.
fn recover(
    session: &mut Session<'_>,
    target: &mut Target,
    wanted: impl Fn(&View, &Transition) -> bool,
    options: &Options,
    report: &mut Report<'_>,
) -> Result<bool, Error> {
    target.reload()?;
    generation::undo_decision(target, report)?;
    let Some(open) = target.view.unfinished.clone() else { return Ok(false) };
    // probing completes a transition in which each thread may migrate by itself; any other has to begin again
    let forward = wanted(&target.view, &open.transition) && allows_mixed_versions(&target.view, &open.transition);
    report.warn(format!("a tool that was killed left transition {} unfinished", open.transition.number));
    let process = target.process.clone();
    let (view, modules) = (target.view.clone(), target.modules.clone());
    let store = target.store.as_mut().ok_or(Error::NoWord(process.pid()))?;
    let mut migrator = migrator(session, &process, modules, store, &view, &[], report)?;
    migrator.faults.clone_from(&options.faults);
    migrator.allow_suspended = options.allow_suspended_frames;
    let completed = migrator.recover(&open, forward, limits(options));
    update_lookup_table(target, report);
    Ok(completed? && forward)
}

/// Returns true if all patches that come or go allow threads of old and new code side by side.
fn allows_mixed_versions(view: &View, transition: &Transition) -> bool {
    let moved = |n: &&u32| transition.before.contains(n) != transition.after.contains(n);
    let patches = transition.before.iter().chain(&transition.after).filter(moved).filter_map(|n| view.patch(*n));
    patches.into_iter().all(|p| p.scope == Scope::ThreadLocal)
}

/// Completes or rolls back the transition of a killed tool in `pid`; returns true if there was one.
///
/// # Errors
/// [`Error::service_state`] of the error states if the transition is unchanged or still unfinished.
pub fn recover_only(pid: Pid, options: &Options, observer: Observer<'_>) -> Result<bool, Error> {
    let mut report = Report::new(observer, pid, "recover");
    let mut target = Target::open(pid)?;
    let rests = |open: &OpenTransition| open.phase == Some(Phase::Resting);
    if target.view.unfinished.as_ref().is_none_or(rests) {
        return Ok(false);
    }
    let process = target.process.clone();
    traced(&process, move |session| recover(session, &mut target, |_, _| false, options, &mut report).map(|_| true))
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
    traced(&process, move |session| {
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
        let mut outcome = None;
        match generation::continue_resting(session, &mut target, rest_request, options, &mut report, start)? {
            RestResult::Forward(done @ Outcome::Rests { .. }) => return Ok(done),
            RestResult::Forward(done) | RestResult::Back(done) if *selection != PatchSelection::All => return Ok(done),
            RestResult::Forward(done) | RestResult::Back(done) => outcome = Some(done),
            RestResult::None => {}
        }
        target.reload()?;
        if recover(session, &mut target, drops_patches, options, &mut report)? && *selection != PatchSelection::All {
            return Ok(Outcome::AlreadyThere("the unfinished revert is complete now".into()));
        }
        loop {
            let dropped = match patches_to_revert(pid, &target.view, selection) {
                Err(Error::NothingActive(_)) => break,
                dropped => dropped?,
            };
            let done = revert_in(session, &mut target, &dropped, options, &mut report, start)?;
            let rests = matches!(done, Outcome::Rests { .. });
            outcome = Some(done);
            target.reload()?;
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
    match selection {
        PatchSelection::Newest => Ok(vec![top]),
        PatchSelection::All => {
            let module = view.patch(top).map(|p| (p.build_id.clone(), p.bias));
            let same = |n: &u32| view.patch(*n).map(|p| (p.build_id.clone(), p.bias)) == module;
            Ok(view.active.iter().copied().filter(same).collect())
        }
        PatchSelection::Named(wanted) => {
            let place = view.active.iter().position(|n| name(*n) == *wanted);
            let place = place.ok_or_else(|| Error::NotActive(wanted.clone()))?;
            if place + 1 < view.active.len() {
                return Err(Error::NotOnTop { below: wanted.clone(), above: name(top) });
            }
            Ok(vec![top])
        }
    }
}

fn revert_in(
    session: &mut Session<'_>,
    target: &mut Target,
    dropped: &[u32],
    options: &Options,
    report: &mut Report<'_>,
    start: u64,
) -> Result<Outcome, Error> {
    let view = target.view.clone();
    check_view(&view, dropped.iter(), None, options)?;
    let after: Vec<u32> = view.active.iter().copied().filter(|n| !dropped.contains(n)).collect();
    let patches: Vec<_> = dropped.iter().filter_map(|n| view.patch(*n)).collect();
    for patch in &patches {
        barrier::check_scope(&patch.name, patch.scope, options.quiescence)?;
    }
    barrier::check_points(&target.process, &target.modules, options.quiescence)?;
    let first = patches.first().ok_or(Error::NothingActive(target.process.pid()))?;
    let module = target.modules.iter().find(|m| m.bias == first.bias && m.build_id.as_ref() == Some(&first.build_id));
    let fallback = || target.modules.iter().find(|m| m.executable);
    let module = module.or_else(fallback).cloned().ok_or(Error::NothingActive(target.process.pid()))?;
    for patch in patches.iter().filter(|p| !p.escaping.is_empty()) {
        let names = patch.escaping.join(", ");
        report.warn(format!("addresses of {} may remain in data: {names}; its memory stays mapped", patch.name));
    }
    let state = free_state(&view, dropped);
    let room = room(session, target, &module, &view, &after, state, report)?;
    let word_offset = target.store.as_ref().map_or(0, |s| s.ledger.word_offset);
    let plan = plan(&view, "revert", &after, room, word_offset)?;
    let pre: Vec<Avma> = patches.iter().rev().flat_map(|p| p.hooks.pre_revert.clone()).collect();
    let post: Vec<Avma> = patches.iter().rev().flat_map(|p| p.hooks.post_revert.clone()).collect();
    run(session, target, &view, plan, options, report, (&pre, &post), start)
}
