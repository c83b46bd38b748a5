//! Copies rows: several connections, tables in pieces, no faster than clients tolerate.
//!
//! While a snapshot is held, the source keeps every version of every row, and these versions slow clients that write the same
//! rows again and again: the slower a copy, the more versions. So rows are copied without it if possible: rows that are the
//! same now as the slot's snapshot saw them. Each piece has its own snapshot, which lasts only as long as the piece is read.
//! The log brings the rest, from the slot's position on.
//! (A snapshot that is held costs pgbench's clients 25 % of their throughput, without any copy.)
//!
//! - A snapshot that a slot exports lists every number below its end that it does not see, including those of subtransactions
//!   and aborted transactions. So it sees a version of a row if and only if the version's `xmin` committed, is below that end
//!   and is not on the list. Of each row it sees one version at most.
//! - A piece's snapshot sees everything that the slot's snapshot sees. The copy waits for that once
//!   ([`SourceSnapshot::contains`]), because a commit may be in the log and still be invisible while it waits for a standby. So
//!   a version that both see is the row as the slot's snapshot saw it: the copied rows are a subset of that state, and violate
//!   no key.
//! - A version that only the slot's snapshot sees was replaced or deleted by a transaction that it does not see. That
//!   transaction is in the log after the slot's position and before the *horizon*: a position in the log that is after the last
//!   piece, and on disk. Up to the horizon, an update may find no row, and then inserts it; a delete may find no row. After it,
//!   all rows are present.
//! - An update can insert a row only if the log holds all its values. The log omits a large value that is stored elsewhere and
//!   unchanged. So a table that had such values when the slot's snapshot was taken is copied with that snapshot. The same holds
//!   for a table whose rows have no key, or that has rules, because an upsert is impossible there. These tables are copied
//!   first, so that the snapshot is released soon.
//! - An `xmin` has 32 bits. Once the source has assigned that many numbers, a frozen row may carry a number that is used again,
//!   and everything is copied with the slot's snapshot.

use crate::copied_pages::{CopiedPages, gaps, record_piece_sql};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use stillpoint_migrate_apply::inventory::{ColumnDef, TableDef};
use stillpoint_migrate_apply::throttle::Throttle;
use stillpoint_migrate_apply::{Error, SourceSnapshot};
use stillpoint_migrate_postgres::link::{Link, Purpose, Server, ServerError, identifier, literal};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

const PAGE_BYTES: u64 = 8192;
/// Maximum and minimum pages of a piece: 64 MiB and 1 MiB.
const PIECE_PAGES_MAX: u64 = 8192;
const PIECE_PAGES_MIN: u64 = 128;
/// Number of pieces a second at the allowed rate: each is read without a limit, and paid for afterwards.
const PIECES_PER_S: u64 = 8;
/// Transaction number from which on a version's number is no longer sufficient; the remaining numbers are for transactions
/// during the copy.
const XID_MAX: u64 = 3 << 30;
/// Number of sampled rows of a table, and maximum stored size in bytes of each.
const SAMPLE_ROWS: u32 = 100;
const SAMPLE_BYTES: u32 = 64 << 10;

/// A table, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) table: usize,
    /// First page.
    first: u64,
    /// Page after the last one; `None` for the last piece, because the table may have grown by the time of the snapshot.
    end: Option<u64>,
}

impl Piece {
    /// Size of the piece in bytes, as a part of its table.
    fn bytes(&self, table: &TableDef) -> u64 {
        let pages = self.end.unwrap_or(table.pages) - self.first;
        if table.pages == 0 { table.bytes } else { (table.bytes as f64 * pages as f64 / table.pages as f64) as u64 }
    }

    /// SQL condition that finds its rows.
    pub(crate) fn condition(&self) -> String {
        let from = format!("ctid >= '({},0)'", self.first);
        self.end.map_or_else(|| from.clone(), |end| format!("{from} AND ctid < '({end},0)'"))
    }
}

/// Rows of the source that a copy sees.
#[derive(Debug, Clone)]
pub(crate) enum View {
    /// Everything that a snapshot saw, by its name; another session holds the snapshot.
    Snapshot(String),
    /// Rows that a snapshot saw and that are unchanged since.
    Unchanged(SourceSnapshot),
}

/// Returns true if the number of a version shows that a snapshot saw it.
pub(crate) fn distinguishes_versions(snapshot: &SourceSnapshot) -> bool {
    snapshot.end < XID_MAX
}

/// Amount that is copied so far.
#[derive(Debug, Default)]
pub(crate) struct CopiedAmount {
    /// Bytes that were sent.
    pub(crate) bytes: AtomicU64,
    /// Bytes of whole pieces: as they were sent, and as they are stored in their tables.
    whole: Mutex<(u64, u64)>,
}

impl CopiedAmount {
    /// Size of the copied part of the tables, in bytes; for unfinished pieces it is estimated from the finished ones.
    pub(crate) async fn table_bytes(&self) -> u64 {
        let (sent, lay) = *self.whole.lock().await;
        let more = self.bytes.load(Ordering::Relaxed).saturating_sub(sent);
        lay + if sent == 0 { more } else { (more as f64 * lay as f64 / sent as f64) as u64 }
    }
}

/// Cuts tables into pieces: largest tables first, so that no large one is left for the end.
#[derive(Debug)]
pub(crate) struct Cutter {
    tables: Arc<[TableDef]>,
    /// Parts that are left: table, first page, and the page after the last if the part ends before the table.
    left: VecDeque<(usize, u64, Option<u64>)>,
}

impl Cutter {
    pub(crate) fn new(tables: &[TableDef]) -> Cutter {
        Cutter::without(tables, &CopiedPages::new())
    }

    /// The same without parts that are on the target.
    pub(crate) fn without(tables: &[TableDef], copied: &CopiedPages) -> Cutter {
        let mut order: Vec<usize> = (0..tables.len()).collect();
        order.sort_by_key(|table| std::cmp::Reverse(tables[*table].pages));
        let gaps_of = |table: usize| gaps(copied.get(&tables[table].oid).map_or(&[], Vec::as_slice));
        let left =
            order.into_iter().flat_map(|table| gaps_of(table).into_iter().map(move |(first, end)| (table, first, end)));
        Cutter { tables: tables.into(), left: left.collect() }
    }

    /// Returns the next piece, with at most `pages` pages.
    pub(crate) fn next(&mut self, pages: u64) -> Option<Piece> {
        let (table, first, last) = self.left.front_mut()?;
        let piece = Piece { table: *table, first: *first, end: Some(*first + pages) };
        if *first + pages < last.unwrap_or(self.tables[*table].pages) {
            *first += pages;
            return Some(piece);
        }
        let end = *last;
        self.left.pop_front();
        Some(Piece { end, ..piece })
    }
}

/// Copies the rows of tables from one server to another, with `jobs` connections at the same time, and without the parts that are `done`.
pub(crate) async fn copy(
    [source, target]: [&Server; 2],
    view: View,
    tables: &[TableDef],
    done: &CopiedPages,
    jobs: usize,
    copied: &Arc<CopiedAmount>,
    throttle: &Arc<Throttle>,
) -> Result<(), Error> {
    if tables.is_empty() {
        return Ok(());
    }
    let queue = Arc::new(Mutex::new(Cutter::without(tables, done)));
    let mut workers = JoinSet::new();
    for _ in 0..jobs {
        let (mut from, mut to) = connect(source, target, &view).await?;
        let (tables, queue, view) = (Arc::<[TableDef]>::from(tables), Arc::clone(&queue), view.clone());
        let (copied, throttle) = (Arc::clone(copied), Arc::clone(throttle));
        workers.spawn(async move {
            loop {
                let pages = (throttle.rate() / PIECES_PER_S / PAGE_BYTES).clamp(PIECE_PAGES_MIN, PIECE_PAGES_MAX);
                let Some(piece) = queue.lock().await.next(pages) else { return Ok(()) };
                copy_piece(&mut from, &mut to, &view, &tables[piece.table], &piece, &copied, &throttle).await?;
            }
        });
    }
    while let Some(ended) = workers.join_next().await {
        // The other workers end with the set.
        ended.unwrap_or_else(|panic| Err(Error::WrongPhase(format!("a copy task failed: {panic}"))))?;
    }
    Ok(())
}

async fn connect(source: &Server, target: &Server, view: &View) -> Result<(Link, Link), ServerError> {
    let mut from = Link::connect(source, Purpose::Statements, &[]).await?;
    if let View::Snapshot(snapshot) = view {
        from.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        from.query(&format!("SET TRANSACTION SNAPSHOT {}", literal(snapshot))).await?;
    }
    Ok((from, connect_for_copy(target).await?))
}

/// Opens a session that writes copied rows.
pub(crate) async fn connect_for_copy(target: &Server) -> Result<Link, ServerError> {
    Link::connect(target, Purpose::Statements, &[("synchronous_commit", "off")]).await
}

async fn copy_piece(
    from: &mut Link,
    to: &mut Link,
    view: &View,
    table: &TableDef,
    piece: &Piece,
    copied: &CopiedAmount,
    throttle: &Throttle,
) -> Result<(), Error> {
    let rows = match view {
        View::Snapshot(_) => piece.condition(),
        // Pages added later hold no row that the snapshot saw.
        View::Unchanged(snapshot) => {
            let end = piece.end.or(Some(table.pages));
            format!("{} AND {}", Piece { end, ..piece.clone() }.condition(), seen_by(snapshot))
        }
    };
    let (read, write) = copy_statements(table, &rows);
    from.begin_copy(&read).await?;
    to.query("BEGIN").await?;
    to.begin_copy(&write).await?;
    let (mut sent, mut due) = (0, 0);
    while let Some(data) = from.copied().await? {
        to.copy(&data).await?;
        let size = data.len() as u64;
        sent += size;
        copied.bytes.fetch_add(size, Ordering::Relaxed);
        match view {
            // A few pages may refer to many large values.
            View::Snapshot(_) => throttle.spend(size).await,
            View::Unchanged(_) => due += size,
        }
    }
    to.end_copy().await?;
    to.query(&format!("{}; COMMIT", record_piece_sql(table.oid, (piece.first, piece.end)))).await?;
    // Wait only now, when the piece's snapshot is released.
    throttle.spend(due).await;
    let mut whole = copied.whole.lock().await;
    *whole = (whole.0 + sent, whole.1 + piece.bytes(table));
    Ok(())
}

/// Removes rows that an extension made on the target in tables of its configuration, if they are of those that are copied.
pub(crate) async fn make_room(to: &mut Link, tables: &[TableDef]) -> Result<(), ServerError> {
    for table in tables.iter().filter(|table| table.own_rows.is_some()) {
        to.query(&format!("DELETE FROM ONLY {} WHERE {}", table.qualified(), table.moved_rows())).await?;
    }
    Ok(())
}

/// Statements that read rows of a table by a condition, and that write them.
fn copy_statements(table: &TableDef, rows: &str) -> (String, String) {
    let (name, columns) = (table.qualified(), table.column_list());
    let format = if table.binary() { "binary" } else { "text" };
    let list = if columns.is_empty() { String::new() } else { format!("({columns}) ") };
    let own = table.moved_rows();
    let read = format!("COPY (SELECT {columns} FROM ONLY {name} WHERE {own} AND {rows}) TO STDOUT (FORMAT {format})");
    (read, format!("COPY {name} {list}FROM STDIN (FORMAT {format})"))
}

/// Copies some rows of a table without large values, in the same way as a real copy. Returns true if there were any.
pub(crate) async fn sample(from: &mut Link, to: &mut Link, table: &TableDef) -> Result<bool, Error> {
    /// Size in bytes of a binary copy without rows: its header and its end.
    const OF_NO_ROWS: usize = 21;
    let size = |column: &ColumnDef| format!("coalesce(pg_column_size({}), 0)", identifier(&column.name));
    let sizes: Vec<String> = std::iter::once("0".to_owned()).chain(table.columns.iter().map(size)).collect();
    let rows = format!("{} <= {SAMPLE_BYTES} LIMIT {SAMPLE_ROWS}", sizes.join(" + "));
    let (read, write) = copy_statements(table, &rows);
    from.begin_copy(&read).await?;
    let mut copied = Vec::new();
    while let Some(data) = from.copied().await? {
        copied.push(data);
    }
    let bytes: usize = copied.iter().map(Bytes::len).sum();
    if bytes <= if table.binary() { OF_NO_ROWS } else { 0 } {
        return Ok(false);
    }
    to.begin_copy(&write).await?;
    for data in &copied {
        to.copy(data).await?;
    }
    to.end_copy().await?;
    Ok(true)
}

/// SQL condition for versions of rows that a slot's snapshot saw, for a source that has not yet assigned all transaction
/// numbers once. `age` counts from one moment of the statement after its snapshot, so every version that the statement sees is
/// at least as old.
fn seen_by(snapshot: &SourceSnapshot) -> String {
    let running: Vec<String> = snapshot.in_progress.iter().map(u64::to_string).collect();
    format!(
        "age(xmin) NOT BETWEEN 0 AND age('{}'::xid) AND xmin <> ALL ('{{{}}}'::xid[])",
        snapshot.end,
        running.join(",")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(pages: u64) -> TableDef {
        TableDef {
            oid: 1,
            schema: "public".into(),
            name: "t".into(),
            partitioned: false,
            pages,
            bytes: pages * 8192,
            columns: Vec::new(),
            key: None,
            identity: 'd',
            uniques: Vec::new(),
            own_rows: None,
            rules: false,
        }
    }

    fn pieces(tables: &[TableDef], pages: u64) -> Vec<Piece> {
        let mut cutter = Cutter::new(tables);
        std::iter::from_fn(|| cutter.next(pages)).collect()
    }

    #[test]
    fn pieces_cover_every_page_once_and_the_last_is_open() {
        for pages in [0, 1, PIECE_PAGES_MAX - 1, PIECE_PAGES_MAX, PIECE_PAGES_MAX + 1, 5 * PIECE_PAGES_MAX + 3] {
            let pieces = pieces(&[table(pages)], PIECE_PAGES_MAX);
            assert_eq!(pieces[0].first, 0);
            for pair in pieces.windows(2) {
                assert_eq!(pair[0].end, Some(pair[1].first));
            }
            assert_eq!(pieces.last().unwrap().end, None);
        }
    }

    #[test]
    fn pieces_are_all_of_their_table() {
        let mut table = table(2 * PIECE_PAGES_MAX + 1);
        table.bytes = 10 * table.pages;
        let pieces: Vec<u64> =
            pieces(&[table.clone()], PIECE_PAGES_MAX).iter().map(|piece| piece.bytes(&table)).collect();
        assert_eq!(pieces, [10 * PIECE_PAGES_MAX, 10 * PIECE_PAGES_MAX, 10]);
    }

    #[test]
    fn a_piece_is_as_long_as_it_may_be_when_it_is_cut() {
        let mut cutter = Cutter::new(&[table(10), table(3)]);
        let cut = [4, 2, 9, 2, 2, 2].map(|pages| cutter.next(pages).map(|piece| (piece.table, piece.first, piece.end)));
        let expected = [
            Some((0, 0, Some(4))),
            Some((0, 4, Some(6))),
            Some((0, 6, None)),
            Some((1, 0, Some(2))),
            Some((1, 2, None)),
            None,
        ];
        assert_eq!(cut, expected);
    }

    #[tokio::test]
    async fn what_is_under_way_counts_as_what_came_before() {
        let copied = CopiedAmount::default();
        copied.bytes.store(300, Ordering::Relaxed);
        assert_eq!(copied.table_bytes().await, 300, "nothing is known yet");
        *copied.whole.lock().await = (200, 800);
        assert_eq!(copied.table_bytes().await, 800 + 400);
    }

    #[test]
    fn large_tables_come_first() {
        let order: Vec<usize> =
            pieces(&[table(1), table(9), table(5)], PIECE_PAGES_MAX).iter().map(|piece| piece.table).collect();
        assert_eq!(order, [1, 2, 0]);
    }
}
