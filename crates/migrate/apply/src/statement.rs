//! The statement that repeats a change, with its parameters; data only.
//!
//! A repeated change is blind: it reads only the key of the row that it changes.

use super::transaction::{Described, Table, Write};
use crate::pgoutput::{Tuple, Value};
use bytes::BytesMut;
use postgres_protocol::IsNull;
use postgres_protocol::message::frontend;
use std::io;
use std::sync::Arc;
use stillpoint_migrate_postgres::Frame;
use stillpoint_migrate_postgres::link::identifier;

/// Key of the statement for a change: changes with the same shape share one statement.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Shape {
    Insert(Described),
    /// True for each column that is set.
    Update(Described, Vec<bool>),
    /// True for each column that was sent.
    Replace(Described, Vec<bool>),
    Upsert(Described),
    Delete(Described),
}

impl Write {
    /// Returns the shape of its statement; `None` if preparing it is not worthwhile.
    pub(crate) fn shape(&self) -> Option<Shape> {
        match self {
            Write::Insert { table, .. } => Some(Shape::Insert(table.described())),
            Write::Update { table, old, new } if replaces(table, old.as_ref(), new) => {
                Some(Shape::Replace(table.described(), sent(new)))
            }
            Write::Update { table, new, .. } => Some(Shape::Update(table.described(), settable(table, new))),
            Write::Upsert { table, .. } => Some(Shape::Upsert(table.described())),
            Write::Delete { table, .. } => Some(Shape::Delete(table.described())),
            Write::Truncate { .. } => None,
        }
    }

    /// Text of the statement.
    pub(crate) fn sql(&self) -> String {
        match self {
            Write::Insert { table, .. } => {
                if table.def.columns.is_empty() {
                    return format!("INSERT INTO {} DEFAULT VALUES", table.def.qualified());
                }
                insert(table)
            }
            Write::Upsert { table, new } => {
                let name = |column: &usize| identifier(&table.def.columns[*column].name);
                let key: Vec<String> = table.key.iter().flatten().map(name).collect();
                let set =
                    settable(table, new).into_iter().enumerate().filter(|(_, set)| *set).map(|(column, _)| column);
                let sets: Vec<String> = set.map(|column| format!("{0} = EXCLUDED.{0}", name(&column))).collect();
                format!("{} ON CONFLICT ({}) DO UPDATE SET {}", insert(table), key.join(", "), sets.join(", "))
            }
            Write::Update { table, old, new } if replaces(table, old.as_ref(), new) => replace(table, new),
            Write::Update { table, new, .. } => {
                let mut number = 0;
                let mut sets = Vec::new();
                for (column, set) in table.def.columns.iter().zip(settable(table, new)) {
                    if set {
                        number += 1;
                        sets.push(format!("{} = ${number}", identifier(&column.name)));
                    }
                }
                format!("UPDATE {} SET {} WHERE {}", table.def.alone(), sets.join(", "), place(table, number + 1))
            }
            Write::Delete { table, .. } => {
                format!("DELETE FROM {} WHERE {}", table.def.alone(), place(table, 1))
            }
            Write::Truncate { tables, restart_identity } => {
                let names: Vec<String> = tables.iter().map(|table| table.def.qualified()).collect();
                let restart = if *restart_identity { " RESTART IDENTITY" } else { "" };
                // CASCADE: tables that refer to these were truncated with them, or hold no row that refers to them.
                format!("TRUNCATE ONLY {}{restart} CASCADE", names.join(", "))
            }
        }
    }

    /// Parameters of the statement, in order.
    pub(crate) fn parameters(&self) -> Vec<&Value> {
        match self {
            Write::Insert { new, .. } | Write::Upsert { new, .. } => new.iter().collect(),
            Write::Update { table, old, new } => {
                let set = if replaces(table, old.as_ref(), new) { sent(new) } else { settable(table, new) };
                let set = new.iter().zip(set).filter(|(_, set)| *set).map(|(value, _)| value);
                let old = old.as_ref().unwrap_or(new);
                set.chain(key_values(table, old)).collect()
            }
            Write::Delete { table, old } => key_values(table, old).collect(),
            Write::Truncate { .. } => Vec::new(),
        }
    }

    /// Returns equivalent writes for the case that the row may be missing, if the table allows that ([`TableDef::upserts`]). If
    /// a value of the row was not sent, the row is present, because the value is stored in it.
    ///
    /// [`TableDef::upserts`]: crate::inventory::TableDef::upserts
    pub(super) fn found_or_not(self) -> impl Iterator<Item = Write> {
        let (table, old, new) = match self {
            Write::Update { table, old, new } if table.can_upsert() && !new.contains(&Value::Unchanged) => {
                (table, old, new)
            }
            other => return [Some(other), None].into_iter().flatten(),
        };
        let values = |row: &Tuple| key_values(&table, row).cloned().collect::<Vec<_>>();
        let moves = old.as_ref().is_some_and(|old| values(old) != values(&new));
        let as_new_row = moves || replaces(&table, old.as_ref(), &new) || !settable(&table, &new).contains(&true);
        let writes = if as_new_row {
            let old = old.unwrap_or_else(|| new.clone());
            [Some(Write::Delete { table: Arc::clone(&table), old }), Some(Write::Insert { table, new })]
        } else {
            [Some(Write::Upsert { table, new }), None]
        };
        writes.into_iter().flatten()
    }

    /// Returns true if it changes anything: a row whose columns are all unchanged or not settable needs no statement.
    pub(crate) fn has_effect(&self) -> bool {
        match self {
            Write::Update { table, old, new } => {
                settable(table, new).contains(&true) || replaces(table, old.as_ref(), new)
            }
            _ => true,
        }
    }
}

/// Buffers the execution of a prepared statement.
pub(crate) fn execute(statement: &str, parameters: &[&Value], buffer: &mut BytesMut) -> io::Result<()> {
    let serialise = |value: &&Value, buffer: &mut BytesMut| match value {
        Value::Text(text) => {
            buffer.extend_from_slice(text);
            Ok(IsNull::No)
        }
        Value::Null | Value::Unchanged => Ok(IsNull::Yes),
    };
    frontend::bind("", statement, [], parameters, serialise, [], buffer).map_err(|error| match error {
        frontend::BindError::Conversion(error) => io::Error::other(error),
        frontend::BindError::Serialization(error) => error,
    })?;
    frontend::execute("", 0, buffer)
}

/// Number of rows in the server's report that a statement is complete.
pub(crate) fn rows_written(complete: &Frame) -> Option<u64> {
    let tag = String::from_utf8_lossy(&complete.body);
    tag.trim_end_matches('\0').rsplit(' ').next()?.parse().ok()
}

/// The statement that inserts a row with values for all columns.
fn insert(table: &Table) -> String {
    let places: Vec<String> = (1..=table.def.columns.len()).map(|number| format!("${number}")).collect();
    let (name, columns) = (table.def.qualified(), table.def.column_list());
    format!("INSERT INTO {name} ({columns}) OVERRIDING SYSTEM VALUE VALUES ({})", places.join(", "))
}

/// Returns true for each column that was sent.
fn sent(new: &Tuple) -> Vec<bool> {
    new.iter().map(|value| *value != Value::Unchanged).collect()
}

/// Returns true if an update may have set a GENERATED ALWAYS AS IDENTITY column to its default, its next number. No update can
/// set such a column to a given number. The old values of columns outside the key are unknown.
fn replaces(table: &Table, old: Option<&Tuple>, new: &Tuple) -> bool {
    let told = |at: usize| table.key.as_ref().is_none_or(|key| key.contains(&at));
    let always = table.def.columns.iter().enumerate().filter(|(_, column)| column.identity_always);
    always.map(|(at, _)| at).any(|at| match old {
        _ if new[at] == Value::Unchanged => false,
        Some(old) if told(at) => old[at] != new[at],
        // A changed key would have been sent.
        None if told(at) => false,
        _ => true,
    })
}

/// The statement that deletes a row and inserts it with the new values; values that were not sent are kept.
fn replace(table: &Table, new: &Tuple) -> String {
    let mut number = 0;
    let values: Vec<String> = table
        .def
        .columns
        .iter()
        .zip(sent(new))
        .map(|(column, sent)| {
            number += usize::from(sent);
            if sent { format!("${number}") } else { format!("gone.{}", identifier(&column.name)) }
        })
        .collect();
    format!(
        "WITH gone AS (DELETE FROM {} WHERE {} RETURNING *) INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM gone",
        table.def.alone(),
        place(table, number + 1),
        table.def.qualified(),
        table.def.column_list(),
        values.join(", ")
    )
}

/// Returns true for each column that an update sets: columns that were sent and that an update may set.
fn settable(table: &Arc<Table>, new: &Tuple) -> Vec<bool> {
    let columns = table.def.columns.iter().zip(new);
    columns.map(|(column, value)| *value != Value::Unchanged && !column.identity_always).collect()
}

fn key_values<'a>(table: &'a Table, row: &'a Tuple) -> impl Iterator<Item = &'a Value> {
    let all = table.key.is_none().then(|| row.iter());
    let key = table.key.iter().flatten().map(|column| &row[*column]);
    all.into_iter().flatten().chain(key)
}

/// SQL condition that identifies one row, with parameters from `first` on.
fn place(table: &Table, first: usize) -> String {
    let name = |column: &usize| identifier(&table.def.columns[*column].name);
    if let Some(key) = &table.key {
        let value = |column: &usize, number: usize| match &table.def.columns[*column].named_type {
            Some(named) => format!("${number}::{named}"),
            None => format!("${number}"),
        };
        let parts = key.iter().zip(first..).map(|(at, number)| format!("{} = {}", name(at), value(at, number)));
        return parts.collect::<Vec<_>>().join(" AND ");
    }
    // Some types have no equality that identifies one row (json, numeric), but each type has the text that was sent. A cast may
    // not give that text (boolean, char(n), inet). Of equal rows, any one may be taken.
    let parts = (0..table.def.columns.len()).zip(first..).map(|(column, number)| match name(&column) {
        name if let Some(named) = &table.def.columns[column].named_type => {
            format!("{name} IS NOT DISTINCT FROM ${number}::{named}")
        }
        name if table.def.plain(column) => format!("{name} IS NOT DISTINCT FROM ${number}"),
        name => {
            format!(
                "CASE WHEN {name} IS DISTINCT FROM NULL THEN format('%s', {name}) END IS NOT DISTINCT FROM ${number}"
            )
        }
    });
    // Rows without a value that is sent are all equal.
    let parts: Vec<String> = parts.collect();
    let condition = if parts.is_empty() { "true".to_owned() } else { parts.join(" AND ") };
    format!("ctid = (SELECT ctid FROM ONLY {} WHERE {condition} LIMIT 1)", table.def.qualified())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::ColumnDef;
    use crate::transaction::tests::table_def;

    fn table(keyed: bool) -> Arc<Table> {
        let def = table_def(keyed);
        Arc::new(Table { key: def.key.clone(), def, version: 0 })
    }

    fn text(value: &str) -> Value {
        Value::Text(value.to_owned().into())
    }

    #[test]
    fn an_update_leaves_out_what_was_not_sent() {
        let new = vec![text("1"), Value::Unchanged, Value::Null];
        let write = Write::Update { table: table(true), old: None, new };
        assert_eq!(write.sql(), r#"UPDATE ONLY "public"."t" SET "id" = $1, "note" = $2 WHERE "id" = $3"#);
        assert_eq!(write.parameters(), [&text("1"), &Value::Null, &text("1")]);
    }

    #[test]
    fn a_row_whose_generated_number_may_have_changed_is_replaced() {
        let of = |keyed: bool, always: usize| {
            let mut def = table_def(keyed);
            def.columns[always].identity_always = true;
            Arc::new(Table { key: def.key.clone(), def, version: 0 })
        };
        let row = |first: &str| vec![text(first), text("m"), Value::Unchanged];
        let update =
            |table: &Arc<Table>, old: Option<Tuple>| Write::Update { table: Arc::clone(table), old, new: row("2") };
        let of_key = update(&of(true, 0), None);
        assert_eq!(of_key.sql(), r#"UPDATE ONLY "public"."t" SET "mail" = $1 WHERE "id" = $2"#, "the key is as it was");
        let changed = update(&of(true, 0), Some(vec![text("1"), Value::Null, Value::Null]));
        let replacing = r#"WITH gone AS (DELETE FROM ONLY "public"."t" WHERE "id" = $3 RETURNING *) INSERT INTO "public"."t" ("id", "mail", "note") OVERRIDING SYSTEM VALUE SELECT $1, $2, gone."note" FROM gone"#;
        assert_eq!(changed.sql(), replacing);
        assert_eq!(changed.parameters(), [&text("2"), &text("m"), &text("1")]);
        assert_ne!(changed.shape(), of_key.shape());
        assert_eq!(update(&of(true, 1), None).sql(), replacing, "it is not told what it was");
        let without_key = of(false, 0);
        assert!(update(&without_key, Some(row("2"))).sql().starts_with("UPDATE"));
        assert!(update(&without_key, Some(row("1"))).sql().starts_with("WITH gone"));
    }

    #[test]
    fn a_changed_key_is_found_by_the_old_one() {
        let old = Some(vec![text("7"), Value::Null, Value::Null]);
        let new = vec![text("8"), Value::Unchanged, Value::Unchanged];
        let write = Write::Update { table: table(true), old, new };
        assert_eq!(write.parameters(), [&text("8"), &text("7")]);
    }

    #[test]
    fn without_a_key_one_row_of_equals_is_taken() {
        let mut def = table_def(false);
        def.columns[2] = ColumnDef::of("note", false);
        let table = Arc::new(Table { key: None, def, version: 0 });
        let write = Write::Delete { table, old: vec![text("1"), Value::Null, text("x")] };
        let sql = write.sql();
        assert!(sql.contains("LIMIT 1") && sql.contains(r#""mail" IS NOT DISTINCT FROM $2"#), "{sql}");
        assert!(sql.contains(r#"format('%s', "note") END IS NOT DISTINCT FROM $3"#), "no equality of its own: {sql}");
        assert_eq!(write.parameters().len(), 3);
    }
}
