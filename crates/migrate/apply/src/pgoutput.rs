//! The stream of changes from PostgreSQL's output plugin `pgoutput`: takes bytes, returns messages, does no I/O.
//!
//! Protocol version 1, values in text: binary values of composite and array types carry type numbers of the source.
//! Follows the PostgreSQL manual, "Logical Replication Message Formats".

use crate::Error;
use bytes::{Buf, Bytes, TryGetError};

/// A position in the write-ahead log.
pub type Lsn = u64;

/// A column's value in a change.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Value {
    /// NULL.
    Null,
    /// A value stored out of line (TOAST) that the change did not touch: the stream does not contain it.
    Unchanged,
    /// The value in text form.
    Text(Bytes),
}

/// The values of a row, in the order of the columns of its [`Relation`].
pub(crate) type Tuple = Vec<Value>;

/// A column of a [`Relation`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Column {
    pub(crate) name: String,
    /// True if it belongs to the replica identity.
    pub(crate) key: bool,
    /// Number of its type on the source.
    pub(crate) type_oid: u32,
}

/// A table, as the stream describes it before its first change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Relation {
    pub(crate) oid: u32,
    pub(crate) schema: String,
    pub(crate) name: String,
    /// Replica identity: `d`efault, `n`othing, `f`ull, `i`ndex.
    pub(crate) identity: u8,
    pub(crate) columns: Vec<Column>,
}

/// A message of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// A transaction begins; streams hold whole transactions in the order of their commits.
    Begin {
        /// Position of the beginning of its commit record.
        commit_lsn: Lsn,
        /// Number of the transaction on the source.
        xid: u32,
    },
    /// A transaction ends.
    Commit {
        /// Position of the beginning of its commit record.
        commit_lsn: Lsn,
        /// Position of the end of its commit record, which may be confirmed when the transaction has been applied.
        end_lsn: Lsn,
    },
    /// Describes a table.
    Relation(Relation),
    /// A row was inserted.
    Insert { relation: u32, new: Tuple },
    /// A row was changed. `old` is present if the replica identity changed, or is FULL.
    Update { relation: u32, old: Option<Tuple>, new: Tuple },
    /// A row was deleted; only the columns of the replica identity are present.
    Delete { relation: u32, old: Tuple },
    /// Tables were truncated.
    Truncate { relations: Vec<u32>, cascade: bool, restart_identity: bool },
    /// A message of `pg_logical_emit_message`.
    Emitted { prefix: String, content: Bytes },
    /// Types and origins, which are not needed here.
    Other,
}

/// Content of a CopyData while changes are streamed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Streamed {
    /// A message, and the end of its position in the log.
    Data { end: Lsn, message: Message },
    /// The server is alive; it may want an answer immediately.
    KeepAlive { end: Lsn, answer: bool },
}

/// Decodes the contents of one CopyData.
pub(crate) fn streamed(mut body: Bytes) -> Result<Streamed, Error> {
    match body.try_get_u8()? {
        b'w' => {
            let _start = body.try_get_u64()?;
            let end = body.try_get_u64()?;
            let _sent = body.try_get_u64()?;
            Ok(Streamed::Data { end, message: message(body)? })
        }
        b'k' => {
            let end = body.try_get_u64()?;
            let _sent = body.try_get_u64()?;
            Ok(Streamed::KeepAlive { end, answer: body.try_get_u8()? == 1 })
        }
        other => Err(broken(format!("unknown kind {other:#04x}"))),
    }
}

/// Encodes a standby status update: everything before `confirmed` is on disk here.
pub(crate) fn status_update(received: Lsn, confirmed: Lsn) -> Bytes {
    let mut update = Vec::with_capacity(34);
    update.push(b'r');
    for position in [received, confirmed, confirmed] {
        update.extend_from_slice(&position.to_be_bytes());
    }
    // Only the server's statistics use the time, and this module reads no clock.
    update.extend_from_slice(&0i64.to_be_bytes());
    update.push(0);
    update.into()
}

/// Decodes one message, as the stream holds it and as a slot's function returns it.
pub(crate) fn message(mut body: Bytes) -> Result<Message, Error> {
    let tag = body.try_get_u8()?;
    let message = match tag {
        b'B' => {
            let commit_lsn = body.try_get_u64()?;
            let _time = body.try_get_u64()?;
            Message::Begin { commit_lsn, xid: body.try_get_u32()? }
        }
        b'C' => {
            let _flags = body.try_get_u8()?;
            let commit_lsn = body.try_get_u64()?;
            let end_lsn = body.try_get_u64()?;
            let _time = body.try_get_u64()?;
            Message::Commit { commit_lsn, end_lsn }
        }
        b'R' => Message::Relation(relation(&mut body)?),
        b'I' => {
            let relation = body.try_get_u32()?;
            expect(&mut body, b'N')?;
            Message::Insert { relation, new: tuple(&mut body)? }
        }
        b'U' => {
            let relation = body.try_get_u32()?;
            let mut kind = body.try_get_u8()?;
            let mut old = None;
            if matches!(kind, b'K' | b'O') {
                old = Some(tuple(&mut body)?);
                kind = body.try_get_u8()?;
            }
            if kind != b'N' {
                return Err(broken(format!("an update without its new row: {kind:#04x}")));
            }
            Message::Update { relation, old, new: tuple(&mut body)? }
        }
        b'D' => {
            let relation = body.try_get_u32()?;
            let kind = body.try_get_u8()?;
            if !matches!(kind, b'K' | b'O') {
                return Err(broken(format!("a delete without its old row: {kind:#04x}")));
            }
            Message::Delete { relation, old: tuple(&mut body)? }
        }
        b'T' => {
            let count = body.try_get_u32()?;
            let options = body.try_get_u8()?;
            let relations = (0..count).map(|_| body.try_get_u32()).collect::<Result<_, _>>()?;
            Message::Truncate { relations, cascade: options & 1 != 0, restart_identity: options & 2 != 0 }
        }
        b'M' => {
            let _flags = body.try_get_u8()?;
            let _lsn = body.try_get_u64()?;
            let prefix = name(&mut body)?;
            let length = body.try_get_u32()? as usize;
            Message::Emitted { prefix, content: take(&mut body, length)? }
        }
        b'Y' | b'O' => return Ok(Message::Other),
        other => return Err(broken(format!("unknown message {other:#04x}"))),
    };
    if body.is_empty() { Ok(message) } else { Err(broken(format!("{} bytes after a message", body.len()))) }
}

fn relation(body: &mut Bytes) -> Result<Relation, Error> {
    let oid = body.try_get_u32()?;
    let schema = name(body)?;
    // The empty name means pg_catalog.
    let schema = if schema.is_empty() { "pg_catalog".to_owned() } else { schema };
    let table = name(body)?;
    let identity = body.try_get_u8()?;
    let count = body.try_get_u16()?;
    let mut columns = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        let flags = body.try_get_u8()?;
        let column = Column { name: name(body)?, key: flags & 1 != 0, type_oid: body.try_get_u32()? };
        let _modifier = body.try_get_u32()?;
        columns.push(column);
    }
    Ok(Relation { oid, schema, name: table, identity, columns })
}

fn tuple(body: &mut Bytes) -> Result<Tuple, Error> {
    let count = body.try_get_u16()?;
    let mut values = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        values.push(match body.try_get_u8()? {
            b'n' => Value::Null,
            b'u' => Value::Unchanged,
            b't' => {
                let length = body.try_get_u32()? as usize;
                Value::Text(take(body, length)?)
            }
            other => return Err(broken(format!("unknown value {other:#04x}"))),
        });
    }
    Ok(values)
}

fn name(body: &mut Bytes) -> Result<String, Error> {
    let end = body.iter().position(|byte| *byte == 0).ok_or_else(|| broken("a name without an end".into()))?;
    let text = body.split_to(end);
    body.advance(1);
    String::from_utf8(text.to_vec()).map_err(|_| broken("a name that is not UTF-8".into()))
}

fn take(body: &mut Bytes, length: usize) -> Result<Bytes, Error> {
    let missing = TryGetError { requested: length, available: body.len() };
    if body.len() < length { Err(missing.into()) } else { Ok(body.split_to(length)) }
}

fn expect(body: &mut Bytes, wanted: u8) -> Result<(), Error> {
    let found = body.try_get_u8()?;
    if found == wanted { Ok(()) } else { Err(broken(format!("{found:#04x} instead of {wanted:#04x}"))) }
}

impl From<TryGetError> for Error {
    fn from(_: TryGetError) -> Error {
        broken("a message ends early".into())
    }
}

fn broken(what: String) -> Error {
    Error::Pgoutput(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(message: &[u8]) -> Bytes {
        let mut body = vec![b'w'];
        body.extend_from_slice(&[0; 8]);
        body.extend_from_slice(&77u64.to_be_bytes());
        body.extend_from_slice(&[0; 8]);
        body.extend_from_slice(message);
        body.into()
    }

    fn update() -> Vec<u8> {
        let mut message = b"U\0\0\0\x05K\0\x02t\0\0\0\x011nN\0\x03t\0\0\0\x012un".to_vec();
        assert_eq!(message.pop(), Some(b'n'));
        message.push(b'n');
        message
    }

    #[test]
    fn an_update_with_its_old_key() {
        let Ok(Streamed::Data { end, message }) = streamed(data(&update())) else { panic!("it decodes") };
        assert_eq!(end, 77);
        let old = Some(vec![Value::Text("1".into()), Value::Null]);
        let new = vec![Value::Text("2".into()), Value::Unchanged, Value::Null];
        assert_eq!(message, Message::Update { relation: 5, old, new });
    }

    #[test]
    fn every_cut_and_every_surplus_is_an_error() {
        let whole = data(&update());
        for end in 0..whole.len() {
            assert!(streamed(whole.slice(..end)).is_err(), "cut at {end}");
        }
        let mut more = whole.to_vec();
        more.push(0);
        assert!(streamed(more.into()).is_err());
    }

    #[test]
    fn a_status_update_tells_three_positions() {
        let update = status_update(5, 3);
        assert_eq!(update.len(), 34);
        assert_eq!((update[0], update[8], update[16], update[24]), (b'r', 5, 3, 3));
    }
}
