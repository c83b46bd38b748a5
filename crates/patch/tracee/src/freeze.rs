//! All threads standing.

use crate::restart;
use crate::status::Usual;
use crate::tracer::{ASLEEP_FIRST, STOP_LIMIT, Seen, State, Tracer, will_not_stop};
use crate::{Error, Event, Held, Session, ThreadInfo, Tid, carrier};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use stillpoint_patch_format::Avma;

const PAGE: u64 = 4096;
/// While one thread is waited for the others stand: much less patience than for a single stop. For one in state D there is
/// less still, see [`ASLEEP_FIRST`].
const LIMIT: Duration = Duration::from_millis(500);
/// Rounds in which new threads may turn up. Threads that stand bear none, so two would do.
const ROUNDS: usize = 64;
/// How threads are stopped: those that may not stop at all first, threads that run last, and between them sleepers, whose
/// calls need mending or restart by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Manner {
    Unwilling,
    Sleeping,
    Restarting,
    Running,
}
/// A thread that does not stand yet.
#[derive(Debug, Clone, Copy)]
struct Missing {
    tid: i32,
    manner: Manner,
    /// Processor time that it has used, in the kernel's ticks.
    ticks: u64,
    /// It sleeps, and has used much less of the processor than its fellows: nobody misses it for a few milliseconds.
    idle: bool,
}
/// Sleepers on their way to a stop at the same time, at most.
const TOGETHER: usize = 32;
/// Threads asked at once where none needs mending: enough to pay for their turns on a processor together, and so few that
/// those who use it most, which are the last, do not stand for the others.
const AT_ONCE: usize = 16;
/// A stop that takes longer waits for a processor, or the thread for a disk.
const LOOK: Duration = Duration::from_millis(2);
/// How often it is looked whether threads still sleep in state D, before anybody stands.
const LOOK_AT_SLEEP: Duration = Duration::from_millis(1);
const _: () = assert!(LIMIT.as_nanos() < STOP_LIMIT.as_nanos());

impl Missing {
    fn sleeps(&self) -> bool {
        matches!(self.manner, Manner::Sleeping | Manner::Restarting)
    }

    /// Whose turn comes first: the idle, those that may not stop at all, other sleepers, and threads that run.
    fn place(&self) -> impl Ord + use<> {
        let sleeps = if self.sleeps() { Manner::Sleeping } else { self.manner };
        // about as busy is good enough, or no two of a kind would be neighbours
        let busy = if self.idle { 0 } else { u64::BITS - self.ticks.leading_zeros() };
        (Reverse(self.idle), sleeps, busy, self.manner, self.ticks, Reverse(self.tid))
    }
}

/// A process of which those threads stand that nobody misses: what is to be looked at of them can be, before the others
/// stand as well. Dropping it lets them go.
#[derive(Debug)]
pub struct Freezing<'s, 'p> {
    part: Frozen<'s, 'p>,
    others: Vec<Missing>,
}

impl<'s, 'p> Freezing<'s, 'p> {
    pub(crate) fn begin(session: &'s mut Session<'p>) -> Result<Freezing<'s, 'p>, Error> {
        // On failure, dropping `part` lets go whoever stands.
        let mut part = Frozen::nobody(session);
        let others = part.begin()?;
        Ok(Freezing { part, others })
    }

    /// The threads that stand.
    pub fn threads(&self) -> &[Tid] {
        &self.part.order
    }

    /// One of them.
    pub fn thread(&mut self, tid: Tid) -> Result<Held<'_>, Error> {
        self.part.thread(tid)
    }

    /// Stops the others; on failure everything runs on.
    pub fn complete(self) -> Result<Frozen<'s, 'p>, Error> {
        let Freezing { part: mut frozen, others } = self;
        frozen.complete(&others)?;
        Ok(frozen)
    }
}

/// All threads of a process standing. Dropping it thaws them, those that ran before first.
#[derive(Debug)]
pub struct Frozen<'s, 'p> {
    session: &'s mut Session<'p>,
    order: Vec<Tid>,
    /// So many of them, the first, are idle.
    idle: usize,
    /// For how long threads have stood when it was tried in vain.
    in_vain: Vec<(Tid, u64)>,
    thawed: bool,
}

impl<'s, 'p> Frozen<'s, 'p> {
    fn nobody(session: &'s mut Session<'p>) -> Frozen<'s, 'p> {
        Frozen { session, order: Vec::new(), idle: 0, in_vain: Vec::new(), thawed: false }
    }

    /// All threads, tried again where others would have stood for one in state D.
    pub(crate) fn all(session: &'s mut Session<'p>) -> Result<Frozen<'s, 'p>, Error> {
        let until = Instant::now() + LIMIT;
        let mut frozen = Frozen::nobody(session);
        loop {
            let patience = frozen.session.tracer.asleep_limit;
            match frozen.begin().and_then(|others| frozen.complete(&others)) {
                Ok(()) => return Ok(frozen),
                // it was given up for that reason, and not for good
                Err(_) if frozen.session.tracer.asleep_limit > patience && Instant::now() < until => {
                    let stood = frozen.let_go()?;
                    frozen.in_vain.extend(stood);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Stops threads that nobody misses; returns the others.
    fn begin(&mut self) -> Result<Vec<Missing>, Error> {
        let mut missing = self.missing()?;
        if self.wait_for_disks(&missing)? {
            missing = self.missing()?;
        }
        let (idle, others) = missing.split_at(missing.partition_point(|missing| missing.idle));
        self.session.tracer.idle = Some(idle.iter().map(|missing| missing.tid).collect());
        // not before: who looks through the threads takes no processor from them
        self.session.expect_all_to_stop(true);
        self.stop_idle(idle)?;
        Ok(others.to_vec())
    }

    /// Stops those that [`Frozen::begin`] did not, and whoever turns up meanwhile.
    fn complete(&mut self, others: &[Missing]) -> Result<(), Error> {
        self.session.tracer.priority.spare_nobody();
        self.stop_groups(others)?;
        self.stop_all()?;
        self.session.tracer.timer.disarm();
        self.session.tracer.asleep_limit = ASLEEP_FIRST;
        Ok(())
    }

    /// Waits until each thread in state D has left that sleep once, as long as nobody stands; whether it waited at all.
    fn wait_for_disks(&mut self, missing: &[Missing]) -> Result<bool, Error> {
        let switches = |tracer: &Tracer, tid| tracer.process.voluntary_switches(Tid(tid)).ok();
        let unwilling = missing.iter().filter(|missing| missing.manner == Manner::Unwilling);
        let mut asleep: Vec<_> = unwilling.map(|m| (m.tid, switches(&self.session.tracer, m.tid))).collect();
        let until = Instant::now() + LIMIT;
        let mut waited = false;
        loop {
            let tracer = &mut self.session.tracer;
            let state = |tid| tracer.process.thread_info(Tid(tid)).ok().flatten().map(|info| info.state);
            asleep.retain(|&(tid, before)| state(tid) == Some('D') && switches(tracer, tid) == before);
            let Some(&(first, _)) = asleep.first() else { break };
            if tracer.anybody_stands() {
                break;
            }
            if Instant::now() > until {
                return Err(will_not_stop(first, 'D'));
            }
            tracer.timer.arm(LOOK_AT_SLEEP);
            tracer.serve_one(true)?;
            waited = true;
        }
        Ok(waited)
    }

    /// Others stand for a thread in state D, and have done so for long enough: next time it may last longer, so that it comes
    /// to an end where some thread is always there.
    fn give_up(&mut self, tid: i32) -> Error {
        let tracer = &mut self.session.tracer;
        tracer.asleep_limit = (tracer.asleep_limit * 2).min(LIMIT);
        will_not_stop(tid, 'D')
    }

    /// Stops whoever does not stand yet, those included that turn up meanwhile.
    fn stop_all(&mut self) -> Result<(), Error> {
        for _ in 0..ROUNDS {
            if self.all_stand()? {
                return Ok(());
            }
            self.session.tracer.seize_new()?;
            let missing = self.missing()?;
            self.stop_groups(&missing)?;
        }
        let why = "new threads appear without end".to_owned();
        Err(Error::Unstoppable { tid: self.session.process().pid().leader(), why })
    }

    /// Stops threads that nobody misses: as long as nobody else stands, the processor is the others'.
    fn stop_idle(&mut self, idle: &[Missing]) -> Result<(), Error> {
        let alone = !self.session.tracer.anybody_stands();
        if alone && !idle.is_empty() {
            self.session.tracer.priority.spare_others();
        }
        self.stop_groups(idle)?;
        self.idle = if alone { self.order.len() } else { 0 };
        Ok(())
    }

    fn stop_groups(&mut self, missing: &[Missing]) -> Result<(), Error> {
        missing.chunk_by(|a, b| a.manner == b.manner).try_for_each(|group| self.stop_group(group))
    }

    /// Threads that do not stand yet. Of sleepers, however they are stopped, those that have used the processor most, or
    /// are the oldest, come last: who is busy stands for the shortest time.
    fn missing(&self) -> Result<Vec<Missing>, Error> {
        let tracer = &self.session.tracer;
        let running = tracer.threads.iter().filter(|(_, thread)| !matches!(thread.state, State::Standing(_)));
        let mut missing = Vec::with_capacity(tracer.threads.len());
        for (&tid, thread) in running {
            let info = tracer.process.thread_info(Tid(tid))?;
            if thread.in_vfork || info.is_some_and(|info| tracer.sleeps_in_vfork(&info)) {
                return Err(in_vfork(tid));
            }
            let manner = match info.map(|info| info.state) {
                Some('D') | None => Manner::Unwilling,
                Some('R') => Manner::Running,
                Some(_) => match tracer.process.sleeps_in(Tid(tid)) {
                    Some(call) if restart::restarts_by_itself(call) => Manner::Restarting,
                    _ => Manner::Sleeping,
                },
            };
            missing.push(Missing { tid, manner, ticks: info.map_or(0, |info| info.cpu_ticks), idle: false });
        }
        let usual = Usual::of(missing.iter().map(|missing| missing.ticks));
        for missing in missing.iter_mut().filter(|missing| missing.sleeps()) {
            missing.idle = usual.is_idle(missing.ticks);
        }
        missing.sort_unstable_by_key(Missing::place);
        Ok(missing)
    }

    fn stop_group(&mut self, group: &[Missing]) -> Result<(), Error> {
        let manner = group[0].manner;
        if matches!(manner, Manner::Unwilling | Manner::Sleeping) {
            let result = self.stop_sleepers(group);
            self.session.tracer.threads.values_mut().for_each(|thread| thread.asked = false);
            // after a failure some may stand that are not counted yet: they are to be thawed as well
            let stood = self.take_stood();
            self.order.extend(stood.into_iter().map(Tid));
            return result;
        }
        let at_once = if manner == Manner::Running { group.len() } else { AT_ONCE };
        for some in group.chunks(at_once) {
            for missing in some {
                self.session.tracer.ask_to_stop(missing.tid, false)?;
            }
            some.iter().try_for_each(|missing| self.await_stop(missing.tid))?;
        }
        Ok(())
    }

    /// Stops sleeping threads whose calls may need mending, and takes each as it comes to stand: a call is mended when its
    /// thread is seen standing, and that must be soon, so they are asked one at a time. On a busy machine, where each must
    /// wait for its turn on a processor, that would add up to seconds with everybody standing: there several wait
    /// together.
    fn stop_sleepers(&mut self, group: &[Missing]) -> Result<(), Error> {
        let mut rest = group.iter().map(|missing| missing.tid);
        let mut asked: BTreeMap<i32, Instant> = BTreeMap::new();
        let mut patience = Instant::now() + LIMIT;
        let mut together = 1;
        loop {
            while asked.len() < together
                && let Some(tid) = rest.next()
            {
                self.ask(tid, &mut asked)?;
            }
            let Some((&first, _)) = asked.first_key_value() else { return Ok(()) };
            let tracer = &mut self.session.tracer;
            tracer.timer.arm(LOOK);
            let served = tracer.serve_one(true)?.is_some();
            if !served {
                together = (together * 2).min(TOGETHER);
            }
            let stood = self.take_stood();
            if self.session.tracer.replaced {
                return Err(Error::Exec(self.session.process().pid()));
            }
            if !stood.is_empty() {
                patience = Instant::now() + LIMIT;
            }
            for tid in stood {
                asked.remove(&tid);
                self.order.push(Tid(tid));
            }
            let tracer = &mut self.session.tracer;
            asked.retain(|tid, _| tracer.threads.contains_key(tid));
            if let Some(tid) = asked.keys().find(|tid| tracer.threads.get(tid).is_some_and(|thread| thread.in_vfork)) {
                return Err(in_vfork(*tid));
            }
            if served {
                continue;
            }
            let limit = tracer.asleep_limit;
            for (&tid, _) in asked.iter().filter(|(_, since)| since.elapsed() >= limit) {
                if tracer.process.thread_info(Tid(tid))?.is_some_and(|info| info.state == 'D') {
                    return Err(self.give_up(tid));
                }
            }
            if Instant::now() > patience {
                return Err(match tracer.process.thread_info(Tid(first))? {
                    Some(info) => will_not_stop(first, info.state),
                    None => Error::Unstoppable { tid: Tid(first), why: "it is about to end".to_owned() },
                });
            }
        }
    }

    fn ask(&mut self, tid: i32, asked: &mut BTreeMap<i32, Instant>) -> Result<(), Error> {
        let tracer = &mut self.session.tracer;
        if !tracer.ask_to_stop(tid, false)? {
            return Ok(());
        }
        match tracer.threads.get_mut(&tid).map(|thread| (thread.state, &mut thread.asked)) {
            Some((State::Running, flag)) => {
                *flag = true;
                asked.insert(tid, Instant::now());
                Ok(())
            }
            // a newborn, whose first stop needs no request
            Some((State::Expected, _)) => self.await_stop(tid),
            _ => Ok(()),
        }
    }

    /// The threads that have come to stand because they were asked to.
    fn take_stood(&mut self) -> Vec<i32> {
        let mut stood = Vec::new();
        self.session.tracer.events.retain(|event| match event {
            Event::Stood(tid) => {
                stood.push(tid.0);
                false
            }
            _ => true,
        });
        stood
    }

    fn await_stop(&mut self, tid: i32) -> Result<(), Error> {
        let asleep = self.session.tracer.asleep_limit;
        match self.session.tracer.await_stop(tid, LIMIT, Some(asleep))? {
            Seen::Standing => self.order.push(Tid(tid)),
            Seen::Asleep => return Err(self.give_up(tid)),
            Seen::InVfork => return Err(in_vfork(tid)),
            _ if self.session.tracer.replaced => return Err(Error::Exec(self.session.process().pid())),
            _ => {}
        }
        Ok(())
    }

    /// Whether every thread stands, also by the kernel's count, or else its list. Others stand meanwhile, so no file is
    /// read for a thread that is known.
    fn all_stand(&self) -> Result<bool, Error> {
        let tracer = &self.session.tracer;
        if !tracer.threads.values().all(|thread| matches!(thread.state, State::Standing(_))) {
            return Ok(false);
        }
        // a thread that is traced counts until its tracer has waited for it, so as many as are known are those
        if tracer.process.thread_count() == Some(tracer.threads.len() as u64) {
            return Ok(true);
        }
        let others = tracer.process.threads_but(|tid| tracer.threads.contains_key(&tid))?;
        Ok(others.all && !others.threads.iter().any(ThreadInfo::runs_program))
    }

    /// The threads, all of them standing (kernel workers not among them), in the order stopped. Threads that were held
    /// already (new ones) come first.
    pub fn threads(&self) -> Vec<Tid> {
        let held_before = self.session.threads().into_iter().filter(|tid| !self.order.contains(tid));
        held_before.chain(self.order.iter().copied()).collect()
    }

    /// One of them.
    pub fn thread(&mut self, tid: Tid) -> Result<Held<'_>, Error> {
        self.session.tracer.standing(tid.0)?;
        Ok(Held::new(&mut self.session.tracer, tid.0))
    }

    /// A thread suited to carry remote calls.
    pub fn carrier(&mut self) -> Result<Held<'_>, Error> {
        let pid = self.session.process().pid();
        let mut why = "it has no threads".to_owned();
        for tid in carrier::by_fitness(&self.session.tracer) {
            match carrier::fault(&mut self.session.tracer, tid)? {
                None => return Ok(Held::new(&mut self.session.tracer, tid)),
                Some(fault) => why = format!("thread {tid}: {fault}"),
            }
        }
        Err(Error::NoCarrier { pid, why })
    }

    /// Writes pieces of text, each with one write that a kill cannot split (so a piece must not cross a page: all are
    /// checked before the first is written). The caller has proved that no thread stands inside of any of them.
    ///
    /// On an error the pieces before the one named are written, the others are not.
    pub fn write_text(&mut self, pieces: &[(Avma, &[u8])]) -> Result<(), Error> {
        for (at, bytes) in pieces {
            if at.0 % PAGE + bytes.len() as u64 > PAGE {
                return Err(Error::CrossesPage { at: *at, len: bytes.len() });
            }
        }
        let tracer: &Tracer = &self.session.tracer;
        let holder = tracer.threads.keys().next().copied().unwrap_or(tracer.process.pid().0);
        let memory = tracer.process.memory();
        pieces.iter().try_for_each(|(at, bytes)| memory.write_through(holder, *at, bytes))
    }

    /// Thaws and says for how long each thread stood, in nanoseconds, in the order thawed; behind those, what threads
    /// stood when it was tried in vain. Threads born meanwhile stay held until they are let go, as
    /// [`Event::NewThread`](crate::Event::NewThread) says.
    pub fn thaw(mut self) -> Result<Vec<(Tid, u64)>, Error> {
        self.thawed = true;
        let mut stood = self.let_go()?;
        stood.append(&mut self.in_vain);
        Ok(stood)
    }

    fn let_go(&mut self) -> Result<Vec<(Tid, u64)>, Error> {
        let order = std::mem::take(&mut self.order);
        let mut stood = Vec::with_capacity(order.len());
        let mut first_error = None;
        for (at, &tid) in order.iter().enumerate().rev() {
            // who is missed runs again
            if at + 1 == self.idle {
                self.session.tracer.priority.spare_others();
            }
            match self.session.tracer.let_go(tid.0) {
                Ok(ns) => stood.push((tid, ns)),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        self.session.tracer.timer.disarm();
        self.session.expect_all_to_stop(false);
        first_error.map_or(Ok(stood), Err)
    }
}

impl Drop for Frozen<'_, '_> {
    fn drop(&mut self) {
        if !self.thawed {
            let _ = self.let_go();
        }
    }
}

fn in_vfork(tid: i32) -> Error {
    Error::Unstoppable {
        tid: Tid(tid),
        why: "it waits for the child of its vfork, which uses the same memory".to_owned(),
    }
}
