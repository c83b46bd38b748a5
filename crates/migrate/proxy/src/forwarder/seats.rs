//! Sessions of the thread that share server connections: they hand them on to each other between reads and writes.

use super::{ForwardedSession, Thread, watch_server};
use crate::error::{Refusal, SessionError};
use crate::polled_stream::PolledStream;
use crate::pool::Acquired;
use crate::pool::connection::Connection;
use crate::pool::seat::SeatStep;
use crate::pool::waiter::{Grant, Recipient, Waiter};
use crate::session::pump::{Event, Pump};
use rustix::event::epoll;

impl Pump<PolledStream> {
    /// Ends its wait for a connection.
    pub(super) fn withdraw(&mut self) {
        let number = self.number();
        if let Some(seat) = self.seat.as_mut().filter(|seat| seat.is_queued) {
            seat.is_queued = false;
            seat.pool.withdraw(number);
        }
    }
}

/// Error of a session that gets no connection.
pub(crate) fn no_connection(why: String) -> SessionError {
    SessionError::Refused(
        Refusal::new("53300", why).hint("The pool of server connections is too small for these clients."),
    )
}

/// Error of a session that has waited for too long.
pub(crate) fn waited_too_long(wait_ms: u64) -> SessionError {
    no_connection(format!("no server connection became free within {wait_ms} ms"))
}

/// Error of a session that finds the queue full.
pub(crate) fn queue_is_full(limit: usize) -> SessionError {
    no_connection(format!("{limit} sessions wait for a server connection already"))
}

impl Thread {
    /// Lets sessions of the group give connections back and take others. Sessions that get one are added to the group.
    pub(super) fn share_connections(&mut self, group: &mut Vec<u32>) {
        let mut at = 0;
        while let Some(number) = group.get(at).copied() {
            at += 1;
            // Each turn ends a transaction or begins one.
            while self.take_step(number, group) {}
        }
    }

    /// Makes the next step of a session's seat; returns true if there may be another one.
    fn take_step(&mut self, number: u32, group: &mut Vec<u32>) -> bool {
        let Some(session) = self.sessions.get_mut(&number) else { return false };
        if session.failed.is_some() || session.pending.is_some() || session.pump.seat.is_none() {
            return false;
        }
        match session.pump.seat_step() {
            Ok(SeatStep::Stay) => false,
            Ok(SeatStep::Settle) => {
                session.pending = Some(Event::Settle);
                false
            }
            Ok(SeatStep::MakeAlike) => {
                session.pending = Some(Event::MakeAlike);
                false
            }
            Ok(SeatStep::Release) => {
                self.release(number, group);
                true
            }
            Ok(SeatStep::Acquire) => self.acquire(number),
            Err(error) => {
                session.failed = Some(error);
                false
            }
        }
    }

    fn release(&mut self, number: u32, group: &mut Vec<u32>) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let (stream, facts) = session.pump.take_polled();
        if let Some(fd) = stream.fd() {
            let _ = epoll::delete(&self.epoll, fd);
        }
        let Some(pool) = session.pump.seat.as_ref().map(|seat| seat.pool.clone()) else { return };
        let Some(facts) = facts else { return };
        let Some((waiter, grant)) = pool.release(Connection { stream, facts }) else { return };
        if !waiter.is_at(&self.handle) {
            return waiter.deliver(grant);
        }
        let next = waiter.session;
        if self.take_grant(next, grant) && !group.contains(&next) {
            group.push(next);
        }
    }

    fn acquire(&mut self, number: u32) -> bool {
        let Some(session) = self.sessions.get_mut(&number) else { return false };
        let Some(seat) = session.pump.seat.as_mut() else { return false };
        if seat.needs_task {
            session.pending = Some(Event::NeedsServer(None));
            return false;
        }
        let wish = seat.wish();
        let handle = &self.handle;
        match seat.pool.acquire(&wish, || Waiter::new(&wish, Recipient::Thread(handle.clone()))) {
            Acquired::Connection(connection) => return self.install(number, connection),
            Acquired::Open(slot) => session.pending = Some(Event::NeedsServer(Some(slot))),
            Acquired::Queued => {
                seat.is_queued = true;
                session.pump.mark_waiting();
            }
            Acquired::Full(limit) => session.failed = Some(queue_is_full(limit)),
        }
        false
    }

    /// Gives a session what it waited for, and lets it go on with the next group.
    pub(super) fn take_late_grant(&mut self, number: u32, grant: Grant) {
        if self.take_grant(number, grant)
            && let Some(session) = self.sessions.get_mut(&number)
            && !std::mem::replace(&mut session.is_ready, true)
        {
            self.ready.push(number);
        }
    }

    /// Gives a session what it waited for; returns true if it still waited.
    fn take_grant(&mut self, number: u32, grant: Grant) -> bool {
        let waits =
            |session: &&mut Box<ForwardedSession>| session.pump.seat.as_ref().is_some_and(|seat| seat.is_queued);
        let Some(session) = self.sessions.get_mut(&number).filter(waits) else {
            // The session is with its task, or gone: another one gets it.
            if let Grant::Connection(connection) = grant {
                give_back(connection);
            }
            return false;
        };
        if let Some(seat) = &mut session.pump.seat {
            seat.is_queued = false;
        }
        match grant {
            Grant::Connection(connection) => {
                self.install(number, connection);
            }
            Grant::Open(slot) => session.pending = Some(Event::NeedsServer(Some(slot))),
            Grant::TimedOut => {
                let wait_ms = session.pump.seat.as_ref().map_or(0, |seat| seat.pool.wait_ms());
                session.failed = Some(waited_too_long(wait_ms));
            }
        }
        true
    }

    /// Puts a connection in; returns true if messages pass.
    fn install(&mut self, number: u32, connection: Connection) -> bool {
        let Some(session) = self.sessions.get_mut(&number) else { return false };
        let put = session.pump.put_polled(connection).and_then(|is_ready| match is_ready {
            true => session.pump.scan_up().map(|()| true),
            false => {
                session.pending = Some(Event::MakeAlike);
                Ok(false)
            }
        });
        let watched = watch_server(&self.epoll, session).map_err(|error| SessionError::Handover(error.into()));
        match put.and_then(|is_ready| watched.map(|()| is_ready)) {
            Ok(is_ready) => is_ready,
            Err(error) => {
                session.failed = Some(error);
                false
            }
        }
    }
}

/// Gives back a connection that its session could not take.
fn give_back(connection: Connection) {
    let Some(pool) = connection.facts.pool() else { return };
    if let Some((waiter, grant)) = pool.release(connection) {
        waiter.deliver(grant);
    }
}
