//! Threads that migrate by themselves, and the moment at which blocked threads migrate.

use super::migrate::{Direction, PendingThread, holds};
use super::{Trampolines, data};
use crate::error::Busy;
use crate::generation_word::{transition_of_word, word_value};
use crate::ledger::Transition;
use crate::points::Library;
use crate::points::abi::{GatherOutcome, Mode, Name, Request};
use crate::points::rendezvous::{self, StackExaminer, describe};
use crate::report::now_ns;
use crate::scan::Forbidden;
use crate::{Error, Quiescence};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use stillpoint_base::Backoff;
use stillpoint_events::patch;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::Tid;

/// Interval of the reads of the slots; reading them stops no thread.
const POLL_INTERVAL_MIN: Duration = Duration::from_micros(100);
const POLL_INTERVAL_MAX: Duration = Duration::from_millis(1);

/// A request that threads follow.
#[derive(Debug, Default)]
pub(super) struct FollowedRequest {
    request: Option<Request>,
    /// Threads that the library knows and that have not migrated: they must not be probed.
    self_migrating: BTreeSet<Tid>,
}

impl FollowedRequest {
    /// Returns true if a thread migrates by itself.
    pub(super) fn migrates_itself(&self, tid: Tid) -> bool {
        self.self_migrating.contains(&tid)
    }
}

impl Trampolines<'_, '_, '_> {
    /// Migrates every thread in a mode with quiescence points.
    pub(super) fn migrate_at_points(
        &mut self,
        transition: &Transition,
        how: Quiescence,
        deadline: Instant,
    ) -> Result<u32, Error> {
        self.find_library()?;
        match how {
            Quiescence::Group(name) => {
                self.migrate_singly(transition, Mode::Others, name, deadline)?;
                self.in_phase("gather", |m| m.commit_together(transition, Mode::Group, name, deadline))
            }
            Quiescence::Global => {
                self.in_phase("gather", |m| m.commit_together(transition, Mode::Global, Name::default(), deadline))
            }
            _ => self.migrate_singly(transition, Mode::Local, Name::default(), deadline),
        }
    }

    /// Migrates each thread by itself: at its point if it has one, otherwise by probing.
    fn migrate_singly(
        &mut self,
        transition: &Transition,
        mode: Mode,
        group: Name,
        deadline: Instant,
    ) -> Result<u32, Error> {
        self.decide_per_thread(transition)?;
        let request = self.send_request(transition, mode, group, deadline)?;
        self.followed_request.request = Some(request);
        let moved = self.in_phase("migrate", |m| m.move_threads(transition, Direction::Forward, deadline));
        self.followed_request = FollowedRequest::default();
        // in a group's request new threads may be members: they stay on the old side until the others migrate with them
        self.new_thread_word = None;
        moved
    }

    fn send_request(
        &mut self,
        transition: &Transition,
        mode: Mode,
        group: Name,
        deadline: Instant,
    ) -> Result<Request, Error> {
        let left = deadline.saturating_duration_since(Instant::now()).as_nanos() as u64;
        let word = (self.word_offset, word_value(transition.number));
        let Some(library) = &mut self.library else { return Err(self.no_library(mode)) };
        library.send_request(self.cx.process, mode, group, word, 0, now_ns() + left)
    }

    /// Looks for the library if that was not done yet.
    pub(super) fn find_library(&mut self) -> Result<(), Error> {
        if self.library.is_none() {
            self.library = Library::find(self.cx.process, &self.cx.process.modules()?)?;
        }
        Ok(())
    }

    fn no_library(&self, mode: Mode) -> Error {
        let why = "its libstillpoint is not mapped any more".to_owned();
        Error::NoPoints { pid: self.cx.process.pid(), mode: format!("{mode:?}").to_lowercase(), why }
    }

    /// Records the threads that have migrated by themselves, and those that have not yet.
    pub(super) fn track_self_migrating(
        &mut self,
        threads: &[Tid],
        waiting: &mut BTreeMap<Tid, PendingThread>,
        done: &mut BTreeMap<Tid, Avma>,
    ) -> Result<(), Error> {
        let (Some(request), Some(library)) = (&self.followed_request.request, &mut self.library) else { return Ok(()) };
        library.update_tids(self.cx.process, threads);
        self.followed_request.self_migrating.clear();
        for slot in library.slots(self.cx.process.memory())? {
            let Some(tid) = library.thread(&slot).filter(|tid| !done.contains_key(tid)) else { continue };
            // it was asked to stop before it was known: the probe's result is equally good
            if waiting.get(&tid).is_some_and(|t| t.stop_requested) {
                continue;
            }
            if request.awaits(&slot) {
                let pending = waiting.entry(tid).or_insert_with(PendingThread::new);
                if pending.update_location(describe(&slot)) {
                    self.cx.report.event(patch::Event::ThreadBusy { tid: tid.0, function: describe(&slot) });
                }
                self.followed_request.self_migrating.insert(tid);
                continue;
            }
            waiting.remove(&tid);
            // its control block was not read, and belongs to no other thread
            done.insert(tid, Avma(0));
            if request.is_taken_by(&slot) {
                let transition = transition_of_word(slot.word).unwrap_or_default();
                self.cx.report.event(patch::Event::ThreadMigrated { tid: tid.0, transition });
            }
        }
        Ok(())
    }

    /// Waits until all of them are blocked, and commits in that moment.
    fn commit_together(
        &mut self,
        transition: &Transition,
        mode: Mode,
        group: Name,
        deadline: Instant,
    ) -> Result<u32, Error> {
        let request = self.send_request(transition, mode, group, deadline)?;
        let forbidden = self.forbidden(&transition.leave, transition);
        self.walker.prepare();
        let mut reported = BTreeSet::new();
        let mut wait = Backoff::new(POLL_INTERVAL_MIN, POLL_INTERVAL_MAX);
        let mut last = Vec::new();
        loop {
            self.serve(Instant::now() + wait.next_wait())?;
            let Some(library) = &mut self.library else { return Err(self.no_library(mode)) };
            let mut busy = rendezvous::awaited(self.cx.process, library, &request, &self.cx.session.threads())?;
            // the blocked threads have continued: the other threads are the cause
            if rendezvous::is_over(self.cx.process, library, &request)? {
                return Err(Error::TimedOut(if last.is_empty() { busy } else { last }));
            }
            if busy.is_empty() {
                match self.commit_blocked(transition, &request, &forbidden)? {
                    None => return Ok(self.cx.session.threads().len() as u32),
                    Some(found) => busy = found,
                }
            }
            for b in busy.iter().filter(|b| reported.insert((b.tid, b.function.clone()))) {
                self.cx.report.event(patch::Event::ThreadBusy { tid: b.tid.0, function: b.function.clone() });
            }
            last = busy;
        }
    }

    /// Stops the process. Commits if all known threads are blocked or have migrated, and all other threads are outside the code that
    /// changes. While the process is stopped and no thread is inside the library's lock, writing the outcome is equivalent to holding that
    /// lock.
    fn commit_blocked(
        &mut self,
        transition: &Transition,
        request: &Request,
        forbidden: &Forbidden,
    ) -> Result<Option<Vec<Busy>>, Error> {
        let Some(library) = &mut self.library else { return Err(self.no_library(request.mode)) };
        let mut frozen = match self.cx.session.freeze() {
            Err(stillpoint_patch_tracee::Error::Unstoppable { tid, why }) => {
                return Ok(Some(vec![Busy { tid, function: why }]));
            }
            other => other?,
        };
        let memory = self.cx.process.memory();
        let offset = i64::from(self.word_offset);
        let examiner = StackExaminer { prober: &mut self.prober, walker: &self.walker, forbidden };
        let mut busy =
            rendezvous::blocking_threads(&mut frozen, self.cx.process, library, request, examiner, |_, snapshot| {
                let at = Avma(snapshot.fs_base.0.wrapping_add_signed(offset));
                request.mode != Mode::Global && holds(memory, at, request.word)
            })?;
        if busy.is_empty() {
            busy.extend(data::decide(&mut frozen, self.cx.process, &self.cx.target.view, transition)?);
        }
        if busy.is_empty() {
            library.write_outcome(memory, GatherOutcome::Released)?;
        }
        for (tid, stopped_ns) in frozen.thaw()? {
            self.cx.report.stopped(tid, "freeze: commit", stopped_ns);
        }
        if busy.is_empty() {
            library.wake(self.cx.process);
        }
        Ok((!busy.is_empty()).then_some(busy))
    }

    /// Settles a request on which threads may still act, of this tool or of a killed tool: no thread waits for it any more. After
    /// `Abandoned` no thread takes it any more either.
    pub(super) fn settle_request(&mut self, outcome: GatherOutcome) -> Result<(), Error> {
        let memory = self.cx.process.memory();
        let Some(library) = &mut self.library else { return Ok(()) };
        if library.control(memory)?.pending().is_none() {
            return Ok(());
        }
        if outcome == GatherOutcome::Abandoned {
            return self.abandon();
        }
        // the byte has already decided: they continue, even if the library applies the deadline
        library.write_outcome(memory, outcome)?;
        library.wake(self.cx.process);
        Ok(())
    }

    fn abandon(&mut self) -> Result<(), Error> {
        let limit = Instant::now() + rendezvous::LOCK_TIMEOUT;
        while let Some(library) = &mut self.library
            && !rendezvous::abandon(self.cx.process, self.cx.session, library, self.cx.report)?
        {
            if Instant::now() > limit {
                return Err(Error::TimedOut(vec![rendezvous::lock_holder(self.cx.process)]));
            }
            self.serve(Instant::now() + POLL_INTERVAL_MIN)?;
        }
        Ok(())
    }
}
