//! Messages to the follower of a capture.

use serde::{Deserialize, Serialize};
use stillpoint_migrate_capture::Action;
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

/// A written row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Object identifier of its table.
    pub table: u32,
    /// Kind of the change.
    pub did: Action,
    /// Values as text, NULL as null.
    pub values: Vec<Option<String>>,
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
    pub tokens: Vec<Token>,
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
