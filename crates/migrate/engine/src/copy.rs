//! Copying rows: several connections, large tables in pieces, no faster than clients can bear.

use crate::inventory::{Inventory, TableDef};
use crate::link::{Link, Purpose, literal};
use crate::throttle::Throttle;
use crate::{Error, Server};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

/// Pages of a piece: 64 MiB.
const PIECE_PAGES: u64 = 8192;

/// A table, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) table: usize,
    /// From this page on.
    first: u64,
    /// To before this page; the last piece is open, since the table may have grown by the time of the snapshot.
    end: Option<u64>,
}

impl Piece {
    /// How much it is of its table, in bytes.
    fn bytes(&self, table: &TableDef) -> u64 {
        let pages = self.end.unwrap_or(table.pages) - self.first;
        if table.pages == 0 { table.bytes } else { (table.bytes as f64 * pages as f64 / table.pages as f64) as u64 }
    }

    /// The condition that finds its rows.
    pub(crate) fn place(&self) -> String {
        let from = format!("ctid >= '({},0)'", self.first);
        self.end.map_or_else(|| from.clone(), |end| format!("{from} AND ctid < '({end},0)'"))
    }
}

/// What is copied so far.
#[derive(Debug, Default)]
pub(crate) struct Copied {
    /// As it was sent.
    pub(crate) bytes: AtomicU64,
    /// Of whole pieces: as they were sent, and as they lie in their tables.
    whole: Mutex<(u64, u64)>,
}

impl Copied {
    /// How much of the tables it is, in bytes; what is sent of pieces that are not whole yet by what others came to.
    pub(crate) async fn of_tables(&self) -> u64 {
        let (sent, lay) = *self.whole.lock().await;
        let more = self.bytes.load(Ordering::Relaxed).saturating_sub(sent);
        lay + if sent == 0 { more } else { (more as f64 * lay as f64 / sent as f64) as u64 }
    }
}

/// Largest tables first, so that no long one is left for the end.
pub(crate) fn pieces(tables: &[TableDef], pages: u64) -> VecDeque<Piece> {
    let mut order: Vec<usize> = (0..tables.len()).collect();
    order.sort_by_key(|table| std::cmp::Reverse(tables[*table].pages));
    let of_table = |table: usize| {
        let count = tables[table].pages.div_ceil(pages).max(1);
        (0..count).map(move |number| {
            let end = (number + 1 < count).then_some((number + 1) * pages);
            Piece { table, first: number * pages, end }
        })
    };
    order.into_iter().flat_map(of_table).collect()
}

/// Copies all tables of the inventory as the snapshot sees them.
pub(crate) async fn copy(
    source: &Server,
    target: &Server,
    snapshot: &str,
    inventory: &Inventory,
    jobs: usize,
    copied: &Arc<Copied>,
    throttle: &Arc<Throttle>,
) -> Result<(), Error> {
    let tables: Arc<[TableDef]> = inventory.tables.clone().into();
    let queue = Arc::new(Mutex::new(pieces(&tables, PIECE_PAGES)));
    let mut workers = JoinSet::new();
    for _ in 0..jobs {
        let (mut from, mut to) = connect(source, target, snapshot).await?;
        let (tables, queue) = (Arc::clone(&tables), Arc::clone(&queue));
        let (copied, throttle) = (Arc::clone(copied), Arc::clone(throttle));
        workers.spawn(async move {
            loop {
                let Some(piece) = queue.lock().await.pop_front() else { return Ok(()) };
                copy_piece(&mut from, &mut to, &tables[piece.table], &piece, &copied, &throttle).await?;
            }
        });
    }
    while let Some(ended) = workers.join_next().await {
        // The others end with the set.
        ended.unwrap_or_else(|panic| Err(Error::WrongPhase(format!("a copy ended: {panic}"))))?;
    }
    Ok(())
}

async fn connect(source: &Server, target: &Server, snapshot: &str) -> Result<(Link, Link), Error> {
    let mut from = Link::connect(source, Purpose::Statements, &[]).await?;
    from.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
    from.query(&format!("SET TRANSACTION SNAPSHOT {}", literal(snapshot))).await?;
    let settings = [("session_replication_role", "replica"), ("synchronous_commit", "off")];
    Ok((from, Link::connect(target, Purpose::Statements, &settings).await?))
}

async fn copy_piece(
    from: &mut Link,
    to: &mut Link,
    table: &TableDef,
    piece: &Piece,
    copied: &Copied,
    throttle: &Throttle,
) -> Result<(), Error> {
    let (name, columns) = (table.qualified(), table.column_list());
    let format = if table.binary() { "binary" } else { "text" };
    let place = piece.place();
    let list = if columns.is_empty() { String::new() } else { format!("({columns}) ") };
    from.begin_copy(&format!("COPY (SELECT {columns} FROM ONLY {name} WHERE {place}) TO STDOUT (FORMAT {format})"))
        .await?;
    to.begin_copy(&format!("COPY {name} {list}FROM STDIN (FORMAT {format})")).await?;
    let mut sent = 0;
    while let Some(data) = from.copied().await? {
        to.copy(&data).await?;
        sent += data.len() as u64;
        copied.bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
        throttle.spend(data.len() as u64).await;
    }
    to.end_copy().await?;
    let mut whole = copied.whole.lock().await;
    *whole = (whole.0 + sent, whole.1 + piece.bytes(table));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::ColumnDef;

    fn table(pages: u64) -> TableDef {
        TableDef {
            oid: 1,
            schema: "public".into(),
            name: "t".into(),
            partitioned: false,
            pages,
            bytes: pages * 8192,
            columns: vec![ColumnDef::of("a", true)],
            key: None,
            identity: 'd',
            uniques: Vec::new(),
        }
    }

    #[test]
    fn pieces_cover_every_page_once_and_the_last_is_open() {
        for pages in [0, 1, PIECE_PAGES - 1, PIECE_PAGES, PIECE_PAGES + 1, 5 * PIECE_PAGES + 3] {
            let pieces: Vec<Piece> = pieces(&[table(pages)], PIECE_PAGES).into();
            assert_eq!(pieces[0].first, 0);
            for pair in pieces.windows(2) {
                assert_eq!(pair[0].end, Some(pair[1].first));
            }
            assert_eq!(pieces.last().unwrap().end, None);
        }
    }

    #[test]
    fn pieces_are_all_of_their_table() {
        let mut table = table(2 * PIECE_PAGES + 1);
        table.bytes = 10 * table.pages;
        let pieces: Vec<u64> = pieces(&[table.clone()], PIECE_PAGES).iter().map(|piece| piece.bytes(&table)).collect();
        assert_eq!(pieces, [10 * PIECE_PAGES, 10 * PIECE_PAGES, 10]);
    }

    #[tokio::test]
    async fn what_is_under_way_counts_as_what_came_before() {
        let copied = Copied::default();
        copied.bytes.store(300, Ordering::Relaxed);
        assert_eq!(copied.of_tables().await, 300, "nothing is known yet");
        *copied.whole.lock().await = (200, 800);
        assert_eq!(copied.of_tables().await, 800 + 400);
    }

    #[test]
    fn large_tables_come_first() {
        let order: Vec<usize> =
            pieces(&[table(1), table(9), table(5)], PIECE_PAGES).iter().map(|piece| piece.table).collect();
        assert_eq!(order, [1, 2, 0]);
    }
}
