//! Event loop: one thread, all connections.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mio::{Events, Poll, Token};

use super::Plan;
use super::connection::{Address, Connection, Pending, Role};
use super::counters::Counters;
use super::schedule::Schedule;
use super::sink::Sink;
use super::timer::Timer;
use super::workload::Workload;
use crate::clock::{now_ns, ns};
use crate::error::{Error, Result};
use crate::record::End;
use crate::summary::{Summary, SummaryBuilder};
use stillpoint_base::Random;

const TIMER: Token = Token(usize::MAX);
/// Requests that are written between two reads of answers.
const BATCH_REQUESTS: usize = 64;
/// Interval of checks for time-outs, reconnects and the record.
pub(super) const HOUSEKEEPING_NS: u64 = 5_000_000;
/// Limit of pushes in progress on the feeder; far more than wait at a server that answers.
const FEEDER_PIPELINE: usize = 4096;

/// Result of a run.
#[derive(Debug)]
pub(crate) struct DriverResult {
    pub(crate) summary: Summary,
    pub(crate) end: End,
    pub(crate) complaints: Vec<String>,
}

/// State of the loop.
pub(crate) struct Driver<'a, W: Workload> {
    pub(super) plan: &'a Plan,
    pub(super) workload: W,
    pub(super) address: Address,
    pub(super) counters: Arc<Counters>,
    pub(super) poll: Poll,
    pub(super) events: Events,
    pub(super) timer: Timer,
    pub(super) connections: Vec<Connection<W::Expect>>,
    /// Index of the first connection after the workers.
    pub(super) first_blocked: usize,
    pub(super) feeder: Option<usize>,
    pub(super) dirty: Vec<usize>,
    pub(super) next_worker: usize,
    pub(super) next_blocked: usize,
    /// Measured requests in progress, without those that have timed out.
    pub(super) waiting: usize,
    pub(super) rng: Random,
    pub(super) sink: Option<Sink>,
    pub(super) builder: SummaryBuilder,
    pub(super) complaints: Vec<String>,
    pub(super) end: End,
    /// Kind of the next request, drawn before a free connection is known.
    pub(super) drawn: Option<u8>,
    /// True if the request that is due next found no free connection.
    pub(super) full: bool,
    /// Time at which a connection was free again after that.
    pub(super) room_ns: u64,
    pub(super) housekeeping_ns: u64,
    pub(super) record_flush_ns: u64,
    pub(super) buffer: Vec<u8>,
}

impl<'a, W: Workload> Driver<'a, W> {
    pub(crate) fn new(plan: &'a Plan, workload: W, address: Address, counters: Arc<Counters>) -> Result<Self> {
        let system = |call| move |source| Error::System { call, source };
        let poll = Poll::new().map_err(system("epoll_create1"))?;
        let timer = Timer::new(poll.registry(), TIMER).map_err(system("timerfd_create"))?;
        let mut roles = vec![Role::Worker; plan.connections as usize];
        let first_blocked = roles.len();
        roles.extend(vec![Role::Blocked; plan.blocking as usize]);
        let feeder = (plan.blocking > 0).then_some(roles.len());
        roles.extend(feeder.map(|_| Role::Feeder));
        roles.extend(vec![Role::Idle; plan.idle as usize]);
        Ok(Driver {
            plan,
            workload,
            address,
            counters,
            poll,
            events: Events::with_capacity(1024),
            timer,
            connections: roles.into_iter().map(Connection::new).collect(),
            first_blocked,
            feeder,
            dirty: Vec::new(),
            next_worker: 0,
            next_blocked: 0,
            waiting: 0,
            rng: Random::new(plan.seed),
            sink: None,
            builder: SummaryBuilder::default(),
            complaints: Vec::new(),
            end: End::default(),
            drawn: None,
            full: false,
            room_ns: 0,
            housekeeping_ns: 0,
            record_flush_ns: 0,
            buffer: vec![0; 256 << 10],
        })
    }

    /// Opens all connections.
    pub(crate) fn connect(&mut self) -> Result<()> {
        let began_ns = now_ns();
        let patience_ns = ns(self.plan.connect_timeout);
        loop {
            let open = self.connections.iter().filter(|c| c.is_open()).count();
            if open == self.connections.len() {
                return Ok(());
            }
            let now = now_ns();
            if now - began_ns > patience_ns {
                return Err(Error::Slow {
                    target: self.plan.target.to_string(),
                    open,
                    wanted: self.connections.len(),
                    waited_s: self.plan.connect_timeout.as_secs(),
                });
            }
            self.open_some(now).map_err(|source| Error::Connect { target: self.plan.target.to_string(), source })?;
            self.wait_for_events(Duration::from_millis(1))?;
            self.flush_dirty()?;
            if self.end.dropped + self.end.reconnect_failures > 0 {
                let source = io::Error::new(
                    io::ErrorKind::ConnectionRefused,
                    self.complaints.first().cloned().unwrap_or_else(|| "the connection was refused".into()),
                );
                return Err(Error::Connect { target: self.plan.target.to_string(), source });
            }
        }
    }

    /// Runs the schedule to its end, then checks that the idle and the blocked connections are still alive.
    pub(crate) fn run(mut self, start_ns: u64, sink: Option<Sink>) -> Result<DriverResult> {
        let mut until_ns = start_ns + ns(self.plan.duration);
        let mut schedule =
            Schedule::new(self.plan.arrivals, self.plan.rate, start_ns, until_ns, self.plan.seed ^ 0x5ced);
        self.sink = sink;
        self.builder = SummaryBuilder::new(&self.workload.kinds(), start_ns);
        while now_ns() < until_ns || schedule.due_ns().is_some() || self.waiting > 0 {
            if self.counters.stop.load(Ordering::Relaxed) {
                until_ns = until_ns.min(now_ns());
                schedule.end_at(until_ns);
            }
            let full = self.issue_due(&mut schedule)?;
            self.flush_dirty()?;
            self.sleep_until(schedule.due_ns().filter(|_| !full))?;
            self.housekeeping(&mut schedule)?;
        }
        self.end.ended_ns = now_ns();
        let summary = std::mem::take(&mut self.builder).finish(self.end.ended_ns);
        self.check_alive()?;
        if let Some(sink) = self.sink.take() {
            sink.end(&self.end)?;
        }
        Ok(DriverResult { summary, end: self.end, complaints: self.complaints })
    }

    /// Sends the due requests. Returns true if a due request finds no free connection.
    fn issue_due(&mut self, schedule: &mut Schedule) -> Result<bool> {
        let now = now_ns();
        for _ in 0..BATCH_REQUESTS {
            let Some(due) = schedule.due_ns().filter(|&due| due <= now) else { return Ok(false) };
            let kind = *self.drawn.get_or_insert_with(|| self.workload.draw(&mut self.rng));
            self.builder.waiting_since(due);
            // The server is responsible for time without a free connection.
            if self.full {
                self.room_ns = now;
            }
            let late_us = u32::try_from((now - due.max(self.room_ns)) / 1000).unwrap_or(u32::MAX);
            let issued = if self.workload.is_push(kind) {
                self.issue_push(kind, due, late_us)
            } else {
                self.issue_request(kind, due, late_us)
            };
            self.full = !issued;
            if self.full {
                return Ok(true);
            }
            self.drawn = None;
            schedule.advance();
        }
        Ok(false)
    }

    fn issue_request(&mut self, kind: u8, scheduled_ns: u64, late_us: u32) -> bool {
        let Some(index) = self.free_worker() else { return false };
        let connection = &mut self.connections[index];
        let expect = self.workload.append_request(kind, index as u32, &mut self.rng, &mut connection.output);
        let pending = Pending { scheduled_ns, late_us, kind, measured: true, timed_out: false, expect };
        connection.pending.push_back(pending);
        self.waiting += 1;
        self.touch(index);
        true
    }

    /// Sends a push through the feeder; the measured part is the pop of the blocked connection.
    fn issue_push(&mut self, kind: u8, scheduled_ns: u64, late_us: u32) -> bool {
        let Some(feeder) = self.feeder.filter(|&f| self.has_room(f, FEEDER_PIPELINE)) else { return false };
        let Some(blocked) = self.free_blocked() else { return false };
        self.push_to(feeder, blocked, kind, scheduled_ns, late_us, true);
        self.waiting += 1;
        true
    }

    pub(super) fn push_to(
        &mut self,
        feeder: usize,
        blocked: usize,
        kind: u8,
        scheduled_ns: u64,
        late_us: u32,
        measured: bool,
    ) {
        let epoch = self.connections[blocked].epoch;
        let pair = self.workload.push(blocked as u32, epoch, &mut self.connections[feeder].output);
        let pending = |expect, measured| Pending { scheduled_ns, late_us, kind, measured, timed_out: false, expect };
        self.connections[feeder].pending.push_back(pending(pair.push, false));
        self.connections[blocked].pending.push_back(pending(pair.pop, measured));
        self.touch(feeder);
    }

    fn has_room(&self, index: usize, pipeline: usize) -> bool {
        self.connections[index].is_open() && self.connections[index].pending.len() < pipeline
    }

    /// Returns a worker with room; workers take turns.
    fn free_worker(&mut self) -> Option<usize> {
        let count = self.first_blocked;
        let pipeline = self.plan.pipeline as usize;
        let indices = (0..count).map(|offset| (self.next_worker + offset) % count);
        let index = indices.into_iter().find(|&index| self.has_room(index, pipeline))?;
        self.next_worker = (index + 1) % count;
        Some(index)
    }

    fn free_blocked(&mut self) -> Option<usize> {
        let count = self.plan.blocking as usize;
        let indices = (0..count).map(|offset| (self.next_blocked + offset) % count);
        let index = indices.into_iter().find(|index| self.connections[self.first_blocked + index].is_open())?;
        self.next_blocked = (index + 1) % count;
        Some(self.first_blocked + index)
    }

    pub(super) fn touch(&mut self, index: usize) {
        if !self.connections[index].dirty {
            self.connections[index].dirty = true;
            self.dirty.push(index);
        }
    }

    pub(super) fn flush_dirty(&mut self) -> Result<()> {
        while let Some(index) = self.dirty.pop() {
            self.connections[index].dirty = false;
            if let Err(error) = self.connections[index].flush() {
                self.drop_connection(index, &error.to_string())?;
            }
        }
        Ok(())
    }

    /// Waits for answers, at most until the next request is due. The last microseconds are spent polling: a thread that sleeps wakes up
    /// some microseconds late.
    fn sleep_until(&mut self, due: Option<u64>) -> Result<()> {
        let now = now_ns();
        let spin_ns = ns(self.plan.spin);
        let timeout = match due {
            Some(due) if due <= now + spin_ns => Duration::ZERO,
            Some(due) => {
                self.timer.arm(due - spin_ns).map_err(|source| Error::System { call: "timerfd_settime", source })?;
                Duration::from_nanos(HOUSEKEEPING_NS)
            }
            None => Duration::from_nanos(HOUSEKEEPING_NS),
        };
        self.wait_for_events(timeout)
    }

    pub(super) fn wait_for_events(&mut self, timeout: Duration) -> Result<()> {
        // Taken out during the loop, which needs the driver itself; an empty one allocates nothing.
        let mut events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        let polled = self.poll.poll(&mut events, Some(timeout));
        match polled {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => events.clear(),
            Err(source) => return Err(Error::System { call: "epoll_wait", source }),
        }
        for event in events.iter().filter(|event| event.token() != TIMER) {
            self.ready(event.token().0, event.is_writable(), event.is_read_closed() || event.is_error())?;
        }
        self.events = events;
        Ok(())
    }
}
