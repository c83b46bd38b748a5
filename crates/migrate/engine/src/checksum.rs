//! Comparing both sides: a sum over each table that does not depend on the order of rows.

use crate::Error;
use crate::copy::Cutter;
use crate::inventory::{Inventory, TableDef, number};
use crate::link::{Link, Row};
use crate::throttle::Throttle;

/// What was compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compared {
    /// Tables.
    pub tables: usize,
    /// Rows of the source.
    pub rows: u64,
}

/// Pages that one statement reads, some milliseconds' work: little enough for clients to come in between.
const PIECE_PAGES: u64 = 128;
const PAGE: u64 = 8192;

/// Compares all tables of the inventory in the transactions that are open on both connections; `in_turn` has one of them work
/// at a time.
pub(crate) async fn compare(
    source: &mut Link,
    target: &mut Link,
    inventory: &Inventory,
    reading: &Throttle,
    in_turn: bool,
) -> Result<Compared, Error> {
    let mut sums = vec![[Sum::default(); 2]; inventory.tables.len()];
    let mut cutter = Cutter::new(&inventory.tables);
    while let Some(piece) = cutter.next(PIECE_PAGES) {
        // The hash of the text: equal values have equal text when both sides print alike, which our connections see to.
        let sql = format!(
            "SELECT count(*), coalesce(sum(hashtextextended(_stillpoint_row::text, 0)), 0) FROM ONLY {} _stillpoint_row \
             WHERE {}",
            inventory.tables[piece.table].qualified(),
            piece.place()
        );
        // The same rows lie in other pieces on the other side: only whole tables compare.
        let (here, there) = if in_turn {
            (source.query(&sql).await?, target.query(&sql).await?)
        } else {
            tokio::try_join!(source.query(&sql), target.query(&sql))?
        };
        let [ours, theirs] = &mut sums[piece.table];
        ours.add(&here);
        theirs.add(&there);
        reading.spend(PIECE_PAGES.min(inventory.tables[piece.table].pages) * PAGE).await;
    }
    let differing = |(table, [here, there]): (&TableDef, &[Sum; 2])| {
        (here != there).then(|| format!("{} ({} and {} rows)", table.display(), here.rows, there.rows))
    };
    let differing: Vec<String> = inventory.tables.iter().zip(&sums).filter_map(differing).collect();
    let rows = sums.iter().map(|[here, _]| here.rows).sum();
    if differing.is_empty() {
        Ok(Compared { tables: inventory.tables.len(), rows })
    } else {
        Err(Error::Differs(differing))
    }
}

/// Of rows, in whatever order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sum {
    rows: u64,
    hashes: i128,
}

impl Sum {
    fn add(&mut self, piece: &[Row]) {
        for row in piece {
            self.rows += number::<u64>(row, 0);
            self.hashes = self.hashes.wrapping_add(number(row, 1));
        }
    }
}
