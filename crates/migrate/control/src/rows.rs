//! Messages to the follower of a capture.

use serde::{Deserialize, Serialize};
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
pub enum RowChange {
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
    pub did: RowChange,
    /// Values as text, NULL as null.
    pub values: Vec<Option<String>>,
}

/// A token of the replay's scheduler ([`stillpoint_migrate_replay::Token`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenSpec {
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
    pub tokens: Vec<TokenSpec>,
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

impl From<Token> for TokenSpec {
    fn from(token: Token) -> TokenSpec {
        match token {
            Token::Row { table, key } => TokenSpec::Row(table, key),
            Token::Unique { table, index, value } => TokenSpec::Unique(table, index, value),
            Token::Parent { table, index, value } => TokenSpec::Parent(table, index, value),
            Token::Index { table, index } => TokenSpec::Index(table, index),
            Token::Table(table) => TokenSpec::Table(table),
            Token::Everything => TokenSpec::Everything,
        }
    }
}

impl From<TokenSpec> for Token {
    fn from(touched: TokenSpec) -> Token {
        match touched {
            TokenSpec::Row(table, key) => Token::Row { table, key },
            TokenSpec::Unique(table, index, value) => Token::Unique { table, index, value },
            TokenSpec::Parent(table, index, value) => Token::Parent { table, index, value },
            TokenSpec::Index(table, index) => Token::Index { table, index },
            TokenSpec::Table(table) => Token::Table(table),
            TokenSpec::Everything => Token::Everything,
        }
    }
}
