//! The stream of changes: reads it, puts transactions together, and confirms what is safe on the target.
//!
//! A server sends each change by itself. Where they come fast, waking up for each costs more than all else that we do with
//! it: the reader then rests until some have come. While clients are to be spared it always does, and for longer: players
//! repeat many transactions together for much less than each by itself. For that it has a thread of its own; one that waits
//! for the sockets of others as well would be woken up all the same. Where there is much to read before, it is read in another way
//! ([`super::backlog`]).

use super::backlog::{Backlog, trail};
use super::transaction::{Assembler, Item};
use crate::inventory::Inventory;
use crate::link::{Frame, Link, Purpose, identifier, literal};
use crate::pgoutput::{self, Lsn, Message, Streamed};
use crate::throttle::Throttle;
use crate::{Error, Server};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// How often the source hears from us; well below its `wal_sender_timeout`.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// How long the slot may have another reader.
const SLOT_LIMIT: Duration = Duration::from_secs(10);

/// Items that are handed on at once.
const CHUNK_MAX: usize = 512;
/// Messages in a millisecond from which on the reader rests, and for how long.
const FAST: u32 = 20;
const REST: Duration = Duration::from_millis(1);
/// For how long it rests while clients are to be spared: little beside what counts as caught up.
const REST_FOR_CLIENTS: Duration = Duration::from_millis(25);

/// How fast messages come.
#[derive(Debug)]
struct Tempo {
    since: Instant,
    messages: u32,
    fast: bool,
}

impl Tempo {
    /// So many have come, and nothing more is there; whether there is time to rest.
    fn take(&mut self, messages: u32) -> bool {
        self.messages += messages;
        let elapsed = self.since.elapsed();
        if elapsed >= Duration::from_millis(1) {
            self.fast = f64::from(self.messages) >= f64::from(FAST) * elapsed.as_secs_f64() * 1e3;
            (self.since, self.messages) = (Instant::now(), 0);
        }
        self.fast
    }
}

/// What is read of one slot.
struct Stream {
    opening: Opening,
    assembler: Assembler,
    received: Lsn,
    tempo: Tempo,
}

/// Where reading begins.
enum Start {
    Backlog(Backlog),
    Stream(Link),
}

type Items = mpsc::Sender<Result<Vec<Item>, Error>>;

/// What a stream is opened with.
pub(crate) struct Opening {
    pub(crate) source: Server,
    pub(crate) slot: String,
    pub(crate) publications: Vec<String>,
    pub(crate) inventory: Inventory,
    /// Where the slot stands, or here when that is later.
    pub(crate) from: Lsn,
    /// Up to here rows may not be there that are changed.
    pub(crate) horizon: Lsn,
    /// Everything before it is safe on the target.
    pub(crate) confirmed: Arc<AtomicU64>,
    /// What the replay is allowed while clients are to be spared.
    pub(crate) pace: Arc<Throttle>,
}

/// Opens a stream and reads it, on a thread of its own, until the receiver of items is gone; the error that ends it goes the
/// same way.
pub(crate) async fn start(opening: Opening, items: Items) -> Result<(), Error> {
    let (told, opened) = oneshot::channel();
    let failed =
        |error: std::io::Error| Error::Program { program: "the stream's reader".into(), why: error.to_string() };
    let reading = move || {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return drop(told.send(Err(failed(error)))),
        };
        runtime.block_on(async {
            let mut stream = Stream::new(opening);
            let (outcome, start) = match stream.open().await {
                Ok(start) => (Ok(()), Some(start)),
                Err(error) => (Err(error), None),
            };
            // Where nobody waits for it any more it is not read either.
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

impl Opening {
    fn publications(&self) -> String {
        self.publications.iter().map(|name| identifier(name)).collect::<Vec<_>>().join(",")
    }

    fn safe(&self) -> Lsn {
        self.confirmed.load(Ordering::Acquire)
    }
}

impl Stream {
    fn new(opening: Opening) -> Stream {
        let (assembler, received) = (Assembler::new(&opening.inventory, opening.horizon), opening.from);
        let tempo = Tempo { since: Instant::now(), messages: 0, fast: false };
        Stream { opening, assembler, received, tempo }
    }

    async fn open(&self) -> Result<Start, Error> {
        let Opening { source, slot, from, .. } = &self.opening;
        match Backlog::open(source, slot, &self.opening.publications(), *from).await {
            Some(backlog) => Ok(Start::Backlog(backlog)),
            None => self.begin().await.map(Start::Stream),
        }
    }

    /// Begins the stream behind what was received.
    async fn begin(&self) -> Result<Link, Error> {
        let source = &self.opening.source;
        let mut link = Link::connect(source, Purpose::Replication, &[]).await?;
        // The server has not noticed yet that whoever read it before is gone.
        let begun = Instant::now();
        while let Err(error) = link.begin_copy(&self.statement(&self.opening.slot)).await {
            if error.sqlstate() != Some("55006") || begun.elapsed() > SLOT_LIMIT {
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
            literal(&self.opening.publications())
        )
    }

    async fn run(&mut self, start: Start, items: &Items) -> Result<(), Error> {
        let backlog = match start {
            Start::Stream(mut link) => return self.pump(&mut link, items).await,
            Start::Backlog(backlog) => backlog,
        };
        match self.behind(backlog, items).await? {
            Ok(mut link) => {
                let Opening { source, slot, from, confirmed, .. } = &self.opening;
                let (source, slot, from, confirmed) = (source.clone(), slot.clone(), *from, Arc::clone(confirmed));
                tokio::select! {
                    ended = self.pump(&mut link, items) => ended,
                    error = trail(&source, &slot, from, &confirmed) => Err(error),
                }
            }
            Err(error) => {
                tracing::debug!(%error, "the rest of the backlog is left to the stream");
                self.pump(&mut self.begin().await?, items).await
            }
        }
    }

    /// The stream behind a backlog, which is handed on first. What the server failed to bring is the inner error.
    async fn behind(&mut self, mut backlog: Backlog, items: &Items) -> Result<Result<Link, Error>, Error> {
        if let Err(error) = self.work_off(&mut backlog, items).await? {
            return Ok(Err(error));
        }
        let (mut link, copy) = backlog.end();
        Ok(link.begin_copy(&self.statement(&copy)).await.map(|()| link))
    }

    /// Hands on what a backlog holds, step by step. What the server failed to bring is the inner error.
    async fn work_off(&mut self, backlog: &mut Backlog, items: &Items) -> Result<Result<(), Error>, Error> {
        let mut asked = backlog.ask().await;
        while asked.is_ok() {
            let (messages, more) = match backlog.step().await {
                Ok(step) => step,
                Err(error) => return Ok(Err(error)),
            };
            // The server is at the next one while players are at this one.
            if more {
                asked = backlog.ask().await;
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
                    // Where nobody takes it this is not waited for any more.
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
        Ok(asked)
    }

    async fn pump(&mut self, link: &mut Link, items: &Items) -> Result<(), Error> {
        let mut heartbeat = tokio::time::interval(HEARTBEAT);
        loop {
            let frame = tokio::select! {
                frame = link.receiver.frame() => frame?,
                _ = heartbeat.tick() => {
                    self.update(link).await?;
                    continue;
                }
            };
            // What has come with it goes the same way, all at once.
            let mut chunk = Vec::new();
            let mut messages = 1;
            chunk.extend(self.item(link, frame).await?);
            while chunk.len() < CHUNK_MAX {
                let Some(frame) = link.receiver.waiting()? else { break };
                messages += 1;
                chunk.extend(self.item(link, frame).await?);
            }
            let rest = self.rest(messages).filter(|_| link.receiver.is_dry());
            if !chunk.is_empty() {
                // The conductor may be busy for longer than the source's patience.
                let permit = loop {
                    tokio::select! {
                        permit = items.reserve() => break permit,
                        _ = heartbeat.tick() => self.update(link).await?,
                    }
                };
                let Ok(permit) = permit else { return Ok(()) };
                permit.send(Ok(chunk));
            }
            if let Some(rest) = rest {
                // A timer of the runtime would wait for the socket as well.
                std::thread::sleep(rest);
            }
        }
    }

    /// So many messages have come, and nothing more is there; how long to wait for more.
    fn rest(&mut self, messages: u32) -> Option<Duration> {
        let fast = self.tempo.take(messages);
        if self.opening.pace.is_free() { fast.then_some(REST) } else { Some(REST_FOR_CLIENTS) }
    }

    async fn item(&mut self, link: &mut Link, frame: Frame) -> Result<Option<Item>, Error> {
        let size = frame.body.len() as u64;
        match frame.tag {
            b'd' => self.decode(link, pgoutput::streamed(frame.body)?, size).await,
            b'E' => Err(link.receiver.sql_error(&frame.body, "streaming changes")),
            tag => Err(link.receiver.protocol(format!("`{}` in the stream", char::from(tag)))),
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
                    self.update(link).await?;
                }
                Ok(Some(Item::Position(end)))
            }
        }
    }

    async fn update(&self, link: &mut Link) -> Result<(), Error> {
        link.copy(&pgoutput::status_update(self.received, self.opening.safe())).await?;
        link.sender.flush().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reader_rests_only_while_messages_come_fast() {
        let ago = |ms| Instant::now().checked_sub(Duration::from_millis(ms)).unwrap();
        let mut tempo = Tempo { since: ago(2), messages: 0, fast: false };
        assert!(tempo.take(1000), "a catch-up");
        assert!(tempo.take(1), "it goes on until the next look");
        tempo.since = ago(10);
        assert!(!tempo.take(10), "clients that are followed");
    }
}
