//! A backlog of changes, read in steps before the stream begins.
//!
//! A server sends each change of a stream separately, and that takes more time than decoding it. Changes that it decodes for a
//! statement are sent in large pieces, at a third of the cost. A step moves the slot that it reads, even if its changes are not
//! yet on disk at the target. So it reads a copy of the slot, which is removed with its connection. The stream continues from
//! the copy, which is at the right position already; the slot itself follows with what is on disk.

use crate::pgoutput::Lsn;
use crate::replication_objects::{copy_of, lsn};
use bytes::{Buf, Bytes};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use stillpoint_migrate_postgres::link::{Link, Purpose, Server, ServerError, literal};

/// Minimum bytes of log that count as a backlog.
const BACKLOG_BYTES_MIN: u64 = 16 << 20;
/// Number of changes in the first step, small so that apply workers do not wait long, and maximum number in a step, large
/// because the server begins to decode some seconds before the step's first change.
const FIRST_STEP_CHANGES: u64 = 1 << 16;
const STEP_CHANGES_MAX: u64 = 1 << 19;
/// Intended bytes of a step in memory, on either side, unless one transaction is larger.
const STEP_BYTES: u64 = 32 << 20;
/// Bytes of log that are kept for the slot itself before it follows, and (`SLOT_ADVANCE_INTERVAL`) the interval of that check.
const SLOT_ADVANCE_BYTES: u64 = 64 << 20;
const SLOT_ADVANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Beginning of a binary COPY, up to the length of its extension.
const SIGNATURE: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0";

/// A backlog while it is read.
pub(crate) struct Backlog {
    link: Link,
    copy: String,
    publications: String,
    /// End of the backlog; the stream begins after it.
    pub(crate) until: Lsn,
    changes: u64,
}

impl Backlog {
    /// Opens the commits of the source after `from`, if they are many and the source allows this way of reading; `publications`
    /// is a list of names.
    pub(crate) async fn open(source: &Server, slot: &str, publications: &str, from: Lsn) -> Option<Backlog> {
        let opened = Backlog::open_copy(source, slot, publications, from).await;
        opened.inspect_err(|error| tracing::debug!(%error, "the backlog is read by the stream instead")).ok().flatten()
    }

    async fn open_copy(
        source: &Server,
        slot: &str,
        publications: &str,
        from: Lsn,
    ) -> Result<Option<Backlog>, ServerError> {
        // If a transaction is larger than that, the server writes it to a file.
        let mut link = Link::connect(source, Purpose::Replication, &[("work_mem", "64MB")]).await?;
        let until = lsn(&link.text("SELECT pg_current_wal_flush_lsn()").await?);
        if until.saturating_sub(from) < BACKLOG_BYTES_MIN {
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
        Ok(Some(Backlog { link, copy, publications: publications.to_owned(), until, changes: FIRST_STEP_CHANGES }))
    }

    /// Requests the next step.
    pub(crate) async fn request_step(&mut self) -> Result<(), ServerError> {
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

    /// Returns all messages of the requested step, and true if there is another step. If a step fails, none of its changes are
    /// lost.
    pub(crate) async fn read_step(&mut self) -> Result<(Vec<Bytes>, bool), ServerError> {
        let (mut messages, mut bytes) = (Vec::new(), 0);
        while let Some(row) = self.link.copied().await? {
            if let Some(message) = message(row).ok_or_else(|| self.link.receiver.protocol("a broken copy".into()))? {
                bytes += message.len() as u64;
                messages.push(message);
            }
        }
        let got = messages.len() as u64;
        let more = got >= self.changes;
        self.changes = (4 * self.changes).min(STEP_CHANGES_MAX).min((STEP_BYTES * got / bytes.max(1)).max(1));
        Ok((messages, more))
    }

    /// Returns its connection, and the slot from which the stream continues on it.
    pub(crate) fn into_stream(self) -> (Link, String) {
        (self.link, self.copy)
    }
}

/// Moves a slot without a reader behind what is on disk at the target, until the connection to the source fails.
pub(crate) async fn advance_slot(source: &Server, slot: &str, from: Lsn, confirmed: &AtomicU64) -> ServerError {
    let mut at = from;
    let mut link = match Link::connect(source, Purpose::Statements, &[]).await {
        Ok(link) => link,
        Err(error) => return error,
    };
    loop {
        tokio::time::sleep(SLOT_ADVANCE_INTERVAL).await;
        let safe = confirmed.load(Ordering::Acquire);
        if safe.saturating_sub(at) < SLOT_ADVANCE_BYTES {
            continue;
        }
        let sql = format!("SELECT pg_replication_slot_advance({}, {})", literal(slot), position(safe));
        match link.query(&sql).await {
            Ok(_) => at = safe,
            // The server may not have noticed yet that the previous reader is gone.
            Err(error) if error.sqlstate() == Some("55006") => {
                tracing::debug!(%error, "the slot is still in use and is not advanced")
            }
            Err(error) => return error,
        }
    }
}

fn position(at: Lsn) -> String {
    format!("'{:X}/{:X}'::pg_lsn", at >> 32, at & 0xffff_ffff)
}

/// The only column of a row of a binary COPY; `Some(None)` is the end. Each row is one piece, and the first one includes the
/// header.
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
