//! Patterns for schemas and tables, in the notation of psql and pg_dump: `SCHEMA`, `SCHEMA.*` or `SCHEMA.TABLE`.

use serde::{Deserialize, Serialize};

/// Maximum length of a pattern, in bytes: two names, each with all characters quoted, and wildcards.
const PATTERN_BYTES_MAX: usize = 1024;

/// One character of a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    /// This character.
    Character(char),
    /// Any one character: `?`.
    One,
    /// Any number of characters: `*`.
    Many,
}

/// A pattern for the names of a schema, or of a table, view or sequence in a schema.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern {
    text: String,
    schema: Vec<Piece>,
    /// `None` for a whole schema.
    relation: Option<Vec<Piece>>,
}

impl Pattern {
    /// Parses a pattern. As in psql, letters outside of double quotes are folded to lower case, and everything inside of
    /// double quotes stands for itself; two double quotes there stand for one.
    ///
    /// # Errors
    ///
    /// The reason why the text is no pattern.
    pub fn parse(text: &str) -> Result<Pattern, String> {
        if text.len() > PATTERN_BYTES_MAX {
            return Err(format!("a pattern has more than {PATTERN_BYTES_MAX} bytes"));
        }
        let mut parts = vec![Vec::new()];
        let (mut quoted, mut characters) = (false, text.chars().peekable());
        while let Some(character) = characters.next() {
            let piece = match character {
                '"' if quoted && characters.peek() == Some(&'"') => {
                    characters.next();
                    Piece::Character('"')
                }
                '"' => {
                    quoted = !quoted;
                    continue;
                }
                '.' if !quoted => {
                    parts.push(Vec::new());
                    continue;
                }
                '*' if !quoted => Piece::Many,
                '?' if !quoted => Piece::One,
                _ if quoted => Piece::Character(character),
                _ => Piece::Character(character.to_ascii_lowercase()),
            };
            parts.last_mut().into_iter().for_each(|part: &mut Vec<Piece>| part.push(piece));
        }
        if quoted {
            return Err(format!("pattern `{text}` has a double quote without its end"));
        }
        if parts.iter().any(Vec::is_empty) {
            return Err(format!("pattern `{text}` has an empty name"));
        }
        let mut parts = parts.into_iter();
        match (parts.next(), parts.next(), parts.next()) {
            (Some(schema), relation, None) => Ok(Pattern { text: text.into(), schema, relation }),
            _ => Err(format!("pattern `{text}` has more than two names: it must be SCHEMA, SCHEMA.* or SCHEMA.TABLE")),
        }
    }

    /// Returns true if it is for schemas with everything in them, not for tables.
    pub(crate) fn is_of_schemas(&self) -> bool {
        self.relation.is_none()
    }

    /// Returns true if it is for whole schemas, and for this one.
    pub(crate) fn selects_schema(&self, schema: &str) -> bool {
        self.is_of_schemas() && matches(&self.schema, schema)
    }

    /// Returns true if it is for tables, and for this one.
    pub(crate) fn selects_relation(&self, schema: &str, name: &str) -> bool {
        self.relation.as_ref().is_some_and(|relation| matches(relation, name)) && matches(&self.schema, schema)
    }

    /// The pattern as it was given.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}

impl TryFrom<String> for Pattern {
    type Error = String;

    fn try_from(text: String) -> Result<Pattern, String> {
        Pattern::parse(&text)
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> String {
        pattern.text
    }
}

/// Pattern for exactly one relation.
pub(crate) fn exact(schema: &str, name: &str) -> String {
    let part = |name: &str| {
        let plain = |(at, c): (usize, char)| c.is_ascii_lowercase() || c == '_' || at > 0 && c.is_ascii_digit();
        match !name.is_empty() && name.chars().enumerate().all(plain) {
            true => name.to_owned(),
            false => format!("\"{}\"", name.replace('"', "\"\"")),
        }
    };
    format!("{}.{}", part(schema), part(name))
}

/// Returns true if the pieces describe the whole name. The time is at most the product of both lengths.
fn matches(pieces: &[Piece], name: &str) -> bool {
    let name: Vec<char> = name.chars().collect();
    let (mut piece, mut at, mut last_many) = (0, 0, None);
    while at < name.len() {
        match pieces.get(piece) {
            Some(Piece::Many) => {
                last_many = Some((piece, at));
                piece += 1;
                continue;
            }
            Some(Piece::One) => {}
            Some(Piece::Character(character)) if *character == name[at] => {}
            _ => {
                // The last `*` stands for one character more.
                let Some((many, from)) = last_many else { return false };
                last_many = Some((many, from + 1));
                (piece, at) = (many + 1, from + 1);
                continue;
            }
        }
        (piece, at) = (piece + 1, at + 1);
    }
    pieces[piece..].iter().all(|piece| *piece == Piece::Many)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_matched_as_psql_does() {
        for (pattern, schema, name, wanted) in [
            ("sales.orders", "sales", "orders", true),
            ("Sales.ORDERS", "sales", "orders", true),
            ("\"Sales\".orders", "sales", "orders", false),
            ("\"Sales\".orders", "Sales", "orders", true),
            ("sales.*", "sales", "", true),
            ("sales.*", "sales", "a.b", true),
            ("sales.o*s", "sales", "orders", true),
            ("sales.o*s", "sales", "orderx", false),
            ("sales.*a*b*", "sales", "xxaxxaxb", true),
            ("sales.*a*b", "sales", "xxaxxbxa", false),
            ("sales.order?", "sales", "orders", true),
            ("sales.order?", "sales", "order", false),
            ("s?les.*", "s\u{e4}les", "t", true),
            ("sales.\"a*\"*", "sales", "a*b", true),
            ("sales.\"a*\"*", "sales", "ab", false),
            ("sales.\"a\"\"b\"", "sales", "a\"b", true),
            ("\"a.b\".\"c\nd\"", "a.b", "c\nd", true),
            ("sales", "sales", "orders", false),
        ] {
            let parsed = Pattern::parse(pattern).unwrap();
            assert_eq!(parsed.selects_relation(schema, name), wanted, "{pattern} for {schema}.{name}");
        }
        let whole = Pattern::parse("\"S\"*").unwrap();
        assert!(whole.is_of_schemas() && whole.selects_schema("Sales") && !whole.selects_schema("sales"));
    }

    #[test]
    fn what_is_no_pattern_is_refused_with_its_reason() {
        let long = "a".repeat(PATTERN_BYTES_MAX + 1);
        for (text, why) in [
            ("", "empty name"),
            (".orders", "empty name"),
            ("sales.", "empty name"),
            ("\"\".orders", "empty name"),
            ("\"sales.orders", "without its end"),
            ("shop.sales.orders", "more than two names"),
            (long.as_str(), "more than 1024 bytes"),
        ] {
            let refused = Pattern::parse(text).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }

    #[test]
    fn an_exact_pattern_selects_one_relation() {
        for (schema, name) in [("sales", "orders"), ("S.a\"les", "O*rd?ers"), ("1", "2"), ("a b", "\u{c4}\nx")] {
            let pattern = Pattern::parse(&exact(schema, name)).unwrap();
            assert!(pattern.selects_relation(schema, name), "{}", pattern.text());
            assert!(!pattern.selects_relation(schema, &format!("{name}x")));
        }
        assert_eq!(exact("sales", "orders_1"), "sales.orders_1");
    }

    #[test]
    fn many_wildcards_take_no_time() {
        let pattern = Pattern::parse(&format!("s.{}b", "*a".repeat(400))).unwrap();
        let begun = std::time::Instant::now();
        assert!(!pattern.selects_relation("s", &"a".repeat(63)));
        assert!(begun.elapsed() < std::time::Duration::from_secs(1));
    }
}
