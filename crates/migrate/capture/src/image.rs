//! The hidden column: a record in the server's own notation, as one text.

use stillpoint_migrate_replay::Token;

use crate::error::Refusal;
use crate::rewrite::{Hash, RewrittenStatement};

/// A row that was written, with its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Values of the columns of [`RewrittenStatement::image`], as text.
    pub values: Vec<Option<String>>,
    /// Tokens that the row touched.
    pub tokens: Vec<Token>,
}

impl RewrittenStatement {
    /// Reads the hidden column of one row.
    ///
    /// # Errors
    /// [`Refusal::Image`] if it is not a record with the expected number of columns.
    pub fn read(&self, hidden: &str) -> Result<Image, Refusal> {
        let mut values = fields(hidden).ok_or(Refusal::Image(self.table.oid))?;
        if values.len() != self.image.len() + self.hashes.len() {
            return Err(Refusal::Image(self.table.oid));
        }
        let mut tokens = Vec::with_capacity(self.hashes.len());
        for (hash, value) in self.hashes.iter().zip(values.split_off(self.image.len())) {
            // NULL: no other row can conflict with it.
            let Some(value) = value else { continue };
            let value = value.parse::<i64>().map_err(|_| Refusal::Image(self.table.oid))?.cast_unsigned();
            let table = self.table.oid;
            tokens.push(match *hash {
                Hash::Row => Token::Row(table, value),
                Hash::Unique { index } => Token::Unique(table, index, value),
                Hash::Parent { table, index } => Token::Parent(table, index, value),
            });
        }
        Ok(Image { values, tokens })
    }
}

/// The fields of a record: `(a,"b ""c""",,"")`; an empty place between commas is NULL.
fn fields(record: &str) -> Option<Vec<Option<String>>> {
    let inside = record.strip_prefix('(')?.strip_suffix(')')?;
    let (mut fields, mut field, mut quoted, mut is_null) = (Vec::new(), String::new(), false, true);
    let mut chars = inside.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                chars.next();
                field.push('"');
            }
            '"' => (quoted, is_null) = (!quoted, false),
            '\\' => {
                field.push(chars.next()?);
                is_null = false;
            }
            ',' if !quoted => {
                fields.push((!is_null).then(|| std::mem::take(&mut field)));
                is_null = true;
            }
            c => {
                field.push(c);
                is_null = false;
            }
        }
    }
    fields.push((!is_null).then_some(field));
    (!quoted).then_some(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_the_server_writes_them() {
        let read = |text| fields(text).map(|fields| fields.into_iter().map(|f| f.unwrap_or("NULL".into())).collect());
        assert_eq!(read("(1,,\"\")"), Some(vec!["1".to_owned(), "NULL".into(), String::new()]));
        let tricky = r#"("a ""b"" \\ c","x,y)","{1,2}",)"#;
        let expected = ["a \"b\" \\ c", "x,y)", "{1,2}", "NULL"].map(str::to_owned);
        assert_eq!(read(tricky), Some(expected.to_vec()));
        for wrong in ["", "(", "1,2", "(\"a)", "(a\\"] {
            assert_eq!(fields(wrong), None, "{wrong}");
        }
    }
}
