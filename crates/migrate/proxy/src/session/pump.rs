//! Passes a session's bytes on, both ways, and follows its state.
//!
//! One call serves both directions: it goes through the bytes of one read header by header and sends them on with one
//! write. While nothing special happens, that is all the work, and [`crate::forwarder`] does it for all sessions together.

use crate::batch::{Taken, Write};
use crate::buffer::Buffer;
use crate::clock::now_us;
use crate::command::Command;
use crate::counters::Counters;
use crate::entry::Entry;
use crate::error::SessionError;
use crate::mirror::tap::Tap;
use crate::polled_stream::{End, PolledStream};
use crate::pool::connection::Slot;
use crate::pool::seat::Seat;
use crate::process_ids::ProcessIds;
use crate::session::state_tracker::StateTracker;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;
use stillpoint_migrate_control::Activity;
use stillpoint_migrate_postgres::Stream;
use stillpoint_migrate_wire::frame::{HEADER_LEN, Scanner, Step};
use stillpoint_migrate_wire::{Conversation, Status, WireError, backend, frontend};
use tokio::io::AsyncWrite;
use tokio::sync::mpsc::UnboundedReceiver;

/// Longest message in bytes; the limit of the server.
const MESSAGE_MAX: u32 = (1 << 30) - 1;
/// Most reads and writes in a row; then other sessions have their turn.
const ROUNDS_MAX: usize = 32;

/// Admission of new transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// New transactions may begin.
    Open,
    /// New transactions wait, and one may still run.
    Closing,
    /// New transactions wait, and none runs.
    Closed,
}

/// Reason why the pump stopped.
#[derive(Debug)]
pub(crate) enum Event {
    /// The client is gone.
    ClientLeft,
    /// The server closed the connection; all its bytes have been passed on.
    ServerLeft,
    /// A command has arrived.
    Command(Command),
    /// No transaction is open, as was requested.
    Boundary,
    /// No transaction is open, and nothing is captured any more.
    CaptureOver,
    /// No transaction is open, and the session's state decides if its connection goes back to the pool.
    Settle,
    /// The client's message needs a server connection; with a place if the session may open one.
    NeedsServer(Option<Slot>),
    /// The server connection must be made like the session.
    MakeAlike,
}

/// One direction.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) buffer: Buffer,
    pub(super) scanner: Scanner,
    /// The end of the stream was read.
    ended: bool,
    /// Nothing more has arrived, and new bytes will wake the task: no read is needed before that.
    drained: bool,
    /// An encrypted stream may hold bytes that have not gone to the kernel.
    unflushed: bool,
}

impl Lane {
    fn new() -> Lane {
        let (buffer, scanner) = (Buffer::default(), Scanner::new(MESSAGE_MAX));
        Lane { buffer, scanner, ended: false, drained: false, unflushed: false }
    }

    /// Reads what has arrived, if there is room; returns the number of bytes.
    #[inline]
    fn fill(&mut self, from: &mut impl End, cx: &mut Context<'_>) -> io::Result<usize> {
        if self.ended || self.drained || !self.buffer.has_room() {
            return Ok(0);
        }
        match from.poll_fill(cx, self.buffer.room())? {
            Poll::Ready(0) => self.ended = true,
            Poll::Ready(n) => {
                self.buffer.filled(n);
                return Ok(n);
            }
            Poll::Pending => self.drained = true,
        }
        Ok(0)
    }

    /// Sends what may be sent, as far as it is taken; returns true if any byte was.
    #[inline]
    fn send(&mut self, to: &mut Stream, cx: &mut Context<'_>) -> io::Result<bool> {
        let mut moved = false;
        while !self.buffer.all_sent() {
            match Pin::new(&mut *to).poll_write(cx, self.buffer.sendable())? {
                Poll::Ready(0) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(n) => {
                    self.buffer.sent(n);
                    moved = true;
                    self.unflushed = to.is_tls();
                }
                Poll::Pending => break,
            }
        }
        if self.unflushed && Pin::new(to).poll_flush(cx)?.is_ready() {
            self.unflushed = false;
        }
        Ok(moved)
    }

    /// Records the result of one of the proxy's writes.
    #[inline]
    fn sent(&mut self, to: &mut PolledStream, taken: Taken) -> io::Result<()> {
        match taken {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => self.buffer.sent(n),
            Err(Errno::AGAIN) => to.mark_full(),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Returns true if a read or a write is possible at once between these ends.
    #[inline]
    fn can_continue(&self, from: &PolledStream, to: &PolledStream) -> bool {
        let more = from.is_readable() && !self.ended && self.buffer.has_room();
        more || (to.is_writable() && !self.buffer.all_sent())
    }
}

/// State of a session after its bytes have been passed on.
#[derive(Debug)]
pub(crate) enum NextStep {
    /// Wait until the kernel reports an event.
    Wait,
    /// A read or a write is possible at once.
    Continue,
    /// An event needs a decision.
    Event(Event),
}

/// A session whose client and server exchange messages.
#[derive(Debug)]
pub(crate) struct Pump<E = Stream> {
    pub(super) client: E,
    pub(super) server: E,
    pub(super) up: Lane,
    pub(super) down: Lane,
    pub(crate) conversation: Conversation,
    pub(crate) tracker: StateTracker,
    /// Parameters that the server reported, as the client knows them.
    pub(crate) parameters: Arc<BTreeMap<String, Vec<u8>>>,
    pub(crate) admission: Admission,
    /// Stop at the next boundary.
    pub(crate) wants_boundary: bool,
    /// The client has sent Terminate: the server will close, and gets no more questions.
    leaving: bool,
    /// Time at which the first unanswered statement was passed on.
    pub(super) asked_us: Option<u64>,
    /// Set if a counterpart must be kept alike: after this time stop at a boundary if the session's state may have
    /// changed.
    pub(crate) follows: Option<Instant>,
    /// Copies reads for a mirror.
    pub(super) tap: Option<Box<Tap>>,
    /// Ids of the tenant's sessions at the server.
    pub(super) ids: Arc<ProcessIds>,
    pub(super) entry: Arc<Entry>,
    /// Seat in a pool; `None` if the session has a server connection of its own.
    pub(crate) seat: Option<Box<Seat>>,
}

impl Pump {
    pub(crate) fn new(
        client: Stream,
        server: Stream,
        entry: Arc<Entry>,
        ids: Arc<ProcessIds>,
        tracker: StateTracker,
    ) -> Pump {
        Pump {
            client,
            server,
            up: Lane::new(),
            down: Lane::new(),
            conversation: Conversation::default(),
            tracker,
            parameters: Arc::default(),
            admission: Admission::Open,
            wants_boundary: false,
            leaving: false,
            asked_us: None,
            follows: None,
            tap: None,
            ids,
            entry,
            seat: None,
        }
    }

    /// Adds bytes as if they had come from the server.
    pub(crate) fn inject(&mut self, bytes: &[u8]) {
        self.down.buffer.append(bytes);
    }

    /// Takes the bytes under way: unread bytes of the client, bytes that the client must still get, unread bytes of the
    /// server. Only at a boundary, or if nothing has gone through the pump since one.
    pub(super) fn take_lanes(&mut self) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        let (up, down) = (&self.up.buffer, &self.down.buffer);
        let taken = (up.unscanned().to_vec(), down.sendable().to_vec(), down.unscanned().to_vec());
        (self.up.buffer, self.down.buffer) = (Buffer::default(), Buffer::default());
        taken
    }

    /// Gives bytes back: the client's bytes, and the bytes that the client must still get, which have been looked at.
    pub(super) fn return_lanes(&mut self, up: &[u8], down: &[u8]) {
        self.up.buffer.append(up);
        let seen = self.down.buffer.unscanned().is_empty();
        self.down.buffer.append(down);
        self.down.buffer.scan(if seen { down.len() } else { 0 });
    }

    /// Goes on at another server: the old one has sent all its messages.
    pub(super) fn move_to(&mut self, server: Stream, ids: Arc<ProcessIds>) -> Result<Stream, WireError> {
        // Messages of the old server have its ids.
        self.scan_down()?;
        self.ids = ids;
        Ok(std::mem::replace(&mut self.server, server))
    }

    /// Passes bytes on until an event needs a decision.
    pub(super) async fn run(&mut self, commands: &mut UnboundedReceiver<Command>) -> Result<Event, SessionError> {
        poll_fn(|cx| self.poll(cx, commands)).await
    }

    /// Returns true if the session only needs its bytes passed on.
    pub(super) fn needs_only_forwarding(&self) -> bool {
        let plain = matches!((&self.client, &self.server), (Stream::Plain(_), Stream::Plain(_)));
        plain && self.admission == Admission::Open && !self.wants_boundary && self.follows.is_none()
    }

    /// Takes the connections out of the runtime; only for a session without encryption.
    pub(crate) fn unregister(self) -> io::Result<Pump<PolledStream>> {
        self.with_ends(|stream| match stream {
            Stream::Plain(raw) => PolledStream::from(raw),
            Stream::Tls(_) => Err(io::Error::other("an encrypted connection stays with its runtime")),
        })
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        commands: &mut UnboundedReceiver<Command>,
    ) -> Poll<Result<Event, SessionError>> {
        if let Poll::Ready(Some(command)) = commands.poll_recv(cx) {
            return Poll::Ready(Ok(Event::Command(command)));
        }
        self.pass(cx)
    }

    /// Passes on what has arrived, as far as it is taken.
    fn pass(&mut self, cx: &mut Context<'_>) -> Poll<Result<Event, SessionError>> {
        (self.up.drained, self.down.drained) = (false, false);
        for _ in 0..ROUNDS_MAX {
            let mut moved = self.take_down(cx)?;
            moved |= self.down.send(&mut self.client, cx).map_err(SessionError::Client)?;
            moved |= self.take_up(cx)?;
            if !self.server.is_vacant() {
                moved |= self.up.send(&mut self.server, cx).map_err(SessionError::Server)?;
            }
            if let Some(event) = self.seat_event()?.or_else(|| self.event()) {
                return Poll::Ready(Ok(event));
            }
            if !moved {
                self.up.buffer.release_memory();
                self.down.buffer.release_memory();
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Sends the client a last message, unless that would be in the middle of another message.
    pub(crate) async fn send_last_message(&mut self, bytes: &[u8]) {
        use tokio::io::AsyncWriteExt;
        if self.down.scanner.at_edge() && self.down.buffer.all_sent() {
            let _ = self.client.send(bytes).await;
        }
        let _ = self.client.shutdown().await;
    }
}

/// Three steps, so that the writes of all sessions can be made together: see [`crate::forwarder`].
impl Pump<PolledStream> {
    /// Puts the connections into the runtime of the calling task.
    pub(crate) fn register(self) -> io::Result<Pump> {
        self.with_ends(|stream| stream.register().map(Stream::Plain))
    }

    /// Reads what has arrived, at most a buffer from each side, and looks at it.
    #[inline]
    pub(crate) fn read_all(&mut self) -> Result<(), SessionError> {
        (self.up.drained, self.down.drained) = (false, false);
        let mut no_waker = Context::from_waker(Waker::noop());
        self.take_down(&mut no_waker)?;
        self.take_up(&mut no_waker).map(drop)
    }

    /// Writes that are due: to the client, and to the server.
    #[inline]
    pub(crate) fn writes(&self) -> [Option<Write<'_>>; 2] {
        [(&self.down, &self.client), (&self.up, &self.server)].map(|(lane, to)| {
            let due = to.is_writable() && !lane.buffer.all_sent();
            let to = to.fd().filter(|_| due);
            to.map(|to| Write { to, bytes: lane.buffer.sendable() })
        })
    }

    /// Records the result of one of the two writes.
    #[inline]
    pub(crate) fn record_write(&mut self, to_client: bool, taken: Taken) -> Result<(), SessionError> {
        match to_client {
            true => self.down.sent(&mut self.client, taken).map_err(SessionError::Client),
            false => self.up.sent(&mut self.server, taken).map_err(SessionError::Server),
        }
    }

    /// Returns the next step.
    #[inline]
    pub(crate) fn next_step(&mut self) -> NextStep {
        if let Some(event) = self.event() {
            return NextStep::Event(event);
        }
        if self.down.can_continue(&self.server, &self.client) || self.up.can_continue(&self.client, &self.server) {
            return NextStep::Continue;
        }
        self.up.buffer.release_memory();
        self.down.buffer.release_memory();
        NextStep::Wait
    }
}

impl<E: End> Pump<E> {
    /// The number of its session.
    pub(crate) fn number(&self) -> u32 {
        self.entry.id
    }

    /// The client's end and the server's.
    #[inline]
    pub(crate) fn ends(&self) -> [&E; 2] {
        [&self.client, &self.server]
    }

    /// The client's end or the server's, for changes.
    #[inline]
    pub(crate) fn end_mut(&mut self, of_client: bool) -> &mut E {
        if of_client { &mut self.client } else { &mut self.server }
    }

    fn with_ends<F>(self, mut change: impl FnMut(E) -> io::Result<F>) -> io::Result<Pump<F>> {
        Ok(Pump {
            client: change(self.client)?,
            server: change(self.server)?,
            up: self.up,
            down: self.down,
            conversation: self.conversation,
            tracker: self.tracker,
            parameters: self.parameters,
            admission: self.admission,
            wants_boundary: self.wants_boundary,
            leaving: self.leaving,
            asked_us: self.asked_us,
            follows: self.follows,
            tap: self.tap,
            ids: self.ids,
            entry: self.entry,
            seat: self.seat,
        })
    }

    /// Event that needs a decision, if there is one.
    #[inline]
    fn event(&self) -> Option<Event> {
        if (self.wants_boundary || self.has_new_state()) && self.at_boundary() {
            return Some(Event::Boundary);
        }
        if self.has_left_vacant() {
            return Some(Event::ClientLeft);
        }
        // The server's last bytes are passed on before its end is reported; the client's end is reported after all its
        // bytes are sent.
        if self.down.ended && self.down.buffer.is_empty() && !self.down.unflushed {
            return Some(Event::ServerLeft);
        }
        let left = self.up.ended && self.up.buffer.all_sent() && !self.up.unflushed;
        left.then_some(Event::ClientLeft)
    }

    pub(super) fn has_new_state(&self) -> bool {
        self.tracker.dirty && self.follows.is_some_and(|after| Instant::now() >= after)
    }

    /// Returns true if nothing is under way in any direction, except bytes that a slow client has not taken yet.
    pub(super) fn at_boundary(&self) -> bool {
        !self.leaving
            && self.conversation.at_boundary()
            && self.up.scanner.at_edge()
            && self.up.buffer.all_sent()
            && self.down.scanner.at_edge()
            && self.down.buffer.unscanned().is_empty()
    }

    #[inline]
    fn take_up(&mut self, cx: &mut Context<'_>) -> Result<bool, SessionError> {
        let n = self.up.fill(&mut self.client, cx).map_err(SessionError::Client)?;
        Counters::add(&self.entry.counters.bytes_up, n as u64);
        self.scan_up()?;
        Ok(n > 0)
    }

    #[inline]
    fn take_down(&mut self, cx: &mut Context<'_>) -> Result<bool, SessionError> {
        let n = self.down.fill(&mut self.server, cx).map_err(SessionError::Server)?;
        Counters::add(&self.entry.counters.bytes_down, n as u64);
        self.scan_down().map_err(SessionError::ServerProtocol)?;
        Ok(n > 0)
    }

    /// Returns true if the client's next message begins a transaction, or may begin one.
    fn is_held_back(&self) -> bool {
        if self.seat.as_ref().is_some_and(|seat| !seat.is_ready) {
            return true;
        }
        self.admission != Admission::Open
            && self.up.scanner.at_edge()
            && (self.conversation.at_boundary() || self.conversation.awaits_verdict())
    }

    pub(crate) fn scan_up(&mut self) -> Result<(), SessionError> {
        loop {
            let bytes = self.up.buffer.unscanned();
            // A client that leaves begins no transaction. A connection of the pool stays when it leaves.
            if bytes.is_empty() || (self.is_held_back() && bytes[0] != b'X') || self.leaves_pool(bytes[0]) {
                return Ok(());
            }
            let message = match self.up.scanner.peek(bytes).map_err(SessionError::ClientProtocol)? {
                Step::Starved => return Ok(()),
                Step::Rest(n) => {
                    if let Some(seat) = &mut self.seat {
                        seat.note_rest(&bytes[..n])?;
                    }
                    self.up.buffer.scan(n);
                    continue;
                }
                Step::Message(message) => message,
            };
            frontend::check(&message).map_err(SessionError::ClientProtocol)?;
            // Statements are judged whole if they fit; a longer one counts as a change of everything.
            if matches!(message.tag, b'Q' | b'P') && !message.is_whole() && message.total() <= crate::buffer::LEN {
                return Ok(());
            }
            if !matches!(message.tag, b'X' | b'H') {
                let begins = self.conversation.at_boundary();
                if begins || self.asked_us.is_none() {
                    let now_us = now_us();
                    self.asked_us = Some(now_us);
                    if begins {
                        self.entry.begin(now_us);
                    }
                }
            }
            self.leaving |= message.tag == b'X';
            if let Some(seat) = &mut self.seat {
                seat.note(&message)?;
            }
            self.tracker.frontend(&message);
            if let Some(tap) = &mut self.tap {
                tap.frontend(&message, bytes, self.conversation.begins_statement(), self.tracker.dirty);
            }
            self.conversation.frontend(message.tag);
            let n = self.up.scanner.take(&message);
            self.up.buffer.scan(n);
        }
    }

    fn scan_down(&mut self) -> Result<(), WireError> {
        loop {
            let bytes = self.down.buffer.unscanned();
            let message = match self.down.scanner.peek(bytes)? {
                Step::Starved => return Ok(()),
                Step::Rest(n) => {
                    self.down.buffer.scan(n);
                    continue;
                }
                Step::Message(message) => message,
            };
            let mut sender = None;
            match message.tag {
                b'A' => match message.body.first_chunk() {
                    Some(id) => sender = Some(self.ids.of_clients(u32::from_be_bytes(*id))),
                    None if message.is_whole() => return Err(WireError::Malformed("notification")),
                    None => return Ok(()),
                },
                b'Z' | b'S' if !message.is_whole() && message.total() <= crate::buffer::LEN => return Ok(()),
                b'Z' => {
                    let status = backend::ready(message.body)?;
                    self.conversation.ready(status);
                    Counters::add(&self.entry.counters.statements, 1);
                    if let Some(asked_us) = self.asked_us.take() {
                        self.entry.answered(asked_us);
                    }
                    self.entry.set(match status {
                        _ if !self.conversation.at_boundary() && status == Status::Idle => Activity::Active,
                        Status::Idle => Activity::Idle,
                        Status::InTransaction | Status::Failed => Activity::InTransaction,
                    });
                }
                b'S' if message.is_whole() => {
                    let (name, value) = backend::parameter_status(message.body)?;
                    Arc::make_mut(&mut self.parameters).insert(name.to_owned(), value.to_vec());
                }
                b'G' | b'W' | b'E' | b'C' => {
                    if message.tag == b'E' && self.conversation.is_copying_in() {
                        // One more answer may come than is known.
                        self.seat.iter_mut().for_each(|seat| seat.hold_answers());
                    }
                    self.conversation.backend(message.tag);
                }
                _ => {}
            }
            let n = self.down.scanner.take(&message);
            if let Some(id) = sender {
                self.down.buffer.unscanned_mut()[HEADER_LEN..][..4].copy_from_slice(&id.to_be_bytes());
            }
            self.down.buffer.scan(n);
        }
    }
}
