//! Comparing both sides: a sum over each table that does not depend on the order of rows.

use crate::Error;
use crate::inventory::{Inventory, number, text};
use crate::link::Link;

/// What was compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compared {
    /// Tables.
    pub tables: usize,
    /// Rows of the source.
    pub rows: u64,
}

/// Compares all tables of the inventory in the transactions that are open on both connections.
pub(crate) async fn compare(source: &mut Link, target: &mut Link, inventory: &Inventory) -> Result<Compared, Error> {
    let mut differing = Vec::new();
    let mut rows = 0;
    for table in &inventory.tables {
        // The hash of the text: equal values have equal text when both sides print alike, which our connections see to.
        let sql = format!(
            "SELECT count(*), coalesce(sum(hashtextextended(_stillpoint_row::text, 0)), 0) FROM ONLY {} _stillpoint_row",
            table.qualified()
        );
        let (here, there) = tokio::try_join!(source.query(&sql), target.query(&sql))?;
        if here != there {
            let count = |rows: &[crate::link::Row]| rows.first().map_or_else(String::new, |row| text(row, 0));
            differing.push(format!("{} ({} and {} rows)", table.display(), count(&here), count(&there)));
        }
        rows += here.first().map_or(0, |row| number::<u64>(row, 0));
    }
    if differing.is_empty() {
        Ok(Compared { tables: inventory.tables.len(), rows })
    } else {
        Err(Error::Differs(differing))
    }
}
