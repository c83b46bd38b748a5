//! Tables that are copied in a round: which they are, how they are emptied, and their rows.

use super::table_shape::{self, TableShape};
use super::{IS_ABSENT, IS_UNSUPPORTED, Redefinition, SourceDefinitions};
use crate::copied_pages::CopiedPages;
use crate::copy::{CopiedAmount, View, copy};
use crate::options::Options;
use std::collections::BTreeSet;
use std::sync::Arc;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::inventory::TableDef;
use stillpoint_migrate_apply::partial_tables::{CopySnapshot, PartialTables};
use stillpoint_migrate_apply::throttle::Throttle;
use stillpoint_migrate_postgres::link::{ServerError, literal};

impl Redefinition<'_, '_> {
    /// Records which tables are not to be repeated until they are copied, and which columns are gone.
    pub(super) async fn record_partial(&mut self, now: &SourceDefinitions) -> Result<(), Error> {
        let mut there = table_shape::read(&mut self.target).await?;
        while self.drop_other_forms(now, &there).await? {
            there = table_shape::read(&mut self.target).await?;
        }
        // One that left the selection in an earlier attempt may be back.
        let left = PartialTables::read(&mut self.target).await?.gone;
        let mut copying = BTreeSet::new();
        let mut dropped = Vec::new();
        for shape in &now.shapes {
            let before = self.shape_before(shape);
            let target = there.iter().find(|target| target.has_name_of(shape));
            let is_whole = match (before, target) {
                (Some(before), Some(target)) => {
                    dropped.extend(shape.dropped_since(before).into_iter().map(|name| (shape.relation, name)));
                    !shape.needs_copy_since(before)
                        && !shape.lost_columns(before, target)
                        && !left.contains(&shape.relation)
                }
                _ => false,
            };
            if !is_whole && !shape.partitioned {
                copying.insert(shape.relation);
            }
        }
        let gone = self.shapes.iter().filter(|before| now.shapes.iter().all(|shape| shape.relation != before.relation));
        let gone = PartialTables::record_gone(gone.map(|before| before.relation));
        let sql = gone + &PartialTables::record_copying(copying) + &PartialTables::record_dropped(&dropped);
        if !sql.is_empty() {
            self.target.query(&format!("BEGIN; {sql} COMMIT")).await?;
        }
        // A table that is copied is emptied at once: what follows is quick then, and no rule for rows can fail.
        let partial = PartialTables::read(&mut self.target).await?;
        for shape in now.shapes.iter().filter(|shape| partial.copying.contains(&shape.relation)) {
            if there.iter().any(|target| target.has_name_of(shape)) {
                self.empty(&shape.qualified()).await?;
            }
        }
        Ok(())
    }

    fn shape_before(&self, shape: &TableShape) -> Option<&TableShape> {
        self.shapes.iter().find(|before| before.relation == shape.relation)
    }

    /// Drops what is to be made again, and tables of the target whose columns cannot be brought into the source's order: they are
    /// created again, and copied. Returns true if there were any; others may have gone with them.
    async fn drop_other_forms(&mut self, now: &SourceDefinitions, there: &[TableShape]) -> Result<bool, Error> {
        let mut is_any = false;
        let (tables, drops) = self.replaced.take();
        for table in tables {
            self.target.query(&format!("DROP TABLE IF EXISTS {table} CASCADE")).await?;
            is_any = true;
        }
        for drop in drops {
            // Another one may have taken it along.
            match self.target.query(&drop).await {
                Err(ServerError::Sql { code, .. }) if IS_ABSENT.contains(&code.as_str()) => {}
                dropped => dropped.map(|_| ())?,
            }
        }
        if is_any {
            return Ok(true);
        }
        for shape in &now.shapes {
            let Some(target) = there.iter().find(|target| target.has_name_of(shape)) else { continue };
            if shape.can_be_made_of(self.shape_before(shape), target) {
                continue;
            }
            let table = shape.qualified();
            // They would lose a column with the type.
            let users = format!(
                "SELECT count(*) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_type t ON t.oid = a.atttypid \
                 WHERE c.relkind IN ('r', 'p') AND NOT a.attisdropped AND {}::regclass IN (t.typrelid, (SELECT e.typrelid FROM \
                 pg_type e WHERE e.oid = t.typelem))",
                literal(&table)
            );
            if self.target.text(&users).await? != "0" {
                let why =
                    format!("table {}.{}, whose type other tables use, has other columns", shape.schema, shape.name);
                return Err(Error::SchemaChanged(why));
            }
            self.target.query(&format!("DROP TABLE {table} CASCADE")).await?;
            is_any = true;
        }
        Ok(is_any)
    }

    /// Removes all rows of a table on the target.
    async fn empty(&mut self, table: &str) -> Result<(), Error> {
        match self.target.query(&format!("TRUNCATE ONLY {table}")).await {
            // Other tables refer to it.
            Err(ServerError::Sql { code, .. }) if code == IS_UNSUPPORTED => {
                self.target.query(&format!("DELETE FROM ONLY {table}")).await.map(drop)?;
                Ok(())
            }
            emptied => Ok(emptied.map(drop)?),
        }
    }

    /// Copies the tables that are not repeated yet, as the snapshot sees them. Returns false if it does not see all of their rows:
    /// an earlier snapshot finds nothing in a table that TRUNCATE or ALTER TABLE gives a new file.
    pub(super) async fn copy_tables(
        &mut self,
        now: &SourceDefinitions,
        (name, snapshot): &(String, CopySnapshot),
    ) -> Result<bool, Error> {
        let partial = PartialTables::read(&mut self.target).await?;
        let tables: Vec<TableDef> =
            now.inventory.tables.iter().filter(|table| partial.copying.contains(&table.oid)).cloned().collect();
        for table in &tables {
            self.empty(&table.qualified()).await?;
        }
        if !tables.is_empty() {
            let (copied, throttle) = (Arc::new(CopiedAmount::default()), Arc::new(Throttle::unlimited()));
            let Options { source, target, copy_jobs, .. } = &self.options;
            copy(
                [source, target],
                View::Snapshot(name.clone()),
                &tables,
                &CopiedPages::new(),
                *copy_jobs,
                &copied,
                &throttle,
            )
            .await?;
            let numbers: Vec<String> = tables.iter().map(|table| table.oid.to_string()).collect();
            let files =
                format!("SELECT oid, relfilenode FROM pg_class WHERE oid IN ({}) ORDER BY 1", numbers.join(", "));
            if self.source.query(&files).await? != self.asking.query(&files).await? {
                return Ok(false);
            }
        }
        // Those that came and went between two attempts may be in the log.
        let gone = partial.copying.iter().copied().filter(|oid| tables.iter().all(|table| table.oid != *oid));
        let sql = PartialTables::record_gone(gone)
            + &PartialTables::record_copied(tables.iter().map(|table| table.oid), snapshot);
        self.target.query(&format!("BEGIN; {sql} COMMIT")).await?;
        self.copied = tables.iter().map(|table| table.oid).collect();
        let copied: Vec<String> = tables.iter().map(TableDef::qualified).collect();
        if !copied.is_empty() {
            self.target.query(&format!("ANALYZE {}", copied.join(", "))).await?;
        }
        Ok(true)
    }
}
