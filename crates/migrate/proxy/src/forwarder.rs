//! Steady sessions, in which nothing special happens: one thread waits for all of them and passes their bytes on.
//!
//! The obvious way is to leave them to the runtime, one task each. The runtime polls a task through wakers, locks and
//! queues, with two events for each pair of messages; outside the kernel that was most of the cost of a pair. Here an
//! event of the kernel leads directly to the session. Special work (a command, a counterpart to keep alike, encryption)
//! is done by the session's task, which gets the session back for it.
//!
//! ```text
//! task:    log in ──▶ lend ── commands? ──────── serve the command ──▶ lend ...
//!                      │         │ recall          ▲
//! thread:              └▶ watch both connections, ─┘ give back, with what happened
//!                         pass bytes on
//! ```
//!
//! Bytes are passed on for many ready sessions together: the thread reads what has arrived for each of them, then makes
//! all their writes at once ([`crate::batch`]). Each round takes at most one buffer from either side of a session, so a
//! flooding session delays no other.

use crate::batch::Batch;
use crate::command::Command;
use crate::error::SessionError;
use crate::polled_stream::PolledStream;
use crate::pool::waiter::{Grant, PassingThread};
use crate::session::pump::{Event, NextStep, Pump};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;

pub(crate) mod seats;

/// Most events from one system call.
const EVENTS_MAX: usize = 1024;
/// Sessions whose bytes are passed on together. Each may hold two buffers meanwhile: as many as a thread keeps.
const GROUP_SESSIONS: usize = crate::buffer::KEPT_MAX / 2;
/// Event data of the bell; events of sessions have the session's number and the side of the connection.
const WAKE_TOKEN: u64 = u64::MAX;
/// Events at a connection that something has arrived, or that it has ended.
const CHANGES: EventFlags = EventFlags::IN.union(EventFlags::RDHUP).union(EventFlags::ET);

/// Reason why a session came back.
type SessionOutcome = Result<Event, SessionError>;

/// A session that was lent to the thread.
#[derive(Debug)]
struct ForwardedSession {
    pump: Pump<PolledStream>,
    back: oneshot::Sender<(Pump<PolledStream>, SessionOutcome)>,
    /// The kernel also reports when one of its connections takes bytes again.
    watches_room: bool,
    /// The session is in the list of ready sessions.
    is_ready: bool,
    /// Error with which the session ends as soon as its pending bytes have been sent.
    failed: Option<SessionError>,
    /// Event that needs the session's task.
    pending: Option<Event>,
}

impl ForwardedSession {
    /// Reads what has arrived, unless the session is about to go to its task.
    fn read(&mut self) {
        if self.failed.is_none() && self.pending.is_none() {
            self.failed = self.pump.read_all().err();
        }
    }
}

#[derive(Debug)]
enum ForwarderCommand {
    /// Pass its bytes on.
    Forward(Box<ForwardedSession>),
    /// Give the session of this number back, for this command.
    Recall(u32, Command),
    /// Give the session what it waited for.
    Grant(u32, Box<Grant>),
    /// End the thread, with all its sessions.
    End,
}

/// Way to the thread.
#[derive(Debug)]
pub(crate) struct ForwarderHandle {
    commands_in: Sender<ForwarderCommand>,
    wake_fd: OwnedFd,
}

impl ForwarderHandle {
    fn send(&self, order: ForwarderCommand) {
        // A thread that has ended has dropped its sessions, and each task that waits for one notices that.
        let _ = self.commands_in.send(order);
        let _ = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes());
    }
}

impl PassingThread for ForwarderHandle {
    fn grant(&self, session: u32, grant: Grant) {
        self.send(ForwarderCommand::Grant(session, Box::new(grant)));
    }
}

/// The thread, for tasks that lend it sessions.
#[derive(Debug)]
pub(crate) struct Forwarder {
    handle: Arc<ForwarderHandle>,
}

impl Forwarder {
    /// Starts a thread.
    pub(crate) fn start(number: usize) -> io::Result<(Forwarder, JoinHandle<()>)> {
        let (commands_in, receiver) = channel();
        let wake_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &wake_fd, EventData::new_u64(WAKE_TOKEN), EventFlags::IN | EventFlags::ET)?;
        let handle = Arc::new(ForwarderHandle { commands_in, wake_fd });
        let thread = Thread {
            epoll,
            commands_in: receiver,
            handle: handle.clone(),
            sessions: HashMap::new(),
            ready: Vec::new(),
            batch: Batch::new(),
        };
        let thread = std::thread::Builder::new().name(format!("forwarder-{number}")).spawn(|| thread.run())?;
        Ok((Forwarder { handle }, thread))
    }

    /// Ends the thread.
    pub(crate) fn end(&self) {
        self.handle.send(ForwarderCommand::End);
    }

    /// Lends a session to the thread until an event, for example a command. Commands that were sent before come before
    /// every byte: a session that begins under a capture begins no transaction without it.
    pub(crate) async fn forward(
        &self,
        pump: Pump,
        commands: &mut UnboundedReceiver<Command>,
    ) -> Result<(Pump, SessionOutcome), SessionError> {
        if let Ok(command) = commands.try_recv() {
            return Ok((pump, Ok(Event::Command(command))));
        }
        let number = pump.number();
        let (back, mut returned) = oneshot::channel();
        let pump = pump.unregister().map_err(SessionError::Handover)?;
        let session =
            ForwardedSession { pump, back, watches_room: false, is_ready: false, failed: None, pending: None };
        self.handle.send(ForwarderCommand::Forward(Box::new(session)));
        let returned = tokio::select! {
            returned = &mut returned => returned,
            Some(command) = commands.recv() => {
                self.handle.send(ForwarderCommand::Recall(number, command));
                returned.await
            }
        };
        // The thread failed in this session.
        let (pump, happened) = returned.map_err(|gone| SessionError::Handover(io::Error::other(gone)))?;
        Ok((pump.register().map_err(SessionError::Handover)?, happened))
    }
}

struct Thread {
    epoll: OwnedFd,
    commands_in: Receiver<ForwarderCommand>,
    handle: Arc<ForwarderHandle>,
    sessions: HashMap<u32, Box<ForwardedSession>>,
    /// Numbers of ready sessions.
    ready: Vec<u32>,
    batch: Batch,
}

impl Thread {
    fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            let limit = (!self.ready.is_empty()).then_some(&at_once);
            match epoll::wait(&self.epoll, spare_capacity(&mut events), limit) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!(%error, "a thread cannot wait for events of its sessions"),
            }
            let mut rung = false;
            for event in events.drain(..) {
                match event.data.u64() {
                    WAKE_TOKEN => rung = true,
                    data => self.record_event((data >> 1) as u32, data & 1 == 0, event.flags),
                }
            }
            self.forward();
            // Orders come after the events: those of a session that is given back end here.
            while rung && let Ok(order) = self.commands_in.try_recv() {
                match order {
                    ForwarderCommand::Forward(session) => self.add_session(session),
                    ForwarderCommand::Recall(number, command) => {
                        self.return_session(number, Ok(Event::Command(command)))
                    }
                    ForwarderCommand::Grant(number, grant) => self.take_late_grant(number, *grant),
                    ForwarderCommand::End => return,
                }
            }
        }
    }

    /// Records an event at one end of a session.
    #[inline]
    fn record_event(&mut self, number: u32, of_client: bool, flags: EventFlags) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        session.pump.end_mut(of_client).record_event(flags);
        if !std::mem::replace(&mut session.is_ready, true) {
            self.ready.push(number);
        }
    }

    /// Passes on the bytes of all ready sessions.
    fn forward(&mut self) {
        let mut left = self.ready.len();
        while left > 0 {
            let group: Vec<u32> = self.ready.drain(..left.min(GROUP_SESSIONS)).collect();
            left -= group.len();
            self.forward_group(group);
        }
    }

    /// Reads what has arrived for each session of the group, then makes all their writes.
    fn forward_group(&mut self, mut group: Vec<u32>) {
        group.retain(|number| self.handle_ready(*number, ForwardedSession::read));
        self.share_connections(&mut group);
        let (mut places, mut writes) = (Vec::with_capacity(2 * GROUP_SESSIONS), Vec::with_capacity(2 * GROUP_SESSIONS));
        for number in &group {
            let Some(session) = self.sessions.get(number) else { continue };
            for (to_client, write) in [true, false].into_iter().zip(session.pump.writes()) {
                places.extend(write.map(|_| (*number, to_client)));
                writes.extend(write);
            }
        }
        let taken = self.batch.write(&writes);
        for ((number, to_client), taken) in places.into_iter().zip(taken) {
            let Some(session) = self.sessions.get_mut(&number) else { continue };
            if let Err(error) = session.pump.record_write(to_client, *taken) {
                session.failed.get_or_insert(error);
            }
        }
        for number in group {
            self.requeue(number);
        }
    }

    /// Runs `what` on a session; returns true if the session still exists afterwards.
    #[inline]
    fn handle_ready(&mut self, number: u32, what: impl FnOnce(&mut ForwardedSession)) -> bool {
        let Some(session) = self.sessions.get_mut(&number) else { return false };
        let done = catch_unwind(AssertUnwindSafe(|| what(session)));
        if done.is_err() {
            // Its connections are closed; the other sessions are not affected.
            self.sessions.remove(&number);
        }
        done.is_ok()
    }

    #[inline]
    fn requeue(&mut self, number: u32) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        session.is_ready = false;
        if let Some(error) = session.failed.take() {
            return self.return_session(number, Err(error));
        }
        if let Some(event) = session.pending.take() {
            return self.return_session(number, Ok(event));
        }
        match session.pump.next_step() {
            NextStep::Event(event) => return self.return_session(number, Ok(event)),
            NextStep::Continue => {
                session.is_ready = true;
                self.ready.push(number);
            }
            NextStep::Wait => {}
        }
        if !session.watches_room && session.pump.ends().into_iter().any(|end| end.fd().is_some() && !end.is_writable())
        {
            session.watches_room = true;
            if let Err(error) = update_events(&self.epoll, session) {
                self.return_session(number, Err(SessionError::Handover(error.into())));
            }
        }
    }

    fn add_session(&mut self, mut session: Box<ForwardedSession>) {
        let number = session.pump.number();
        let watched = update_events(&self.epoll, &session);
        // Its buffers may already hold bytes.
        session.is_ready = true;
        self.sessions.insert(number, session);
        self.ready.push(number);
        if let Err(error) = watched {
            self.return_session(number, Err(SessionError::Handover(error.into())));
        }
    }

    fn return_session(&mut self, number: u32, happened: SessionOutcome) {
        // A recall may come too late: the session has then come back already.
        let Some(session) = self.sessions.remove(&number) else { return };
        for end in session.pump.ends().into_iter().filter_map(PolledStream::fd) {
            let _ = epoll::delete(&self.epoll, end);
        }
        let mut session = session;
        session.pump.withdraw();
        let _ = session.back.send((session.pump, happened));
    }
}

/// Lets the kernel report events at both connections of a session. Events about room for writes are requested only
/// after there was none: a socket in the file system would report one after every message.
fn update_events(epoll: &OwnedFd, session: &ForwardedSession) -> rustix::io::Result<()> {
    let number = u64::from(session.pump.number());
    for (side, end) in session.pump.ends().into_iter().enumerate() {
        let data = EventData::new_u64(number << 1 | side as u64);
        let Some(end) = end.fd() else { continue };
        match session.watches_room {
            false => epoll::add(epoll, end, data, CHANGES)?,
            true => epoll::modify(epoll, end, data, CHANGES | EventFlags::OUT)?,
        }
    }
    Ok(())
}

/// Lets the kernel report events at the server connection that a session has just got.
fn watch_server(epoll: &OwnedFd, session: &ForwardedSession) -> rustix::io::Result<()> {
    let number = u64::from(session.pump.number());
    let [_, server] = session.pump.ends();
    let Some(server) = server.fd() else { return Ok(()) };
    let room = if session.watches_room { EventFlags::OUT } else { EventFlags::empty() };
    epoll::add(epoll, server, EventData::new_u64(number << 1 | 1), CHANGES | room)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::{Entry, SessionIdentity};
    use crate::session::state_tracker::{CustomNames, StateTracker};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream as StdUnixStream;
    use std::sync::atomic::Ordering;
    use std::time::Duration;
    use stillpoint_migrate_postgres::{Raw, Stream};
    use stillpoint_migrate_wire::{frame, frontend};
    use tokio::net::UnixStream;

    /// A session, with its client's and its server's ends.
    struct Session {
        pump: Pump,
        entry: Arc<Entry>,
        commands: UnboundedReceiver<Command>,
        client: StdUnixStream,
        server: StdUnixStream,
    }

    fn session(number: u32) -> Session {
        let stream = || {
            let (ours, theirs) = StdUnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            theirs.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            (Stream::Plain(Raw::Unix(UnixStream::from_std(ours).unwrap())), theirs)
        };
        let text = || "x".to_owned();
        let who = SessionIdentity { tenant: text(), user: text(), database: text(), origin: text() };
        let (entry, commands) = Entry::new(number, who, Arc::default());
        let (entry, (ours, client), (theirs, server)) = (Arc::new(entry), stream(), stream());
        let pump = Pump::new(ours, theirs, entry.clone(), Arc::default(), StateTracker::new(CustomNames::default()));
        Session { pump, entry, commands, client, server }
    }

    fn receive(from: &mut StdUnixStream, expected: &[u8]) {
        let mut bytes = vec![0; expected.len()];
        from.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, expected);
    }

    /// Sends a question and its answer.
    fn pair(client: &mut StdUnixStream, server: &mut StdUnixStream) {
        let (mut question, mut answer) = (Vec::new(), Vec::new());
        frontend::put_query(&mut question, "select 1");
        frame::put(&mut answer, b'Z', |body| body.push(b'I'));
        client.write_all(&question).unwrap();
        receive(server, &question);
        server.write_all(&answer).unwrap();
        receive(client, &answer);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_session_comes_back_for_each_command_and_with_its_end_and_goes_on_between() {
        let (forwarder, thread) = Forwarder::start(0).unwrap();
        let Session { mut pump, entry, mut commands, mut client, mut server } = session(7);
        for _ in 0..3 {
            let talk = tokio::task::spawn_blocking({
                let entry = entry.clone();
                move || {
                    pair(&mut client, &mut server);
                    entry.send(Command::Abandon);
                    (client, server)
                }
            });
            let (back, happened) = forwarder.forward(pump, &mut commands).await.unwrap();
            assert!(matches!(happened, Ok(Event::Command(Command::Abandon))), "{happened:?}");
            (pump, (client, server)) = (back, talk.await.unwrap());
        }
        assert_eq!(entry.counters.statements.load(Ordering::Relaxed), 3);
        drop(client);
        let (_, happened) = forwarder.forward(pump, &mut commands).await.unwrap();
        assert!(matches!(happened, Ok(Event::ClientLeft)), "{happened:?}");
        forwarder.end();
        thread.join().unwrap();
    }

    #[tokio::test(flavor = "current_thread")]
    async fn what_was_asked_for_before_comes_before_every_byte() {
        let (forwarder, thread) = Forwarder::start(0).unwrap();
        // A thread that has ended takes no sessions.
        forwarder.end();
        thread.join().unwrap();
        let Session { pump, entry, mut commands, .. } = session(7);
        entry.send(Command::Abandon);
        let (_, happened) = forwarder.forward(pump, &mut commands).await.unwrap();
        assert!(matches!(happened, Ok(Event::Command(Command::Abandon))), "{happened:?}");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_flood_that_no_client_takes_waits_and_holds_up_no_other() {
        let (forwarder, thread) = Forwarder::start(0).unwrap();
        let (mut flooded, mut other) = (session(1), session(2));
        let (taken, end) = std::sync::mpsc::channel::<()>();
        // Far more than sockets and buffers hold.
        const ROWS: usize = 400;
        let mut row = Vec::new();
        frame::put(&mut row, b'D', |body| body.resize(20_000, 7));
        let expected = row.clone();
        let flood = std::thread::spawn(move || (0..ROWS).for_each(|_| flooded.server.write_all(&row).unwrap()));
        let talk = std::thread::spawn(move || {
            (0..100).for_each(|_| pair(&mut other.client, &mut other.server));
            drop(taken);
        });
        let take = std::thread::spawn(move || {
            let _ = end.recv();
            (0..ROWS).for_each(|_| receive(&mut flooded.client, &expected));
        });
        let (one, two) = tokio::join!(
            forwarder.forward(flooded.pump, &mut flooded.commands),
            forwarder.forward(other.pump, &mut other.commands)
        );
        for (_, happened) in [one.unwrap(), two.unwrap()] {
            assert!(matches!(happened, Ok(Event::ClientLeft | Event::ServerLeft)), "{happened:?}");
        }
        for thread in [flood, talk, take] {
            thread.join().unwrap();
        }
        forwarder.end();
        thread.join().unwrap();
    }

    #[tokio::test(flavor = "current_thread")]
    async fn sessions_that_talk_at_the_same_time_get_what_is_theirs() {
        let (forwarder, thread) = Forwarder::start(0).unwrap();
        let mut sessions: Vec<_> = (1..=8).map(session).collect();
        let talks: Vec<_> = sessions.iter().map(|session| (clone(&session.client), clone(&session.server))).collect();
        let begin = Arc::new(std::sync::Barrier::new(talks.len()));
        let talk = |(number, (mut client, mut server)): (usize, (StdUnixStream, StdUnixStream))| {
            let begin = begin.clone();
            std::thread::spawn(move || {
                for turn in 0..200 {
                    let mut row = Vec::new();
                    frame::put(&mut row, b'D', |body| body.extend(format!("{number} {turn}").bytes()));
                    // All servers write at once.
                    begin.wait();
                    server.write_all(&row).unwrap();
                    receive(&mut client, &row);
                }
                let _ = client.shutdown(std::net::Shutdown::Both);
            })
        };
        let talks: Vec<_> = talks.into_iter().enumerate().map(talk).collect();
        let mut passes = tokio::task::JoinSet::new();
        let forwarder = Arc::new(forwarder);
        for Session { pump, mut commands, entry, client, server } in sessions.drain(..) {
            let forwarder = forwarder.clone();
            passes.spawn(async move {
                let happened = forwarder.forward(pump, &mut commands).await.unwrap().1;
                drop((entry, client, server));
                happened
            });
        }
        while let Some(happened) = passes.join_next().await {
            assert!(matches!(happened.unwrap(), Ok(Event::ClientLeft)));
        }
        talks.into_iter().for_each(|talk| talk.join().unwrap());
        forwarder.end();
        thread.join().unwrap();
    }

    fn clone(stream: &StdUnixStream) -> StdUnixStream {
        stream.try_clone().unwrap()
    }

    #[tokio::test(flavor = "current_thread")]
    async fn bytes_that_are_not_the_protocol_end_their_session() {
        let (forwarder, thread) = Forwarder::start(0).unwrap();
        let (mut wrong, mut other) = (session(1), session(2));
        wrong.client.write_all(b"\0GET / HTTP").unwrap();
        let (_, happened) = forwarder.forward(wrong.pump, &mut wrong.commands).await.unwrap();
        assert!(matches!(happened, Err(SessionError::ClientProtocol(_))), "{happened:?}");
        let talk = std::thread::spawn(move || {
            pair(&mut other.client, &mut other.server);
            (other.client, drop(other.server)).0
        });
        let (_, happened) = forwarder.forward(other.pump, &mut other.commands).await.unwrap();
        assert!(matches!(happened, Ok(Event::ServerLeft)), "{happened:?}");
        drop(talk.join().unwrap());
        forwarder.end();
        thread.join().unwrap();
    }
}
