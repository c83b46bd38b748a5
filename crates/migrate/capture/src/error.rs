//! Why row images of a statement cannot be captured.

/// Why row images of a statement cannot be captured: it is a barrier, or the table goes another way.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The parser does not know it: whatever it writes is unknown.
    #[error("the statement cannot be parsed: {0}")]
    Unparsable(String),
    /// A string of several statements, which is to be split before.
    #[error("{0} statements in one text")]
    Several(usize),
    /// A table that the catalogue does not have: made since, or temporary.
    #[error("table {0} is not in the catalogue")]
    UnknownTable(String),
    /// The relation is not a table.
    #[error("{0} is not a table but a {1}")]
    NotATable(String, &'static str),
    /// Nothing identifies its rows.
    #[error("table {0} has no key")]
    NoKey(String),
    /// What the statement writes is not all that is written.
    #[error("table {table} has {what}")]
    WritesMore {
        /// The table.
        table: String,
        /// `trigger NAME`, `rule NAME`, `foreign key NAME that cascades`.
        what: String,
    },
    /// RETURNING needs to read the row.
    #[error("table {0} may not be read in full: {1}")]
    NotReadable(String, &'static str),
    /// The old key is not returned (PostgreSQL 18 could).
    #[error("key column {column} of table {table} is changed")]
    KeyChanged {
        /// The table.
        table: String,
        /// The column.
        column: String,
    },
    /// A statement whose writes RETURNING does not show.
    #[error("{0} cannot return the rows that it writes")]
    NoReturning(&'static str),
    /// A function that may write.
    #[error("function {0} may write")]
    Function(String),
    /// Its text may do something else when it is repeated.
    #[error("{0} may differ when the statement is repeated")]
    NotRepeatable(String),
    /// Writes inside WITH.
    #[error("WITH holds a statement that writes")]
    WritingWith,
    /// The hidden column does not hold what was asked for.
    #[error("an image of a row of table {0} is malformed")]
    Image(u32),
}
