//! The stream of changes: reads it, assembles transactions, and confirms what is flushed on the target.
//!
//! A server sends each change separately. If changes arrive fast, waking up for each costs more than all other work on it, so
//! the reader then sleeps until several have arrived. While the replay is throttled for clients, it always sleeps, and longer:
//! apply workers repeat many transactions together at much lower cost. So the reader has its own thread; a thread that also
//! waits for other sockets would be woken anyway. A large backlog at the beginning is read in another way ([`super::backlog`]).

use super::backlog::{Backlog, advance_slot};
use super::transaction::{Assembler, Item};
use crate::Error;
use crate::inventory::Inventory;
use crate::partial_tables::PartialTables;
use crate::pgoutput::{self, Lsn, Message, Streamed};
use crate::throttle::Throttle;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use stillpoint_migrate_postgres::Frame;
use stillpoint_migrate_postgres::link::{Link, Purpose, Server, ServerError, identifier, literal};
use tokio::sync::{mpsc, oneshot};

/// Interval of status updates to the source; well below its `wal_sender_timeout`.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// Maximum time to wait for another reader of the slot to end.
const SLOT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum items that are passed on together.
const CHUNK_MAX: usize = 512;
/// Messages in a millisecond from which on the reader sleeps, and (`FAST_SLEEP`) the time it sleeps.
const FAST_MESSAGES_PER_MS: u32 = 20;
const FAST_SLEEP: Duration = Duration::from_millis(1);
/// Time the reader sleeps while the replay is throttled for clients: short compared with the lag that counts as caught up.
const THROTTLED_SLEEP: Duration = Duration::from_millis(25);

/// Rate at which messages arrive.
#[derive(Debug)]
struct MessageRate {
    since: Instant,
    messages: u32,
    fast: bool,
}

impl MessageRate {
    /// Records that `messages` have arrived and no more are waiting; returns true if the reader should sleep.
    fn take(&mut self, messages: u32) -> bool {
        self.messages += messages;
        let elapsed = self.since.elapsed();
        if elapsed >= Duration::from_millis(1) {
            self.fast = f64::from(self.messages) >= f64::from(FAST_MESSAGES_PER_MS) * elapsed.as_secs_f64() * 1e3;
            (self.since, self.messages) = (Instant::now(), 0);
        }
        self.fast
    }
}

/// The reader of one slot.
struct Stream {
    parameters: StreamParameters,
    assembler: Assembler,
    received: Lsn,
    message_rate: MessageRate,
}

/// Place where reading begins.
enum Start {
    Backlog(Backlog),
    Stream(Link),
}

type Items = mpsc::Sender<Result<Vec<Item>, Error>>;

/// Parameters of a stream.
pub(crate) struct StreamParameters {
    pub(crate) source: Server,
    pub(crate) slot: String,
    pub(crate) publications: Vec<String>,
    pub(crate) inventory: Inventory,
    pub(crate) partial: PartialTables,
    /// Start position; the slot's position if that is later.
    pub(crate) from: Lsn,
    /// Position up to which changed rows may be missing.
    pub(crate) horizon: Lsn,
    /// Everything before this position is flushed on the target.
    pub(crate) confirmed: Arc<AtomicU64>,
    /// Throttle of the replay for clients.
    pub(crate) pace: Arc<Throttle>,
}

/// Opens a stream and reads it, on its own thread, until the receiver of items is gone; an error that ends it is sent on the
/// same channel.
pub(crate) async fn start(parameters: StreamParameters, items: Items) -> Result<(), Error> {
    let (told, opened) = oneshot::channel();
    let failed =
        |error: std::io::Error| Error::Program { program: "the stream's reader".into(), why: error.to_string() };
    let reading = move || {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return drop(told.send(Err(failed(error)))),
        };
        runtime.block_on(async {
            let mut stream = Stream::new(parameters);
            let (outcome, start) = match stream.open().await {
                Ok(start) => (Ok(()), Some(start)),
                Err(error) => (Err(error.into()), None),
            };
            // If the caller no longer waits for it, the stream is not read.
            if let (Ok(()), Some(start)) = (told.send(outcome), start) {
                tokio::select! {
                    Err(error) = stream.run(start, &items) => drop(items.send(Err(error)).await),
                    () = items.closed() => {}
                }
            }
        });
    };
    std::thread::Builder::new().name("changes".into()).spawn(reading).map_err(failed)?;
    opened.await.unwrap_or_else(|_| Err(Error::WrongPhase("the stream's reader has ended".into())))
}

impl StreamParameters {
    fn publications(&self) -> String {
        self.publications.iter().map(|name| identifier(name)).collect::<Vec<_>>().join(",")
    }

    fn confirmed_position(&self) -> Lsn {
        self.confirmed.load(Ordering::Acquire)
    }
}

impl Stream {
    fn new(parameters: StreamParameters) -> Stream {
        let partial = parameters.partial.clone();
        let assembler = Assembler::new(&parameters.inventory, partial, parameters.horizon);
        let received = parameters.from;
        let message_rate = MessageRate { since: Instant::now(), messages: 0, fast: false };
        Stream { parameters, assembler, received, message_rate }
    }

    async fn open(&self) -> Result<Start, ServerError> {
        let StreamParameters { source, slot, from, .. } = &self.parameters;
        match Backlog::open(source, slot, &self.parameters.publications(), *from).await {
            Some(backlog) => Ok(Start::Backlog(backlog)),
            None => self.begin().await.map(Start::Stream),
        }
    }

    /// Begins the stream after what was received.
    async fn begin(&self) -> Result<Link, ServerError> {
        let source = &self.parameters.source;
        let mut link = Link::connect(source, Purpose::Replication, &[]).await?;
        // The server may not have noticed yet that the previous reader is gone.
        let begun = Instant::now();
        while let Err(error) = link.begin_copy(&self.statement(&self.parameters.slot)).await {
            if error.sqlstate() != Some("55006") || begun.elapsed() > SLOT_TIMEOUT {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            link = Link::connect(source, Purpose::Replication, &[]).await?;
        }
        Ok(link)
    }

    fn statement(&self, slot: &str) -> String {
        format!(
            "START_REPLICATION SLOT {} LOGICAL {:X}/{:X} (proto_version '1', publication_names {}, messages 'true')",
            identifier(slot),
            self.received >> 32,
            self.received & 0xffff_ffff,
            literal(&self.parameters.publications())
        )
    }

    async fn run(&mut self, start: Start, items: &Items) -> Result<(), Error> {
        let backlog = match start {
            Start::Stream(mut link) => return self.pump(&mut link, items).await,
            Start::Backlog(backlog) => backlog,
        };
        match self.read_backlog(backlog, items).await? {
            Ok(mut link) => {
                let StreamParameters { source, slot, from, confirmed, .. } = &self.parameters;
                let (source, slot, from, confirmed) = (source.clone(), slot.clone(), *from, Arc::clone(confirmed));
                tokio::select! {
                    ended = self.pump(&mut link, items) => ended,
                    error = advance_slot(&source, &slot, from, &confirmed) => Err(error.into()),
                }
            }
            Err(error) => {
                tracing::debug!(%error, "the rest of the backlog is read by the stream");
                self.pump(&mut self.begin().await?, items).await
            }
        }
    }

    /// Passes on the backlog and then begins the stream after it. The inner error is a failure of the server.
    async fn read_backlog(&mut self, mut backlog: Backlog, items: &Items) -> Result<Result<Link, ServerError>, Error> {
        if let Err(error) = self.read_backlog_steps(&mut backlog, items).await? {
            return Ok(Err(error));
        }
        let (mut link, copy) = backlog.into_stream();
        Ok(link.begin_copy(&self.statement(&copy)).await.map(|()| link))
    }

    /// Passes on the contents of a backlog, step by step. The inner error is a failure of the server.
    async fn read_backlog_steps(
        &mut self,
        backlog: &mut Backlog,
        items: &Items,
    ) -> Result<Result<(), ServerError>, Error> {
        let mut requested = backlog.request_step().await;
        while requested.is_ok() {
            let (messages, more) = match backlog.read_step().await {
                Ok(step) => step,
                Err(error) => return Ok(Err(error)),
            };
            // The server prepares the next step while the apply workers execute this one.
            if more {
                requested = backlog.request_step().await;
            }
            let mut chunk = Vec::new();
            for message in messages {
                let size = message.len() as u64;
                let message = pgoutput::message(message)?;
                if let Message::Commit { end_lsn, .. } = &message {
                    self.received = self.received.max(*end_lsn);
                }
                chunk.extend(self.assembler.take(message, size)?);
                if chunk.len() >= CHUNK_MAX {
                    // If the receiver is gone, the caller notices and drops this future.
                    let _ = items.send(Ok(std::mem::take(&mut chunk))).await;
                }
            }
            if !more {
                self.received = self.received.max(backlog.until);
                chunk.push(Item::Position(self.received));
            }
            let _ = items.send(Ok(chunk)).await;
            if !more {
                break;
            }
        }
        Ok(requested)
    }

    async fn pump(&mut self, link: &mut Link, items: &Items) -> Result<(), Error> {
        let mut heartbeat = tokio::time::interval(HEARTBEAT);
        loop {
            let frame = tokio::select! {
                frame = link.receiver.frame() => frame?,
                _ = heartbeat.tick() => {
                    self.send_status(link).await?;
                    continue;
                }
            };
            // Messages that have arrived with it are passed on together.
            let mut chunk = Vec::new();
            let mut messages = 1;
            chunk.extend(self.item(link, frame).await?);
            while chunk.len() < CHUNK_MAX {
                let Some(frame) = link.receiver.waiting()? else { break };
                messages += 1;
                chunk.extend(self.item(link, frame).await?);
            }
            let sleep = self.sleep_time(messages).filter(|_| link.receiver.needs_read());
            if !chunk.is_empty() {
                // The conductor may be busy for longer than the source's time-out.
                let permit = loop {
                    tokio::select! {
                        permit = items.reserve() => break permit,
                        _ = heartbeat.tick() => self.send_status(link).await?,
                    }
                };
                let Ok(permit) = permit else { return Ok(()) };
                permit.send(Ok(chunk));
            }
            if let Some(sleep) = sleep {
                // A timer of the runtime would wait for the socket too.
                std::thread::sleep(sleep);
            }
        }
    }

    /// Records that `messages` have arrived and no more are waiting; returns the time to sleep.
    fn sleep_time(&mut self, messages: u32) -> Option<Duration> {
        let fast = self.message_rate.take(messages);
        if self.parameters.pace.is_unlimited() { fast.then_some(FAST_SLEEP) } else { Some(THROTTLED_SLEEP) }
    }

    async fn item(&mut self, link: &mut Link, frame: Frame) -> Result<Option<Item>, Error> {
        let size = frame.body.len() as u64;
        match frame.tag {
            b'd' => self.decode(link, pgoutput::streamed(frame.body)?, size).await,
            b'E' => Err(link.receiver.sql_error(&frame.body, "streaming changes").into()),
            tag => Err(link.receiver.protocol(format!("`{}` in the stream", char::from(tag))).into()),
        }
    }

    async fn decode(&mut self, link: &mut Link, streamed: Streamed, size: u64) -> Result<Option<Item>, Error> {
        match streamed {
            Streamed::Data { end, message } => {
                self.received = self.received.max(end);
                self.assembler.take(message, size)
            }
            Streamed::KeepAlive { end, answer } => {
                self.received = self.received.max(end);
                if answer {
                    self.send_status(link).await?;
                }
                Ok(Some(Item::Position(end)))
            }
        }
    }

    async fn send_status(&self, link: &mut Link) -> Result<(), ServerError> {
        link.copy(&pgoutput::status_update(self.received, self.parameters.confirmed_position())).await?;
        link.sender.flush().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reader_rests_only_while_messages_come_fast() {
        let ago = |ms| Instant::now().checked_sub(Duration::from_millis(ms)).unwrap();
        let mut message_rate = MessageRate { since: ago(2), messages: 0, fast: false };
        assert!(message_rate.take(1000), "a catch-up");
        assert!(message_rate.take(1), "it goes on until the next look");
        message_rate.since = ago(10);
        assert!(!message_rate.take(10), "clients that are followed");
    }
}
