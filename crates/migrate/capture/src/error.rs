//! Reasons why row images of a statement cannot be captured.

/// Reason why row images of a statement cannot be captured: it becomes a barrier, or its table is captured in another way.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The parser does not know the statement, so its writes are unknown. Holds what the parser expected.
    #[error("the statement cannot be parsed{0}")]
    Unparsable(String),
    /// The statement has more tokens than the parser takes. Holds the limit.
    #[error("the statement is too long: more than {0} tokens")]
    TooLong(usize),
    /// Operators in a row, set operations or brackets may make a tree that is too deep to walk. Holds the limit in levels.
    #[error("the statement is too deep: more than {0} tokens without a comma between them")]
    TooDeep(usize),
    /// The text has several statements; the caller must split it first. Holds their number.
    #[error("{0} statements in one text")]
    Several(usize),
    /// The catalogue does not have the table: it is newer than the catalogue, or temporary.
    #[error("table {0} is not in the catalogue")]
    UnknownTable(String),
    /// The relation is not a table.
    #[error("{0} is not a table but a {1}")]
    NotATable(String, &'static str),
    /// The table has no key that identifies its rows.
    #[error("table {0} has no key")]
    NoKey(String),
    /// The server writes more than the statement does.
    #[error("table {table} has {what}")]
    WritesMore {
        /// Name of the table.
        table: String,
        /// `trigger NAME`, `rule NAME`, `foreign key NAME that cascades`.
        what: String,
    },
    /// RETURNING would have to read a row that the client may not read in full.
    #[error("table {0} may not be read in full: {1}")]
    NotReadable(String, &'static str),
    /// The statement changes a key; RETURNING does not show the old one (PostgreSQL 18 could).
    #[error("key column {column} of table {table} is changed")]
    KeyChanged {
        /// Name of the table.
        table: String,
        /// Name of the key column.
        column: String,
    },
    /// RETURNING does not show the writes of this kind of statement.
    #[error("{0} cannot return the rows that it writes")]
    NoReturning(&'static str),
    /// The statement calls a function that may write.
    #[error("function {0} may write")]
    Function(String),
    /// The text may have another effect when it is repeated.
    #[error("{0} may differ when the statement is replayed")]
    NotRepeatable(String),
    /// A statement inside WITH writes.
    #[error("WITH contains a statement that writes")]
    WritingWith,
    /// The hidden column does not hold what was asked for. Holds the table's object identifier.
    #[error("an image of a row of table {0} is malformed")]
    Image(u32),
}

impl Refusal {
    /// Keeps only what the parser expected: what it found may be a value of the client's and must not be quoted.
    pub(crate) fn unparsable(error: &sqlparser::parser::ParserError) -> Refusal {
        let text = error.to_string();
        let expected = text.split_once("Expected: ").and_then(|(_, text)| text.split_once(", found:"));
        Refusal::Unparsable(expected.map_or_else(String::new, |(expected, _)| format!(": expected {expected}")))
    }
}

#[cfg(test)]
mod tests {
    use crate::{Catalogue, Refusal, rewrite};

    #[test]
    fn no_value_is_told_of_a_text_that_cannot_be_parsed() {
        for text in ["UPDATE SET 'secret'", "DELETE FROM 'secret' secret 7", "SELECT 'secret"] {
            let refusal = rewrite(text, &Catalogue::new(["s".to_owned()])).unwrap_err();
            assert!(matches!(refusal, Refusal::Unparsable(_)), "{refusal}");
            assert!(!refusal.to_string().contains("secret"), "{refusal}");
        }
        let refusal = rewrite("UPDATE SET 'secret'", &Catalogue::new(["s".to_owned()])).unwrap_err();
        assert_eq!(refusal.to_string(), "the statement cannot be parsed: expected SET");
    }
}
