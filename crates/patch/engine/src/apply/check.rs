//! Dry run: all checks of an operation, without changing the target.

use super::checks::{CheckResult, find_room, is_applied, remaining_patches, run_checks};
use super::mapping::{self, MemoryRequest};
use super::plan::{Room, plan};
use super::{memory_limit, placement};
use crate::data_change::DataRoom;
use crate::error::Busy;
use crate::event_pump::{self, ended_or, traced};
use crate::ledger::Span;
use crate::link::{Layout, link};
use crate::probe::Prober;
use crate::report::{Observer, Report};
use crate::scan::Forbidden;
use crate::target::Target;
use crate::walk::Walker;
use crate::{Error, Options, Quiescence, generation, generation_word, points, suspended_frames};
use stillpoint_events::patch;
use stillpoint_patch_format::{Avma, Signed};
use stillpoint_patch_tracee::{Pid, Process, Session, Stopped};

/// Result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prediction {
    /// True if the patch is applied already.
    pub already: bool,
    /// Functions that would be redirected.
    pub functions: Vec<String>,
    /// Variables and constants that would be written.
    pub data: Vec<String>,
    /// Memory that the patch would take, in bytes.
    pub bytes: u64,
    /// Number of threads examined.
    pub threads: u32,
    /// Threads that would block now, each with the code that blocks it.
    pub busy: Vec<Busy>,
    /// Conditions that the operation may meet and that a check cannot see in advance.
    pub unchecked: Vec<String>,
}

/// Runs all checks without changing the target, and returns the threads that would block now.
///
/// # Errors
/// The same refusals as of [`apply`](crate::apply), or the process cannot be read or traced, or has ended.
pub fn check(pid: Pid, signed: &Signed, options: &Options, observer: Observer<'_>) -> Result<Prediction, Error> {
    let mut report = Report::new(observer, pid, "check");
    let target = Target::open(pid)?;
    generation::refuse(&target, options)?;
    if is_applied(&target.view, signed) {
        return Ok(Prediction { already: true, functions: names(signed), ..Prediction::default() });
    }
    predict(&target, signed, options, &mut report)
}

fn names(signed: &Signed) -> Vec<String> {
    signed.patch.functions.iter().map(|f| f.name.clone()).collect()
}

/// Predicts the result of applying, including the remote calls and the state of the threads.
pub(crate) fn predict(
    target: &Target,
    signed: &Signed,
    options: &Options,
    report: &mut Report<'_>,
) -> Result<Prediction, Error> {
    let CheckResult { prepared, values, reused, len: bytes, .. } =
        run_checks(target, signed, options).map_err(|error| ended_or(&target.process, error))?;
    let module = &target.modules[prepared.module];
    let layout = Layout::of(&signed.patch);
    let at = find_room(&target.mappings, module, layout.len(), 0)?;
    let mut image = link(&signed.patch, &layout, at, &values)
        .map_err(|source| Error::Link { patch: signed.patch.name.clone(), source })?;
    let placed = placement::place(signed, None, module, &prepared, &layout, at, &mut image)?;
    let mut view = target.view.clone();
    view.placed.push(placed.into());
    let mut after = remaining_patches(&view, signed, options);
    after.push(view.placed.len() as u32 - 1);
    let data = Some(DataRoom { completer: at, list: at, state: at });
    let room = Room { state: Avma(at.0), dispatchers: Some(Span::new(at, 1 << 20)), data };
    let transition = plan(&view, "check", &after, room, 0x80)?.transition;
    let forbidden = Forbidden::new(&transition.leave, &view.trampolines(), &transition.loop_entries);
    let process = target.process.clone();
    process.prepare_remote().map_err(|error| ended_or(&process, error.into()))?;
    let frames = target.view.placed.iter().map(|p| p.eh_frame).collect();
    let walker = Walker::new(&process, target.modules.clone(), frames);
    walker.prepare();
    let mappings = target.mappings.clone();
    let is_first = target.store.is_none();
    let wanted = MemoryRequest { arena: reused.is_none().then_some((at, layout.lens)), ledger: is_first };
    let needs_word = is_first && points::own_word(&process, &target.modules)?.is_none();
    let (threads, busy) = traced(&process, |session| {
        let mut stopped = |tid, ns| report.stopped(tid, "check", ns);
        mapping::check_calls(&process, session, wanted, &mut stopped)?;
        if needs_word {
            generation_word::choose(&process, session, &mut stopped)?;
        }
        let mut prober = Prober::new(mappings);
        examine_threads(session, &process, &mut prober, &walker, &forbidden, report)
    })?;
    let mut busy = points::to_be_probed(&process, &target.modules, options.quiescence, busy)?;
    let mut unchecked = unchecked(target, signed, options, bytes);
    if suspended_frames::switches_stacks(&process, &target.modules)?.is_some() {
        let code = Forbidden::new(&transition.leave, &[], &[]);
        let search = suspended_frames::search(&process, &code, target.ledger_at())?;
        let tid = process.pid().leader();
        busy.extend(search.found.map(|frame| Busy { tid, function: frame.describe() }));
        if search.left > 0 {
            unchecked.push(format!("{} MiB that may hold suspended frames", search.left.div_ceil(1 << 20)));
        }
    }
    let (functions, data) = (names(signed), signed.patch.data.iter().map(|change| change.name.clone()).collect());
    Ok(Prediction { already: false, functions, data, bytes, threads, busy, unchecked })
}

/// Returns the conditions that can still prevent the patch although all checks permit it.
fn unchecked(target: &Target, signed: &Signed, options: &Options, bytes: u64) -> Vec<String> {
    let mut unchecked = Vec::new();
    if let Some(open) = &target.view.unfinished {
        let number = open.transition.number;
        unchecked.push(format!("the completion of transition {number}, which a killed tool left unfinished"));
    }
    if !signed.patch.hooks.pre_apply.is_empty() {
        unchecked.push("the patch's hooks, which may refuse".to_owned());
    }
    if bytes > 0 && memory_limit::has_address_limit(target.process.pid()) {
        unchecked.push(format!("the target's address space limit (RLIMIT_AS), which {bytes} more bytes could exceed"));
    }
    unchecked.push(match options.quiescence {
        Quiescence::Probe | Quiescence::Stop => {
            "functions that threads enter from now on, and threads that start from now on".to_owned()
        }
        _ => "the time until threads reach their quiescence points".to_owned(),
    });
    unchecked
}

impl Prediction {
    /// Returns one line for people.
    pub(crate) fn summary(&self) -> String {
        /// Largest number of threads that are named.
        const THREADS_SHOWN: usize = 4;
        let (functions, bytes, threads) = (self.functions.len(), self.bytes, self.threads);
        let mut text = format!("{functions} functions, {bytes} bytes, {threads} threads");
        if !self.data.is_empty() {
            text += &format!("; {} variables are written", self.data.len());
        }
        for busy in self.busy.iter().take(THREADS_SHOWN) {
            text += &format!("; thread {} would have to leave {} first", busy.tid, busy.function);
        }
        if self.busy.len() > THREADS_SHOWN {
            text += &format!("; and {} more threads", self.busy.len() - THREADS_SHOWN);
        }
        text + "; not checked: " + &self.unchecked.join("; ")
    }
}

fn examine_threads(
    session: &mut Session<'_>,
    process: &Process,
    prober: &mut Prober,
    walker: &Walker<'_>,
    forbidden: &Forbidden,
    report: &mut Report<'_>,
) -> Result<(u32, Vec<Busy>), Error> {
    let mut found = Vec::new();
    let examine = |stopped: &mut Stopped<'_>| {
        let snapshot = prober.snapshot(process, stopped)?;
        let verdict = walker.judge(&snapshot, forbidden);
        if !verdict.is_free() {
            found.push(Busy { tid: stopped.tid(), function: verdict.describe() });
        }
        Ok(())
    };
    let threads = event_pump::each_thread(process, session, examine, &mut |tid, ns| report.stopped(tid, "probe", ns))?;
    found.sort_unstable_by_key(|b| b.tid);
    for busy in &found {
        report.event(patch::Event::ThreadBusy { tid: busy.tid.0, function: busy.function.clone() });
    }
    Ok((threads, found))
}
