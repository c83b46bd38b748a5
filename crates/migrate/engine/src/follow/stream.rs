//! The stream of changes: reads it, puts transactions together, and confirms what is safe on the target.
//!
//! A server sends each change by itself. Where they come fast, waking up for each costs more than all else that we do with
//! it: the reader then rests until some have come. For that it has a thread of its own; one that waits for the sockets of
//! others as well would be woken up all the same.

use super::transaction::{Assembler, Item};
use crate::inventory::Inventory;
use crate::link::{Frame, Link, Purpose, identifier, literal};
use crate::pgoutput::{self, Lsn, Streamed};
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

/// An open stream of one slot.
pub(crate) struct Stream {
    link: Link,
    assembler: Assembler,
    /// Everything before it is safe on the target.
    confirmed: Arc<AtomicU64>,
    received: Lsn,
    tempo: Tempo,
}

/// What a stream is opened with.
pub(crate) struct Opening {
    pub(crate) source: Server,
    pub(crate) slot: String,
    pub(crate) publications: Vec<String>,
    pub(crate) inventory: Inventory,
    /// Where the slot stands, or here when that is later.
    pub(crate) from: Lsn,
    pub(crate) confirmed: Arc<AtomicU64>,
}

/// Opens a stream and reads it, on a thread of its own, until the receiver of items is gone; the error that ends it goes the
/// same way.
pub(crate) async fn start(opening: Opening, items: mpsc::Sender<Result<Vec<Item>, Error>>) -> Result<(), Error> {
    let (told, opened) = oneshot::channel();
    let failed =
        |error: std::io::Error| Error::Program { program: "the stream's reader".into(), why: error.to_string() };
    let reading = move || {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return drop(told.send(Err(failed(error)))),
        };
        runtime.block_on(async {
            let (outcome, stream) = match Stream::open(opening).await {
                Ok(stream) => (Ok(()), Some(stream)),
                Err(error) => (Err(error), None),
            };
            // Where nobody waits for it any more it is not read either.
            if let (Ok(()), Some(stream)) = (told.send(outcome), stream) {
                stream.run(items).await;
            }
        });
    };
    std::thread::Builder::new().name("changes".into()).spawn(reading).map_err(failed)?;
    opened.await.unwrap_or_else(|_| Err(Error::WrongPhase("the stream's reader has ended".into())))
}

impl Stream {
    async fn open(opening: Opening) -> Result<Stream, Error> {
        let Opening { source, slot, publications, inventory, from, confirmed } = opening;
        let mut link = Link::connect(&source, Purpose::Replication, &[]).await?;
        let names: Vec<String> = publications.iter().map(|name| identifier(name)).collect();
        let start = format!(
            "START_REPLICATION SLOT {} LOGICAL {:X}/{:X} (proto_version '1', publication_names {}, messages 'true')",
            identifier(&slot),
            from >> 32,
            from & 0xffff_ffff,
            literal(&names.join(","))
        );
        // The server has not noticed yet that whoever read it before is gone.
        let begun = Instant::now();
        while let Err(error) = link.begin_copy(&start).await {
            if error.sqlstate() != Some("55006") || begun.elapsed() > SLOT_LIMIT {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            link = Link::connect(&source, Purpose::Replication, &[]).await?;
        }
        let tempo = Tempo { since: Instant::now(), messages: 0, fast: false };
        Ok(Stream { link, assembler: Assembler::new(&inventory), confirmed, received: from, tempo })
    }

    async fn run(mut self, items: mpsc::Sender<Result<Vec<Item>, Error>>) {
        if let Err(error) = self.pump(&items).await {
            // Nobody listens any more: then nobody is interested.
            let _ = items.send(Err(error)).await;
        }
    }

    async fn pump(&mut self, items: &mpsc::Sender<Result<Vec<Item>, Error>>) -> Result<(), Error> {
        let mut heartbeat = tokio::time::interval(HEARTBEAT);
        loop {
            let frame = tokio::select! {
                frame = self.link.receiver.frame() => frame?,
                _ = heartbeat.tick() => {
                    self.update().await?;
                    continue;
                }
                () = items.closed() => return Ok(()),
            };
            // What has come with it goes the same way, all at once.
            let mut chunk = Vec::new();
            let mut messages = 1;
            chunk.extend(self.item(frame).await?);
            while chunk.len() < CHUNK_MAX {
                let Some(frame) = self.link.receiver.waiting()? else { break };
                messages += 1;
                chunk.extend(self.item(frame).await?);
            }
            let rests = self.tempo.take(messages) && self.link.receiver.is_dry();
            if !chunk.is_empty() {
                // The conductor may be busy for longer than the source's patience.
                let permit = loop {
                    tokio::select! {
                        permit = items.reserve() => break permit,
                        _ = heartbeat.tick() => self.update().await?,
                    }
                };
                let Ok(permit) = permit else { return Ok(()) };
                permit.send(Ok(chunk));
            }
            if rests {
                // A timer of the runtime would wait for the socket as well.
                std::thread::sleep(REST);
            }
        }
    }

    async fn item(&mut self, frame: Frame) -> Result<Option<Item>, Error> {
        let size = frame.body.len() as u64;
        match frame.tag {
            b'd' => self.decode(pgoutput::streamed(frame.body)?, size).await,
            b'E' => Err(self.link.receiver.sql_error(&frame.body, "streaming changes")),
            tag => Err(self.link.receiver.protocol(format!("`{}` in the stream", char::from(tag)))),
        }
    }

    async fn decode(&mut self, streamed: Streamed, size: u64) -> Result<Option<Item>, Error> {
        match streamed {
            Streamed::Data { end, message } => {
                self.received = self.received.max(end);
                self.assembler.take(message, size)
            }
            Streamed::KeepAlive { end, answer } => {
                self.received = self.received.max(end);
                if answer {
                    self.update().await?;
                }
                Ok(Some(Item::Position(end)))
            }
        }
    }

    async fn update(&mut self) -> Result<(), Error> {
        let update = pgoutput::status_update(self.received, self.confirmed.load(Ordering::Acquire));
        self.link.copy(&update).await?;
        self.link.sender.flush().await
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
