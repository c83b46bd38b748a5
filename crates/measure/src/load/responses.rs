//! Second half of the loop: answers, time-outs, and connections that end.

use std::io;
use std::time::Duration;

use mio::Token;

use super::connection::{Pending, Role, State};
use super::driver::{Driver, HOUSEKEEPING_NS};
use super::schedule::Schedule;
use super::sink::Sink;
use super::workload::{Verdict, Workload};
use crate::clock::{now_ns, ns};
use crate::error::Result;
use crate::record::{Mark, MarkKind, Outcome, Sample};

const RECORD_FLUSH_NS: u64 = 1_000_000_000;
const RETRY_MIN_NS: u64 = 10_000_000;
const RETRY_MAX_NS: u64 = 500_000_000;
/// Limit of handshakes in progress: Redis listens with a backlog of 511, and a lost SYN costs a second.
const CONNECTING_MAX: usize = 128;
/// Limit of bad answers that are described in words; others are only counted.
const COMPLAINTS_MAX: usize = 20;
/// Time limit for the last answer of connections that only wait.
const ALIVE_TIMEOUT_NS: u64 = 5_000_000_000;

impl<W: Workload> Driver<'_, W> {
    /// Handles an event of a socket.
    pub(super) fn ready(&mut self, index: usize, writable: bool, closed: bool) -> Result<()> {
        if self.connections[index].state == State::Connecting && (writable || closed) {
            match self.connections[index].connected() {
                Ok(true) => self.opened(index)?,
                Ok(false) => return Ok(()),
                Err(error) => return self.connect_failed(index, &error),
            }
        }
        if writable {
            self.touch(index);
        }
        self.read_answers(index, closed)
    }

    fn opened(&mut self, index: usize) -> Result<()> {
        self.counters.opened();
        let connection = &mut self.connections[index];
        let again = connection.epoch > 0;
        if connection.role == Role::Blocked {
            self.workload.block(index as u32, connection.epoch, &mut connection.output);
            self.touch(index);
        }
        if again { self.mark(index, MarkKind::Reconnected, "opened again".into()) } else { Ok(()) }
    }

    fn connect_failed(&mut self, index: usize, error: &io::Error) -> Result<()> {
        let connection = &mut self.connections[index];
        connection.failures += 1;
        let wait = (RETRY_MIN_NS << connection.failures.min(8)).min(RETRY_MAX_NS);
        connection.close(now_ns() + wait);
        self.end.reconnect_failures += 1;
        self.counters.reconnect_failed();
        self.describe_error(index, error.to_string())
    }

    /// Reads all available bytes and judges the answers in them.
    fn read_answers(&mut self, index: usize, closed: bool) -> Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let ended = loop {
            match self.connections[index].read(&mut buffer) {
                Ok(None) => break None,
                Ok(Some(0)) => break Some("closed by the server".to_owned()),
                Ok(Some(count)) => {
                    let t_ns = now_ns();
                    if let Err(problem) = self.judge_answers(index, &buffer[..count], t_ns)? {
                        break Some(problem);
                    }
                    // The event is edge-triggered, but a read that did not fill the buffer has emptied the socket. Only the end of the
                    // stream would still have to be read.
                    if count < buffer.len() && !closed {
                        break None;
                    }
                }
                Err(error) => break Some(error.to_string()),
            }
        };
        self.buffer = buffer;
        match ended {
            Some(why) => self.drop_connection(index, &why),
            None => Ok(()),
        }
    }

    /// Judges every complete answer; the rest waits for more bytes. The inner error is the reason for which the connection cannot be used
    /// any further.
    fn judge_answers(&mut self, index: usize, bytes: &[u8], t_ns: u64) -> Result<Result<(), String>> {
        let mut kept = std::mem::take(&mut self.connections[index].input);
        let input = if kept.is_empty() {
            bytes
        } else {
            kept.extend_from_slice(bytes);
            kept.as_slice()
        };
        let mut at = 0;
        while at < input.len() {
            let connection = &mut self.connections[index];
            let Some(front) = connection.pending.front() else {
                let text = String::from_utf8_lossy(&input[at..input.len().min(at + 80)]);
                let text = format!("an answer without a request: `{}`", text.trim_end());
                self.describe_error(index, text.clone())?;
                return Ok(Err(text));
            };
            match self.workload.judge_answer(&front.expect, &input[at..]) {
                Ok(None) => break,
                Ok(Some(answer)) => {
                    at += answer.used;
                    self.answered(index, answer.verdict, t_ns)?;
                }
                Err(malformed) => {
                    self.answered(index, Verdict::Wrong(malformed.0.clone()), t_ns)?;
                    return Ok(Err(malformed.0));
                }
            }
        }
        if at > 0 || kept.is_empty() {
            kept = input[at..].to_vec();
        }
        self.connections[index].input = kept;
        Ok(Ok(()))
    }

    fn answered(&mut self, index: usize, verdict: Verdict, t_ns: u64) -> Result<()> {
        let connection = &mut self.connections[index];
        let Some(pending) = connection.pending.pop_front() else { return Ok(()) };
        if connection.role == Role::Blocked {
            self.workload.block(index as u32, connection.epoch, &mut connection.output);
            self.touch(index);
        }
        let outcome = match verdict {
            Verdict::Ok => Outcome::Ok,
            Verdict::Error(text) => {
                self.describe_error(index, text)?;
                Outcome::ErrorReply
            }
            Verdict::Wrong(text) => {
                self.describe_error(index, text)?;
                Outcome::WrongAnswer
            }
        };
        if pending.timed_out {
            return Ok(());
        }
        if pending.measured {
            self.waiting -= 1;
            return self.emit(&pending.sample(index, t_ns, outcome));
        }
        self.connections[index].alive = outcome == Outcome::Ok;
        if outcome != Outcome::Ok && self.connections[index].role == Role::Feeder {
            // The pop that belongs to it will time out; this is the reason.
            return self.emit(&pending.sample(index, t_ns, outcome));
        }
        Ok(())
    }

    fn emit(&mut self, sample: &Sample) -> Result<()> {
        self.counters.sample(sample);
        self.builder.add(sample, self.waiting > 0);
        self.sink.as_mut().map_or(Ok(()), |sink| sink.sample(sample))
    }

    /// Closes a connection that has ended: requests in progress on it are lost.
    pub(super) fn drop_connection(&mut self, index: usize, why: &str) -> Result<()> {
        if matches!(self.connections[index].state, State::Down { .. }) {
            return Ok(());
        }
        if self.connections[index].state == State::Connecting {
            return self.connect_failed(index, &io::Error::other(why.to_owned()));
        }
        let now = now_ns();
        self.connections[index].close(now + RETRY_MIN_NS);
        self.end.dropped += 1;
        self.counters.dropped();
        if self.complaints.len() < COMPLAINTS_MAX {
            self.complaints.push(format!("connection {index}: dropped: {why}"));
        }
        self.mark(index, MarkKind::Dropped, why.to_owned())?;
        for pending in std::mem::take(&mut self.connections[index].pending) {
            if pending.measured && !pending.timed_out {
                self.waiting -= 1;
                self.emit(&pending.sample(index, now, Outcome::Lost))?;
            }
            self.workload.abandon(pending.expect);
        }
        Ok(())
    }

    /// Opens closed connections that are due to be opened, a few at a time.
    pub(super) fn open_some(&mut self, now: u64) -> io::Result<()> {
        let mut connecting = self.connections.iter().filter(|c| c.state == State::Connecting).count();
        for (index, connection) in self.connections.iter_mut().enumerate() {
            if connecting >= CONNECTING_MAX {
                break;
            }
            if matches!(connection.state, State::Down { retry_ns } if retry_ns <= now) {
                match connection.open(&self.address, self.poll.registry(), Token(index)) {
                    Ok(()) => connecting += 1,
                    // The backlog of a Unix socket is full.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Handles time-outs, reconnects and the record, once per interval.
    pub(super) fn housekeeping(&mut self, schedule: &mut Schedule) -> Result<()> {
        let now = now_ns();
        if now < self.housekeeping_ns {
            return Ok(());
        }
        self.housekeeping_ns = now + HOUSEKEEPING_NS;
        self.reopen(now)?;
        let limit = now.saturating_sub(ns(self.plan.timeout));
        self.time_out_sent(limit, now)?;
        self.time_out_unsent(schedule, limit, now)?;
        if now >= self.record_flush_ns {
            self.record_flush_ns = now + RECORD_FLUSH_NS;
            self.sink.as_mut().map_or(Ok(()), Sink::flush)?;
        }
        Ok(())
    }

    fn reopen(&mut self, now: u64) -> Result<()> {
        // If the server is gone a Unix socket fails at once, where TCP fails by an event.
        if let Err(error) = self.open_some(now) {
            for index in 0..self.connections.len() {
                if matches!(self.connections[index].state, State::Down { retry_ns } if retry_ns <= now) {
                    self.connect_failed(index, &error)?;
                }
            }
        }
        Ok(())
    }

    fn time_out_sent(&mut self, limit: u64, now: u64) -> Result<()> {
        for index in 0..self.connections.len() {
            for at in 0..self.connections[index].pending.len() {
                let pending = &mut self.connections[index].pending[at];
                if pending.scheduled_ns > limit {
                    break;
                }
                if !pending.measured || pending.timed_out {
                    continue;
                }
                pending.timed_out = true;
                let sample = pending.sample(index, now, Outcome::Timeout);
                self.waiting -= 1;
                self.emit(&sample)?;
            }
        }
        Ok(())
    }

    /// Counts requests as timed out that were due too long ago and found no free connection, in the same way as sent ones.
    fn time_out_unsent(&mut self, schedule: &mut Schedule, limit: u64, now: u64) -> Result<()> {
        while let Some(due) = schedule.due_ns().filter(|&due| due <= limit) {
            let kind = self.drawn.take().unwrap_or_else(|| self.workload.draw(&mut self.rng));
            let sample = Sample {
                scheduled_ns: due,
                latency_ns: now - due,
                late_us: 0,
                connection: self.next_worker as u32,
                kind,
                outcome: Outcome::Timeout,
            };
            schedule.advance();
            self.emit(&sample)?;
        }
        Ok(())
    }

    /// Sends a request to every idle connection and an element to every blocked one: those that answer are alive.
    pub(super) fn check_alive(&mut self) -> Result<()> {
        let now = now_ns();
        for index in 0..self.connections.len() {
            let connection = &mut self.connections[index];
            connection.alive = false;
            if !connection.is_open() {
                continue;
            }
            match (connection.role, self.feeder) {
                (Role::Idle, _) => {
                    let expect = self.workload.ping(&mut connection.output);
                    let (scheduled_ns, late_us, kind) = (now, 0, 0);
                    let pending = Pending { scheduled_ns, late_us, kind, measured: false, timed_out: false, expect };
                    connection.pending.push_back(pending);
                    self.touch(index);
                }
                (Role::Blocked, Some(feeder)) => self.push_to(feeder, index, 0, now, 0, false),
                _ => {}
            }
        }
        while self.connections.iter().any(|c| c.role != Role::Worker && !c.pending.is_empty())
            && now_ns() < now + ALIVE_TIMEOUT_NS
        {
            self.flush_dirty()?;
            self.wait_for_events(Duration::from_millis(5))?;
        }
        let alive = |role| self.connections.iter().filter(|c| c.role == role && c.alive).count() as u32;
        self.end.idle_alive = alive(Role::Idle);
        self.end.blocking_alive = alive(Role::Blocked);
        Ok(())
    }

    /// Describes an error in words, for the first few times.
    fn describe_error(&mut self, index: usize, text: String) -> Result<()> {
        if self.complaints.len() >= COMPLAINTS_MAX {
            return Ok(());
        }
        self.complaints.push(format!("connection {index}: {text}"));
        self.mark(index, MarkKind::Complaint, text)
    }

    fn mark(&mut self, index: usize, what: MarkKind, text: String) -> Result<()> {
        let mark = Mark { t_ns: now_ns(), connection: index as u32, what, text };
        self.sink.as_mut().map_or(Ok(()), |sink| sink.mark(&mark))
    }
}
