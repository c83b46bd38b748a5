//! Combined effect of several transactions, if no session reads between them, and the statements that write many rows at once;
//! data only.
//!
//! ```text
//! insert, update(s)  => insert       insert .. delete  => nothing       anything else on a row that was touched,
//! update, update     => update       update .. delete  => delete        or on a table where order matters  => in order
//! upsert, update(s)  => upsert       upsert .. delete  => delete, if it is present
//! ```
//!
//! Rows of one table without further unique indexes, identified by a key, can be written in any order: foreign keys are not
//! checked and triggers do not fire here. A change that does not fit is sent separately, after everything gathered before.

use super::transaction::{Described, Table, Transaction, Write};
use crate::pgoutput::{Tuple, Value};
use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;
use stillpoint_migrate_postgres::link::identifier;

/// One statement of a batch.
#[derive(Debug)]
pub(crate) enum Step<'a> {
    /// A single unchanged change.
    One(&'a Write),
    /// Many rows at once.
    Many(BulkStatement),
}

/// Rows of one table that one statement writes.
#[derive(Debug)]
pub(crate) struct BulkStatement {
    pub(crate) shape: BulkShape,
    table: Arc<Table>,
    /// Values of each column of the statement, row by row, as the text of an array.
    pub(crate) arrays: Vec<Value>,
    pub(crate) rows: u64,
    /// True if each of the rows must be present, or is created.
    each: bool,
}

/// Key of the statement.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum BulkShape {
    Insert(Described),
    /// True for each column that is set.
    Update(Described, Vec<bool>),
    Upsert(Described),
    Delete(Described),
}

/// Combined effect on a row.
#[derive(Debug)]
enum RowEffect<'a> {
    Insert(Row<'a>),
    Update(Row<'a>),
    Upsert(Row<'a>),
    /// The row is deleted; holds its key.
    Delete(Row<'a>),
    /// The row is deleted if it is present; holds its key. An earlier upsert of the group is dropped.
    DeleteAny(Row<'a>),
    /// The row was inserted and deleted.
    Nothing,
}

/// Values of a row: borrowed, unless several changes were combined.
type Row<'a> = Cow<'a, [Value]>;

/// Key of a row; most keys have one column.
#[derive(Debug, PartialEq, Eq, Hash)]
enum Key<'a> {
    One(&'a Value),
    Columns(Vec<&'a Value>),
}

/// Changes gathered for a table, rows in the order of their first change.
#[derive(Debug)]
struct TableChanges<'a> {
    table: &'a Arc<Table>,
    rows: Vec<RowEffect<'a>>,
    places: HashMap<Key<'a>, usize>,
}

/// Returns the statements of a group of transactions, in order.
pub(crate) fn steps(group: &[Arc<Transaction>]) -> Vec<Step<'_>> {
    let mut steps = Vec::new();
    let mut gathered: Vec<TableChanges<'_>> = Vec::new();
    for write in group.iter().flat_map(|transaction| &transaction.writes).filter(|write| write.has_effect()) {
        if group.len() == 1 || !gather(&mut gathered, write) {
            gathered.drain(..).for_each(|table| table.flush(&mut steps));
            // A change that did not fit may be the first of a new group.
            if group.len() == 1 || !gather(&mut gathered, write) {
                steps.push(Step::One(write));
            }
        }
    }
    gathered.drain(..).for_each(|table| table.flush(&mut steps));
    steps
}

/// Returns true if rows of the table may be written in any order, many at once.
fn allows_any_order(table: &Table) -> bool {
    let key = table.key.as_ref().is_some_and(|key| !key.is_empty() && key.iter().all(|at| table.def.plain(*at)));
    // If another index identified the rows, the order of writes would also have to respect their primary key.
    key && table.key == table.def.key
        && table.def.uniques.is_empty()
        && table.def.columns.iter().all(|c| c.element.is_some() && !c.identity_always)
}

/// Returns true if rows of the table have no key and no unique index, so that inserts can be combined.
fn only_inserts(table: &Table) -> bool {
    let def = &table.def;
    let plain = def.key.is_none() && def.uniques.is_empty();
    plain && !def.columns.is_empty() && def.columns.iter().all(|column| column.element.is_some())
}

fn key_of<'a>(table: &Table, row: &'a [Value]) -> Key<'a> {
    match table.key.as_deref().unwrap_or_default() {
        [at] => Key::One(&row[*at]),
        key => Key::Columns(key.iter().map(|at| &row[*at]).collect()),
    }
}

/// Likely order of rows in their table and its index: numbers of one sign by size. Every order is correct.
fn storage_order(table: &Table, one: &[Value], other: &[Value]) -> Ordering {
    let length = |value: &Value| if let Value::Text(text) = value { text.len() } else { 0 };
    let of = |at: &usize| {
        let (one, other) = (&one[*at], &other[*at]);
        length(one).cmp(&length(other)).then_with(|| one.cmp(other))
    };
    table.key.iter().flatten().map(of).find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
}

/// Takes a change; returns `false` if it does not fit after those already gathered.
fn gather<'a>(gathered: &mut Vec<TableChanges<'a>>, write: &'a Write) -> bool {
    let table = match write {
        Write::Insert { table, .. } if table.key.is_none() && only_inserts(table) => table,
        Write::Insert { table, .. }
        | Write::Update { table, .. }
        | Write::Upsert { table, .. }
        | Write::Delete { table, .. }
            if allows_any_order(table) =>
        {
            table
        }
        _ => return false,
    };
    let at = gathered.iter().position(|known| known.table.def.oid == table.def.oid);
    if at.is_some_and(|at| !Arc::ptr_eq(gathered[at].table, table)) {
        // The table was described again: changes with the old description are sent first.
        return false;
    }
    let at = at.unwrap_or_else(|| {
        gathered.push(TableChanges { table, rows: Vec::new(), places: HashMap::new() });
        gathered.len() - 1
    });
    gathered[at].take(write)
}

impl<'a> TableChanges<'a> {
    fn take(&mut self, write: &'a Write) -> bool {
        let row: &'a Tuple = match write {
            Write::Insert { new, .. } | Write::Update { new, .. } | Write::Upsert { new, .. } => new,
            Write::Delete { old, .. } => old,
            Write::Truncate { .. } => return false,
        };
        if self.table.key.is_none() {
            self.rows.push(RowEffect::Insert(row.into()));
            return true;
        }
        let key = key_of(self.table, row);
        let moved = matches!(write, Write::Update { old: Some(old), .. } if key_of(self.table, old) != key);
        let unknown = match &key {
            Key::One(value) => **value == Value::Unchanged,
            Key::Columns(values) => values.contains(&&Value::Unchanged),
        };
        if moved || unknown {
            return false;
        }
        match (write, self.places.get(&key).copied()) {
            (Write::Insert { .. }, None) => self.put(key, RowEffect::Insert(row.into())),
            (Write::Update { .. }, None) => self.put(key, RowEffect::Update(row.into())),
            (Write::Upsert { .. }, None) => self.put(key, RowEffect::Upsert(row.into())),
            (Write::Delete { .. }, None) => self.put(key, RowEffect::Delete(row.into())),
            (Write::Update { .. } | Write::Upsert { .. }, Some(at)) => match &mut self.rows[at] {
                RowEffect::Insert(known) | RowEffect::Update(known) | RowEffect::Upsert(known) => overlay(known, row),
                RowEffect::Delete(_) | RowEffect::DeleteAny(_) | RowEffect::Nothing => return false,
            },
            (Write::Delete { .. }, Some(at)) => match self.rows[at] {
                RowEffect::Insert(_) => self.rows[at] = RowEffect::Nothing,
                RowEffect::Update(_) => self.rows[at] = RowEffect::Delete(row.into()),
                RowEffect::Upsert(_) => self.rows[at] = RowEffect::DeleteAny(row.into()),
                RowEffect::Delete(_) | RowEffect::DeleteAny(_) | RowEffect::Nothing => return false,
            },
            _ => return false,
        }
        true
    }

    fn put(&mut self, key: Key<'a>, net: RowEffect<'a>) {
        self.places.insert(key, self.rows.len());
        self.rows.push(net);
    }

    fn flush(self, steps: &mut Vec<Step<'_>>) {
        let TableChanges { table, rows, .. } = self;
        let (mut inserts, mut upserts) = (Vec::new(), Vec::new());
        let (mut deletes, mut deletes_any) = (Vec::new(), Vec::new());
        let mut updates: Vec<(Vec<bool>, Vec<Row<'a>>)> = Vec::new();
        for net in rows {
            match net {
                RowEffect::Insert(row) => inserts.push(row),
                RowEffect::Upsert(row) => upserts.push(row),
                RowEffect::Delete(row) => deletes.push(row),
                RowEffect::DeleteAny(row) => deletes_any.push(row),
                RowEffect::Update(row) => {
                    let is_set = |value: &Value| *value != Value::Unchanged;
                    match updates.iter_mut().find(|(known, _)| row.iter().map(is_set).eq(known.iter().copied())) {
                        Some((_, rows)) => rows.push(row),
                        None => updates.push((row.iter().map(is_set).collect(), vec![row])),
                    }
                }
                RowEffect::Nothing => {}
            }
        }
        let of = table.described();
        let all = || (0..table.def.columns.len()).collect::<Vec<_>>();
        let key = || table.key.clone().unwrap_or_default();
        // Rows that are stored together are changed together.
        let in_order = |rows: &mut Vec<Row<'a>>| rows.sort_unstable_by(|one, other| storage_order(table, one, other));
        let mut many = |shape, each, columns: Vec<usize>, rows: &[Row<'a>]| {
            if !rows.is_empty() {
                let arrays = columns.iter().map(|at| array(rows.iter().map(|row| &row[*at]))).collect();
                let rows = rows.len() as u64;
                steps.push(Step::Many(BulkStatement { shape, table: Arc::clone(table), arrays, rows, each }));
            }
        };
        in_order(&mut deletes);
        many(BulkShape::Delete(of), true, key(), &deletes);
        in_order(&mut deletes_any);
        many(BulkShape::Delete(of), false, key(), &deletes_any);
        for (set, mut rows) in updates {
            in_order(&mut rows);
            let columns = all().into_iter().filter(|at| set[*at]).collect();
            many(BulkShape::Update(of, set), true, columns, &rows);
        }
        in_order(&mut upserts);
        many(BulkShape::Upsert(of), true, all(), &upserts);
        many(BulkShape::Insert(of), true, all(), &inserts);
    }
}

/// Applies a later state of a row to an earlier one.
fn overlay<'a>(row: &mut Row<'a>, later: &'a Tuple) {
    if !later.contains(&Value::Unchanged) {
        *row = later.into();
        return;
    }
    for (value, new) in row.to_mut().iter_mut().zip(later) {
        if *new != Value::Unchanged {
            *value = new.clone();
        }
    }
}

/// Formats the text of an array.
fn array<'a>(values: impl Iterator<Item = &'a Value> + Clone) -> Value {
    let length = |value: &Value| if let Value::Text(text) = value { text.len() + 3 } else { 5 };
    let mut text = Vec::with_capacity(2 + values.clone().map(length).sum::<usize>());
    text.push(b'{');
    for (number, value) in values.enumerate() {
        if number > 0 {
            text.push(b',');
        }
        let Value::Text(bytes) = value else {
            text.extend_from_slice(b"NULL");
            continue;
        };
        text.push(b'"');
        let mut rest = &bytes[..];
        while let Some(at) = rest.iter().position(|byte| matches!(byte, b'"' | b'\\')) {
            text.extend_from_slice(&rest[..at]);
            text.extend_from_slice(&[b'\\', rest[at]]);
            rest = &rest[at + 1..];
        }
        text.extend_from_slice(rest);
        text.push(b'"');
    }
    text.push(b'}');
    Value::Text(text.into())
}

impl BulkStatement {
    /// Returns true if it must find or create each of its rows; rows that early transactions delete may be missing.
    pub(crate) fn has_known_row_count(&self, early: bool) -> bool {
        self.each && !(early && self.table.can_upsert() && matches!(self.shape, BulkShape::Delete(_)))
    }

    /// Text of the statement.
    pub(crate) fn sql(&self) -> String {
        let def = &self.table.def;
        let all: Vec<usize> = (0..def.columns.len()).collect();
        let key = self.table.key.clone().unwrap_or_default();
        let name = |at: &usize| identifier(&def.columns[*at].name);
        let list = |columns: &[usize], of: &str| {
            columns.iter().map(|at| format!("{of}{}", name(at))).collect::<Vec<_>>().join(", ")
        };
        let rows = |columns: &[usize]| {
            let element = |at: &usize| def.columns[*at].element.as_deref().unwrap_or("text");
            let arrays = columns.iter().zip(1..).map(|(at, number)| format!("${number}::{}[]", element(at)));
            format!("unnest({}) AS v({})", arrays.collect::<Vec<_>>().join(", "), list(columns, ""))
        };
        let same = key.iter().map(|at| format!("t.{0} = v.{0}", name(at))).collect::<Vec<_>>().join(" AND ");
        let (table, alone) = (def.qualified(), def.alone());
        let insert = || {
            let columns = list(&all, "");
            format!("INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM {}", rows(&all))
        };
        match &self.shape {
            BulkShape::Insert(_) => insert(),
            BulkShape::Upsert(_) => {
                let sets = all.iter().map(|at| format!("{0} = EXCLUDED.{0}", name(at))).collect::<Vec<_>>().join(", ");
                format!("{} ON CONFLICT ({}) DO UPDATE SET {sets}", insert(), list(&key, ""))
            }
            BulkShape::Update(_, set) => {
                let columns: Vec<usize> = all.iter().copied().filter(|at| set[*at]).collect();
                // The key is the same before and after the update.
                let sets: Vec<String> =
                    columns.iter().filter(|at| !key.contains(at)).map(|at| format!("{0} = v.{0}", name(at))).collect();
                let sets = if sets.is_empty() { format!("{0} = v.{0}", name(&key[0])) } else { sets.join(", ") };
                format!("UPDATE {alone} t SET {sets} FROM {} WHERE {same}", rows(&columns))
            }
            BulkShape::Delete(_) => format!("DELETE FROM {alone} t USING {} WHERE {same}", rows(&key)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transaction::tests::table_def;

    fn table() -> Arc<Table> {
        let mut def = table_def(true);
        def.uniques.clear();
        Arc::new(Table { key: def.key.clone(), def, version: 0 })
    }

    fn row(values: [&str; 3]) -> Tuple {
        let value = |text: &str| match text {
            "" => Value::Null,
            "?" => Value::Unchanged,
            text => Value::Text(text.to_owned().into()),
        };
        values.into_iter().map(value).collect()
    }

    fn of(writes: Vec<Write>) -> Vec<Arc<Transaction>> {
        let each = writes.into_iter().zip(1..);
        each.map(|(write, stamp)| {
            Arc::new(Transaction { stamp, xid: 1, writes: vec![write], bytes: 1, told: None, early: false })
        })
        .collect()
    }

    fn texts(group: &[Arc<Transaction>]) -> Vec<String> {
        let text = |value: &Value| match value {
            Value::Text(bytes) => String::from_utf8(bytes.to_vec()).unwrap(),
            other => format!("{other:?}"),
        };
        let step = |step: Step<'_>| match step {
            Step::One(write) => format!("one {}", write.sql().split(' ').next().unwrap()),
            Step::Many(many) => {
                let arrays: Vec<String> = many.arrays.iter().map(text).collect();
                format!("{} {} {}", many.sql().split(' ').next().unwrap(), many.rows, arrays.join(" "))
            }
        };
        steps(group).into_iter().map(step).collect()
    }

    fn insert(table: &Arc<Table>, values: [&str; 3]) -> Write {
        Write::Insert { table: Arc::clone(table), new: row(values) }
    }

    fn update(table: &Arc<Table>, values: [&str; 3]) -> Write {
        Write::Update { table: Arc::clone(table), old: None, new: row(values) }
    }

    fn delete(table: &Arc<Table>, key: &str) -> Write {
        Write::Delete { table: Arc::clone(table), old: row([key, "", ""]) }
    }

    #[test]
    fn a_hot_row_is_written_once() {
        let t = table();
        let group = of(vec![update(&t, ["1", "a", "x"]), update(&t, ["2", "b", ""]), update(&t, ["1", "c", "?"])]);
        assert_eq!(texts(&group), [r#"UPDATE 2 {"1","2"} {"c","b"} {"x",NULL}"#]);
    }

    #[test]
    fn a_row_that_may_not_be_there_is_brought_as_it_is_at_last() {
        let t = table();
        let upsert = |values| Write::Upsert { table: Arc::clone(&t), new: row(values) };
        let group = of(vec![
            upsert(["1", "a", "x"]),
            upsert(["2", "b", "y"]),
            update(&t, ["1", "c", "?"]),
            upsert(["3", "d", "z"]),
            delete(&t, "3"),
            update(&t, ["5", "g", "z"]),
            delete(&t, "5"),
            insert(&t, ["4", "e", "x"]),
            upsert(["4", "f", "y"]),
        ]);
        let expected = [
            r#"DELETE 1 {"5"}"#,
            r#"DELETE 1 {"3"}"#,
            r#"INSERT 2 {"1","2"} {"c","b"} {"x","y"}"#,
            r#"INSERT 1 {"4"} {"f"} {"y"}"#,
        ];
        assert_eq!(texts(&group), expected);
        let steps = steps(&group);
        let [Step::Many(gone), Step::Many(any), Step::Many(brought), _] = &steps[..] else { panic!("{steps:?}") };
        assert!(
            !gone.has_known_row_count(true) && gone.has_known_row_count(false) && brought.has_known_row_count(true)
        );
        assert!(!any.has_known_row_count(false), "the upsert would have made it");
        let sql = brought.sql();
        let conflict = r#" ON CONFLICT ("id") DO UPDATE SET "id" = EXCLUDED."id", "mail" = EXCLUDED."mail", "note" = EXCLUDED."note""#;
        assert!(sql.ends_with(conflict), "{sql}");
    }

    #[test]
    fn rows_that_come_and_go_are_not_written() {
        let t = table();
        let group = of(vec![
            insert(&t, ["1", "a", "x"]),
            delete(&t, "1"),
            insert(&t, ["2", "a", "x"]),
            update(&t, ["2", "b", "?"]),
            update(&t, ["3", "c", "y"]),
            delete(&t, "3"),
        ]);
        assert_eq!(texts(&group), [r#"DELETE 1 {"3"}"#, r#"INSERT 1 {"2"} {"b"} {"x"}"#]);
    }

    #[test]
    fn a_row_that_comes_again_comes_after_it_went() {
        let t = table();
        let group = of(vec![delete(&t, "1"), insert(&t, ["1", "a", "x"]), insert(&t, ["2", "a", "x"])]);
        assert_eq!(texts(&group), [r#"DELETE 1 {"1"}"#, r#"INSERT 2 {"1","2"} {"a","a"} {"x","x"}"#]);
    }

    #[test]
    fn what_does_not_fit_keeps_its_place() {
        let t = table();
        let old = Some(row(["1", "", ""]));
        let moves = Write::Update { table: Arc::clone(&t), old, new: row(["9", "a", "x"]) };
        let group = of(vec![update(&t, ["1", "a", "x"]), moves, update(&t, ["9", "b", "x"])]);
        assert_eq!(texts(&group), [r#"UPDATE 1 {"1"} {"a"} {"x"}"#, "one UPDATE", r#"UPDATE 1 {"9"} {"b"} {"x"}"#]);
        let mut def = table_def(true);
        def.key = Some(vec![0]);
        let unique = Arc::new(Table { key: def.key.clone(), def, version: 0 });
        let group = of(vec![delete(&unique, "1"), insert(&unique, ["2", "a", "x"])]);
        assert_eq!(texts(&group), ["one DELETE", "one INSERT"], "values of its unique index go from row to row");
    }

    #[test]
    fn columns_that_were_not_sent_are_not_set() {
        let t = table();
        let group = of(vec![update(&t, ["1", "?", "x"]), update(&t, ["2", "?", "y"])]);
        let steps = steps(&group);
        let [Step::Many(many)] = &steps[..] else { panic!("{steps:?}") };
        let sql = r#"UPDATE ONLY "public"."t" t SET "note" = v."note" FROM unnest($1::text[], $2::text[]) AS v("id", "note") WHERE t."id" = v."id""#;
        assert_eq!(many.sql(), sql);
    }

    #[test]
    fn elements_are_quoted() {
        let values = [Value::Text(r#"a"b\c,{}"#.to_owned().into()), Value::Null, Value::Text("".to_owned().into())];
        assert_eq!(array(values.iter()), Value::Text(r#"{"a\"b\\c,{}",NULL,""}"#.to_owned().into()));
    }
}
