//! Stopping of all threads of a process.
//!
//! Nothing can stop a thread that waits for a disk (state D). If one does not stop within 2 or 3 ms, all threads continue, and the stop is
//! tried again when that thread has left its sleep, with twice the limit each time. Beside a disk that is filled and flushed all the time,
//! 180 stops of a MariaDB lasted 2.8 ms (median), 5.3 (p90) and 8.9 (longest); with all threads stopped until that thread came, 2.9, 15.8 and
//! 37 ms. Threads that have used less than a quarter of what threads use on average, and sleep, are stopped first and woken last: a short
//! stop of these delays no client.

use crate::remote::{Diversion, Remote};
use crate::restart;
use crate::status::AverageUsage;
use crate::tracer::{STOP_TIMEOUT, State, StopOutcome, Tracer, UNINTERRUPTIBLE_LIMIT_MIN, unstoppable};
use crate::{Error, Event, Session, StoppedThread, ThreadInfo, Tid, carrier};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use stillpoint_base::crosses_page;
use stillpoint_patch_format::Avma;

/// Time limit for one thread: shorter than for a single stop, because the other threads are stopped meanwhile. For a thread in state D the
/// limit is even shorter, see [`UNINTERRUPTIBLE_LIMIT_MIN`].
const THREAD_STOP_TIMEOUT: Duration = Duration::from_millis(500);
/// Number of rounds in which new threads may appear. Stopped threads create none, so two would do.
const ROUNDS_MAX: usize = 64;
/// Way to stop a thread, in this order: first threads that may not stop at all, then sleepers whose calls need a repair, then sleepers
/// whose calls restart by themselves, last running threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum StopClass {
    Uninterruptible,
    Sleeping,
    Restarting,
    Running,
}
/// A thread that is not stopped yet.
#[derive(Debug, Clone, Copy)]
struct PendingStop {
    tid: i32,
    class: StopClass,
    /// Processor time that it has used, in ticks of the kernel.
    ticks: u64,
    /// True if it sleeps and has used much less of the processor than the other threads: a pause of a few milliseconds does no harm.
    idle: bool,
}
/// Largest number of sleepers that are asked to stop at the same time.
const CONCURRENT_STOPS_MAX: usize = 32;
/// Number of threads asked at the same time when none needs a repair: enough to make their turns on a processor worthwhile together, and so
/// few that the busiest threads, which come last, are not stopped while the others are waited for.
const STOPS_PER_BATCH_MAX: usize = 16;
/// Poll interval: a stop that takes longer waits for a processor, or its thread waits for a disk.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Interval of checks for threads that sleep in state D, before any thread is stopped.
const SLEEP_POLL_INTERVAL: Duration = Duration::from_millis(1);
const _: () = assert!(THREAD_STOP_TIMEOUT.as_nanos() < STOP_TIMEOUT.as_nanos());

impl PendingStop {
    fn sleeps(&self) -> bool {
        matches!(self.class, StopClass::Sleeping | StopClass::Restarting)
    }

    /// Returns the sort key of the order of stops: idle threads, threads that may not stop at all, other sleepers, running threads.
    fn order(&self) -> impl Ord + use<> {
        let sleeps = if self.sleeps() { StopClass::Sleeping } else { self.class };
        // approximate activity is good enough; exact values would separate neighbours of the same kind
        let busy = if self.idle { 0 } else { u64::BITS - self.ticks.leading_zeros() };
        (Reverse(self.idle), sleeps, busy, self.class, self.ticks, Reverse(self.tid))
    }
}

/// A process whose idle threads are stopped, so that the caller can inspect them before the other threads are stopped too. Dropping it
/// resumes them.
#[derive(Debug)]
pub struct PartialFreeze<'s, 'p> {
    part: FrozenProcess<'s, 'p>,
    others: Vec<PendingStop>,
}

impl<'s, 'p> PartialFreeze<'s, 'p> {
    pub(crate) fn begin(session: &'s mut Session<'p>) -> Result<PartialFreeze<'s, 'p>, Error> {
        // On failure, dropping `part` resumes the stopped threads.
        let mut part = FrozenProcess::empty(session);
        let others = part.begin()?;
        Ok(PartialFreeze { part, others })
    }

    /// Returns the stopped threads.
    pub fn threads(&self) -> &[Tid] {
        &self.part.order
    }

    /// Returns one of them.
    ///
    /// # Errors
    /// [`Error::ThreadGone`] if it is not among the stopped threads.
    pub fn thread(&mut self, tid: Tid) -> Result<StoppedThread<'_>, Error> {
        self.part.thread(tid)
    }

    /// Stops the other threads; on failure all threads continue.
    ///
    /// # Errors
    /// A thread does not stop ([`Error::Unstoppable`]), or the process has ended or called exec.
    pub fn complete(self) -> Result<FrozenProcess<'s, 'p>, Error> {
        let PartialFreeze { part: mut frozen, others } = self;
        frozen.complete(&others)?;
        Ok(frozen)
    }
}

/// A process with all threads stopped. Dropping it thaws them, those that were stopped last first.
#[derive(Debug)]
pub struct FrozenProcess<'s, 'p> {
    session: &'s mut Session<'p>,
    order: Vec<Tid>,
    /// Number of idle threads; they are the first ones of `order`.
    idle: usize,
    /// Threads that execute other code first, see [`FrozenProcess::divert`].
    diverted: Vec<Diversion>,
    /// Time for which threads were stopped in failed attempts, in nanoseconds.
    failed_attempts: Vec<(Tid, u64)>,
    thawed: bool,
}

impl<'s, 'p> FrozenProcess<'s, 'p> {
    fn empty(session: &'s mut Session<'p>) -> FrozenProcess<'s, 'p> {
        FrozenProcess {
            session,
            order: Vec::new(),
            idle: 0,
            diverted: Vec::new(),
            failed_attempts: Vec::new(),
            thawed: false,
        }
    }

    /// Stops all threads; tries again if other threads would have been stopped for too long because of one in state D.
    pub(crate) fn all(session: &'s mut Session<'p>) -> Result<FrozenProcess<'s, 'p>, Error> {
        let until = Instant::now() + THREAD_STOP_TIMEOUT;
        let mut frozen = FrozenProcess::empty(session);
        loop {
            let limit = frozen.session.tracer.uninterruptible_limit;
            match frozen.begin().and_then(|others| frozen.complete(&others)) {
                Ok(()) => return Ok(frozen),
                // the attempt was aborted for that reason, and may succeed later
                Err(_) if frozen.session.tracer.uninterruptible_limit > limit && Instant::now() < until => {
                    let stopped = frozen.resume_thread()?;
                    frozen.failed_attempts.extend(stopped);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Stops the idle threads; returns the others.
    fn begin(&mut self) -> Result<Vec<PendingStop>, Error> {
        let mut pending = self.pending()?;
        if self.wait_for_disks(&pending)? {
            pending = self.pending()?;
        }
        let (idle, others) = pending.split_at(pending.partition_point(|pending| pending.idle));
        self.session.tracer.idle = Some(idle.iter().map(|pending| pending.tid).collect());
        // not before: the search through the threads takes no processor from them
        self.session.expect_all_to_stop(true);
        self.stop_idle(idle)?;
        Ok(others.to_vec())
    }

    /// Stops the threads that [`FrozenProcess::begin`] did not stop, and new threads.
    fn complete(&mut self, others: &[PendingStop]) -> Result<(), Error> {
        self.session.tracer.priority.end_sparing();
        self.stop_groups(others)?;
        self.stop_all()?;
        self.session.tracer.timer.disarm();
        self.session.tracer.uninterruptible_limit = UNINTERRUPTIBLE_LIMIT_MIN;
        Ok(())
    }

    /// Waits until each thread in state D has left that sleep once, as long as no thread is stopped; returns true if it waited at all.
    fn wait_for_disks(&mut self, pending: &[PendingStop]) -> Result<bool, Error> {
        let switches = |tracer: &Tracer, tid| tracer.process.voluntary_switches(Tid(tid)).ok();
        let uninterruptible = pending.iter().filter(|pending| pending.class == StopClass::Uninterruptible);
        let mut uninterruptible: Vec<_> =
            uninterruptible.map(|m| (m.tid, switches(&self.session.tracer, m.tid))).collect();
        let until = Instant::now() + THREAD_STOP_TIMEOUT;
        let mut waited = false;
        loop {
            let tracer = &mut self.session.tracer;
            let state = |tid| tracer.process.thread_info(Tid(tid)).ok().flatten().map(|info| info.state);
            uninterruptible.retain(|&(tid, before)| state(tid) == Some('D') && switches(tracer, tid) == before);
            let Some(&(first, _)) = uninterruptible.first() else { break };
            if tracer.any_stopped() {
                break;
            }
            if Instant::now() > until {
                return Err(unstoppable(first, 'D'));
            }
            tracer.timer.arm(SLEEP_POLL_INTERVAL);
            tracer.serve_one(true)?;
            waited = true;
        }
        Ok(waited)
    }

    /// Aborts the attempt: other threads have been stopped long enough for a thread in state D. The limit is longer next time, so that the
    /// freeze succeeds even if some thread is always in that state.
    fn abort_attempt(&mut self, tid: i32) -> Error {
        let tracer = &mut self.session.tracer;
        tracer.uninterruptible_limit = (tracer.uninterruptible_limit * 2).min(THREAD_STOP_TIMEOUT);
        unstoppable(tid, 'D')
    }

    /// Stops every thread that is not stopped yet, including new threads.
    fn stop_all(&mut self) -> Result<(), Error> {
        for _ in 0..ROUNDS_MAX {
            if self.all_stopped()? {
                return Ok(());
            }
            self.session.tracer.seize_new()?;
            let pending = self.pending()?;
            self.stop_groups(&pending)?;
        }
        let why = "new threads appear without end".to_owned();
        Err(Error::Unstoppable { tid: self.session.process().pid().leader(), why })
    }

    /// Stops idle threads. The processor belongs to the other threads until one of them is stopped.
    fn stop_idle(&mut self, idle: &[PendingStop]) -> Result<(), Error> {
        let alone = !self.session.tracer.any_stopped();
        if alone && !idle.is_empty() {
            self.session.tracer.priority.spare_others();
        }
        self.stop_groups(idle)?;
        self.idle = if alone { self.order.len() } else { 0 };
        Ok(())
    }

    fn stop_groups(&mut self, pending: &[PendingStop]) -> Result<(), Error> {
        pending.chunk_by(|a, b| a.class == b.class).try_for_each(|group| self.stop_group(group))
    }

    /// Returns the threads that are not stopped yet. Among sleepers of any kind, those that have used the processor most, or are the
    /// oldest, come last: a busy thread is stopped for the shortest time.
    fn pending(&self) -> Result<Vec<PendingStop>, Error> {
        let tracer = &self.session.tracer;
        let running = tracer.threads.iter().filter(|(_, thread)| !matches!(thread.state, State::Stopped(_)));
        let mut pending = Vec::with_capacity(tracer.threads.len());
        for (&tid, thread) in running {
            let info = tracer.process.thread_info(Tid(tid))?;
            if thread.in_vfork || info.is_some_and(|info| tracer.sleeps_in_vfork(&info)) {
                return Err(in_vfork(tid));
            }
            let class = match info.map(|info| info.state) {
                Some('D') | None => StopClass::Uninterruptible,
                Some('R') => StopClass::Running,
                Some(_) => match tracer.process.sleeps_in(Tid(tid)) {
                    Some(call) if restart::restarts_by_itself(call) => StopClass::Restarting,
                    _ => StopClass::Sleeping,
                },
            };
            pending.push(PendingStop { tid, class, ticks: info.map_or(0, |info| info.cpu_ticks), idle: false });
        }
        let average = AverageUsage::of(pending.iter().map(|pending| pending.ticks));
        for pending in pending.iter_mut().filter(|pending| pending.sleeps()) {
            pending.idle = average.is_idle(pending.ticks);
        }
        pending.sort_unstable_by_key(PendingStop::order);
        Ok(pending)
    }

    fn stop_group(&mut self, group: &[PendingStop]) -> Result<(), Error> {
        let class = group[0].class;
        if matches!(class, StopClass::Uninterruptible | StopClass::Sleeping) {
            let result = self.stop_sleepers(group);
            self.session.tracer.threads.values_mut().for_each(|thread| thread.stop_requested = false);
            // after a failure some stopped threads may not be counted yet: they must be thawed as well
            let stopped = self.take_stopped();
            self.order.extend(stopped.into_iter().map(Tid));
            return result;
        }
        let at_once = if class == StopClass::Running { group.len() } else { STOPS_PER_BATCH_MAX };
        for some in group.chunks(at_once) {
            for pending in some {
                self.session.tracer.request_stop(pending.tid, false)?;
            }
            some.iter().try_for_each(|pending| self.await_stop(pending.tid))?;
        }
        Ok(())
    }

    /// Stops sleeping threads whose calls may need a repair, and takes each when it stops. A call is repaired when its thread is seen
    /// stopped, and that must be soon, so the threads are asked one at a time. On a busy machine each must wait for its turn on a
    /// processor; that would add up to seconds with all threads stopped. On such a machine several threads are asked together.
    fn stop_sleepers(&mut self, group: &[PendingStop]) -> Result<(), Error> {
        let mut rest = group.iter().map(|pending| pending.tid);
        let mut requested: BTreeMap<i32, Instant> = BTreeMap::new();
        let mut deadline = Instant::now() + THREAD_STOP_TIMEOUT;
        let mut concurrent = 1;
        loop {
            while requested.len() < concurrent
                && let Some(tid) = rest.next()
            {
                self.request(tid, &mut requested)?;
            }
            let Some((&first, _)) = requested.first_key_value() else { return Ok(()) };
            let tracer = &mut self.session.tracer;
            tracer.timer.arm(POLL_INTERVAL);
            let served = tracer.serve_one(true)?.is_some();
            if !served {
                concurrent = (concurrent * 2).min(CONCURRENT_STOPS_MAX);
            }
            let stopped = self.take_stopped();
            if self.session.tracer.replaced {
                return Err(Error::Exec(self.session.process().pid()));
            }
            if !stopped.is_empty() {
                deadline = Instant::now() + THREAD_STOP_TIMEOUT;
            }
            for tid in stopped {
                requested.remove(&tid);
                self.order.push(Tid(tid));
            }
            let tracer = &mut self.session.tracer;
            requested.retain(|tid, _| tracer.threads.contains_key(tid));
            if let Some(tid) =
                requested.keys().find(|tid| tracer.threads.get(tid).is_some_and(|thread| thread.in_vfork))
            {
                return Err(in_vfork(*tid));
            }
            if served {
                continue;
            }
            let limit = tracer.uninterruptible_limit;
            for (&tid, _) in requested.iter().filter(|(_, since)| since.elapsed() >= limit) {
                if tracer.process.thread_info(Tid(tid))?.is_some_and(|info| info.state == 'D') {
                    return Err(self.abort_attempt(tid));
                }
            }
            if Instant::now() > deadline {
                return Err(match tracer.process.thread_info(Tid(first))? {
                    Some(info) => unstoppable(first, info.state),
                    None => Error::Unstoppable { tid: Tid(first), why: "it is about to end".to_owned() },
                });
            }
        }
    }

    fn request(&mut self, tid: i32, requested: &mut BTreeMap<i32, Instant>) -> Result<(), Error> {
        let tracer = &mut self.session.tracer;
        if !tracer.request_stop(tid, false)? {
            return Ok(());
        }
        match tracer.threads.get_mut(&tid).map(|thread| (thread.state, &mut thread.stop_requested)) {
            Some((State::Running, flag)) => {
                *flag = true;
                requested.insert(tid, Instant::now());
                Ok(())
            }
            // a new thread, whose first stop needs no request
            Some((State::Expected, _)) => self.await_stop(tid),
            _ => Ok(()),
        }
    }

    /// Returns the threads that have stopped on request.
    fn take_stopped(&mut self) -> Vec<i32> {
        let mut stopped = Vec::new();
        self.session.tracer.events.retain(|event| match event {
            Event::Stopped(tid) => {
                stopped.push(tid.0);
                false
            }
            _ => true,
        });
        stopped
    }

    fn await_stop(&mut self, tid: i32) -> Result<(), Error> {
        let uninterruptible = self.session.tracer.uninterruptible_limit;
        match self.session.tracer.await_stop(tid, THREAD_STOP_TIMEOUT, Some(uninterruptible))? {
            StopOutcome::Stopped => self.order.push(Tid(tid)),
            StopOutcome::Uninterruptible => return Err(self.abort_attempt(tid)),
            StopOutcome::InVfork => return Err(in_vfork(tid)),
            _ if self.session.tracer.replaced => return Err(Error::Exec(self.session.process().pid())),
            _ => {}
        }
        Ok(())
    }

    /// Returns true if every thread is stopped, also by the kernel's count, or otherwise by its list. Other threads are stopped meanwhile,
    /// so no file is read for a known thread.
    fn all_stopped(&self) -> Result<bool, Error> {
        let tracer = &self.session.tracer;
        if !tracer.threads.values().all(|thread| matches!(thread.state, State::Stopped(_))) {
            return Ok(false);
        }
        // a traced thread counts until its tracer has waited for it: an equal number means the same threads
        if tracer.process.thread_count() == Some(tracer.threads.len() as u64) {
            return Ok(true);
        }
        let others = tracer.process.threads_but(|tid| tracer.threads.contains_key(&tid))?;
        Ok(others.all && !others.threads.iter().any(ThreadInfo::runs_program))
    }

    /// Returns the threads, all of them stopped (without kernel workers), in the order in which they were stopped. Threads that were held
    /// already (new ones) come first.
    pub fn threads(&self) -> Vec<Tid> {
        let held_before = self.session.threads().into_iter().filter(|tid| !self.order.contains(tid));
        held_before.chain(self.order.iter().copied()).collect()
    }

    /// Returns one of them.
    ///
    /// # Errors
    /// [`Error::ThreadGone`] if it is not among the stopped threads.
    pub fn thread(&mut self, tid: Tid) -> Result<StoppedThread<'_>, Error> {
        self.session.tracer.stop_state(tid.0)?;
        Ok(StoppedThread::new(&mut self.session.tracer, tid.0))
    }

    /// Returns a thread that can carry remote calls.
    ///
    /// # Errors
    /// [`Error::NoCarrier`] if no thread can, or the state of a thread cannot be read.
    pub fn carrier(&mut self) -> Result<StoppedThread<'_>, Error> {
        let pid = self.session.process().pid();
        let mut why = "it has no threads".to_owned();
        for tid in carrier::by_fitness(&self.session.tracer) {
            match carrier::fault(&mut self.session.tracer, tid)? {
                None => return Ok(StoppedThread::new(&mut self.session.tracer, tid)),
                Some(fault) => why = format!("thread {tid}: {fault}"),
            }
        }
        Err(Error::NoCarrier { pid, why })
    }

    /// Writes pieces of text, each with one write that a kill cannot split. A piece must therefore not cross a page; all are checked before
    /// the first is written. The caller has proved that no thread is stopped inside any of them.
    ///
    /// # Errors
    /// [`Error::CrossesPage`] before anything is written; [`Error::Memory`] for a piece that cannot be written: the pieces before it are
    /// written, the others are not.
    pub fn write_text(&mut self, pieces: &[(Avma, &[u8])]) -> Result<(), Error> {
        for (at, bytes) in pieces {
            if crosses_page(at.0, bytes.len()) {
                return Err(Error::CrossesPage { at: *at, len: bytes.len() });
            }
        }
        let tracer: &Tracer = &self.session.tracer;
        let holder = tracer.threads.keys().next().copied().unwrap_or(tracer.process.pid().0);
        let memory = tracer.process.memory();
        pieces.iter().try_for_each(|(at, bytes)| memory.write_through(holder, *at, bytes))
    }

    /// Makes every thread execute the code at `code` before anything else when it continues: after the tool's death, or if
    /// [`FrozenProcess::cancel_diversion`] does not come first. The code may use any register but the stack pointer, and returns; then the
    /// thread restores itself. If a thread cannot be diverted, all are restored.
    ///
    /// # Errors
    /// [`Error::BadCarrier`], [`Error::NoGadget`] or [`Error::Seccomp`] for a thread that cannot restore itself; or it has ended.
    pub fn divert(&mut self, code: Avma) -> Result<(), Error> {
        // while all threads are stopped, none maps memory
        let mappings = self.session.process().mappings()?;
        for tid in self.threads() {
            let tracer = &mut self.session.tracer;
            if tracer.registers(tid.0)?.has_no_user_side() {
                continue;
            }
            match Remote::begin_among(tracer, tid.0, &mappings).and_then(|remote| remote.divert(code)) {
                Ok(diversion) => self.diverted.push(diversion),
                Err(error) => {
                    self.cancel_diversion()?;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Restores all threads that were diverted: they continue with their own code.
    ///
    /// # Errors
    /// A thread has ended; the others are restored.
    pub fn cancel_diversion(&mut self) -> Result<(), Error> {
        let results: Vec<_> = self.diverted.drain(..).map(|diversion| diversion.cancel()).collect();
        results.into_iter().collect()
    }

    /// Thaws and returns for how long each thread was stopped, in nanoseconds, in the order thawed; after them the times of failed
    /// attempts. New threads stay held until they are resumed, as [`Event::NewThread`](crate::Event::NewThread) states.
    ///
    /// # Errors
    /// A thread cannot be resumed; the others continue.
    pub fn thaw(mut self) -> Result<Vec<(Tid, u64)>, Error> {
        self.thawed = true;
        let mut stopped = self.resume_thread()?;
        stopped.append(&mut self.failed_attempts);
        Ok(stopped)
    }

    fn resume_thread(&mut self) -> Result<Vec<(Tid, u64)>, Error> {
        let order = std::mem::take(&mut self.order);
        let mut stopped = Vec::with_capacity(order.len());
        let mut first_error = None;
        for (at, &tid) in order.iter().enumerate().rev() {
            // the busy threads run again; only idle ones are left
            if at + 1 == self.idle {
                self.session.tracer.priority.spare_others();
            }
            match self.session.tracer.resume_thread(tid.0) {
                Ok(ns) => stopped.push((tid, ns)),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        self.session.tracer.timer.disarm();
        self.session.expect_all_to_stop(false);
        first_error.map_or(Ok(stopped), Err)
    }
}

impl Drop for FrozenProcess<'_, '_> {
    fn drop(&mut self) {
        if !self.thawed {
            let _ = self.resume_thread();
        }
    }
}

fn in_vfork(tid: i32) -> Error {
    Error::Unstoppable {
        tid: Tid(tid),
        why: "it waits for the child of its vfork, which uses the same memory".to_owned(),
    }
}
