//! The stream of changes: reads it, puts transactions together, and confirms what is safe on the target.

use super::transaction::{Assembler, Item};
use crate::inventory::Inventory;
use crate::link::{Frame, Link, Purpose, identifier, literal};
use crate::pgoutput::{self, Lsn, Streamed};
use crate::{Error, Server};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

/// How often the source hears from us; well below its `wal_sender_timeout`.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// Items that are handed on at once.
const CHUNK_MAX: usize = 64;

/// An open stream of one slot.
pub(crate) struct Stream {
    link: Link,
    assembler: Assembler,
    /// Everything before it is safe on the target.
    confirmed: Arc<AtomicU64>,
    received: Lsn,
}

impl Stream {
    /// Opens it where the slot stands, or at `from` when that is later.
    pub(crate) async fn open(
        source: &Server,
        slot: &str,
        publications: &[&str],
        inventory: &Inventory,
        from: Lsn,
        confirmed: Arc<AtomicU64>,
    ) -> Result<Stream, Error> {
        let mut link = Link::connect(source, Purpose::Replication, &[]).await?;
        let names: Vec<String> = publications.iter().map(|name| identifier(name)).collect();
        let start = format!(
            "START_REPLICATION SLOT {} LOGICAL {:X}/{:X} (proto_version '1', publication_names {}, messages 'true')",
            identifier(slot),
            from >> 32,
            from & 0xffff_ffff,
            literal(&names.join(","))
        );
        link.begin_copy(&start).await?;
        Ok(Stream { link, assembler: Assembler::new(inventory), confirmed, received: from })
    }

    /// Reads until the receiver of items is gone; the error that ends it goes the same way.
    pub(crate) async fn run(mut self, items: mpsc::Sender<Result<Vec<Item>, Error>>) {
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
            chunk.extend(self.item(frame).await?);
            while chunk.len() < CHUNK_MAX {
                let Some(frame) = self.link.receiver.waiting()? else { break };
                chunk.extend(self.item(frame).await?);
            }
            if chunk.is_empty() {
                continue;
            }
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
