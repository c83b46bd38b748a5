//! Passes a session's bytes on, both ways, and knows where it stands.
//!
//! Both directions are served together: whatever one read brought is looked at header by header and sent on by one write.
//! While nothing special goes on, that is all there is, and [`crate::steady`] does it for all sessions alike.

use crate::batch::{Taken, Write};
use crate::buffer::Buffer;
use crate::entry::{Activity, Command, Counters, Entry, now_us};
use crate::error::SessionError;
use crate::loose::Loose;
use crate::session::notes::Notes;
use crate::steady::Steady;
use crate::stream::{End, Stream};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;
use stillpoint_migrate_wire::frame::{Scanner, Step};
use stillpoint_migrate_wire::{Conversation, Status, WireError, backend, frontend};
use tokio::io::AsyncWrite;
use tokio::sync::mpsc::UnboundedReceiver;

/// As the server: no message is longer.
const MESSAGE_MAX: u32 = (1 << 30) - 1;
/// After so many reads and writes in a row others have their turn.
const ROUNDS: usize = 32;

/// Whether new transactions may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// They may.
    Open,
    /// They wait, and one may still be running.
    Closing,
    /// They wait, and none runs.
    Closed,
}

/// Why the pump stopped for a moment.
#[derive(Debug)]
pub(crate) enum Event {
    /// The client is gone.
    ClientLeft,
    /// The server closed the connection; all it said has been passed on.
    ServerLeft,
    /// Somebody wants something.
    Command(Command),
    /// No transaction is open, as was asked for.
    Boundary,
    /// No transaction is open, and nothing is captured any more.
    CaptureOver,
}

/// One direction.
#[derive(Debug)]
struct Lane {
    buffer: Buffer,
    scanner: Scanner,
    /// The end was read.
    ended: bool,
    /// Nothing more has come, and what comes will wake the task: it need not be asked again.
    drained: bool,
    /// Bytes may lie in an encrypted stream that have not gone to the kernel.
    unflushed: bool,
}

impl Lane {
    fn new() -> Lane {
        Lane {
            buffer: Buffer::default(),
            scanner: Scanner::new(MESSAGE_MAX),
            ended: false,
            drained: false,
            unflushed: false,
        }
    }

    /// Reads what has come, if there is room for it; how much that was.
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

    /// Sends what may be sent, as far as it is taken; true when something was.
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

    /// A write of ours has been answered.
    #[inline]
    fn sent(&mut self, to: &mut Loose, taken: Taken) -> io::Result<()> {
        match taken {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => self.buffer.sent(n),
            Err(Errno::AGAIN) => to.fill_up(),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Whether something can be done at once between these ends.
    #[inline]
    fn can_go_on(&self, from: &Loose, to: &Loose) -> bool {
        let more = from.is_readable() && !self.ended && self.buffer.has_room();
        more || (to.is_writable() && !self.buffer.all_sent())
    }
}

/// How a session stands after its bytes have been passed on.
#[derive(Debug)]
pub(crate) enum Standing {
    /// The kernel will tell when something more can be done.
    Rest,
    /// It can be gone on with at once.
    More,
    /// Something is to be decided.
    Happened(Event),
}

/// A session whose client and server talk.
#[derive(Debug)]
pub(crate) struct Pump<E = Stream> {
    pub(super) client: E,
    pub(super) server: E,
    up: Lane,
    down: Lane,
    pub(crate) conversation: Conversation,
    pub(crate) notes: Notes,
    /// What the server reported of itself, as the client knows it.
    pub(crate) parameters: BTreeMap<String, Vec<u8>>,
    pub(crate) admission: Admission,
    /// Stop at the next boundary.
    pub(crate) wants_boundary: bool,
    /// The client has said good-bye: the server will close, and is asked nothing any more.
    leaving: bool,
    /// When the first statement that is not answered was passed on.
    asked_us: Option<u64>,
    /// There is a counterpart to keep alike; stop at a boundary after this time when something may have changed.
    pub(crate) follows: Option<Instant>,
    pub(super) entry: Arc<Entry>,
}

impl Pump {
    pub(crate) fn new(client: Stream, server: Stream, entry: Arc<Entry>, notes: Notes) -> Pump {
        Pump {
            client,
            server,
            up: Lane::new(),
            down: Lane::new(),
            conversation: Conversation::new(),
            notes,
            parameters: BTreeMap::new(),
            admission: Admission::Open,
            wants_boundary: false,
            leaving: false,
            asked_us: None,
            follows: None,
            entry,
        }
    }

    /// Adds bytes as if they had come from the server.
    pub(crate) fn inject(&mut self, bytes: &[u8]) {
        self.down.buffer.append(bytes);
    }

    /// Takes what is under way: what the client sent and nobody has looked at; what it is to get; what the server sent and
    /// nobody has looked at. Only at a boundary, or when nothing has gone through the pump since.
    pub(super) fn lanes_taken(&mut self) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        let (up, down) = (&self.up.buffer, &self.down.buffer);
        let taken = (up.unscanned().to_vec(), down.sendable().to_vec(), down.unscanned().to_vec());
        (self.up.buffer, self.down.buffer) = (Buffer::default(), Buffer::default());
        taken
    }

    /// Gives it back: what the client sent, and what it is to get.
    pub(super) fn lanes_given(&mut self, up: &[u8], down: &[u8]) {
        self.up.buffer.append(up);
        self.down.buffer.append(down);
    }

    /// Passes bytes on until something is to be decided; an error of the outer kind leaves nothing of the session.
    pub(super) async fn run(
        mut self,
        commands: &mut UnboundedReceiver<Command>,
        steady: &Steady,
    ) -> Result<(Pump, Result<Event, SessionError>), SessionError> {
        if self.is_steady() {
            return steady.pass(self, commands).await;
        }
        let event = poll_fn(|cx| self.poll(cx, commands)).await;
        Ok((self, event))
    }

    /// Nothing is asked of it but to pass bytes on.
    fn is_steady(&self) -> bool {
        let plain = matches!((&self.client, &self.server), (Stream::Plain(_), Stream::Plain(_)));
        plain && self.admission == Admission::Open && !self.wants_boundary && self.follows.is_none()
    }

    /// Takes the connections out of the runtime; only of a session without encryption.
    pub(crate) fn loosen(self) -> io::Result<Pump<Loose>> {
        self.with_ends(|stream| match stream {
            Stream::Plain(raw) => Loose::from(raw),
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

    /// Passes on what has come, as far as it is taken.
    fn pass(&mut self, cx: &mut Context<'_>) -> Poll<Result<Event, SessionError>> {
        (self.up.drained, self.down.drained) = (false, false);
        for _ in 0..ROUNDS {
            let mut moved = self.take_down(cx)?;
            moved |= self.down.send(&mut self.client, cx).map_err(SessionError::Client)?;
            moved |= self.take_up(cx)?;
            moved |= self.up.send(&mut self.server, cx).map_err(SessionError::Server)?;
            if let Some(event) = self.event() {
                return Poll::Ready(Ok(event));
            }
            if !moved {
                self.up.buffer.rest();
                self.down.buffer.rest();
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Tells the client something last, where that does not end up in the middle of a message.
    pub(crate) async fn tell_client(&mut self, bytes: &[u8]) {
        use tokio::io::AsyncWriteExt;
        if self.down.scanner.at_edge() && self.down.buffer.all_sent() {
            let _ = self.client.write_all(bytes).await;
            let _ = self.client.flush().await;
        }
        let _ = self.client.shutdown().await;
    }
}

/// In three steps, so that what all sessions have to send can be sent at once: see [`crate::steady`].
impl Pump<Loose> {
    /// Puts the connections into the runtime of the calling task.
    pub(crate) fn settle(self) -> io::Result<Pump> {
        self.with_ends(|loose| loose.settle().map(Stream::Plain))
    }

    /// Reads what has come, at most a buffer from each side, and looks at it.
    #[inline]
    pub(crate) fn take_in(&mut self) -> Result<(), SessionError> {
        (self.up.drained, self.down.drained) = (false, false);
        let mut nobody = Context::from_waker(Waker::noop());
        self.take_down(&mut nobody)?;
        self.take_up(&mut nobody).map(drop)
    }

    /// What is to be sent: to the client, and to the server.
    #[inline]
    pub(crate) fn writes(&self) -> [Option<Write<'_>>; 2] {
        [(&self.down, &self.client), (&self.up, &self.server)].map(|(lane, to)| {
            let due = to.is_writable() && !lane.buffer.all_sent();
            due.then(|| Write { to: to.as_fd(), bytes: lane.buffer.sendable() })
        })
    }

    /// One of the two has been answered.
    #[inline]
    pub(crate) fn wrote(&mut self, to_client: bool, taken: Taken) -> Result<(), SessionError> {
        match to_client {
            true => self.down.sent(&mut self.client, taken).map_err(SessionError::Client),
            false => self.up.sent(&mut self.server, taken).map_err(SessionError::Server),
        }
    }

    /// What comes next.
    #[inline]
    pub(crate) fn standing(&mut self) -> Standing {
        if let Some(event) = self.event() {
            return Standing::Happened(event);
        }
        if self.down.can_go_on(&self.server, &self.client) || self.up.can_go_on(&self.client, &self.server) {
            return Standing::More;
        }
        self.up.buffer.rest();
        self.down.buffer.rest();
        Standing::Rest
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

    /// The client's end to be changed, or the other.
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
            notes: self.notes,
            parameters: self.parameters,
            admission: self.admission,
            wants_boundary: self.wants_boundary,
            leaving: self.leaving,
            asked_us: self.asked_us,
            follows: self.follows,
            entry: self.entry,
        })
    }

    /// What is to be decided, if anything is.
    #[inline]
    fn event(&self) -> Option<Event> {
        if (self.wants_boundary || self.has_news()) && self.at_boundary() {
            return Some(Event::Boundary);
        }
        // The server's last words come before the end that it makes; the client's after all has been sent.
        if self.down.ended && self.down.buffer.is_empty() && !self.down.unflushed {
            return Some(Event::ServerLeft);
        }
        let left = self.up.ended && self.up.buffer.all_sent() && !self.up.unflushed;
        left.then_some(Event::ClientLeft)
    }

    pub(super) fn has_news(&self) -> bool {
        self.notes.dirty && self.follows.is_some_and(|after| Instant::now() >= after)
    }

    /// Nothing is under way in any direction, but for what a slow client has not taken yet.
    fn at_boundary(&self) -> bool {
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
        self.scan_up().map_err(SessionError::ClientProtocol)?;
        Ok(n > 0)
    }

    #[inline]
    fn take_down(&mut self, cx: &mut Context<'_>) -> Result<bool, SessionError> {
        let n = self.down.fill(&mut self.server, cx).map_err(SessionError::Server)?;
        Counters::add(&self.entry.counters.bytes_down, n as u64);
        self.scan_down().map_err(SessionError::ServerProtocol)?;
        Ok(n > 0)
    }

    /// Whether what comes next from the client would begin a transaction, or may.
    fn holds(&self) -> bool {
        self.admission != Admission::Open
            && self.up.scanner.at_edge()
            && (self.conversation.at_boundary() || self.conversation.awaits_verdict())
    }

    fn scan_up(&mut self) -> Result<(), WireError> {
        loop {
            let bytes = self.up.buffer.unscanned();
            // A client that leaves begins nothing.
            if bytes.is_empty() || (self.holds() && bytes[0] != b'X') {
                return Ok(());
            }
            let message = match self.up.scanner.peek(bytes)? {
                Step::Starved => return Ok(()),
                Step::Rest(n) => {
                    self.up.buffer.scan(n);
                    continue;
                }
                Step::Message(message) => message,
            };
            frontend::check(&message)?;
            // Statements are judged whole where they fit; the longer ones count as changing everything.
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
            self.notes.frontend(&message);
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
            match message.tag {
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
                    self.parameters.insert(name.to_owned(), value.to_vec());
                }
                b'G' | b'W' | b'E' | b'C' => self.conversation.backend(message.tag),
                _ => {}
            }
            let n = self.down.scanner.take(&message);
            self.down.buffer.scan(n);
        }
    }
}
