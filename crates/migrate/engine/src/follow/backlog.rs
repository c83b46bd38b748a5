//! A backlog, read in steps before the stream begins.
//!
//! A server sends each change of a stream by itself, and spends more on that than on decoding it. What it decodes for a
//! statement crosses in large pieces, at a third of the cost. A step moves the slot that it is read from, whether what it brought
//! is safe or not: so it is read from a copy of the slot, which is gone with its connection. The stream goes on from the
//! copy, which stands there already, and the slot itself trails behind with what is safe.

use crate::link::{Link, Purpose, literal};
use crate::outfit::lsn;
use crate::pgoutput::Lsn;
use crate::{Error, Server};
use bytes::{Buf, Bytes};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of log from which on there is a backlog.
const LEAST: u64 = 16 << 20;
/// Changes of the first step, so that players need not wait for long, and of the longest: a step begins where the server may
/// begin to decode, some seconds before its first change.
const FIRST: u64 = 1 << 16;
const LONGEST: u64 = 1 << 19;
/// What a step should come to in memory, on either side, unless one transaction is larger.
const BYTES: u64 = 32 << 20;
/// Bytes of log that are kept for the slot itself before it follows, and how often that is looked at.
const STRIDE: u64 = 64 << 20;
const LOOK: Duration = Duration::from_secs(1);
/// What a binary COPY begins with, up to the length of its extension.
const SIGNATURE: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0";

/// What the copy of a slot is called: as one of ours it is found by whoever cleans up.
pub(crate) fn copy_of(slot: &str) -> String {
    format!("{slot}_copy")
}

/// A backlog that is being read.
pub(crate) struct Backlog {
    link: Link,
    copy: String,
    publications: String,
    /// Its end: what follows is the stream's.
    pub(crate) until: Lsn,
    changes: u64,
}

impl Backlog {
    /// What the source has committed behind `from`, if that is much and the source lets us read it like that;
    /// `publications` is a list of names.
    pub(crate) async fn open(source: &Server, slot: &str, publications: &str, from: Lsn) -> Option<Backlog> {
        let opened = Backlog::copied(source, slot, publications, from).await;
        opened.inspect_err(|error| tracing::debug!(%error, "the backlog is left to the stream")).ok().flatten()
    }

    async fn copied(source: &Server, slot: &str, publications: &str, from: Lsn) -> Result<Option<Backlog>, Error> {
        // Of more than that the server makes a file.
        let mut link = Link::connect(source, Purpose::Replication, &[("work_mem", "64MB")]).await?;
        let until = lsn(&link.text("SELECT pg_current_wal_flush_lsn()").await?);
        if until.saturating_sub(from) < LEAST {
            return Ok(None);
        }
        let copy = copy_of(slot);
        let (of, name) = (literal(slot), literal(&copy));
        link.query(&format!("SELECT pg_copy_logical_replication_slot({of}, {name}, true)")).await?;
        link.query(&format!(
            "SELECT pg_replication_slot_advance({name}, greatest(confirmed_flush_lsn, {})) \
             FROM pg_replication_slots WHERE slot_name = {name}",
            position(from)
        ))
        .await?;
        Ok(Some(Backlog { link, copy, publications: publications.to_owned(), until, changes: FIRST }))
    }

    /// Asks for the next step.
    pub(crate) async fn ask(&mut self) -> Result<(), Error> {
        let sql = format!(
            "COPY (SELECT data FROM pg_logical_slot_get_binary_changes({}, {}, {}, 'proto_version', '1', \
             'publication_names', {}, 'messages', 'true')) TO STDOUT (FORMAT binary)",
            literal(&self.copy),
            position(self.until),
            self.changes,
            literal(&self.publications)
        );
        self.link.begin_copy(&sql).await
    }

    /// All messages of the step that was asked for, and whether there is another step. Nothing of a step is lost that fails.
    pub(crate) async fn step(&mut self) -> Result<(Vec<Bytes>, bool), Error> {
        let (mut messages, mut bytes) = (Vec::new(), 0);
        while let Some(row) = self.link.copied().await? {
            if let Some(message) = message(row).ok_or_else(|| self.link.receiver.protocol("a broken copy".into()))? {
                bytes += message.len() as u64;
                messages.push(message);
            }
        }
        let got = messages.len() as u64;
        let more = got >= self.changes;
        self.changes = (4 * self.changes).min(LONGEST).min((BYTES * got / bytes.max(1)).max(1));
        Ok((messages, more))
    }

    /// Its connection, and the slot from which the stream goes on there.
    pub(crate) fn end(self) -> (Link, String) {
        (self.link, self.copy)
    }
}

/// Has a slot that nobody reads trail behind what is safe on the target, until the source is lost.
pub(crate) async fn trail(source: &Server, slot: &str, from: Lsn, confirmed: &AtomicU64) -> Error {
    let mut at = from;
    let mut link = match Link::connect(source, Purpose::Statements, &[]).await {
        Ok(link) => link,
        Err(error) => return error,
    };
    loop {
        tokio::time::sleep(LOOK).await;
        let safe = confirmed.load(Ordering::Acquire);
        if safe.saturating_sub(at) < STRIDE {
            continue;
        }
        let sql = format!("SELECT pg_replication_slot_advance({}, {})", literal(slot), position(safe));
        match link.query(&sql).await {
            Ok(_) => at = safe,
            // Who read it before may not have noticed yet that nobody listens.
            Err(error) if error.sqlstate() == Some("55006") => tracing::debug!(%error, "the slot is left behind"),
            Err(error) => return error,
        }
    }
}

fn position(at: Lsn) -> String {
    format!("'{:X}/{:X}'::pg_lsn", at >> 32, at & 0xffff_ffff)
}

/// The one column of a row of a binary COPY; `Some(None)` is its end. A row comes by itself, the first one behind the head.
fn message(mut row: Bytes) -> Option<Option<Bytes>> {
    if row.starts_with(SIGNATURE) {
        row.advance(SIGNATURE.len());
        let extension = usize::try_from(row.try_get_u32().ok()?).ok()?;
        row = (extension <= row.len()).then(|| row.split_off(extension))?;
    }
    match row.try_get_i16().ok()? {
        -1 if row.is_empty() => Some(None),
        1 => {
            let length = usize::try_from(row.try_get_i32().ok()?).ok()?;
            (length == row.len()).then_some(Some(row))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_read_row_by_row() {
        let head = [SIGNATURE, &[0, 0, 0, 2, 9, 9]].concat();
        let row = [0, 1, 0, 0, 0, 2, b'a', b'b'];
        let first = Bytes::from([&head[..], &row].concat());
        assert_eq!(message(first.clone()), Some(Some(Bytes::from_static(b"ab"))));
        assert_eq!(message(Bytes::copy_from_slice(&row)), Some(Some(Bytes::from_static(b"ab"))));
        assert_eq!(message(Bytes::from_static(&[0xff, 0xff])), Some(None));
        assert_eq!(message(Bytes::from([&head[..], &[0xff, 0xff]].concat())), Some(None), "nothing came");
        for end in 0..first.len() {
            assert_eq!(message(first.slice(..end)), None, "cut at {end}");
        }
        assert_eq!(message(Bytes::from_static(&[0, 1, 0xff, 0xff, 0xff, 0xff])), None, "NULL");
    }
}
