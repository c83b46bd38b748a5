//! The parser with limits for a client's text: memory for its tokens, and stack for the depth of its tree.
//!
//! The parser's own limit is not enough: it counts only the parser's recursion. The parser reads a chain of operators in a
//! loop, but builds a tree as deep as the chain is long, and all code that walks or drops that tree recurses. So the depth is
//! bounded before parsing, from the tokens alone, and a tree is built and dropped on a stack that is large enough for it.
//!
//! The bound needs little knowledge of the grammar. Each level of the tree takes one token that is neither a literal nor a
//! separator; that token is inside the open brackets and after the last comma there. Only set operations chain across commas
//! (`SELECT 1, 2 UNION SELECT 3, 4`), so they count until their bracket closes. So memory alone limits the length of a list,
//! and this bound limits the length of a chain.

use sqlparser::ast::{Ident, ObjectName, Statement};
use sqlparser::dialect::PostgreSqlDialect;
use sqlparser::keywords::Keyword;
use sqlparser::parser::Parser;
use sqlparser::tokenizer::{Location, Token, TokenWithSpan, Tokenizer};
use std::str::Chars;

use crate::error::Refusal;

/// Maximum depth of a tree, in levels: a chain of 3,300 `a = 1 OR`.
pub(crate) const DEPTH_MAX: usize = 10_000;
/// Maximum number of tokens in one text, blanks included: 100 bytes each, and the tree takes twice that.
const TOKENS_MAX: usize = 1 << 20;
/// Bytes of stack for a tree of depth 0, and for each level. The comparison of two trees takes most: 2 to 3 KiB a level in an
/// unoptimized build (measured). The parser's own recursion has limits of its own and grows its stack by itself.
const STACK_BASE: usize = 512 << 10;
const STACK_PER_LEVEL: usize = 8 << 10;

/// Returns the identifier as the server reads it: in lower case unless it is quoted.
pub(crate) fn fold_case(ident: &Ident) -> String {
    if ident.quote_style.is_some() { ident.value.clone() } else { ident.value.to_lowercase() }
}

/// Returns the parts of a name as the server reads them.
pub(crate) fn name_parts(name: &ObjectName) -> Vec<String> {
    name.0.iter().filter_map(|part| part.as_ident()).map(fold_case).collect()
}

/// Parses `text` and passes its statements to `judge`. They are dropped before this returns: no other stack may walk them.
///
/// # Errors
/// [`Refusal::TooLong`] and [`Refusal::TooDeep`] before anything is parsed; [`Refusal::Unparsable`]; the refusals of `judge`.
pub(crate) fn parsed<T>(text: &str, judge: impl FnOnce(Vec<Statement>) -> Result<T, Refusal>) -> Result<T, Refusal> {
    let tokens = tokens(text)?;
    let depth = depth(&tokens);
    if depth > DEPTH_MAX {
        return Err(Refusal::TooDeep(DEPTH_MAX));
    }
    let stack = STACK_BASE + depth * STACK_PER_LEVEL;
    // Most texts need no separate stack.
    stacker::maybe_grow(stack, stack, || {
        let statements = Parser::new(&PostgreSqlDialect {}).with_tokens_with_locations(tokens).parse_statements();
        judge(statements.map_err(|error| Refusal::unparsable(&error))?)
    })
}

/// The tokens of `text` with their places.
///
/// # Errors
/// [`Refusal::TooLong`]; [`Refusal::Unparsable`].
pub(crate) fn tokens(text: &str) -> Result<Vec<TokenWithSpan>, Refusal> {
    // A token takes at least one byte.
    if text.len() > TOKENS_MAX && about_tokens(text) > TOKENS_MAX {
        return Err(Refusal::TooLong(TOKENS_MAX));
    }
    let tokens = Tokenizer::new(&PostgreSqlDialect {}, text).tokenize_with_location();
    tokens.map_err(|error| Refusal::unparsable(&error.into()))
}

/// Contents of one open bracket.
#[derive(Default)]
struct Level {
    /// Tokens after the last comma that may make the tree deeper.
    behind_comma: usize,
    set_operations: usize,
}

impl Level {
    fn depth(&self) -> usize {
        self.behind_comma + self.set_operations
    }
}

/// Upper bound of the depth of a tree of these tokens, in chained or nested constructs.
fn depth(tokens: &[TokenWithSpan]) -> usize {
    let (mut around, mut here) = (Vec::<Level>::new(), Level::default());
    let (mut depth_around, mut deepest) = (0, 0);
    for token in tokens {
        match &token.token {
            Token::Comma => here.behind_comma = 0,
            Token::SemiColon => here = Level::default(),
            Token::LParen | Token::LBracket | Token::LBrace => {
                here.behind_comma += 1;
                depth_around += here.depth();
                around.push(std::mem::take(&mut here));
            }
            Token::RParen | Token::RBracket | Token::RBrace => {
                if let Some(outer) = around.pop() {
                    depth_around -= outer.depth();
                    here = outer;
                }
            }
            Token::Word(word) => match word.keyword {
                Keyword::UNION | Keyword::INTERSECT | Keyword::EXCEPT | Keyword::MINUS => here.set_operations += 1,
                _ => here.behind_comma += 1,
            },
            Token::Whitespace(_) | Token::Period | Token::Number(..) | Token::Placeholder(_) => {}
            Token::SingleQuotedString(_) | Token::EscapedStringLiteral(_) | Token::DollarQuotedString(_) => {}
            _ => here.behind_comma += 1,
        }
        deepest = deepest.max(depth_around + here.depth());
    }
    deepest
}

/// Approximate number of tokens in a text; only the memory limit depends on it.
fn about_tokens(text: &str) -> usize {
    let (mut rest, mut count, mut escapes) = (text.as_bytes(), 0, false);
    while let Some(first) = rest.first() {
        let length = match first {
            b'\'' => quoted(rest, escapes),
            b'"' => quoted(rest, false),
            b'-' if rest.starts_with(b"--") => rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len()),
            b'$' => dollar_quoted(rest),
            b if is_of_word(*b) => rest.iter().position(|b| !is_of_word(*b)).unwrap_or(rest.len()),
            _ => 1,
        };
        escapes = matches!(&rest[..length], b"e" | b"E");
        (rest, count) = (&rest[length..], count + 1);
    }
    count
}

fn is_of_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// The length in bytes of the quoted text at the beginning of `text`; a doubled quote ends one quoted text and begins another.
fn quoted(text: &[u8], escapes: bool) -> usize {
    let mut at = 1;
    while let Some(byte) = text.get(at) {
        at += 1;
        match byte {
            b'\\' if escapes => at += 1,
            byte if *byte == text[0] => break,
            _ => {}
        }
    }
    at.min(text.len())
}

/// The length in bytes of `$tag$...$tag$`; 1 (the sign alone) for a parameter such as `$1`.
fn dollar_quoted(text: &[u8]) -> usize {
    let end = text.iter().skip(1).position(|b| !is_of_word(*b)).map(|at| at + 1);
    let Some(end) = end.filter(|end| text[*end] == b'$' && !text[1].is_ascii_digit()) else { return 1 };
    let (tag, inside) = text.split_at(end + 1);
    // Only a `$` can begin the closing tag.
    let mut places = inside.iter().enumerate().filter(|(_, b)| **b == b'$').map(|(at, _)| at);
    places.find(|at| inside[*at..].starts_with(tag)).map_or(text.len(), |at| at + 2 * tag.len())
}

/// Converts token locations in a text to byte offsets. The caller asks in ascending order, so the text is walked once.
pub(crate) struct Places<'t> {
    rest: Chars<'t>,
    at: usize,
    place: Location,
}

impl<'t> Places<'t> {
    pub(crate) fn of(text: &'t str) -> Places<'t> {
        Places { rest: text.chars(), at: 0, place: Location::new(1, 1) }
    }

    /// Returns the byte offset of a location. Lines and columns count from 1, columns in characters.
    pub(crate) fn byte(&mut self, place: Location) -> usize {
        while self.place < place {
            let Some(character) = self.rest.next() else { break };
            self.at += character.len_utf8();
            self.place = match character {
                '\n' => Location::new(self.place.line + 1, 1),
                _ => Location::new(self.place.line, self.place.column + 1),
            };
        }
        self.at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deep(text: &str) -> usize {
        depth(&tokens(text).unwrap())
    }

    #[test]
    fn chains_and_brackets_are_deep_and_lists_are_not() {
        for (text, levels) in [
            ("", 0),
            ("1 + 1 + 1", 2),
            ("1, 'x', $1, E'y', $$z$$", 0),
            ("foo.bar.baz", 3),
            ("((((1))))", 4),
            ("(1), (2), (3)", 1),
            ("(1 + 1 + 1), 1 + (2 + (3))", 4),
            ("1::int::int::int", 6),
            ("1::int[][][]", 5),
            ("1 + 1 + 1; 1 + 1", 2),
            ("1, 2 UNION 3, 4 UNION 5, 6", 2),
            ("(1 UNION 2, 3) + (1 UNION 2, 3)", 4),
            ("1))) + 1 + 1", 2),
        ] {
            assert_eq!(deep(text), levels, "{text}");
        }
        assert_eq!(deep(&format!("SELECT 1{}", " + 1".repeat(7_000))), 7_001);
        assert_eq!(deep(&format!("VALUES (1, -1){}", ", (1, -1)".repeat(7_000))), 3);
    }

    #[test]
    fn tokens_are_counted_without_what_stands_in_quotes() {
        for (text, count) in [
            ("", 0),
            ("ab c", 3),
            ("'a b c' , \"d e\"", 5),
            ("E'it\\'s, so' 1", 4),
            ("'a\\' , 1", 5),
            ("'it''s'", 2),
            ("-- a, b, c\n1", 3),
            ("$$ a, b $ c $$ 1", 3),
            ("$x$ a, $$ b $x$ 1", 3),
            ("$1 + $2", 7),
            ("'open , , ,", 1),
            ("$$ open , , ,", 1),
            ("E'\\", 2),
            ("$", 1),
        ] {
            assert_eq!(about_tokens(text), count, "{text}");
        }
    }

    #[test]
    fn a_long_text_is_taken_if_it_has_few_tokens() {
        let value = "x, ".repeat(400_000);
        assert_eq!(tokens(&format!("SELECT '{value}'")).unwrap().len(), 3);
        let refusal = tokens(&format!("SELECT {value} 1")).unwrap_err();
        assert_eq!(refusal, Refusal::TooLong(TOKENS_MAX));
    }

    #[test]
    fn places_are_found_in_one_walk() {
        let text = "ä 'b\nc' d\n\ne";
        let mut places = Places::of(text);
        let found: Vec<_> = tokens(text).unwrap().iter().map(|token| places.byte(token.span.start)).collect();
        assert_eq!(found, [0, 2, 3, 8, 9, 10, 11, 12]);
    }
}
