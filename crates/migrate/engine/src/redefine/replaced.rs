//! Tables, types and the like of the target that no statement brings to what the source has: they are dropped at the beginning of
//! the next attempt of a round, made again, and copied.

use super::NOT_CASCADED;
use crate::archive::Entry;
use std::collections::{BTreeSet, HashSet};
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::{Link, identifier, literal, text};

/// Tables and types of the target that no statement brings to what the source has.
#[derive(Debug, Default)]
pub(super) struct Replaced {
    /// Names of tables, and statements that drop types and sequences, which come after the tables that use them.
    tables: BTreeSet<String>,
    drops: BTreeSet<String>,
    /// Those of earlier attempts, which are not dropped again.
    done: HashSet<String>,
}

impl Replaced {
    pub(super) fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.drops.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.tables.clear();
        self.drops.clear();
    }

    pub(super) fn add_table(&mut self, name: String) {
        if !self.done.contains(&name) {
            self.tables.insert(name);
        }
    }

    fn add_drop(&mut self, drop: String) {
        if !self.done.contains(&drop) {
            self.drops.insert(drop);
        }
    }

    /// Takes what is to be dropped now.
    pub(super) fn take(&mut self) -> (BTreeSet<String>, BTreeSet<String>) {
        let taken = (std::mem::take(&mut self.tables), std::mem::take(&mut self.drops));
        self.done.extend(taken.0.iter().chain(&taken.1).cloned());
        taken
    }

    /// Remembers that a table or type, which no statement brings to what the source has, is made again.
    pub(super) async fn add(&mut self, before: &Entry, target: &mut Link) -> Result<(), Error> {
        let name = format!("{}.{}", identifier(&before.schema), identifier(&before.tag));
        match before.kind.as_str() {
            "TABLE" => self.add_table(name),
            // Columns of these types are dropped with them, so their tables are made again too.
            "TYPE" | "DOMAIN" => {
                let users = format!(
                    "WITH RECURSIVE used (type) AS (SELECT to_regtype({0})::oid UNION SELECT t.oid FROM pg_type t, used u WHERE \
                     u.type IN (t.typelem, t.typbasetype) OR EXISTS (SELECT FROM pg_range r WHERE r.rngtypid = t.oid AND \
                     r.rngsubtype = u.type) OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = t.typrelid AND a.atttypid \
                     = u.type AND a.attnum > 0 AND NOT a.attisdropped)) SELECT DISTINCT format('%I.%I', n.nspname, c.relname) \
                     FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
                     WHERE c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid IN (SELECT type FROM \
                     used)",
                    literal(&name)
                );
                for row in target.query(&users).await? {
                    self.add_table(text(&row, 0));
                }
                self.add_drop(format!("DROP TYPE IF EXISTS {name} CASCADE"));
            }
            // One of a column is made with its table.
            "SEQUENCE" => {
                let owner = format!(
                    "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_depend d JOIN pg_class c ON c.oid = d.refobjid JOIN \
                     pg_namespace n ON n.oid = c.relnamespace WHERE d.classid = 'pg_class'::regclass AND d.refclassid = \
                     'pg_class'::regclass AND d.objid = to_regclass({}) AND d.deptype IN ('a', 'i') AND d.refobjsubid > 0",
                    literal(&name)
                );
                match target.value(&owner).await? {
                    Some(table) => self.add_table(table),
                    None => self.add_drop(format!("DROP SEQUENCE IF EXISTS {name} CASCADE")),
                }
            }
            kind if NOT_CASCADED.contains(&kind) => {}
            _ => {
                let drop = before.drop.trim_end().trim_end_matches(';');
                if drop.starts_with("DROP ") {
                    self.add_drop(format!("{} CASCADE", drop.replacen(" IF EXISTS", "", 1)));
                }
            }
        }
        Ok(())
    }
}
