//! What a follower of a capture is told.

use super::Reply;
use crate::capture::Written;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use stillpoint_migrate_capture::{Action, Table};
use stillpoint_migrate_replay::Token;

/// A table, as far as its rows are captured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableShape {
    /// Object identifier at the source.
    pub table: u32,
    /// Schema.
    pub schema: String,
    /// Name.
    pub name: String,
    /// Columns that values are given for, in this order.
    pub columns: Vec<String>,
    /// Which of them name a row.
    pub key: Vec<usize>,
    /// Which of them can be given at INSERT only (`GENERATED ALWAYS AS IDENTITY`).
    pub insert_only: Vec<usize>,
}

/// What happened to a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Did {
    /// It is new.
    Insert,
    /// It is new or has been updated: the values are what it is now.
    Upsert,
    /// It was updated; its key is what it was.
    Update,
    /// It is gone.
    Delete,
}

/// A written row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Its table.
    pub table: u32,
    /// What happened.
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
    /// The table.
    Table(u32),
    /// Everything.
    Everything,
}

/// A committed transaction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Syncset {
    /// Its place in the order of commits.
    pub stamp: u64,
    /// Its number at the source, by which a snapshot tells whether it sees it.
    pub xid: String,
    /// What it wrote, in order.
    pub rows: Vec<Row>,
    /// What it touched.
    pub tokens: Vec<Touched>,
    /// What its client sent, where statements are captured. A transaction without rows and tokens only read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statements: Option<Statements>,
}

/// The statements of a committed transaction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statements {
    /// Its number while it ran; none where it cannot have written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<u64>,
    /// In their order.
    pub operations: Vec<Operation>,
    /// The list of a SELECT that gives a session the settings on which it depends what the texts mean.
    pub settings: String,
    /// The role with whose rights they were executed.
    pub role: String,
}

/// A statement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// Whether it writes rows.
    pub writes: bool,
    /// Its text.
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

/// The lines for one transaction; `known` are the tables as the follower knows them.
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
