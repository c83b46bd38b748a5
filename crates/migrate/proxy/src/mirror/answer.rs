//! A server's answer to one statement, as far as it is compared.

use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;
use std::time::{Duration, Instant};
use stillpoint_migrate_capture::ReadStatement;
use stillpoint_migrate_control::DifferenceKind;
use stillpoint_migrate_postgres::{LinkError, Reader, Stream};
use stillpoint_migrate_wire::backend;

/// Largest answer in bytes.
const BYTES_MAX: usize = 32 << 20;
/// Smallest object identifier that a database assigns itself (`FirstNormalObjectId`).
const FIRST_OWN_OID: u32 = 16_384;
/// Code of a statement that was ended by a time limit or on request.
pub(super) const CANCELED: &str = "57014";
/// Code of a statement that waited too long for a lock.
pub(super) const LOCKED: &str = "55P03";

/// A server's answer. Hashes need to resist no attacker, who would only deceive a comparison of his own statements.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Answer {
    rows: u64,
    /// Hash of the names, types and formats of the columns.
    columns: u64,
    /// Hash of the rows in their order.
    in_order: u128,
    /// Hash of the rows in any order.
    in_any_order: u128,
    /// Code of the error.
    pub(super) error: Option<String>,
    pub(super) took: Duration,
}

/// Reason why there is no answer.
#[derive(Debug)]
pub(super) enum NoAnswer {
    /// The connection is of no use any more.
    Lost(LinkError),
    /// It is larger than the limit.
    TooLarge,
    /// The statement was not a SELECT.
    NotRead,
}

/// Two hashes of 64 bits.
fn hash(bytes: &[u8]) -> u128 {
    let half = |seed: u8| {
        let mut hasher = DefaultHasher::new();
        hasher.write_u8(seed);
        hasher.write(bytes);
        u128::from(hasher.finish())
    };
    half(1) << 64 | half(2)
}

impl Answer {
    /// Runs a statement, whose messages end with a Sync.
    pub(super) async fn read(stream: &mut Stream, messages: &[u8]) -> Result<Answer, NoAnswer> {
        let (mut answer, mut reader, mut bytes) = (Answer::default(), Reader::default(), 0);
        let begun = Instant::now();
        let lost = |error| NoAnswer::Lost(LinkError::Io(error));
        stream.send(messages).await.map_err(lost)?;
        loop {
            let frame = reader.next(stream).await.map_err(NoAnswer::Lost)?;
            bytes += frame.body.len();
            if bytes > BYTES_MAX {
                return Err(NoAnswer::TooLarge);
            }
            match frame.tag {
                b'D' => answer.add_row(&frame.body),
                b'T' => answer.columns = columns(&frame.body),
                b'C' if !frame.body.starts_with(b"SELECT ") => return Err(NoAnswer::NotRead),
                b'E' => {
                    let report = backend::report(&frame.body).map_err(|e| NoAnswer::Lost(LinkError::Protocol(e)))?;
                    if report.severity == "FATAL" {
                        return Err(NoAnswer::Lost(LinkError::Refused(report)));
                    }
                    answer.error.get_or_insert(report.code);
                }
                b'Z' => {
                    answer.took = begun.elapsed();
                    return Ok(answer);
                }
                _ => {}
            }
        }
    }

    fn add_row(&mut self, body: &[u8]) {
        let row = hash(body);
        self.rows += 1;
        self.in_any_order = self.in_any_order.wrapping_add(row);
        let mut chained = self.in_order.to_be_bytes().to_vec();
        chained.extend(row.to_be_bytes());
        self.in_order = hash(&chained);
    }

    /// Compares with the target's answer to the statement; `None` if they are the same.
    pub(super) fn difference(&self, target: &Answer, read: &ReadStatement) -> Option<DifferenceKind> {
        if self.error == target.error && self.error.is_some() {
            return None;
        }
        if self.error.is_none() && target.error.is_some() {
            return Some(DifferenceKind::Failed);
        }
        let same_rows = self.is_like(target);
        match () {
            () if same_rows && (self.in_order == target.in_order || !read.is_ordered) => None,
            () if same_rows => Some(DifferenceKind::Reordered),
            () if read.depends_on_order && self.error.is_none() => Some(DifferenceKind::Undefined),
            () => Some(DifferenceKind::Different),
        }
    }

    /// True if both have the same rows, in any order, or the same error.
    pub(super) fn is_like(&self, other: &Answer) -> bool {
        (self.rows, self.columns, self.in_any_order, &self.error)
            == (other.rows, other.columns, other.in_any_order, &other.error)
    }

    /// Describes it for a report.
    pub(super) fn describe(&self) -> String {
        match (&self.error, self.rows) {
            (Some(code), _) => format!("error {code}"),
            (None, 1) => "1 row".into(),
            (None, rows) => format!("{rows} rows"),
        }
    }
}

/// Hash of a RowDescription without the numbers that a server assigns itself.
fn columns(body: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    let mut rest = body.get(2..).unwrap_or_default();
    // Each column: name, table, attribute, type, size of the type, its modifier, format.
    while let Some(end) = rest.iter().position(|byte| *byte == 0) {
        hasher.write(&rest[..=end]);
        let Some((fixed, next)) = rest[end + 1..].split_at_checked(18) else { break };
        let oid = u32::from_be_bytes([fixed[6], fixed[7], fixed[8], fixed[9]]);
        hasher.write_u32(if oid < FIRST_OWN_OID { oid } else { FIRST_OWN_OID });
        hasher.write(&fixed[16..]);
        rest = next;
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(is_ordered: bool, depends_on_order: bool) -> ReadStatement {
        ReadStatement { is_ordered, depends_on_order, ..ReadStatement::default() }
    }

    fn answer(rows: &[&str]) -> Answer {
        let mut answer = Answer::default();
        rows.iter().for_each(|row| answer.add_row(row.as_bytes()));
        answer
    }

    #[test]
    fn the_order_of_rows_counts_where_the_statement_states_it() {
        let (one, other, less) = (answer(&["a", "b"]), answer(&["b", "a"]), answer(&["a"]));
        assert_eq!(one.difference(&other, &read(false, false)), None);
        assert_eq!(one.difference(&other, &read(true, false)), Some(DifferenceKind::Reordered));
        assert_eq!(one.difference(&less, &read(true, false)), Some(DifferenceKind::Different));
        assert_eq!(one.difference(&less, &read(false, true)), Some(DifferenceKind::Undefined));
        assert_eq!(
            answer(&["a", "a"]).difference(&answer(&["b", "b"]), &read(false, false)),
            Some(DifferenceKind::Different)
        );
        assert!(one.is_like(&other) && !one.is_like(&less));
    }

    #[test]
    fn an_error_is_an_answer() {
        let failed = |code: &str| Answer { error: Some(code.into()), ..answer(&[]) };
        assert_eq!(failed("22012").difference(&failed("22012"), &read(true, false)), None);
        assert_eq!(answer(&[]).difference(&failed("42883"), &read(true, true)), Some(DifferenceKind::Failed));
        assert_eq!(failed("22012").difference(&answer(&[]), &read(true, true)), Some(DifferenceKind::Different));
        assert_eq!(failed("22012").difference(&failed("42883"), &read(false, false)), Some(DifferenceKind::Different));
    }

    #[test]
    fn numbers_that_a_server_assigns_are_not_compared() {
        let description = |name: &str, table: u32, oid: u32, format: u16| {
            let mut body = vec![0, 1];
            body.extend(name.as_bytes());
            body.push(0);
            body.extend(table.to_be_bytes());
            body.extend([0, 1]);
            body.extend(oid.to_be_bytes());
            body.extend([0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
            body.extend(format.to_be_bytes());
            columns(&body)
        };
        let one = description("id", 16_390, 20, 0);
        assert_eq!(one, description("id", 17_000, 20, 0));
        assert_eq!(description("mood", 1, 16_500, 0), description("mood", 1, 20_000, 0));
        for other in
            [description("no", 16_390, 20, 0), description("id", 16_390, 23, 0), description("id", 16_390, 20, 1)]
        {
            assert_ne!(one, other);
        }
        assert_eq!(columns(&[]), columns(&[0, 0]));
    }
}
