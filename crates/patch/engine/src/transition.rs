//! Phases of one transition, and its rollback.
//!
//! ```text
//! begin ── arm ── migrate ── commit            state byte:  2 ── 2 ── 0 ── 1
//!            └──────┴──> abort ──> restore                             0 ── 2
//! ```
//! The commit point is the write of one byte. Before it a rollback is always possible. After it every thread, including future ones, runs
//! the new side, and the remaining work (turning entries into direct jumps) has no visible effect. Each step is recorded in the ledger
//! before it is done, so that another tool can continue from the ledger.
//!
//! The obvious way is to compare the generation word of the thread alone. With the state byte before it, abort and commit are one byte
//! each instead of one store per thread, and neither can be half done. The number of a transition rises with every apply, revert and
//! abort and is never used again, so a word that a dead thread left never means anything.

use crate::barrier::abi::GatherOutcome;
use crate::barrier::{FollowedRequest, Library};
use crate::error::Busy;
use crate::event_pump::{EVENTS_MAX, Pace, SLOW_STOP, Window, weight};
use crate::fault::{self, FaultPoint};
use crate::ledger::{NamedSpan, OpenTransition, Phase, Record, Span, Transition};
use crate::plan::word_value;
use crate::probe::{Prober, Verdict};
use crate::report::Report;
use crate::scan::Forbidden;
use crate::store::Store;
use crate::suspended_frames;
use crate::walk::Walker;
use crate::{Error, Quiescence};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use stillpoint_base::Backoff;
use stillpoint_events::{EventKind, patch};
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::DispatchState;
use stillpoint_patch_tracee::{Event, Memory, Pid, Process, ProcessOrigin, Session, Stop, StopRequest, Tid};

pub(crate) const RETRY_INTERVAL_MIN: Duration = Duration::from_micros(500);
const SHARER_DESCRIPTION: &str = "another process that shares the memory";
pub(crate) const RETRY_INTERVAL_MAX: Duration = Duration::from_millis(2);
/// Longest time for which idle threads are moved before others.
const IDLE_FIRST_TIMEOUT: Duration = Duration::from_millis(50);

/// Direction in which threads are moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forward,
    Back,
}

/// One thread to be moved.
pub(crate) struct PendingThread {
    next_check: Instant,
    wait: Backoff,
    /// True if its stop was requested and is still to come.
    pub(crate) stop_requested: bool,
    location: Option<String>,
    stack_walked: bool,
}

/// Drives transitions of one process.
pub(crate) struct Migrator<'m, 's, 'p, 'r> {
    pub(crate) session: &'m mut Session<'s>,
    pub(crate) process: &'p Process,
    pub(crate) store: &'m mut Store,
    pub(crate) report: &'m mut Report<'r>,
    pub(crate) prober: Prober,
    pub(crate) walker: Walker<'p>,
    /// All dispatchers and displaced code ever placed.
    pub(crate) trampolines: Vec<Span>,
    /// Offset and value of the word for new threads; set when a transition begins.
    pub(crate) new_thread_word: Option<(i32, u32)>,
    /// Threads that are stopped on request.
    pub(crate) at_stop: Vec<Tid>,
    pub(crate) window: Window,
    /// New threads that were put on the right side before their first instruction.
    pub(crate) initialised: Vec<(Tid, Avma)>,
    /// The library, found at first use.
    pub(crate) library: Option<Library>,
    pub(crate) followed_request: FollowedRequest,
    /// Points at which the transition fails, for tests.
    pub(crate) faults: Vec<FaultPoint>,
    /// Reason why the program probably switches stacks by itself.
    pub(crate) switches_stacks: Option<String>,
    /// True if frames on suspended stacks may stay on the old side.
    pub(crate) allow_suspended: bool,
}

/// Time limits of the phases.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) migrate: Duration,
    pub(crate) back: Duration,
}

impl Migrator<'_, '_, '_, '_> {
    pub(crate) fn memory(&self) -> &Memory {
        self.process.memory()
    }

    fn set_state(&self, transition: &Transition, state: DispatchState) -> Result<(), Error> {
        Ok(self.memory().write(transition.state, &[state as u8])?)
    }

    fn phase_record(&mut self, transition: &Transition, phase: Phase) -> Result<(), Error> {
        let record = Record::Phase { transition: transition.number, phase };
        self.store.append(self.process.memory(), record)
    }

    /// Runs a transition whose `Begin` record is written. On failure the transition is rolled back as far as possible.
    pub(crate) fn run(&mut self, transition: &Transition, how: Quiescence, limits: Limits) -> Result<u32, Error> {
        let deadline = Instant::now() + limits.migrate;
        match self.forward(transition, how, deadline) {
            Ok(threads) => Ok(threads),
            Err(error) => Err(self.roll_back(transition, error, limits)),
        }
    }

    fn forward(&mut self, transition: &Transition, how: Quiescence, deadline: Instant) -> Result<u32, Error> {
        fault::reach(&self.faults, FaultPoint::Begun)?;
        let armed: Vec<_> = transition.sites.iter().map(|s| (s, s.armed)).collect();
        self.in_phase("arm", |m| m.write_entries(&armed, "arm", deadline))?;
        fault::reach(&self.faults, FaultPoint::Armed)?;
        if !matches!(how, Quiescence::Probe) {
            self.await_suspended(transition, deadline)?;
        }
        let threads = match how {
            Quiescence::Probe => {
                self.decide_per_thread(transition)?;
                let threads = self.in_phase("migrate", |m| m.migrate_forward(transition, deadline))?;
                self.await_suspended(transition, deadline)?;
                fault::reach(&self.faults, FaultPoint::Migrated)?;
                threads
            }
            Quiescence::Stop => self.in_phase("stop", |m| m.stop_all(transition, deadline))?,
            _ => self.migrate_at_points(transition, how, deadline)?,
        };
        self.set_state(transition, DispatchState::AllThen)?;
        fault::reach(&self.faults, FaultPoint::Decided)?;
        self.settle_request(GatherOutcome::Released)?;
        self.complete(transition)?;
        Ok(threads)
    }

    /// Waits until no frame of code to be left is found on a suspended stack.
    fn await_suspended(&mut self, transition: &Transition, deadline: Instant) -> Result<(), Error> {
        let Some(why) = self.switches_stacks.clone() else { return Ok(()) };
        let (ledger, allowed) = (Some(self.store.at()), self.allow_suspended);
        let mut wait =
            suspended_frames::SuspendedFrameWait::new((self.process, why), transition, ledger, allowed, deadline);
        self.in_phase("search suspended stacks", |m| {
            while let Some(until) = wait.search(m.report)? {
                m.serve(until)?;
            }
            Ok(())
        })
    }

    /// Switches to the state in which each thread's word decides.
    pub(crate) fn decide_per_thread(&mut self, transition: &Transition) -> Result<(), Error> {
        self.phase_record(transition, Phase::Migrating)?;
        self.set_state(transition, DispatchState::PerThread)
    }

    pub(crate) fn migrate_forward(&mut self, transition: &Transition, deadline: Instant) -> Result<u32, Error> {
        self.migrate(transition, Direction::Forward, deadline)
    }

    /// Turns entries into direct jumps, after the commit point. A failure here leaves the new side active.
    fn complete(&mut self, transition: &Transition) -> Result<(), Error> {
        let unfinished = |source| Error::Unfinished { transition: transition.number, source: Box::new(source) };
        let direct: Vec<_> = transition.sites.iter().map(|s| (s, s.to.bytes)).collect();
        let deadline = Instant::now() + Duration::from_secs(10);
        self.in_phase("commit", |m| {
            m.write_entries(&direct, "commit", deadline)?;
            m.phase_record(transition, Phase::Committed)
        })
        .map_err(unfinished)
    }

    pub(crate) fn in_phase<T>(
        &mut self,
        phase: &str,
        work: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.report.started(phase);
        let start = crate::report::now_ns();
        let result = work(self);
        self.report.ended(phase, crate::report::now_ns() - start);
        result
    }

    /// Rolls a transition back after `error`; returns the error that describes the result.
    fn roll_back(&mut self, transition: &Transition, error: Error, limits: Limits) -> Error {
        if matches!(error, Error::Ended(_) | Error::Unfinished { .. }) {
            return error;
        }
        // the failure was after the commit point: no rollback is possible
        if matches!(self.state(transition), Ok(DispatchState::AllThen)) {
            return Error::Unfinished { transition: transition.number, source: Box::new(error) };
        }
        self.report.operation("abort");
        if let Err(second) = self.move_back(transition, limits) {
            tracing::warn!(%error, "a transition failed, and so did its rollback");
            return match second {
                Error::Ended(_) | Error::Stuck { .. } => second,
                other => Error::Unfinished { transition: transition.number, source: Box::new(other) },
            };
        }
        self.report.event(EventKind::FellBack { transition: Some(transition.number), reason: error.to_string() });
        match error {
            Error::TimedOut { .. } => error,
            other => Error::RolledBack { transition: transition.number, source: Box::new(other) },
        }
    }

    /// Moves every thread back to the old side, and then restores the entries.
    fn move_back(&mut self, transition: &Transition, limits: Limits) -> Result<(), Error> {
        let deadline = Instant::now() + limits.back;
        self.find_library()?;
        self.settle_request(GatherOutcome::Abandoned)?;
        let state = self.state(transition)?;
        if state == DispatchState::PerThread {
            self.phase_record(transition, Phase::Aborting)?;
            let moved = self.in_phase("migrate", |m| m.migrate(transition, Direction::Back, deadline));
            moved.map_err(|error| match error {
                Error::TimedOut { busy } => Error::Stuck { transition: transition.number, busy },
                other => other,
            })?;
            self.set_state(transition, DispatchState::AllOtherwise)?;
        }
        fault::reach(&self.faults, FaultPoint::Returned)?;
        let restored: Vec<_> = transition.sites.iter().map(|s| (s, s.from.bytes)).collect();
        self.in_phase("restore", |m| m.write_entries(&restored, "restore", deadline))?;
        self.phase_record(transition, Phase::Aborted)
    }

    fn state(&self, transition: &Transition) -> Result<DispatchState, Error> {
        let mut byte = [0];
        self.memory().read(transition.state, &mut byte)?;
        DispatchState::from_byte(byte[0]).ok_or_else(|| {
            let text = format!("state byte {} of transition {}", byte[0], transition.number);
            Error::Ledger(crate::ledger::LedgerError::Inconsistent(text))
        })
    }

    /// Ends the transition of a killed tool: forward if the commit point was passed or `forward` is requested, otherwise back.
    pub(crate) fn recover(&mut self, open: &OpenTransition, forward: bool, limits: Limits) -> Result<bool, Error> {
        let transition = &open.transition;
        self.check_entries(transition)?;
        let state = self.state(transition)?;
        self.find_library()?;
        match (open.phase, state) {
            (_, DispatchState::AllThen) => {
                self.settle_request(GatherOutcome::Released)?;
                self.complete(transition)?;
                Ok(true)
            }
            (Some(Phase::Migrating), DispatchState::PerThread) if forward => {
                self.settle_request(GatherOutcome::Abandoned)?;
                self.run(transition, Quiescence::Probe, limits)?;
                Ok(true)
            }
            _ => {
                self.report.operation("abort");
                self.move_back(transition, limits)?;
                let reason = "the tool that started it was killed".to_owned();
                self.report.event(EventKind::FellBack { transition: Some(transition.number), reason });
                Ok(false)
            }
        }
    }

    /// Moves all threads at once while all are stopped and examined: the baseline mode.
    fn stop_all(&mut self, transition: &Transition, deadline: Instant) -> Result<u32, Error> {
        let forbidden = self.forbidden(&transition.leave, transition);
        self.walker.prepare();
        let mut wait = Backoff::new(RETRY_INTERVAL_MIN, RETRY_INTERVAL_MAX);
        loop {
            let Some(busy) = self.stop_once(transition, &forbidden)? else {
                return Ok(self.session.threads().len() as u32);
            };
            for b in &busy {
                self.report.event(patch::Event::ThreadBusy { tid: b.tid.0, function: b.function.clone() });
            }
            if Instant::now() > deadline {
                return Err(Error::TimedOut { busy });
            }
            self.serve(Instant::now() + wait.next_wait())?;
        }
    }

    /// Examines all threads while all are stopped; commits if none is busy, otherwise returns the busy ones.
    fn stop_once(&mut self, transition: &Transition, forbidden: &Forbidden) -> Result<Option<Vec<Busy>>, Error> {
        let mut busy = Vec::new();
        let mut frozen = match self.session.freeze() {
            Err(stillpoint_patch_tracee::Error::Unstoppable { tid, why }) => {
                return Ok(Some(vec![Busy { tid, function: why }]));
            }
            other => other?,
        };
        for tid in frozen.threads() {
            let mut held = frozen.thread(tid)?;
            let snapshot = self.prober.snapshot(self.process, &mut held)?;
            let verdict = self.walker.judge(&snapshot, forbidden);
            if !verdict.is_free() {
                busy.push(Busy { tid, function: verdict.describe() });
            }
        }
        // a coroutine may have been suspended since the last search
        if busy.is_empty() && self.switches_stacks.is_some() && !self.allow_suspended {
            let search = suspended_frames::search(self.process, forbidden, Some(self.store.at()))?;
            let found = search.found.map(|frame| frame.describe());
            busy.extend(found.map(|function| Busy { tid: self.process.pid().leader(), function }));
        }
        if busy.is_empty() {
            self.process.memory().write(transition.state, &[DispatchState::AllThen as u8])?;
        }
        for (tid, stopped_ns) in frozen.thaw()? {
            self.report.stopped(tid, "freeze: check", stopped_ns);
        }
        Ok((!busy.is_empty()).then_some(busy))
    }

    pub(crate) fn forbidden(&self, code: &[NamedSpan], transition: &Transition) -> Forbidden {
        Forbidden::new(code, &self.trampolines, &transition.loop_entries)
    }

    /// Moves every thread by itself; returns the number of threads.
    fn migrate(&mut self, transition: &Transition, direction: Direction, deadline: Instant) -> Result<u32, Error> {
        // before the stops are announced, so that this search takes no processor from the threads
        let idle = self.session.idle()?;
        self.session.expect_all_to_stop(true);
        let result = self.move_all(transition, direction, deadline, idle);
        self.session.expect_all_to_stop(false);
        // no thread may stay stopped, and no thread may stop for a request that is over
        self.session.withdraw_requests()?;
        for tid in std::mem::take(&mut self.at_stop) {
            match self.session.resume_thread(tid) {
                Ok(()) | Err(stillpoint_patch_tracee::Error::ThreadGone(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        result
    }

    /// Moves the threads, idle ones first: most servers have many, and the busy threads have the processor meanwhile.
    fn move_all(
        &mut self,
        transition: &Transition,
        direction: Direction,
        deadline: Instant,
        mut idle: BTreeSet<Tid>,
    ) -> Result<u32, Error> {
        let idle_until = Instant::now() + IDLE_FIRST_TIMEOUT;
        let offset = self.store.ledger.word_offset;
        let (code, word) = match direction {
            Direction::Forward => (&transition.leave, word_value(transition.number)),
            Direction::Back => (&transition.enter, 0),
        };
        let forbidden = self.forbidden(code, transition);
        self.new_thread_word = Some((offset, word));
        let mut done: BTreeMap<Tid, Avma> = BTreeMap::new();
        let mut waiting: BTreeMap<Tid, PendingThread> = BTreeMap::new();
        let mut pace = Pace::new();
        self.session.expect_idle_to_stop(!idle.is_empty());
        loop {
            self.serve(Instant::now())?;
            for (tid, fs_base) in std::mem::take(&mut self.initialised) {
                waiting.remove(&tid);
                done.insert(tid, fs_base);
            }
            self.window.narrow(self.at_stop.len());
            for tid in std::mem::take(&mut self.at_stop) {
                let mut pending = waiting.remove(&tid).unwrap_or_else(PendingThread::new);
                match self.visit(tid, &mut pending, &forbidden, transition, direction, &done)? {
                    VisitResult::Migrated(fs_base) => {
                        done.insert(tid, fs_base);
                        if direction == Direction::Forward {
                            self.report
                                .event(patch::Event::ThreadMigrated { tid: tid.0, transition: transition.number });
                        }
                    }
                    VisitResult::Ended => {}
                    VisitResult::Busy => {
                        pending.postpone();
                        waiting.insert(tid, pending);
                    }
                }
            }
            let threads = self.session.threads();
            waiting.retain(|tid, _| self.session.knows(*tid));
            done.retain(|tid, _| self.session.knows(*tid));
            self.track_self_migrating(&threads, &mut waiting, &mut done)?;
            if !idle.is_empty() {
                let unexamined = |tid: &Tid| waiting.get(tid).is_none_or(|pending| pending.location.is_none());
                let to_come = |tid: &Tid| self.session.knows(*tid) && !done.contains_key(tid) && unexamined(tid);
                idle.retain(|tid| {
                    to_come(tid) && !self.followed_request.migrates_itself(*tid) && Instant::now() < idle_until
                });
                if idle.is_empty() {
                    self.session.expect_idle_to_stop(false);
                }
            }
            if !pace.is_over() {
                self.request_stops(&threads, &idle, &mut waiting, &done)?;
            } else if self.at_stop.is_empty() && !waiting.values().any(|t| t.stop_requested) {
                self.pause(Pace::pause_duration(threads.len()))?;
                self.session.expect_idle_to_stop(!idle.is_empty());
                pace = Pace::new();
                // At once: in a storm of new threads the next events alone take longer than a burst.
                self.request_stops(&threads, &idle, &mut waiting, &done)?;
            }
            let now = Instant::now();
            if waiting.is_empty() && self.at_stop.is_empty() && self.all_migrated(&done)? {
                return Ok(done.len() as u32);
            }
            if now > deadline {
                let to_busy = |(tid, t): (&Tid, &PendingThread)| Busy { tid: *tid, function: t.describe() };
                let sharers = self.process.memory_sharers()?;
                let sharers = sharers.iter().map(|pid| Busy { tid: pid.leader(), function: SHARER_DESCRIPTION.into() });
                return Err(Error::TimedOut { busy: waiting.iter().map(to_busy).chain(sharers).collect() });
            }
            if self.at_stop.is_empty() {
                let out = waiting.values().any(|t| t.stop_requested);
                let due = waiting.values().filter(|t| !t.stop_requested).map(|t| t.next_check).min();
                let next = if out { now + SLOW_STOP } else { due.unwrap_or(now + RETRY_INTERVAL_MIN) };
                if !self.serve_once(next.min(deadline))? && out {
                    self.window.widen();
                }
            }
        }
    }

    /// Leaves all processors to the target for a while; only new threads and signals are served.
    fn pause(&mut self, time: Duration) -> Result<(), Error> {
        let until = Instant::now() + time;
        self.session.expect_all_to_stop(false);
        self.serve(until)?;
        self.session.expect_all_to_stop(true);
        Ok(())
    }

    /// Asks threads that are due to stop, a limited number at a time: first those not examined yet, then those that have waited longest, so
    /// that no thread waits behind busy threads. Asks only idle threads while there are any.
    fn request_stops(
        &mut self,
        threads: &[Tid],
        idle: &BTreeSet<Tid>,
        waiting: &mut BTreeMap<Tid, PendingThread>,
        done: &BTreeMap<Tid, Avma>,
    ) -> Result<(), Error> {
        let mut asked = waiting.values().filter(|t| t.stop_requested).count();
        let now = Instant::now();
        let mut repeated = Vec::new();
        let wanted = |tid: &Tid| !done.contains_key(tid) && (idle.is_empty() || idle.contains(tid));
        for tid in threads.iter().copied().filter(wanted) {
            if self.window.room(asked) == 0 {
                return Ok(());
            }
            let pending = waiting.entry(tid).or_insert_with(PendingThread::new);
            if pending.stop_requested
                || pending.next_check > now
                || self.followed_request.migrates_itself(tid)
                || self.at_stop.contains(&tid)
            {
                continue;
            }
            match pending.location {
                None => asked += usize::from(self.request_first_stop(tid, waiting)?),
                Some(_) => repeated.push((pending.next_check, tid)),
            }
        }
        repeated.sort_unstable();
        for (_, tid) in repeated {
            if self.window.room(asked) == 0 {
                return Ok(());
            }
            asked += usize::from(self.request_repeated_stop(tid, waiting)?);
        }
        Ok(())
    }

    /// Asks a thread like [`Migrator::request_first_stop`], if it was busy at its last examination.
    fn request_repeated_stop(&mut self, tid: Tid, waiting: &mut BTreeMap<Tid, PendingThread>) -> Result<bool, Error> {
        // another stop of a thread that has not run would show nothing new, and restart its time-out
        if waiting.get(&tid).is_some_and(|t| t.stack_walked) && self.session.idle_since_stop(tid)? {
            waiting.entry(tid).and_modify(PendingThread::postpone);
            return Ok(false);
        }
        self.walker.prepare();
        let asked = self.session.request_stop_again(tid)?;
        Ok(self.record_request(tid, asked, waiting))
    }

    /// Asks a thread to stop; returns true if its stop is to come.
    fn request_first_stop(&mut self, tid: Tid, waiting: &mut BTreeMap<Tid, PendingThread>) -> Result<bool, Error> {
        let asked = self.session.request_stop(tid)?;
        Ok(self.record_request(tid, asked, waiting))
    }

    fn record_request(&mut self, tid: Tid, asked: StopRequest, waiting: &mut BTreeMap<Tid, PendingThread>) -> bool {
        let Entry::Occupied(mut pending) = waiting.entry(tid) else { return false };
        match asked {
            StopRequest::Pending => pending.get_mut().stop_requested = true,
            StopRequest::AlreadyStopped => self.at_stop.push(tid),
            StopRequest::Gone | StopRequest::New => drop(pending.remove()),
            StopRequest::InVfork => {
                pending.get_mut().location = Some("vfork, whose child shares the memory".into());
                pending.get_mut().postpone();
            }
        }
        asked == StopRequest::Pending
    }

    /// Returns true if two enumerations, the session's and the kernel's, hold only threads that have migrated, and no other process shares
    /// the memory. Threads that have not run yet do not count: they have no frames, and obey the state byte from their first instruction
    /// on. Otherwise a program that makes threads without pause could never be committed.
    fn all_migrated(&mut self, done: &BTreeMap<Tid, Avma>) -> Result<bool, Error> {
        let over = |tid: &Tid| done.contains_key(tid) || self.session.is_new(*tid);
        if !self.session.threads().iter().all(over) {
            return Ok(false);
        }
        let tracer = Pid(rustix::thread::gettid().as_raw_nonzero().get());
        for thread in self.process.threads_besides(|tid| over(&tid))?.iter().filter(|thread| thread.runs_program()) {
            // a thread whose parent's report is still to come: the kernel has attached it to the tool and holds it
            match self.process.thread_status(thread.tid) {
                Ok(status) if status.tracer != tracer => {
                    self.session.seize_unreported()?;
                    return Ok(false);
                }
                _ => {}
            }
        }
        Ok(self.process.memory_sharers()?.is_empty())
    }

    fn visit(
        &mut self,
        tid: Tid,
        pending: &mut PendingThread,
        forbidden: &Forbidden,
        transition: &Transition,
        direction: Direction,
        done: &BTreeMap<Tid, Avma>,
    ) -> Result<VisitResult, Error> {
        let walk = pending.location.is_some();
        let offset = self.store.ledger.word_offset;
        let mut stopped = match self.session.stop(tid) {
            Ok(Stop::Stopped(stopped)) => stopped,
            Ok(Stop::Gone) => return Ok(VisitResult::Ended),
            Ok(Stop::InVfork) => {
                pending.location = Some("vfork, whose child shares the memory".into());
                return Ok(VisitResult::Busy);
            }
            Err(stillpoint_patch_tracee::Error::ThreadGone(_)) => return Ok(VisitResult::Ended),
            Err(error @ stillpoint_patch_tracee::Error::Unstoppable { .. }) => {
                pending.location = Some(error.to_string());
                return Ok(VisitResult::Busy);
            }
            Err(error) => return Err(error.into()),
        };
        let snapshot = self.prober.snapshot(self.process, &mut stopped)?;
        let at = Avma(snapshot.fs_base.0.wrapping_add_signed(i64::from(offset)));
        let mut verdict = snapshot.verdict(forbidden);
        if direction == Direction::Back && !holds(self.process.memory(), at, word_value(transition.number)) {
            verdict = Verdict::Clear;
        }
        if walk {
            pending.stack_walked |= verdict.may_be_stale();
            verdict = self.walker.confirm(verdict, &snapshot, forbidden);
        }
        pending.stack_walked |= matches!(&verdict, Verdict::Busy(finding) if finding.executing);
        let fs_base = snapshot.fs_base;
        let shared = done.values().any(|other| *other == fs_base);
        let moved = match verdict {
            Verdict::KernelWorker => true,
            Verdict::Clear if shared || fs_base.0 == 0 => false,
            Verdict::Clear => {
                let word = if direction == Direction::Forward { word_value(transition.number) } else { 0 };
                self.process.memory().write(at, &word.to_le_bytes())?;
                true
            }
            _ => false,
        };
        let stopped_ns = stopped.resume()?;
        self.report.stopped(tid, "probe", stopped_ns);
        if moved {
            return Ok(VisitResult::Migrated(fs_base));
        }
        let function = match verdict {
            Verdict::Clear => "code of a thread that shares its control block with another thread".to_owned(),
            other => other.describe(),
        };
        if pending.location.as_ref() != Some(&function) {
            self.report.event(patch::Event::ThreadBusy { tid: tid.0, function: function.clone() });
        }
        pending.location = Some(function);
        Ok(VisitResult::Busy)
    }

    /// Serves events until `until` has passed.
    pub(crate) fn serve(&mut self, until: Instant) -> Result<(), Error> {
        let mut late = 0;
        while late < EVENTS_MAX && self.serve_once(until)? {
            if Instant::now() > until {
                late += weight(self.at_stop.len());
            }
        }
        Ok(())
    }

    /// Serves one event, or waits until `until`; returns true if there was one.
    fn serve_once(&mut self, until: Instant) -> Result<bool, Error> {
        let pid = self.process.pid();
        match self.session.pump(until)? {
            None => return Ok(false),
            Some(Event::NewThread(tid)) => self.initialise_thread(tid)?,
            Some(Event::Stopped(tid)) => self.at_stop.push(tid),
            Some(Event::NewProcess { pid: child, how, .. }) => self.release(child, how)?,
            Some(Event::Exec | Event::Exited(_)) => return Err(Error::Ended(pid)),
            Some(_) => {}
        }
        Ok(true)
    }

    /// Puts a new thread on the right side before its first instruction: it has no frames.
    fn initialise_thread(&mut self, tid: Tid) -> Result<(), Error> {
        let Some((offset, word)) = self.new_thread_word else { return Ok(self.session.resume_thread(tid)?) };
        let mut stopped = match self.session.stop(tid)? {
            Stop::Stopped(stopped) => stopped,
            Stop::Gone | Stop::InVfork => return Ok(()),
        };
        let fs_base = stopped.fs_base()?;
        if fs_base.0 != 0 {
            let at = Avma(fs_base.0.wrapping_add_signed(i64::from(offset)));
            self.process.memory().write(at, &word.to_le_bytes())?;
            self.initialised.push((tid, fs_base));
        }
        stopped.resume()?;
        Ok(())
    }

    fn release(&mut self, child: Pid, how: ProcessOrigin) -> Result<(), Error> {
        tracing::debug!(%child, ?how, "a process started during the transition");
        Ok(self.session.release(child)?)
    }
}

enum VisitResult {
    Migrated(Avma),
    Busy,
    Ended,
}

impl PendingThread {
    pub(crate) fn new() -> Self {
        PendingThread {
            next_check: Instant::now(),
            wait: Backoff::new(RETRY_INTERVAL_MIN * 2, RETRY_INTERVAL_MAX),
            stop_requested: false,
            location: None,
            stack_walked: false,
        }
    }

    /// Delays the next examination.
    fn postpone(&mut self) {
        self.next_check = Instant::now() + self.wait.next_wait();
        self.stop_requested = false;
    }

    /// Records that it migrates by itself, and delays the next check; returns true if its location has changed.
    pub(crate) fn update_location(&mut self, before: String) -> bool {
        let now = Instant::now();
        if self.next_check <= now {
            self.next_check = now + self.wait.next_wait();
        }
        self.location.replace(before.clone()) != Some(before)
    }

    fn describe(&self) -> String {
        self.location.clone().unwrap_or_else(|| "a run queue, and does not stop".to_owned())
    }
}

pub(crate) fn holds(memory: &Memory, at: Avma, word: u32) -> bool {
    let mut bytes = [0; 4];
    memory.read(at, &mut bytes).is_ok() && u32::from_le_bytes(bytes) == word
}
