//! Columns and settings of tables on both sides, and the statements that give a table of the target those of the source.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::inventory::{NOT_OF_EXTENSION, USER_SCHEMA};
use stillpoint_migrate_postgres::link::{Link, identifier, literal, text};

/// A column.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ColumnShape {
    /// Its number in its table.
    number: i32,
    name: String,
    /// Its type with modifiers, as the server prints it without a search path.
    of: String,
    /// Collation that is not the type's own.
    collation: Option<String>,
    not_null: bool,
    /// Expression of its default.
    default: Option<String>,
    /// Expression of a generated column.
    generated: Option<String>,
    /// Empty for a partition: since version 17 it has the identity of its partitioned table, which older ones do not pass on.
    identity: String,
    storage: String,
    statistics: i32,
    compression: String,
    options: String,
    /// Transaction that wrote the column's definition last.
    #[serde(default)]
    written: String,
}

/// A table, or a partitioned table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TableShape {
    /// Its number on the server that was asked.
    pub(crate) relation: u32,
    pub(crate) schema: String,
    pub(crate) name: String,
    pub(crate) partitioned: bool,
    /// Number of its file, which a rewriting changes; 0 for a partitioned table.
    file: u64,
    /// Numbers of the primary key's columns.
    key: Vec<i32>,
    columns: Vec<ColumnShape>,
    /// Check constraints of its own by name.
    checks: BTreeMap<String, String>,
    /// Storage parameters.
    options: String,
    /// True if row security holds for the owner too.
    forced: bool,
    /// Its replica identity as ALTER TABLE names it.
    identity: String,
}

/// Reads the shape of each table whose rows are moved, those of partitioned tables before their partitions.
pub(crate) async fn read(link: &mut Link) -> Result<Vec<TableShape>, Error> {
    let rows = link
        .query(&format!(
            "SELECT jsonb_build_object('relation', c.oid::bigint, 'schema', n.nspname, 'name', c.relname, \
             'partitioned', c.relkind = 'p', 'file', coalesce(pg_relation_filenode(c.oid), 0)::bigint, \
             'key', coalesce((SELECT to_jsonb(i.indkey::int2[]) FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary), '[]'), \
             'columns', coalesce((SELECT jsonb_agg(jsonb_build_object('number', a.attnum, 'name', a.attname, \
             'of', format_type(a.atttypid, a.atttypmod), 'collation', CASE WHEN a.attcollation <> t.typcollation THEN \
             (SELECT format('%I.%I', x.nspname, l.collname) FROM pg_collation l JOIN pg_namespace x ON x.oid = l.collnamespace \
             WHERE l.oid = a.attcollation) END, 'not_null', a.attnotnull, \
             'default', CASE a.attgenerated WHEN '' THEN pg_get_expr(d.adbin, d.adrelid) END, \
             'generated', CASE a.attgenerated WHEN '' THEN NULL ELSE pg_get_expr(d.adbin, d.adrelid) END, \
             'identity', CASE WHEN c.relispartition THEN '' ELSE a.attidentity::text END, 'storage', a.attstorage::text, \
             'statistics', coalesce(a.attstattarget, -1), \
             'compression', a.attcompression::text, 'written', a.xmin::text, 'options', \
             array_to_string(ARRAY(SELECT o FROM unnest(a.attoptions) o WHERE o !~ '^pg_'), ', ')) ORDER BY a.attnum) \
             FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND \
             d.adnum = a.attnum WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped), '[]'), \
             'checks', coalesce((SELECT jsonb_object_agg(k.conname, pg_get_constraintdef(k.oid)) FROM pg_constraint k \
             WHERE k.conrelid = c.oid AND k.contype = 'c' AND k.conislocal AND k.convalidated), '{{}}'), \
             'options', coalesce(array_to_string(c.reloptions, ', '), ''), 'forced', c.relforcerowsecurity, \
             'identity', CASE c.relreplident WHEN 'f' THEN 'FULL' WHEN 'n' THEN 'NOTHING' WHEN 'i' THEN coalesce((SELECT \
             format('USING INDEX %I', x.relname) FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid WHERE \
             i.indrelid = c.oid AND i.indisreplident), 'NOTHING') ELSE 'DEFAULT' END) \
             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p') AND \
             c.relpersistence = 'p' AND {USER_SCHEMA} AND {NOT_OF_EXTENSION} \
             ORDER BY (SELECT count(*) FROM pg_partition_ancestors(c.oid)), c.relispartition, c.oid"
        ))
        .await?;
    let shape = |row| {
        serde_json::from_str(&text(row, 0)).map_err(|error| Error::Pgoutput(format!("a table's columns: {error}")))
    };
    rows.iter().map(shape).collect()
}

impl TableShape {
    /// `"schema"."table"`.
    pub(crate) fn qualified(&self) -> String {
        format!("{}.{}", identifier(&self.schema), identifier(&self.name))
    }

    pub(crate) fn has_name_of(&self, other: &TableShape) -> bool {
        (&self.schema, &self.name) == (&other.schema, &other.name)
    }

    fn column(&self, name: &str) -> Option<&ColumnShape> {
        self.columns.iter().find(|column| column.name == name)
    }

    /// Names of columns that a table had before and has no more.
    pub(crate) fn dropped_since(&self, before: &TableShape) -> Vec<String> {
        let gone = before.columns.iter().filter(|column| self.column(&column.name).is_none());
        gone.map(|column| column.name.clone()).collect()
    }

    /// Returns true if the rows must be copied again, because the log does not show how they became what they are.
    pub(crate) fn needs_copy_since(&self, before: &TableShape) -> bool {
        let structure = |of: &TableShape| -> Vec<_> {
            let columns = of.columns.iter();
            columns
                .map(|column| (column.number, column.of.clone(), column.generated.clone(), column.collation.clone()))
                .collect()
        };
        let is_other = |column: &ColumnShape| {
            let other_name = before.columns.iter().any(|old| old.number == column.number && old.name != column.name);
            other_name || before.column(&column.name).is_some_and(|old| old.number != column.number)
        };
        // TRUNCATE, VACUUM and the like make new files too, and write no columns.
        let written = |of: &TableShape| of.columns.iter().map(|column| column.written.clone()).collect::<Vec<_>>();
        let is_altered = structure(self) != structure(before) || written(self) != written(before);
        let rewritten = self.file != before.file && is_altered;
        !self.has_name_of(before)
            || self.partitioned != before.partitioned
            || self.key != before.key
            || rewritten
            || self.columns.iter().any(is_other)
    }

    /// Columns of the target that have another name on the source now: old and new name.
    fn renamed(&self, before: Option<&TableShape>, target: &TableShape) -> Vec<(String, String)> {
        let old_name = |column: &ColumnShape| {
            let old = before?.columns.iter().find(|old| old.number == column.number)?;
            let is_renamed = target.column(&old.name).is_some() && target.column(&column.name).is_none();
            is_renamed.then(|| (old.name.clone(), column.name.clone()))
        };
        self.columns.iter().filter_map(old_name).collect()
    }

    /// Returns true if statements about columns give the target's table the same columns in the same order.
    pub(crate) fn can_be_made_of(&self, before: Option<&TableShape>, target: &TableShape) -> bool {
        let renamed = self.renamed(before, target);
        let name = |column: &ColumnShape| {
            let new = renamed.iter().find(|(old, _)| *old == column.name).map(|(_, new)| new.clone());
            new.unwrap_or_else(|| column.name.clone())
        };
        let kept: Vec<String> = target.columns.iter().map(name).filter(|name| self.column(name).is_some()).collect();
        let added = self.columns.iter().map(|column| &column.name).filter(|name| !kept.contains(name));
        self.partitioned == target.partitioned
            && kept.iter().chain(added).eq(self.columns.iter().map(|column| &column.name))
    }

    /// Columns that the target lacks.
    fn added<'s>(&'s self, target: &'s TableShape) -> impl Iterator<Item = &'s ColumnShape> {
        self.columns.iter().filter(|column| target.column(&column.name).is_none())
    }

    /// Returns true if the target lacks a column that is not new on the source.
    pub(crate) fn lost_columns(&self, before: &TableShape, target: &TableShape) -> bool {
        self.added(target).any(|column| before.column(&column.name).is_some())
    }

    /// Statements that give a table of the target, as it is now, these columns; what must hold for all rows is left out unless
    /// `whole`.
    pub(crate) async fn statements(
        &self,
        before: Option<&TableShape>,
        target: &TableShape,
        source: &mut Link,
        whole: bool,
    ) -> Result<Vec<String>, Error> {
        let table = self.qualified();
        let renamed = self.renamed(before, target);
        if !renamed.is_empty() {
            // The rest follows when they have their names.
            let rename = |(old, new): &(String, String)| {
                format!("ALTER TABLE {table} RENAME COLUMN {} TO {}", identifier(old), identifier(new))
            };
            return Ok(renamed.iter().map(rename).collect());
        }
        let mut statements = Vec::new();
        for gone in target.columns.iter().filter(|column| self.column(&column.name).is_none()) {
            statements.push(format!("ALTER TABLE {table} DROP COLUMN IF EXISTS {} CASCADE", identifier(&gone.name)));
        }
        for name in target.checks.keys().filter(|name| target.checks.get(*name) != self.checks.get(*name)) {
            statements.push(format!("ALTER TABLE {table} DROP CONSTRAINT IF EXISTS {}", identifier(name)));
        }
        for column in self.added(target) {
            let name = identifier(&column.name);
            let collation = column.collation.as_ref().map(|name| format!(" COLLATE {name}")).unwrap_or_default();
            let value = match &column.generated {
                Some(expression) => format!(" GENERATED ALWAYS AS ({expression}) STORED"),
                None => {
                    let value = self.value_of_earlier_rows(column, source).await?;
                    value.map(|value| format!(" DEFAULT {}", literal(&value))).unwrap_or_default()
                }
            };
            statements
                .push(format!("ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {name} {}{collation}{value}", column.of));
        }
        let new = ColumnShape::default();
        for column in &self.columns {
            let there = target.column(&column.name).unwrap_or(&new);
            let alter = format!("ALTER TABLE {table} ALTER COLUMN {} ", identifier(&column.name));
            let is_new = target.column(&column.name).is_none();
            let has_other_type = !is_new && (&column.of, &column.collation) != (&there.of, &there.collation);
            if has_other_type {
                if there.default.is_some() {
                    statements.push(format!("{alter}DROP DEFAULT"));
                }
                let collation = column.collation.as_ref().map(|name| format!(" COLLATE {name}")).unwrap_or_default();
                let name = identifier(&column.name);
                statements.push(format!("{alter}TYPE {0}{collation} USING {name}::{0}", column.of));
            }
            if !column.not_null && there.not_null {
                statements.push(format!("{alter}DROP NOT NULL"));
            }
            if !there.identity.is_empty() && column.identity != there.identity {
                statements.push(match column.identity.as_str() {
                    "a" => format!("{alter}SET GENERATED ALWAYS"),
                    "d" => format!("{alter}SET GENERATED BY DEFAULT"),
                    _ => format!("{alter}DROP IDENTITY IF EXISTS"),
                });
            }
            if column.generated.is_none() && (is_new || has_other_type || column.default != there.default) {
                match &column.default {
                    Some(default) => statements.push(format!("{alter}SET DEFAULT {default}")),
                    None => statements.push(format!("{alter}DROP DEFAULT")),
                }
            }
            if column.not_null && !there.not_null && whole {
                statements.push(format!("{alter}SET NOT NULL"));
            }
            if column.storage != there.storage && !is_new || is_new && whole {
                statements.extend(column.storage_word().map(|word| format!("{alter}SET STORAGE {word}")));
            }
            if column.statistics != there.statistics {
                statements.push(format!("{alter}SET STATISTICS {}", column.statistics));
            }
            if column.compression != there.compression {
                let method = match column.compression.as_str() {
                    "p" => "pglz",
                    "l" => "lz4",
                    _ => "default",
                };
                statements.push(format!("{alter}SET COMPRESSION {method}"));
            }
            if column.options != there.options {
                statements.extend(parameters(&alter, &there.options, &column.options));
            }
        }
        if self.options != target.options {
            statements.extend(parameters(&format!("ALTER TABLE {table} "), &target.options, &self.options));
        }
        if self.forced != target.forced {
            let word = if self.forced { "FORCE" } else { "NO FORCE" };
            statements.push(format!("ALTER TABLE {table} {word} ROW LEVEL SECURITY"));
        }
        // Where the source's is the same as before, the target's may be another one for the time of the migration.
        if whole && before.is_some_and(|before| before.identity != self.identity) && self.identity != target.identity {
            statements.push(format!("ALTER TABLE {table} REPLICA IDENTITY {}", self.identity));
        }
        for (name, check) in self.checks.iter().filter(|(name, check)| whole && target.checks.get(*name) != Some(check))
        {
            statements.push(format!("ALTER TABLE {table} ADD CONSTRAINT {} {check}", identifier(name)));
        }
        Ok(statements)
    }

    /// Value of a column in rows that are older than it (`attmissingval`); of the partitions if the table is partitioned, which
    /// must agree.
    async fn value_of_earlier_rows(&self, column: &ColumnShape, source: &mut Link) -> Result<Option<String>, Error> {
        // A cast to the type of the column could run a check of its owner with our rights.
        let values = source
            .query(&format!(
                "SELECT DISTINCT a.attmissingval::text FROM pg_attribute a WHERE a.attname = {1} AND a.atthasmissing AND \
                 a.attrelid IN (SELECT {0}::oid UNION ALL SELECT relid FROM pg_partition_tree({0}))",
                self.relation,
                literal(&column.name)
            ))
            .await?;
        match values.as_slice() {
            [] => Ok(None),
            [one] => {
                let array = text(one, 0);
                let unknown = || Error::Pgoutput(format!("`{array}` is not an array of one value"));
                only_element(&array).map(Some).ok_or_else(unknown)
            }
            _ => Err(Error::SchemaChanged(format!(
                "column {} of {}.{} got different values in its partitions",
                column.name, self.schema, self.name
            ))),
        }
    }
}

impl Default for ColumnShape {
    fn default() -> ColumnShape {
        let nothing = String::new;
        ColumnShape {
            number: 0,
            name: nothing(),
            of: nothing(),
            collation: None,
            not_null: false,
            default: None,
            generated: None,
            identity: nothing(),
            storage: nothing(),
            statistics: -1,
            compression: nothing(),
            options: nothing(),
            written: nothing(),
        }
    }
}

impl ColumnShape {
    fn storage_word(&self) -> Option<&'static str> {
        match self.storage.as_str() {
            "p" => Some("PLAIN"),
            "e" => Some("EXTERNAL"),
            "x" => Some("EXTENDED"),
            "m" => Some("MAIN"),
            _ => None,
        }
    }
}

/// Text of the value in an array of one value that is not NULL, as a server prints it.
fn only_element(array: &str) -> Option<String> {
    let element = array.strip_prefix('{')?.strip_suffix('}')?;
    let Some(quoted) = element.strip_prefix('"') else { return Some(element.to_owned()) };
    let mut characters = quoted.strip_suffix('"')?.chars();
    let mut value = String::new();
    while let Some(character) = characters.next() {
        value.push(if character == '\\' { characters.next()? } else { character });
    }
    Some(value)
}

/// Statements that replace parameters, which are separated as `name=value, name=value`.
fn parameters(alter: &str, before: &str, now: &str) -> Vec<String> {
    let names: Vec<&str> = before.split(", ").filter_map(|one| one.split_once('=')).map(|(name, _)| name).collect();
    let reset = (!names.is_empty()).then(|| format!("{alter}RESET ({})", names.join(", ")));
    let pairs = now.split(", ").filter_map(|one| one.split_once('='));
    let pairs: Vec<String> = pairs.map(|(name, value)| format!("{name} = {}", literal(value))).collect();
    let set = (!pairs.is_empty()).then(|| format!("{alter}SET ({})", pairs.join(", ")));
    reset.into_iter().chain(set).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_in_an_array_is_found() {
        for (array, value) in [
            ("{7}", "7"),
            (r#"{"a \\ \"b\" {c}"}"#, r#"a \ "b" {c}"#),
            (r#"{""}"#, ""),
            (r#"{"{1,2}"}"#, "{1,2}"),
            ("{2026-01-01}", "2026-01-01"),
        ] {
            assert_eq!(only_element(array).as_deref(), Some(value), "{array}");
        }
        for wrong in ["", "7", "{7", r#"{"a}"#, r#"{"a\"}"#] {
            assert_eq!(only_element(wrong), None, "{wrong}");
        }
    }
}
