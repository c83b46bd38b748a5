//! Messages to the follower of a capture.

use super::Reply;
use crate::capture::Written;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use stillpoint_migrate_capture::{Action, Table};
use stillpoint_migrate_replay::Token;

/// Shape of a table, for its captured rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableShape {
    /// Object identifier at the source.
    pub table: u32,
    /// Name of its schema.
    pub schema: String,
    /// Name of the table.
    pub name: String,
    /// Columns that values are given for, in this order.
    pub columns: Vec<String>,
    /// Positions of those that name a row.
    pub key: Vec<usize>,
    /// Positions of those that can be given at INSERT only (`GENERATED ALWAYS AS IDENTITY`).
    pub insert_only: Vec<usize>,
}

/// Kind of a change to a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Did {
    /// The row is new.
    Insert,
    /// The row is new or was updated: the values are its current ones.
    Upsert,
    /// The row was updated; its key is unchanged.
    Update,
    /// The row was deleted.
    Delete,
}

/// A written row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Object identifier of its table.
    pub table: u32,
    /// Kind of the change.
    pub did: Did,
    /// Values as text, NULL as null.
    pub values: Vec<Option<String>>,
}

/// A token of the replay's scheduler ([`stillpoint_migrate_replay::Token`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Touched {
    /// Table and hash of the key.
    Row(u32, u64),
    /// Table, index and hash of the value.
    Unique(u32, u32, u64),
    /// Table that is referred to, its index and the hash of the value.
    Parent(u32, u32, u64),
    /// Table and index.
    Index(u32, u32),
    /// Object identifier of a table.
    Table(u32),
    /// Conflicts with every token.
    Everything,
}

/// A committed transaction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Syncset {
    /// Place in the order of commits.
    pub stamp: u64,
    /// Transaction number at the source, by which a snapshot shows if it sees the transaction.
    pub xid: String,
    /// Written rows, in order.
    pub rows: Vec<Row>,
    /// Tokens of what it touched.
    pub tokens: Vec<Touched>,
    /// Statements of its client, where statements are captured. A transaction without rows and tokens only read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statements: Option<Statements>,
}

/// The statements of a committed transaction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statements {
    /// Number while the transaction ran; none if it cannot have written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<u64>,
    /// Statements in their order.
    pub operations: Vec<Operation>,
    /// List for a SELECT that gives a session the settings that decide what the texts mean.
    pub settings: String,
    /// Role with whose rights they were executed.
    pub role: String,
}

/// A statement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// True if it writes rows.
    pub writes: bool,
    /// Text of the statement.
    pub text: String,
}

impl From<Token> for Touched {
    fn from(token: Token) -> Touched {
        match token {
            Token::Row { table, key } => Touched::Row(table, key),
            Token::Unique { table, index, value } => Touched::Unique(table, index, value),
            Token::Parent { table, index, value } => Touched::Parent(table, index, value),
            Token::Index { table, index } => Touched::Index(table, index),
            Token::Table(table) => Touched::Table(table),
            Token::Everything => Touched::Everything,
        }
    }
}

impl From<Touched> for Token {
    fn from(touched: Touched) -> Token {
        match touched {
            Touched::Row(table, key) => Token::Row { table, key },
            Touched::Unique(table, index, value) => Token::Unique { table, index, value },
            Touched::Parent(table, index, value) => Token::Parent { table, index, value },
            Touched::Index(table, index) => Token::Index { table, index },
            Touched::Table(table) => Token::Table(table),
            Touched::Everything => Token::Everything,
        }
    }
}

impl From<Action> for Did {
    fn from(action: Action) -> Did {
        match action {
            Action::Insert => Did::Insert,
            Action::Upsert => Did::Upsert,
            Action::Update => Did::Update,
            Action::Delete => Did::Delete,
        }
    }
}

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
pub(crate) fn lines(stamp: u64, written: Written, known: &mut BTreeMap<u32, Arc<Table>>) -> Vec<Reply> {
    let mut lines = Vec::new();
    for change in &written.changes {
        let is_known = known.get(&change.table.oid).is_some_and(|table| *table == change.table);
        if !is_known {
            known.insert(change.table.oid, change.table.clone());
            lines.push(Reply::Table(shape(&change.table, &change.columns)));
        }
    }
    let row = |change: crate::capture::Change| Row {
        table: change.table.oid,
        did: change.action.into(),
        values: change.values,
    };
    lines.push(Reply::Syncset(Syncset {
        stamp,
        xid: written.xid,
        rows: written.changes.into_iter().map(row).collect(),
        tokens: written.tokens.into_iter().map(Touched::from).collect(),
        statements: written.spoken.map(|spoken| Statements {
            running: spoken.running,
            settings: spoken.meant.settings.clone(),
            role: spoken.meant.role.clone(),
            operations: spoken.operations.into_iter().map(|(writes, text)| Operation { writes, text }).collect(),
        }),
    }));
    lines
}
