//! Compares both sides by checksums over rows that do not depend on the rows' order.
//!
//! While a snapshot is held, every version of every row stays, and slows clients that write the same rows again and again. So a
//! table whose key sorts in the same order on every server is compared in ranges of keys, and every few seconds both sides get
//! a new snapshot of the same moment. A row that moves from a range not yet compared to a range already compared is not
//! compared; but its change was replayed then, and found its row. Other tables are compared as a whole, at one moment.

use crate::copy::Cutter;
use std::time::{Duration, Instant};
use stillpoint_migrate_apply::inventory::{Inventory, TableDef};
use stillpoint_migrate_apply::throttle::{COMPARISON_BOUNDS, Throttle};
use stillpoint_migrate_apply::{BARRIER_TIMEOUT, Error, Follower};
use stillpoint_migrate_postgres::link::{Link, Purpose, Row, Server, ServerError, identifier, literal, number, text};

/// Size of a comparison that found no difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComparisonReport {
    /// Number of tables.
    pub tables: usize,
    /// Number of rows on the source.
    pub rows: u64,
}

/// Pages that one statement reads, some milliseconds of work: few enough that clients' statements run in between.
const PIECE_PAGES: u64 = 128;
const PAGE_BYTES: u64 = 8192;
/// Limits for the rows of a key range that takes about as much work.
const PIECE_ROWS: std::ops::RangeInclusive<u64> = 64..=16384;
/// Size in bytes above which a value is compared by its own checksum.
const LARGE_VALUE_BYTES: u64 = 100_000;
/// Minimum bytes a second while a snapshot is held for a whole table.
const SNAPSHOT_RATE_MIN: u64 = 32 << 20;
/// Maximum age of the snapshots if the next range may be read at a later moment.
const SNAPSHOT_AGE_MAX: Duration = Duration::from_secs(2);
/// Session settings that make the planner find and read ranges by the index, even with poor statistics of a newly filled table.
const INDEX_SCAN_SETTINGS: [(&str, &str); 4] =
    [("enable_seqscan", "off"), ("enable_bitmapscan", "off"), ("enable_sort", "off"), ("jit", "off")];

/// Connections to both sides while they are compared.
pub(crate) struct Comparison<'a> {
    source: Link,
    target: Link,
    follower: &'a mut Follower,
    reading: &'a Throttle,
    /// True if only one side works at a time.
    in_turn: bool,
    /// True if both sides have the same encoding, and so the same bytes.
    same_bytes: bool,
    /// Time at which both sides got their snapshots of the same moment.
    seen: Option<Instant>,
}

impl<'a> Comparison<'a> {
    /// Connects to two servers; the follower brings the second one to the state that the first one shows.
    pub(crate) async fn between(
        from: &Server,
        to: &Server,
        follower: &'a mut Follower,
        reading: &'a Throttle,
        in_turn: bool,
    ) -> Result<Comparison<'a>, Error> {
        let mut source = Link::connect(from, Purpose::Statements, &INDEX_SCAN_SETTINGS).await?;
        let mut target = Link::connect(to, Purpose::Statements, &INDEX_SCAN_SETTINGS).await?;
        let same_bytes = source.text("SHOW server_encoding").await? == target.text("SHOW server_encoding").await?;
        Ok(Comparison { source, target, follower, reading, in_turn, same_bytes, seen: None })
    }

    /// Compares all tables of the inventory.
    pub(crate) async fn run(mut self, inventory: &Inventory) -> Result<ComparisonReport, Error> {
        let (mut differing, mut rows) = (Vec::new(), 0);
        for table in &inventory.tables {
            let TableChecksums { here, there, same } = match table.ordered_key() {
                Some(key) => self.compare_by_ranges(table, &key).await?,
                None => self.compare_by_pages(table).await?,
            };
            rows += here.rows;
            if !same {
                differing.push(format!("{} ({} and {} rows)", table.display(), here.rows, there.rows));
            }
        }
        if differing.is_empty() {
            Ok(ComparisonReport { tables: inventory.tables.len(), rows })
        } else {
            Err(Error::Differs(differing))
        }
    }

    async fn compare_by_ranges(&mut self, table: &TableDef, key: &[&str]) -> Result<TableChecksums, Error> {
        let (name, mut sums) = (table.qualified(), TableChecksums { same: true, ..TableChecksums::default() });
        let estimate = format!("SELECT reltuples::bigint FROM pg_class WHERE oid = {}::regclass", literal(&name));
        let length = rows_per_piece(table.bytes, self.source.text(&estimate).await?.parse().unwrap_or(0));
        let key = key.iter().map(|column| identifier(column)).collect::<Vec<_>>().join(", ");
        let columns = self.columns(&name).await?;
        let mut after = None;
        loop {
            self.renew_snapshots().await?;
            let behind = after.map_or_else(|| "true".into(), |last: String| format!("({key}) > ({last})"));
            let last =
                format!("SELECT {key} FROM ONLY {name} WHERE {behind} ORDER BY {key} OFFSET {} LIMIT 1", length - 1);
            let last = self.source.query(&last).await?.first().map(values);
            let to = last.as_ref().map_or_else(|| "true".into(), |last| format!("({key}) <= ({last})"));
            let place = format!("{behind} AND {to} AND {}", table.moved_rows());
            let [here, there] = self.sums(&name, &columns, &place).await?;
            sums.same &= here == there;
            sums.add(here, there);
            self.reading.spend((PIECE_PAGES * PAGE_BYTES).min(table.bytes)).await;
            after = last;
            if after.is_none() {
                return Ok(sums);
            }
        }
    }

    /// The same rows are in other pages on the other side, so only checksums of the whole table can be compared. Meanwhile old
    /// versions of rows stay, so a slow comparison does not help clients.
    async fn compare_by_pages(&mut self, table: &TableDef) -> Result<TableChecksums, Error> {
        self.renew_snapshots().await?;
        self.reading.set_min(SNAPSHOT_RATE_MIN);
        let (name, mut sums) = (table.qualified(), TableChecksums::default());
        let columns = self.columns(&name).await?;
        let mut cutter = Cutter::new(std::slice::from_ref(table));
        while let Some(piece) = cutter.next(PIECE_PAGES) {
            let place = format!("{} AND {}", piece.condition(), table.moved_rows());
            let [here, there] = self.sums(&name, &columns, &place).await?;
            sums.add(here, there);
            self.reading.spend(PIECE_PAGES.min(table.pages) * PAGE_BYTES).await;
        }
        self.reading.set_min(COMPARISON_BOUNDS.min);
        Ok(TableChecksums { same: sums.here == sums.there, ..sums })
    }

    /// Takes new snapshots of both sides at the same later moment, unless the present ones are recent.
    async fn renew_snapshots(&mut self) -> Result<(), Error> {
        if let Some(seen) = self.seen {
            if seen.elapsed() < SNAPSHOT_AGE_MAX {
                return Ok(());
            }
            self.source.query("COMMIT").await?;
            self.target.query("COMMIT").await?;
        }
        self.follower.snapshot_both(&mut self.source, &mut self.target, BARRIER_TIMEOUT).await?;
        self.seen = Some(Instant::now());
        Ok(())
    }

    /// SQL list of all columns of a table, generated ones too, in the source's order: a table that inherits may have another
    /// order where it was created again. Large values are compared by a checksum, because no text holds more than a gigabyte
    /// and bytes become two digits each. Their length is known without reading them.
    async fn columns(&mut self, table: &str) -> Result<String, ServerError> {
        let bytes = if self.same_bytes { "%1$s::text" } else { "convert_to(%1$s::text, 'UTF8')" };
        let columns = format!(
            "SELECT coalesce(string_agg(format(CASE coalesce(nullif(t.typbasetype, 0), t.oid) \
             WHEN 'bytea'::regtype THEN 'CASE WHEN octet_length(%1$s) > {LARGE_VALUE_BYTES} THEN decode(md5(%1$s), ''hex'') ELSE %1$s END' \
             WHEN 'text'::regtype THEN {text} WHEN 'varchar'::regtype THEN {text} WHEN 'json'::regtype THEN {text} \
             WHEN 'xml'::regtype THEN {text} ELSE '%1$s' END, '_stillpoint_row.' || quote_ident(attname)), ', ' \
             ORDER BY attnum), '') FROM pg_attribute JOIN pg_type t ON t.oid = atttypid \
             WHERE attrelid = {}::regclass AND attnum > 0 AND NOT attisdropped",
            literal(table),
            text = literal(&format!(
                "CASE WHEN octet_length({bytes}) > {LARGE_VALUE_BYTES} THEN md5({bytes}) ELSE %1$s::text END"
            ))
        );
        self.source.text(&columns).await
    }

    async fn sums(&mut self, table: &str, columns: &str, place: &str) -> Result<[RowChecksum; 2], Error> {
        // The hash of the text: equal values have equal text if both sides print alike, and our connections ensure that.
        let row = format!("ROW({columns})::text");
        let row = if self.same_bytes { row } else { format!("encode(convert_to({row}, 'UTF8'), 'base64')") };
        let sql = format!(
            "SELECT count(*), coalesce(sum(hashtextextended({row}, 0)), 0) FROM ONLY {table} _stillpoint_row \
             WHERE {place}"
        );
        let (here, there) = if self.in_turn {
            (self.source.query(&sql).await?, self.target.query(&sql).await?)
        } else {
            tokio::try_join!(self.source.query(&sql), self.target.query(&sql))?
        };
        Ok([RowChecksum::of(&here), RowChecksum::of(&there)])
    }
}

/// Number of rows that take as much work as the pages of a piece. `bytes` is the table's size and `rows` its estimated number
/// of rows; 0 or less if unknown.
fn rows_per_piece(bytes: u64, rows: i64) -> u64 {
    const UNKNOWN: u64 = 128;
    let row = u64::try_from(rows).ok().and_then(|rows| bytes.checked_div(rows)).unwrap_or(UNKNOWN).max(1);
    (PIECE_PAGES * PAGE_BYTES / row).clamp(*PIECE_ROWS.start(), *PIECE_ROWS.end())
}

/// Formats the row's values as SQL literals.
fn values(row: &Row) -> String {
    (0..row.len()).map(|at| literal(&text(row, at))).collect::<Vec<_>>().join(", ")
}

/// Checksum over rows, independent of their order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct RowChecksum {
    rows: u64,
    hashes: i128,
}

impl RowChecksum {
    fn of(answer: &[Row]) -> RowChecksum {
        answer
            .first()
            .map_or_else(RowChecksum::default, |row| RowChecksum { rows: number(row, 0), hashes: number(row, 1) })
    }

    fn add(&mut self, other: RowChecksum) {
        self.rows += other.rows;
        self.hashes = self.hashes.wrapping_add(other.hashes);
    }
}

/// Checksums of a table on both sides.
#[derive(Debug, Clone, Copy, Default)]
struct TableChecksums {
    here: RowChecksum,
    there: RowChecksum,
    same: bool,
}

impl TableChecksums {
    fn add(&mut self, here: RowChecksum, there: RowChecksum) {
        self.here.add(here);
        self.there.add(there);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_comes_to_about_a_piece() {
        assert_eq!(rows_per_piece(130 * 10_000_000, 10_000_000), 8065);
        for (bytes, rows, length) in
            [(1 << 40, 100, 64), (8192, 1_000_000, 16384), (1 << 30, -1, 8192), (1 << 30, 0, 8192), (0, 0, 8192)]
        {
            assert_eq!(rows_per_piece(bytes, rows), length, "{bytes} {rows}");
        }
    }
}
