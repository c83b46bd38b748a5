//! Why row images of a statement cannot be captured.

/// Why row images of a statement cannot be captured: it is a barrier, or the table goes another way.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The parser does not know it: whatever it writes is unknown. What it expected.
    #[error("the statement cannot be parsed{0}")]
    Unparsable(String),
    /// It has more tokens than are taken apart: how many are.
    #[error("the statement is too long: more than {0} words and signs")]
    TooLong(usize),
    /// Operators in a row, set operations or brackets may make a tree that is not walked: how many levels are.
    #[error("the statement is too deep: more than {0} words and operators without a comma between them")]
    TooDeep(usize),
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

impl Refusal {
    /// Of what the parser says only what it expected: it quotes what it found, which may be a value of the client's.
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
