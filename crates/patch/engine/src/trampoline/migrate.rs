//! Migration of the threads one by one, each stopped for some microseconds (a probe).

use super::Trampolines;
use crate::Error;
use crate::error::Busy;
use crate::event_pump::{EVENTS_MAX, Pace, SLOW_STOP, weight};
use crate::generation_word::word_value;
use crate::ledger::Transition;
use crate::probe::Verdict;
use crate::scan::Forbidden;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use stillpoint_base::Backoff;
use stillpoint_events::patch;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Event, Memory, Pid, ProcessOrigin, Stop, StopRequest, Tid};

pub(super) const RETRY_INTERVAL_MIN: Duration = Duration::from_micros(500);
const SHARER_DESCRIPTION: &str = "another process that shares the memory";
pub(super) const RETRY_INTERVAL_MAX: Duration = Duration::from_millis(2);
/// Longest time for which idle threads are moved before others.
const IDLE_FIRST_TIMEOUT: Duration = Duration::from_millis(50);

/// Direction in which threads are moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    Back,
}

/// One thread to be moved.
pub(super) struct PendingThread {
    next_check: Instant,
    wait: Backoff,
    /// True if its stop was requested and is still to come.
    pub(super) stop_requested: bool,
    location: Option<String>,
    stack_walked: bool,
}

impl Trampolines<'_, '_, '_> {
    /// Moves every thread by itself; returns the number of threads.
    pub(super) fn move_threads(
        &mut self,
        transition: &Transition,
        direction: Direction,
        deadline: Instant,
    ) -> Result<u32, Error> {
        // before the stops are announced, so that this search takes no processor from the threads
        let idle = self.cx.session.idle()?;
        self.cx.session.expect_all_to_stop(true);
        let result = self.move_all(transition, direction, deadline, idle);
        self.cx.session.expect_all_to_stop(false);
        // no thread may stay stopped, and no thread may stop for a request that is over
        self.cx.session.withdraw_requests()?;
        for tid in std::mem::take(&mut self.at_stop) {
            match self.cx.session.resume_thread(tid) {
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
        let offset = self.word_offset;
        let (code, word) = match direction {
            Direction::Forward => (&transition.leave, word_value(transition.number)),
            Direction::Back => (&transition.enter, 0),
        };
        let forbidden = self.forbidden(code, transition);
        self.new_thread_word = Some((offset, word));
        let mut done: BTreeMap<Tid, Avma> = BTreeMap::new();
        let mut waiting: BTreeMap<Tid, PendingThread> = BTreeMap::new();
        let mut pace = Pace::new();
        self.cx.session.expect_idle_to_stop(!idle.is_empty());
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
                            self.cx
                                .report
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
            let threads = self.cx.session.threads();
            waiting.retain(|tid, _| self.cx.session.knows(*tid));
            done.retain(|tid, _| self.cx.session.knows(*tid));
            self.track_self_migrating(&threads, &mut waiting, &mut done)?;
            if !idle.is_empty() {
                let unexamined = |tid: &Tid| waiting.get(tid).is_none_or(|pending| pending.location.is_none());
                let to_come = |tid: &Tid| self.cx.session.knows(*tid) && !done.contains_key(tid) && unexamined(tid);
                idle.retain(|tid| {
                    to_come(tid) && !self.followed_request.migrates_itself(*tid) && Instant::now() < idle_until
                });
                if idle.is_empty() {
                    self.cx.session.expect_idle_to_stop(false);
                }
            }
            if !pace.is_over() {
                self.request_stops(&threads, &idle, &mut waiting, &done)?;
            } else if self.at_stop.is_empty() && !waiting.values().any(|t| t.stop_requested) {
                self.pause(Pace::pause_duration(threads.len()))?;
                self.cx.session.expect_idle_to_stop(!idle.is_empty());
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
                let sharers = self.cx.process.memory_sharers()?;
                let sharers = sharers.iter().map(|pid| Busy { tid: pid.leader(), function: SHARER_DESCRIPTION.into() });
                return Err(Error::TimedOut(waiting.iter().map(to_busy).chain(sharers).collect()));
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
        self.cx.session.expect_all_to_stop(false);
        self.serve(until)?;
        self.cx.session.expect_all_to_stop(true);
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

    /// Asks a thread like [`Trampolines::request_first_stop`], if it was busy at its last examination.
    fn request_repeated_stop(&mut self, tid: Tid, waiting: &mut BTreeMap<Tid, PendingThread>) -> Result<bool, Error> {
        // another stop of a thread that has not run would show nothing new, and restart its time-out
        if waiting.get(&tid).is_some_and(|t| t.stack_walked) && self.cx.session.idle_since_stop(tid)? {
            waiting.entry(tid).and_modify(PendingThread::postpone);
            return Ok(false);
        }
        self.walker.prepare();
        let asked = self.cx.session.request_stop_again(tid)?;
        Ok(self.record_request(tid, asked, waiting))
    }

    /// Asks a thread to stop; returns true if its stop is to come.
    fn request_first_stop(&mut self, tid: Tid, waiting: &mut BTreeMap<Tid, PendingThread>) -> Result<bool, Error> {
        let asked = self.cx.session.request_stop(tid)?;
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
        let over = |tid: &Tid| done.contains_key(tid) || self.cx.session.is_new(*tid);
        if !self.cx.session.threads().iter().all(over) {
            return Ok(false);
        }
        let tracer = Pid(rustix::thread::gettid().as_raw_nonzero().get());
        for thread in self.cx.process.threads_besides(|tid| over(&tid))?.iter().filter(|thread| thread.runs_program()) {
            // a thread whose parent's report is still to come: the kernel has attached it to the tool and holds it
            match self.cx.process.thread_status(thread.tid) {
                Ok(status) if status.tracer != tracer => {
                    self.cx.session.seize_unreported()?;
                    return Ok(false);
                }
                _ => {}
            }
        }
        Ok(self.cx.process.memory_sharers()?.is_empty())
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
        let offset = self.word_offset;
        let mut stopped = match self.cx.session.stop(tid) {
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
        let snapshot = self.prober.snapshot(self.cx.process, &mut stopped)?;
        let at = Avma(snapshot.fs_base.0.wrapping_add_signed(i64::from(offset)));
        let mut verdict = snapshot.verdict(forbidden);
        if direction == Direction::Back && !holds(self.cx.process.memory(), at, word_value(transition.number)) {
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
                self.cx.process.memory().write(at, &word.to_le_bytes())?;
                true
            }
            _ => false,
        };
        let stopped_ns = stopped.resume()?;
        self.cx.report.stopped(tid, "probe", stopped_ns);
        if moved {
            return Ok(VisitResult::Migrated(fs_base));
        }
        let function = match verdict {
            Verdict::Clear => "code of a thread that shares its control block with another thread".to_owned(),
            other => other.describe(),
        };
        if pending.location.as_ref() != Some(&function) {
            self.cx.report.event(patch::Event::ThreadBusy { tid: tid.0, function: function.clone() });
        }
        pending.location = Some(function);
        Ok(VisitResult::Busy)
    }

    /// Serves events until `until` has passed.
    pub(super) fn serve(&mut self, until: Instant) -> Result<(), Error> {
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
        let pid = self.cx.process.pid();
        match self.cx.session.pump(until)? {
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
        let Some((offset, word)) = self.new_thread_word else { return Ok(self.cx.session.resume_thread(tid)?) };
        let mut stopped = match self.cx.session.stop(tid)? {
            Stop::Stopped(stopped) => stopped,
            Stop::Gone | Stop::InVfork => return Ok(()),
        };
        let fs_base = stopped.fs_base()?;
        if fs_base.0 != 0 {
            let at = Avma(fs_base.0.wrapping_add_signed(i64::from(offset)));
            self.cx.process.memory().write(at, &word.to_le_bytes())?;
            self.initialised.push((tid, fs_base));
        }
        stopped.resume()?;
        Ok(())
    }

    fn release(&mut self, child: Pid, how: ProcessOrigin) -> Result<(), Error> {
        tracing::debug!(%child, ?how, "a process started during the transition");
        Ok(self.cx.session.release(child)?)
    }
}

enum VisitResult {
    Migrated(Avma),
    Busy,
    Ended,
}

impl PendingThread {
    pub(super) fn new() -> Self {
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
    pub(super) fn update_location(&mut self, before: String) -> bool {
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

pub(super) fn holds(memory: &Memory, at: Avma, word: u32) -> bool {
    memory.read_array(at).is_ok_and(|bytes| u32::from_le_bytes(bytes) == word)
}
