//! Steps of a session that shares server connections: when it gives one back, and when it needs one.

use super::pump::{Admission, Event, Pump};
use crate::error::SessionError;
use crate::polled_stream::{End, PolledStream};
use crate::pool::connection::{Connection, Facts};
use crate::pool::seat::SeatStep;
use std::sync::Arc;
use stillpoint_migrate_wire::backend::put_parameter_status;
use stillpoint_migrate_wire::frame::{Message, Step};

impl<E: End> Pump<E> {
    /// Next step of its seat.
    pub(crate) fn seat_step(&mut self) -> Result<SeatStep, SessionError> {
        let Some(seat) = &self.seat else { return Ok(SeatStep::Stay) };
        if seat.is_vacant() {
            let may_begin = self.admission == Admission::Open && !self.wants_boundary && !seat.is_queued;
            let acquires = may_begin && self.first_message()?.is_some_and(|message| message.tag != b'X');
            return Ok(if acquires { SeatStep::Acquire } else { SeatStep::Stay });
        }
        if !seat.is_ready {
            return Ok(SeatStep::MakeAlike);
        }
        Ok(if self.at_boundary() { seat.step_at_boundary() } else { SeatStep::Stay })
    }

    /// The client's next message, once it can be judged.
    fn first_message(&mut self) -> Result<Option<Message<'_>>, SessionError> {
        match self.up.scanner.peek(self.up.buffer.unscanned()).map_err(SessionError::ClientProtocol)? {
            Step::Message(message) => {
                let must_be_whole = matches!(message.tag, b'Q' | b'P') && message.total() <= crate::buffer::LEN;
                Ok((message.is_whole() || !must_be_whole).then_some(message))
            }
            Step::Starved | Step::Rest(_) => Ok(None),
        }
    }

    /// Records that the client's message waits for a connection.
    pub(crate) fn mark_waiting(&mut self) {
        if self.asked_us.is_none() {
            let now_us = crate::clock::now_us();
            self.asked_us = Some(now_us);
            self.entry.begin(now_us);
        }
    }

    /// Returns true if the client leaves a session that has no connection of its own to be told so.
    pub(super) fn leaves_pool(&self, tag: u8) -> bool {
        let shares = self.seat.as_ref().is_some_and(|seat| seat.is_vacant() || seat.hold.is_none());
        tag == b'X' && shares && self.conversation.at_boundary() && self.up.scanner.at_edge()
    }

    /// Returns true if the client of a session without a connection has left.
    pub(super) fn has_left_vacant(&self) -> bool {
        let is_vacant = self.seat.as_ref().is_some_and(|seat| seat.is_vacant());
        is_vacant && self.up.buffer.unscanned().first() == Some(&b'X')
    }

    /// Takes the facts of the connection, of which nothing is under way any more. `None` if it must be closed: a
    /// request to cancel is on its way to its server process.
    fn vacate(&mut self) -> Option<Box<Facts>> {
        let mut facts = self.seat.as_mut()?.vacate()?;
        facts.parameters = self.parameters.clone();
        let is_quiet = self.entry.take_process();
        is_quiet.then_some(facts)
    }

    /// Takes the facts of a connection; returns true if the client's messages may pass at once.
    pub(crate) fn occupy(&mut self, facts: Box<Facts>) -> Result<bool, SessionError> {
        self.entry.move_to(facts.process.clone());
        self.ids = facts.process.ids.clone();
        if !Arc::ptr_eq(&self.parameters, &facts.parameters) {
            self.take_parameters(facts.parameters.clone());
        }
        let Some(mut seat) = self.seat.take() else { return Ok(false) };
        let parsed = std::mem::take(&mut self.tracker.unnamed);
        let first = self.first_message();
        let ready = match &first {
            Ok(Some(message)) => seat.occupy(facts, message, &parsed),
            // Nothing may pass before the whole message is here.
            Ok(None) => seat.occupy(facts, &Message { tag: b'S', body: &[], len: 0 }, &parsed),
            Err(_) => false,
        };
        let failed = first.err();
        self.tracker.unnamed = parsed;
        self.seat = Some(seat);
        failed.map_or(Ok(ready), Err)
    }

    /// Records a message of a captured session that passes.
    pub(super) fn note_captured(&mut self, message: &Message<'_>) {
        self.tracker.frontend(message);
        if let Some(seat) = &mut self.seat {
            // The session keeps its connection while it is captured: it meets nothing of other sessions.
            let _ = seat.note(message);
        }
    }

    /// Takes the values of a server process, and tells the client those that it has otherwise.
    pub(super) fn take_parameters(&mut self, parameters: Arc<std::collections::BTreeMap<String, Vec<u8>>>) {
        let mut news = Vec::new();
        for (name, value) in parameters.iter().filter(|(name, value)| self.parameters.get(*name) != Some(*value)) {
            put_parameter_status(&mut news, name, value);
        }
        self.down.buffer.append(&news);
        self.parameters = parameters;
    }
}

impl Pump {
    /// Event of the seat for the session's task.
    pub(super) fn seat_event(&mut self) -> Result<Option<Event>, SessionError> {
        Ok(match self.seat_step()? {
            SeatStep::Stay => None,
            SeatStep::Release | SeatStep::Settle => Some(Event::Settle),
            SeatStep::Acquire => Some(Event::NeedsServer(None)),
            SeatStep::MakeAlike => Some(Event::MakeAlike),
        })
    }

    /// Takes the connection out, for the pool. `None` if it is of no more use.
    pub(super) fn take_connection(&mut self) -> Option<Connection> {
        let facts = self.vacate();
        let vacant = stillpoint_migrate_postgres::Stream::Plain(stillpoint_migrate_postgres::Raw::Vacant);
        let stream = std::mem::replace(&mut self.server, vacant);
        match (stream, facts) {
            (stillpoint_migrate_postgres::Stream::Plain(raw), Some(facts)) => {
                Some(Connection { stream: PolledStream::from(raw).ok()?, facts })
            }
            _ => None,
        }
    }

    /// Puts a connection in; returns true if the client's messages may pass at once.
    pub(super) fn put_connection(&mut self, connection: Connection) -> Result<bool, SessionError> {
        let raw = connection.stream.register().map_err(SessionError::Handover)?;
        self.server = stillpoint_migrate_postgres::Stream::Plain(raw);
        self.occupy(connection.facts)
    }
}

impl Pump<PolledStream> {
    /// Takes the connection out, for the pool; the second value is `None` if it is of no more use.
    pub(crate) fn take_polled(&mut self) -> (PolledStream, Option<Box<Facts>>) {
        let facts = self.vacate();
        (std::mem::replace(&mut self.server, PolledStream::vacant()), facts)
    }

    /// Puts a connection in; returns true if the client's messages may pass at once.
    pub(crate) fn put_polled(&mut self, connection: Connection) -> Result<bool, SessionError> {
        self.server = connection.stream;
        self.occupy(connection.facts)
    }
}
