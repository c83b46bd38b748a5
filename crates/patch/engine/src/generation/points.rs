//! Threads with quiescence points: they migrate to a generation by themselves, or block until it is the code of all.

use super::kernel;
use crate::error::Busy;
use crate::generation_word::word_value;
use crate::ledger::Span;
use crate::points::abi::{GatherOutcome, Mode, Name, Request};
use crate::points::rendezvous::{self, StackExaminer, describe};
use crate::points::{Library, ThreadState};
use crate::probe::Prober;
use crate::report::{Report, now_ns};
use crate::scan::Forbidden;
use crate::target::Target;
use crate::walk::Walker;
use crate::{Error, event_pump};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use stillpoint_events::patch;
use stillpoint_patch_tracee::{self as tracee, FrozenProcess, Process, Session, Tid};

/// Interval of the reads of the slots; reading them stops no thread.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Additional time in which threads may migrate by themselves after the tool's own deadline: the library gives up only if the tool is gone.
const LIBRARY_GRACE: Duration = Duration::from_secs(5);

/// libstillpoint of a process, and the present request to it.
pub(super) struct PointMigration {
    process: Process,
    library: Library,
    request: Option<Request>,
}

impl PointMigration {
    /// Returns `None` if the process has no such library.
    pub(super) fn find(target: &Target) -> Result<Option<PointMigration>, Error> {
        let process = target.process.clone();
        let library = Library::find(&process, &target.modules)?;
        Ok(library.map(|library| PointMigration { process, library, request: None }))
    }

    /// Refuses threads whose seccomp filter could kill them for the call that migrates them: the library makes it without a check.
    pub(super) fn check_filters(&mut self) -> Result<(), Error> {
        let slots = self.library.slots(self.process.memory())?;
        let threads: Vec<Tid> = self.process.threads()?.iter().map(|thread| thread.tid).collect();
        self.library.update_tids(&self.process, &threads);
        for tid in slots.iter().filter_map(|slot| self.library.thread(slot)) {
            if self.process.thread_status(tid).is_ok_and(|status| status.seccomp != 0) {
                let pid = self.process.pid();
                let what =
                    "has threads with seccomp filters, which may not change generations by themselves; --quiescence \
                            probe migrates them"
                        .to_owned();
                return Err(Error::Unsuitable { pid, what });
            }
        }
        Ok(())
    }

    /// Asks threads to migrate to the generation of a transition, or to block until it is the code of all. No thread's word is written, so
    /// its offset does not matter.
    pub(super) fn ask(
        &mut self,
        mode: Mode,
        group: Name,
        (generation, number): (u32, u32),
        deadline: Instant,
    ) -> Result<(), Error> {
        let word = (0, word_value(number));
        let more = if matches!(mode, Mode::Local | Mode::Others) { LIBRARY_GRACE } else { Duration::ZERO };
        let left = deadline.saturating_duration_since(Instant::now()) + more;
        let until = now_ns() + left.as_nanos() as u64;
        self.request = Some(self.library.send_request(&self.process, mode, group, word, generation, until)?);
        Ok(())
    }

    /// Returns which of these threads will migrate by themselves, each with its location, and which are not to migrate at all.
    pub(super) fn self_migrating(&mut self, threads: &[Tid]) -> Result<(BTreeMap<Tid, String>, BTreeSet<Tid>), Error> {
        let (mut going, mut staying) = (BTreeMap::new(), BTreeSet::new());
        let Some(request) = &self.request else { return Ok((going, staying)) };
        self.library.update_tids(&self.process, threads);
        for slot in self.library.slots(self.process.memory())? {
            let Some(tid) = self.library.thread(&slot) else { continue };
            if request.mode == Mode::Others && slot.group == request.group {
                staying.insert(tid);
            } else if slot.state == ThreadState::Active && !request.is_taken_by(&slot) {
                going.insert(tid, describe(&slot));
            }
        }
        Ok((going, staying))
    }

    /// Waits until all threads that must block are blocked, and does `work` in that moment, with the process frozen.
    pub(super) fn gather(
        &mut self,
        session: &mut Session<'_>,
        report: &mut Report<'_>,
        (modules, frames): (Vec<tracee::Module>, Vec<Span>),
        forbidden: &Forbidden,
        generation: u32,
        mut work: impl FnMut(&mut FrozenProcess<'_, '_>) -> Result<Option<Busy>, Error>,
    ) -> Result<u32, Error> {
        let process = self.process.clone();
        let Some(request) = self.request else { return Err(Error::NoWord(process.pid())) };
        let walker = Walker::new(&process, modules, frames);
        let mut prober = Prober::new(process.mappings()?);
        walker.prepare();
        let (mut reported, mut last) = (BTreeSet::new(), Vec::new());
        loop {
            event_pump::serve(&process, session, Instant::now() + POLL_INTERVAL)?;
            let mut busy = rendezvous::awaited(&process, &mut self.library, &request, &session.threads())?;
            // the blocked threads have continued: the other threads are the cause
            if rendezvous::is_over(&process, &self.library, &request)? {
                return Err(Error::TimedOut(if last.is_empty() { busy } else { last }));
            }
            if busy.is_empty() {
                let examiner = StackExaminer { prober: &mut prober, walker: &walker, forbidden };
                let over = |tid| kernel::generation_of(&process, tid) == Some(generation);
                let mut frozen = match session.freeze() {
                    Err(tracee::Error::Unstoppable { tid, why }) => {
                        last = vec![Busy { tid, function: why }];
                        continue;
                    }
                    other => other?,
                };
                busy = rendezvous::blocking_threads(
                    &mut frozen,
                    &process,
                    &self.library,
                    &request,
                    examiner,
                    |tid, _| over(tid),
                )?;
                let worked = if busy.is_empty() { work(&mut frozen) } else { Ok(None) };
                let done = busy.is_empty() && matches!(worked, Ok(None));
                if done {
                    self.library.write_outcome(process.memory(), GatherOutcome::Released)?;
                }
                for (tid, stopped_ns) in frozen.thaw()? {
                    report.stopped(tid, "freeze: commit", stopped_ns);
                }
                busy.extend(worked?);
                if done {
                    self.request = None;
                    self.library.wake(&process);
                    return Ok(session.threads().len() as u32);
                }
            }
            for b in busy.iter().filter(|b| reported.insert((b.tid, b.function.clone()))) {
                report.event(patch::Event::ThreadBusy { tid: b.tid.0, function: b.function.clone() });
            }
            last = busy;
        }
    }

    /// Returns true if threads may still act on a request to migrate to a generation, of this tool or another.
    pub(super) fn has_pending_request(&self) -> Result<bool, Error> {
        let control = self.library.control(self.process.memory())?;
        Ok(control.pending().is_some_and(|request| request.generation != 0))
    }

    /// Releases the request: its generation is the code of all.
    pub(super) fn release(&mut self) -> Result<(), Error> {
        self.request = None;
        if self.has_pending_request()? {
            self.library.write_outcome(self.process.memory(), GatherOutcome::Released)?;
            self.library.wake(&self.process);
        }
        Ok(())
    }

    /// Abandons the request: no thread migrates to a generation, or blocks for it, any more.
    pub(super) fn abandon(&mut self, session: &mut Session<'_>, report: &mut Report<'_>) -> Result<(), Error> {
        self.request = None;
        let limit = Instant::now() + rendezvous::LOCK_TIMEOUT;
        while self.has_pending_request()? && !rendezvous::abandon(&self.process, session, &mut self.library, report)? {
            if Instant::now() > limit {
                return Err(Error::TimedOut(vec![rendezvous::lock_holder(&self.process)]));
            }
            event_pump::serve(&self.process, session, Instant::now() + POLL_INTERVAL)?;
        }
        Ok(())
    }
}
