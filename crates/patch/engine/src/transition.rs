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

use crate::barrier::abi::Gathered;
use crate::barrier::{Following, Library};
use crate::calm::{EVENTS_AT_ONCE, Pace, STOP_SLOW, Window, weight};
use crate::error::Busy;
use crate::fault::{self, FaultPoint};
use crate::ledger::{NamedSpan, Phase, Record, Span, Transition, Unfinished};
use crate::plan::word_value;
use crate::probe::{Prober, Verdict};
use crate::report::Report;
use crate::scan::Forbidden;
use crate::store::Store;
use crate::suspended;
use crate::walk::Walker;
use crate::{Error, Quiescence};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use stillpoint_events::EventKind;
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::DispatchState;
use stillpoint_patch_tracee::{Asked, Birth, Event, Memory, Pid, Process, Session, Stop, Tid};

pub(crate) const RETRY_FIRST: Duration = Duration::from_micros(500);
const SHARER: &str = "another process that uses the same memory";
pub(crate) const RETRY_MAX: Duration = Duration::from_millis(2);
/// Longest time for which idle threads are moved before others.
const IDLE_LIMIT: Duration = Duration::from_millis(50);

/// Direction in which threads are moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forward,
    Back,
}

/// One thread to be moved.
pub(crate) struct Traveller {
    next: Instant,
    wait: Duration,
    /// True if its stop was requested and is still to come.
    pub(crate) asked: bool,
    seen: Option<String>,
    walked: bool,
}

/// Drives transitions of one process.
pub(crate) struct Mover<'m, 's, 'p, 'r> {
    pub(crate) session: &'m mut Session<'s>,
    pub(crate) process: &'p Process,
    pub(crate) store: &'m mut Store,
    pub(crate) report: &'m mut Report<'r>,
    pub(crate) prober: Prober,
    pub(crate) walker: Walker<'p>,
    /// All dispatchers and displaced code ever placed.
    pub(crate) trampolines: Vec<Span>,
    /// Offset and value of the word for new threads; set when a transition begins.
    pub(crate) newborn: Option<(i32, u32)>,
    /// Threads that are stopped on request.
    pub(crate) stood: Vec<Tid>,
    pub(crate) window: Window,
    /// New threads that were put on the right side before their first instruction.
    pub(crate) welcomed: Vec<(Tid, Avma)>,
    /// The library, found at first use.
    pub(crate) library: Option<Library>,
    pub(crate) following: Following,
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

impl Mover<'_, '_, '_, '_> {
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
            Err(error) => Err(self.fall_back(transition, error, limits)),
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
                self.per_thread(transition)?;
                let threads = self.in_phase("migrate", |m| m.forward_all(transition, deadline))?;
                self.await_suspended(transition, deadline)?;
                fault::reach(&self.faults, FaultPoint::Migrated)?;
                threads
            }
            Quiescence::Stop => self.in_phase("stop", |m| m.stop_all(transition, deadline))?,
            _ => self.by_points(transition, how, deadline)?,
        };
        self.set_state(transition, DispatchState::AllThen)?;
        fault::reach(&self.faults, FaultPoint::Decided)?;
        self.settle_library(Gathered::Released)?;
        self.complete(transition)?;
        Ok(threads)
    }

    /// Waits until no frame of code to be left is found on a suspended stack.
    fn await_suspended(&mut self, transition: &Transition, deadline: Instant) -> Result<(), Error> {
        let Some(why) = self.switches_stacks.clone() else { return Ok(()) };
        let (ledger, allowed) = (Some(self.store.at()), self.allow_suspended);
        let mut wait = suspended::Wait::new((self.process, why), transition, ledger, allowed, deadline);
        self.in_phase("search suspended stacks", |m| {
            while let Some(until) = wait.search(m.report)? {
                m.serve(until)?;
            }
            Ok(())
        })
    }

    /// Switches to the state in which each thread's word decides.
    pub(crate) fn per_thread(&mut self, transition: &Transition) -> Result<(), Error> {
        self.phase_record(transition, Phase::Migrating)?;
        self.set_state(transition, DispatchState::PerThread)
    }

    pub(crate) fn forward_all(&mut self, transition: &Transition, deadline: Instant) -> Result<u32, Error> {
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
    fn fall_back(&mut self, transition: &Transition, error: Error, limits: Limits) -> Error {
        if matches!(error, Error::Ended(_) | Error::Unfinished { .. }) {
            return error;
        }
        // the failure was after the commit point: no rollback is possible
        if matches!(self.state(transition), Ok(DispatchState::AllThen)) {
            return Error::Unfinished { transition: transition.number, source: Box::new(error) };
        }
        self.report.operation("abort");
        if let Err(second) = self.back(transition, limits) {
            tracing::warn!(%error, "a transition failed, and so did the way back");
            return match second {
                Error::Ended(_) | Error::Stuck { .. } => second,
                other => Error::Unfinished { transition: transition.number, source: Box::new(other) },
            };
        }
        self.report.event(EventKind::FellBack { transition: transition.number, reason: error.to_string() });
        match error {
            Error::TimedOut { .. } => error,
            other => Error::FellBack { transition: transition.number, source: Box::new(other) },
        }
    }

    /// Moves every thread back to the old side, and then restores the entries.
    fn back(&mut self, transition: &Transition, limits: Limits) -> Result<(), Error> {
        let deadline = Instant::now() + limits.back;
        self.find_library()?;
        self.settle_library(Gathered::Abandoned)?;
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
    pub(crate) fn recover(&mut self, open: &Unfinished, forward: bool, limits: Limits) -> Result<bool, Error> {
        let transition = &open.transition;
        self.check_entries(transition)?;
        let state = self.state(transition)?;
        self.find_library()?;
        match (open.phase, state) {
            (_, DispatchState::AllThen) => {
                self.settle_library(Gathered::Released)?;
                self.complete(transition)?;
                Ok(true)
            }
            (Some(Phase::Migrating), DispatchState::PerThread) if forward => {
                self.settle_library(Gathered::Abandoned)?;
                self.run(transition, Quiescence::Probe, limits)?;
                Ok(true)
            }
            _ => {
                self.report.operation("abort");
                self.back(transition, limits)?;
                let reason = "the tool that began it was killed".to_owned();
                self.report.event(EventKind::FellBack { transition: transition.number, reason });
                Ok(false)
            }
        }
    }

    /// Moves all threads at once while all are stopped and examined: the baseline mode.
    fn stop_all(&mut self, transition: &Transition, deadline: Instant) -> Result<u32, Error> {
        let forbidden = self.forbidden(&transition.leave, transition);
        self.walker.prepare();
        let mut wait = RETRY_FIRST;
        loop {
            let Some(busy) = self.stop_once(transition, &forbidden)? else {
                return Ok(self.session.threads().len() as u32);
            };
            for b in &busy {
                self.report.event(EventKind::ThreadBusy { tid: b.tid.0, function: b.function.clone() });
            }
            if Instant::now() > deadline {
                return Err(Error::TimedOut { busy });
            }
            self.serve(Instant::now() + wait)?;
            wait = (wait * 2).min(RETRY_MAX);
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
            let look = self.prober.look(self.process, &mut held)?;
            let verdict = self.walker.judge(&look, forbidden);
            if !verdict.is_free() {
                busy.push(Busy { tid, function: verdict.describe() });
            }
        }
        // a coroutine may have been suspended since the last search
        if busy.is_empty() && self.switches_stacks.is_some() && !self.allow_suspended {
            let search = suspended::search(self.process, forbidden, Some(self.store.at()))?;
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
        for tid in std::mem::take(&mut self.stood) {
            match self.session.let_go(tid) {
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
        let idle_until = Instant::now() + IDLE_LIMIT;
        let offset = self.store.ledger.word_offset;
        let (code, word) = match direction {
            Direction::Forward => (&transition.leave, word_value(transition.number)),
            Direction::Back => (&transition.enter, 0),
        };
        let forbidden = self.forbidden(code, transition);
        self.newborn = Some((offset, word));
        let mut done: BTreeMap<Tid, Avma> = BTreeMap::new();
        let mut waiting: BTreeMap<Tid, Traveller> = BTreeMap::new();
        let mut pace = Pace::new();
        self.session.expect_idle_to_stop(!idle.is_empty());
        loop {
            self.serve(Instant::now())?;
            for (tid, fs_base) in std::mem::take(&mut self.welcomed) {
                waiting.remove(&tid);
                done.insert(tid, fs_base);
            }
            self.window.arrived(self.stood.len());
            for tid in std::mem::take(&mut self.stood) {
                let mut traveller = waiting.remove(&tid).unwrap_or_else(Traveller::new);
                match self.visit(tid, &mut traveller, &forbidden, transition, direction, &done)? {
                    Visit::Moved(fs_base) => {
                        done.insert(tid, fs_base);
                        if direction == Direction::Forward {
                            self.report.event(EventKind::ThreadMigrated { tid: tid.0, transition: transition.number });
                        }
                    }
                    Visit::Gone => {}
                    Visit::NotYet => {
                        traveller.put_off();
                        waiting.insert(tid, traveller);
                    }
                }
            }
            let threads = self.session.threads();
            waiting.retain(|tid, _| self.session.knows(*tid));
            done.retain(|tid, _| self.session.knows(*tid));
            self.follow(&threads, &mut waiting, &mut done)?;
            if !idle.is_empty() {
                let unseen = |tid: &Tid| waiting.get(tid).is_none_or(|traveller| traveller.seen.is_none());
                let to_come = |tid: &Tid| self.session.knows(*tid) && !done.contains_key(tid) && unseen(tid);
                idle.retain(|tid| to_come(tid) && !self.following.own_way(*tid) && Instant::now() < idle_until);
                if idle.is_empty() {
                    self.session.expect_idle_to_stop(false);
                }
            }
            if !pace.is_over() {
                self.ask(&threads, &idle, &mut waiting, &done)?;
            } else if self.stood.is_empty() && !waiting.values().any(|t| t.asked) {
                self.rest(Pace::rest(threads.len()))?;
                self.session.expect_idle_to_stop(!idle.is_empty());
                pace = Pace::new();
                // At once: in a storm of new threads the next events alone take longer than a burst.
                self.ask(&threads, &idle, &mut waiting, &done)?;
            }
            let now = Instant::now();
            if waiting.is_empty() && self.stood.is_empty() && self.everybody_known(&done)? {
                return Ok(done.len() as u32);
            }
            if now > deadline {
                let seen = |(tid, t): (&Tid, &Traveller)| Busy { tid: *tid, function: t.describe() };
                let sharers = self.process.memory_sharers()?;
                let sharers = sharers.iter().map(|pid| Busy { tid: pid.leader(), function: SHARER.into() });
                return Err(Error::TimedOut { busy: waiting.iter().map(seen).chain(sharers).collect() });
            }
            if self.stood.is_empty() {
                let out = waiting.values().any(|t| t.asked);
                let due = waiting.values().filter(|t| !t.asked).map(|t| t.next).min();
                let next = if out { now + STOP_SLOW } else { due.unwrap_or(now + RETRY_FIRST) };
                if !self.serve_once(next.min(deadline))? && out {
                    self.window.waited();
                }
            }
        }
    }

    /// Leaves all processors to the target for a while; only new threads and signals are served.
    fn rest(&mut self, time: Duration) -> Result<(), Error> {
        let until = Instant::now() + time;
        self.session.expect_all_to_stop(false);
        self.serve(until)?;
        self.session.expect_all_to_stop(true);
        Ok(())
    }

    /// Asks threads that are due to stop, a limited number at a time: first those not examined yet, then those that have waited longest, so
    /// that no thread waits behind busy threads. Asks only idle threads while there are any.
    fn ask(
        &mut self,
        threads: &[Tid],
        idle: &BTreeSet<Tid>,
        waiting: &mut BTreeMap<Tid, Traveller>,
        done: &BTreeMap<Tid, Avma>,
    ) -> Result<(), Error> {
        let mut asked = waiting.values().filter(|t| t.asked).count();
        let now = Instant::now();
        let mut again = Vec::new();
        let wanted = |tid: &Tid| !done.contains_key(tid) && (idle.is_empty() || idle.contains(tid));
        for tid in threads.iter().copied().filter(wanted) {
            if self.window.room(asked) == 0 {
                return Ok(());
            }
            let traveller = waiting.entry(tid).or_insert_with(Traveller::new);
            if traveller.asked || traveller.next > now || self.following.own_way(tid) || self.stood.contains(&tid) {
                continue;
            }
            match traveller.seen {
                None => asked += usize::from(self.ask_one(tid, waiting)?),
                Some(_) => again.push((traveller.next, tid)),
            }
        }
        again.sort_unstable();
        for (_, tid) in again {
            if self.window.room(asked) == 0 {
                return Ok(());
            }
            asked += usize::from(self.ask_again(tid, waiting)?);
        }
        Ok(())
    }

    /// Asks a thread like [`Mover::ask_one`], if it was busy at its last examination.
    fn ask_again(&mut self, tid: Tid, waiting: &mut BTreeMap<Tid, Traveller>) -> Result<bool, Error> {
        // another stop of a thread that has not run would show nothing new, and restart its time-out
        if waiting.get(&tid).is_some_and(|t| t.walked) && self.session.idle_since_stop(tid)? {
            waiting.entry(tid).and_modify(Traveller::put_off);
            return Ok(false);
        }
        self.walker.prepare();
        let asked = self.session.request_stop_again(tid)?;
        Ok(self.note_asked(tid, asked, waiting))
    }

    /// Asks a thread to stop; returns true if its stop is to come.
    fn ask_one(&mut self, tid: Tid, waiting: &mut BTreeMap<Tid, Traveller>) -> Result<bool, Error> {
        let asked = self.session.request_stop(tid)?;
        Ok(self.note_asked(tid, asked, waiting))
    }

    fn note_asked(&mut self, tid: Tid, asked: Asked, waiting: &mut BTreeMap<Tid, Traveller>) -> bool {
        let Entry::Occupied(mut traveller) = waiting.entry(tid) else { return false };
        match asked {
            Asked::Asked => traveller.get_mut().asked = true,
            Asked::Stands => self.stood.push(tid),
            Asked::Gone | Asked::Newborn => drop(traveller.remove()),
            Asked::InVfork => {
                traveller.get_mut().seen = Some("vfork, whose child uses the same memory".into());
                traveller.get_mut().put_off();
            }
        }
        asked == Asked::Asked
    }

    /// Returns true if two enumerations, the session's and the kernel's, hold only threads that have migrated, and no other process shares
    /// the memory. Threads that have not run yet do not count: they have no frames, and obey the state byte from their first instruction
    /// on. Otherwise a program that makes threads without pause could never be committed.
    fn everybody_known(&mut self, done: &BTreeMap<Tid, Avma>) -> Result<bool, Error> {
        let over = |tid: &Tid| done.contains_key(tid) || self.session.is_newborn(*tid);
        if !self.session.threads().iter().all(over) {
            return Ok(false);
        }
        let tracer = Pid(rustix::thread::gettid().as_raw_nonzero().get());
        for thread in self.process.threads_besides(|tid| over(&tid))?.iter().filter(|thread| thread.runs_program()) {
            // a thread whose parent's report is still to come: the kernel has attached it to the tool and holds it
            match self.process.thread_status(thread.tid) {
                Ok(status) if status.tracer != tracer => {
                    self.session.seize_untold()?;
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
        traveller: &mut Traveller,
        forbidden: &Forbidden,
        transition: &Transition,
        direction: Direction,
        done: &BTreeMap<Tid, Avma>,
    ) -> Result<Visit, Error> {
        let walk = traveller.seen.is_some();
        let offset = self.store.ledger.word_offset;
        let mut stopped = match self.session.stop(tid) {
            Ok(Stop::Stopped(stopped)) => stopped,
            Ok(Stop::Gone) => return Ok(Visit::Gone),
            Ok(Stop::InVfork) => {
                traveller.seen = Some("vfork, whose child uses the same memory".into());
                return Ok(Visit::NotYet);
            }
            Err(stillpoint_patch_tracee::Error::ThreadGone(_)) => return Ok(Visit::Gone),
            Err(error @ stillpoint_patch_tracee::Error::Unstoppable { .. }) => {
                traveller.seen = Some(error.to_string());
                return Ok(Visit::NotYet);
            }
            Err(error) => return Err(error.into()),
        };
        let look = self.prober.look(self.process, &mut stopped)?;
        let at = Avma(look.fs_base.0.wrapping_add_signed(i64::from(offset)));
        let mut verdict = look.verdict(forbidden);
        if direction == Direction::Back && !holds(self.process.memory(), at, word_value(transition.number)) {
            verdict = Verdict::Clear;
        }
        if walk {
            traveller.walked |= verdict.may_be_stale();
            verdict = self.walker.confirm(verdict, &look, forbidden);
        }
        traveller.walked |= matches!(&verdict, Verdict::Busy(finding) if finding.standing);
        let fs_base = look.fs_base;
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
            return Ok(Visit::Moved(fs_base));
        }
        let function = match verdict {
            Verdict::Clear => "code of a thread whose control block another thread uses as well".to_owned(),
            other => other.describe(),
        };
        if traveller.seen.as_ref() != Some(&function) {
            self.report.event(EventKind::ThreadBusy { tid: tid.0, function: function.clone() });
        }
        traveller.seen = Some(function);
        Ok(Visit::NotYet)
    }

    /// Serves events until `until` has passed.
    pub(crate) fn serve(&mut self, until: Instant) -> Result<(), Error> {
        let mut late = 0;
        while late < EVENTS_AT_ONCE && self.serve_once(until)? {
            if Instant::now() > until {
                late += weight(self.stood.len());
            }
        }
        Ok(())
    }

    /// Serves one event, or waits until `until`; returns true if there was one.
    fn serve_once(&mut self, until: Instant) -> Result<bool, Error> {
        let pid = self.process.pid();
        match self.session.pump(until)? {
            None => return Ok(false),
            Some(Event::NewThread(tid)) => self.welcome(tid)?,
            Some(Event::Stood(tid)) => self.stood.push(tid),
            Some(Event::NewProcess { pid: child, how, .. }) => self.release(child, how)?,
            Some(Event::Exec | Event::Exited(_)) => return Err(Error::Ended(pid)),
            Some(_) => {}
        }
        Ok(true)
    }

    /// Puts a new thread on the right side before its first instruction: it has no frames.
    fn welcome(&mut self, tid: Tid) -> Result<(), Error> {
        let Some((offset, word)) = self.newborn else { return Ok(self.session.let_go(tid)?) };
        let mut stopped = match self.session.stop(tid)? {
            Stop::Stopped(stopped) => stopped,
            Stop::Gone | Stop::InVfork => return Ok(()),
        };
        let fs_base = stopped.fs_base()?;
        if fs_base.0 != 0 {
            let at = Avma(fs_base.0.wrapping_add_signed(i64::from(offset)));
            self.process.memory().write(at, &word.to_le_bytes())?;
            self.welcomed.push((tid, fs_base));
        }
        stopped.resume()?;
        Ok(())
    }

    fn release(&mut self, child: Pid, how: Birth) -> Result<(), Error> {
        tracing::debug!(%child, ?how, "born during the transition");
        Ok(self.session.release(child)?)
    }
}

enum Visit {
    Moved(Avma),
    NotYet,
    Gone,
}

impl Traveller {
    pub(crate) fn new() -> Self {
        Traveller { next: Instant::now(), wait: RETRY_FIRST, asked: false, seen: None, walked: false }
    }

    /// Delays the next examination.
    fn put_off(&mut self) {
        self.wait = (self.wait * 2).min(RETRY_MAX);
        self.next = Instant::now() + self.wait;
        self.asked = false;
    }

    /// Records that it migrates by itself, and delays the next check; returns true if its location has changed.
    pub(crate) fn follows(&mut self, before: String) -> bool {
        let now = Instant::now();
        if self.next <= now {
            self.wait = (self.wait * 2).min(RETRY_MAX);
            self.next = now + self.wait;
        }
        self.seen.replace(before.clone()) != Some(before)
    }

    fn describe(&self) -> String {
        self.seen.clone().unwrap_or_else(|| "a queue for a processor, and does not stop".to_owned())
    }
}

pub(crate) fn holds(memory: &Memory, at: Avma, word: u32) -> bool {
    let mut bytes = [0; 4];
    memory.read(at, &mut bytes).is_ok() && u32::from_le_bytes(bytes) == word
}
