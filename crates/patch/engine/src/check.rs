//! Everything short of touching: what an operation would meet.

use crate::barrier;
use crate::calm::{self, ended_or, traced};
use crate::error::Busy;
use crate::ledger::Span;
use crate::link::{Layout, link};
use crate::operate::{Options, Ready, Target, already, find_room, ready, remaining};
use crate::plan::{Room, plan};
use crate::probe::Prober;
use crate::report::{Observer, Report};
use crate::scan::Forbidden;
use crate::store::Store;
use crate::suspended;
use crate::walk::Walker;
use crate::{Error, generation, place};
use stillpoint_events::EventKind;
use stillpoint_patch_format::{Avma, Signed};
use stillpoint_patch_tracee::{Pid, Process, Session, Stopped};

/// What a check found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prediction {
    /// It is applied already.
    pub already: bool,
    /// Functions that would be redirected.
    pub functions: Vec<String>,
    /// Bytes of memory that the patch would take.
    pub bytes: u64,
    /// Threads looked at.
    pub threads: u32,
    /// Threads that would block now, and by what.
    pub busy: Vec<Busy>,
}

/// Everything short of touching: all checks, and which threads would block if it were now.
pub fn check(pid: Pid, signed: &Signed, options: &Options, observer: Observer<'_>) -> Result<Prediction, Error> {
    let mut report = Report::new(observer, pid, "check");
    let target = Target::open(pid)?;
    generation::refuse(&target, options)?;
    let functions = signed.patch.functions.iter().map(|f| f.name.clone()).collect();
    if already(&target.view, signed) {
        return Ok(Prediction { already: true, functions, bytes: 0, threads: 0, busy: Vec::new() });
    }
    let Ready { prepared, values, len: bytes, .. } =
        ready(&target, signed, options).map_err(|error| ended_or(&target.process, error))?;
    let module = &target.modules[prepared.module];
    let layout = Layout::of(&signed.patch);
    let at = find_room(&target.mappings, module, layout.len(), 0)?;
    let mut image = link(&signed.patch, &layout, at, &values)
        .map_err(|source| Error::Link { patch: signed.patch.name.clone(), source })?;
    let placed = place::place(signed, None, module, &prepared, &layout, at, &mut image)?;
    let mut view = target.view.clone();
    view.placed.push(placed.into());
    let mut after = remaining(&view, signed, options);
    after.push(view.placed.len() as u32 - 1);
    let room = Room { state: Avma(at.0), dispatchers: Some(Span::new(at, 1 << 20)) };
    let transition = plan(&view, "check", &after, room, 0x80)?.transition;
    let forbidden = Forbidden::new(&transition.leave, &view.trampolines(), &transition.loop_entries);
    let process = target.process.clone();
    let frames = target.view.placed.iter().map(|p| p.eh_frame).collect();
    let walker = Walker::new(&process, target.modules.clone(), frames);
    walker.prepare();
    let mappings = target.mappings.clone();
    let (threads, busy) = traced(&process, |session| {
        let mut prober = Prober::new(mappings);
        look_at_all(session, &process, &mut prober, &walker, &forbidden, &mut report)
    })?;
    let mut busy = barrier::to_be_probed(&process, &target.modules, options.quiescence, busy)?;
    if suspended::switches_stacks(&process, &target.modules)?.is_some() {
        let code = Forbidden::new(&transition.leave, &[], &[]);
        let found = suspended::search(&process, &code, target.store.as_ref().map(Store::at))?.found;
        busy.extend(found.map(|frame| Busy { tid: pid.leader(), function: frame.describe() }));
    }
    Ok(Prediction { already: false, functions, bytes, threads, busy })
}

fn look_at_all(
    session: &mut Session<'_>,
    process: &Process,
    prober: &mut Prober,
    walker: &Walker<'_>,
    forbidden: &Forbidden,
    report: &mut Report<'_>,
) -> Result<(u32, Vec<Busy>), Error> {
    let mut found = Vec::new();
    let look = |stopped: &mut Stopped<'_>| {
        let look = prober.look(process, stopped)?;
        let verdict = walker.judge(&look, forbidden);
        if !verdict.is_free() {
            found.push(Busy { tid: stopped.tid(), function: verdict.describe() });
        }
        Ok(())
    };
    let threads = calm::each_thread(process, session, look, &mut |tid, ns| report.stopped(tid, "probe", ns))?;
    found.sort_unstable_by_key(|b| b.tid);
    for busy in &found {
        report.event(EventKind::ThreadBusy { tid: busy.tid.0, function: busy.function.clone() });
    }
    Ok((threads, found))
}
