//! Tables whose rows are not, or were not always, what the stream has repeated: those that are copied while the others are
//! followed, because they are new or were defined again.
//!
//! All of it is recorded on the target, in the transactions that make it so.

use crate::Error;
use crate::intake::SourceSnapshot;
use crate::pgoutput::Lsn;
use std::collections::{HashMap, HashSet};
use stillpoint_migrate_postgres::link::{Link, literal, number, text};

/// The snapshot with which a table was copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopySnapshot {
    /// Snapshot of the source.
    pub snapshot: SourceSnapshot,
    /// Position in the log after every commit that it sees. Numbers of transactions come again; positions do not.
    pub until: Lsn,
}

impl CopySnapshot {
    /// Returns true if the copied rows contain the changes of a transaction with this number and position of its commit.
    pub(crate) fn contains(&self, xid: u32, commit: Lsn) -> bool {
        commit < self.until && self.snapshot.sees(xid)
    }
}

/// Records about such tables, by their numbers on the source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PartialTables {
    /// Tables that are to be copied: no change of theirs is repeated.
    pub copying: HashSet<u32>,
    /// Tables that are gone on the source, or that no longer belong to what is moved: earlier changes of theirs are not repeated.
    pub gone: HashSet<u32>,
    /// Tables that were copied: which changes their rows contain.
    pub copied: HashMap<u32, CopySnapshot>,
    /// Columns that were dropped; earlier changes still contain them.
    pub dropped: HashSet<(u32, String)>,
}

impl PartialTables {
    /// Statements that create their tables in our schema.
    pub(crate) const INSTALL: &'static str = "CREATE TABLE IF NOT EXISTS stillpoint.copying (relation oid PRIMARY KEY); \
         CREATE TABLE IF NOT EXISTS stillpoint.gone (relation oid PRIMARY KEY); \
         CREATE TABLE IF NOT EXISTS stillpoint.copied (relation oid PRIMARY KEY, snapshot text NOT NULL, until bigint NOT NULL); \
         CREATE TABLE IF NOT EXISTS stillpoint.dropped (relation oid, name text, PRIMARY KEY (relation, name)); \
         CREATE TABLE IF NOT EXISTS stillpoint.pieces (relation oid NOT NULL, first bigint NOT NULL, last bigint); \
         TRUNCATE stillpoint.copying, stillpoint.gone, stillpoint.copied, stillpoint.dropped, stillpoint.pieces; ";

    /// Reads them; there are none on a target that an earlier version made.
    ///
    /// # Errors
    ///
    /// An error if the server cannot be asked.
    pub async fn read(link: &mut Link) -> Result<PartialTables, Error> {
        if link.value("SELECT to_regclass('stillpoint.dropped')").await?.is_none() {
            return Ok(PartialTables::default());
        }
        let copying = link.query("SELECT relation FROM stillpoint.copying").await?;
        let gone = link.query("SELECT relation FROM stillpoint.gone").await?;
        let copied = link.query("SELECT relation, snapshot, until FROM stillpoint.copied").await?;
        let dropped = link.query("SELECT relation, name FROM stillpoint.dropped").await?;
        let snapshot = |row| {
            let snapshot = SourceSnapshot::parse(&text(row, 1))?;
            Ok((number(row, 0), CopySnapshot { snapshot, until: number(row, 2) }))
        };
        Ok(PartialTables {
            copying: copying.iter().map(|row| number(row, 0)).collect(),
            gone: gone.iter().map(|row| number(row, 0)).collect(),
            copied: copied.iter().map(snapshot).collect::<Result<_, Error>>()?,
            dropped: dropped.iter().map(|row| (number(row, 0), text(row, 1))).collect(),
        })
    }

    /// Returns true if a column was dropped.
    pub(crate) fn is_dropped(&self, table: u32, column: &str) -> bool {
        self.dropped.iter().any(|(of, name)| *of == table && name == column)
    }

    /// Statements that record tables that are to be copied.
    pub fn record_copying(tables: impl IntoIterator<Item = u32>) -> String {
        let record = |oid| format!("INSERT INTO stillpoint.copying VALUES ({oid}) ON CONFLICT DO NOTHING; ");
        tables.into_iter().map(record).collect()
    }

    /// Statements that record tables as gone.
    pub fn record_gone(tables: impl IntoIterator<Item = u32>) -> String {
        let record = |oid| format!("INSERT INTO stillpoint.gone VALUES ({oid}) ON CONFLICT DO NOTHING; ");
        tables.into_iter().map(record).collect()
    }

    /// Returns true if no change of a table is to be repeated.
    pub(crate) fn is_left_out(&self, table: u32) -> bool {
        self.copying.contains(&table) || self.gone.contains(&table)
    }

    /// Statements that record columns as dropped.
    pub fn record_dropped(columns: &[(u32, String)]) -> String {
        let record = |(table, name): &(u32, String)| {
            format!("INSERT INTO stillpoint.dropped VALUES ({table}, {}) ON CONFLICT DO NOTHING; ", literal(name))
        };
        columns.iter().map(record).collect()
    }

    /// Statements that record that these tables were copied with a snapshot, and no other is to be copied. A table that was gone
    /// may have come back.
    pub fn record_copied(tables: impl IntoIterator<Item = u32>, copied: &CopySnapshot) -> String {
        let CopySnapshot { snapshot, until } = copied;
        let snapshot = literal(&snapshot.to_string());
        let record = |oid| {
            format!(
                "INSERT INTO stillpoint.copied VALUES ({oid}, {snapshot}, {until}) ON CONFLICT (relation) DO UPDATE SET snapshot \
                 = EXCLUDED.snapshot, until = EXCLUDED.until; DELETE FROM stillpoint.gone WHERE relation = {oid}; "
            )
        };
        tables.into_iter().map(record).chain(["DELETE FROM stillpoint.copying; ".to_owned()]).collect()
    }
}
