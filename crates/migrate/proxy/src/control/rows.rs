//! Lines for the follower of a capture, built from captured transactions.

use crate::capture::{Change, TransactionChanges};
use std::collections::BTreeMap;
use std::sync::Arc;
use stillpoint_migrate_capture::Table;
use stillpoint_migrate_control::Reply;
use stillpoint_migrate_control::rows::{Row, Statements, Syncset, TableShape};

fn shape(table: &Table, columns: &[usize]) -> TableShape {
    let place = |at: &usize| columns.iter().position(|column| column == at);
    let insert_only = columns.iter().enumerate().filter(|(_, at)| table.columns[**at].identity_always);
    TableShape {
        table: table.oid,
        schema: table.schema.clone(),
        name: table.name.clone(),
        columns: columns.iter().map(|at| table.columns[*at].name.clone()).collect(),
        key: table.key.iter().flatten().filter_map(place).collect(),
        insert_only: insert_only.map(|(at, _)| at).collect(),
    }
}

/// Builds the lines for one transaction; `known` are the tables that the follower knows.
pub(crate) fn lines(stamp: u64, written: TransactionChanges, known: &mut BTreeMap<u32, Arc<Table>>) -> Vec<Reply> {
    let mut lines = Vec::new();
    for change in &written.changes {
        let is_known = known.get(&change.table.oid).is_some_and(|table| *table == change.table);
        if !is_known {
            known.insert(change.table.oid, change.table.clone());
            lines.push(Reply::Table(shape(&change.table, &change.columns)));
        }
    }
    let row = |change: Change| Row { table: change.table.oid, did: change.action, values: change.values };
    lines.push(Reply::Syncset(Syncset {
        stamp,
        xid: written.xid,
        rows: written.changes.into_iter().map(row).collect(),
        tokens: written.tokens,
        statements: written.statements_run.map(|statements_run| Statements {
            running: statements_run.running,
            settings: statements_run.context.settings.clone(),
            role: statements_run.context.role.clone(),
            operations: statements_run.operations,
        }),
    }));
    lines
}
