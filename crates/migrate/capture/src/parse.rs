//! The parser, held to what a text of a client may take of it: memory for its tokens, and stack for the depth of its tree.
//!
//! The obvious way is the parser's own limit. It counts the parser's recursion only: a chain of operators is a loop there, and
//! a tree as deep as the chain is long, and whatever walks that tree recurses, the end of its life too. So the depth is bounded
//! before, by the tokens alone, and a tree lives and ends on a stack that is large enough for it.
//!
//! The bound needs to know little of the grammar: a level of the tree takes a token that is no literal and no separator, and
//! stands within the brackets that are open and behind the last comma there. Set operations alone chain up
//! across commas (`SELECT 1, 2 UNION SELECT 3, 4`): they count until their bracket closes. So lists may be as long as memory
//! allows, and chains may not.

use sqlparser::ast::Statement;
use sqlparser::dialect::PostgreSqlDialect;
use sqlparser::keywords::Keyword;
use sqlparser::parser::Parser;
use sqlparser::tokenizer::{Location, Token, TokenWithSpan, Tokenizer};
use std::str::Chars;

use crate::error::Refusal;

/// The deepest tree, in levels: a chain of 3,300 `a = 1 OR`.
pub(crate) const DEPTH_MAX: usize = 10_000;
/// Tokens of one text, blanks among them: 100 bytes each, and the tree twice that.
const TOKENS_MAX: usize = 1 << 20;
/// Bytes of stack for a tree without any depth, and for each level. A comparison of two trees takes most: 2 to 3 KiB a level
/// where nothing is optimized (measured). The parser's own descent, to which it sets limits, grows its stack by itself.
const STACK_BASE: usize = 512 << 10;
const STACK_PER_LEVEL: usize = 8 << 10;

/// Parses `text` and has its statements judged. They are gone when this returns: they must not be walked on another stack.
///
/// # Errors
/// [`Refusal::TooLong`] and [`Refusal::TooDeep`], before anything is parsed; [`Refusal::Unparsable`]; what `judge` refuses.
pub(crate) fn parsed<T>(text: &str, judge: impl FnOnce(Vec<Statement>) -> Result<T, Refusal>) -> Result<T, Refusal> {
    let tokens = tokens(text)?;
    let depth = depth(&tokens);
    if depth > DEPTH_MAX {
        return Err(Refusal::TooDeep(DEPTH_MAX));
    }
    let stack = STACK_BASE + depth * STACK_PER_LEVEL;
    // Most texts need no stack of their own.
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
    // A token is a byte at least.
    if text.len() > TOKENS_MAX && about_tokens(text) > TOKENS_MAX {
        return Err(Refusal::TooLong(TOKENS_MAX));
    }
    let tokens = Tokenizer::new(&PostgreSqlDialect {}, text).tokenize_with_location();
    tokens.map_err(|error| Refusal::unparsable(&error.into()))
}

/// What stands in a bracket.
#[derive(Default)]
struct Level {
    /// Tokens that may make the tree deeper, behind the last comma.
    behind_comma: usize,
    set_operations: usize,
}

impl Level {
    fn depth(&self) -> usize {
        self.behind_comma + self.set_operations
    }
}

/// A tree of these tokens is no deeper, counted in chained or nested constructs.
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

/// How many tokens a text has, about: it decides on memory, and on nothing else.
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

/// The length of a text in quotes, at the beginning of `text`; a doubled quote ends one and begins another.
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

/// The same of `$tag$...$tag$`; of a parameter its sign alone.
fn dollar_quoted(text: &[u8]) -> usize {
    let end = text.iter().skip(1).position(|b| !is_of_word(*b)).map(|at| at + 1);
    let Some(end) = end.filter(|end| text[*end] == b'$' && !text[1].is_ascii_digit()) else { return 1 };
    let (tag, inside) = text.split_at(end + 1);
    // Only a place with a `$` can be the end.
    let mut places = inside.iter().enumerate().filter(|(_, b)| **b == b'$').map(|(at, _)| at);
    places.find(|at| inside[*at..].starts_with(tag)).map_or(text.len(), |at| at + 2 * tag.len())
}

/// Where tokens begin in a text. They are asked for in their order, so that the text is walked once.
pub(crate) struct Places<'t> {
    rest: Chars<'t>,
    at: usize,
    place: Location,
}

impl<'t> Places<'t> {
    pub(crate) fn of(text: &'t str) -> Places<'t> {
        Places { rest: text.chars(), at: 0, place: Location::new(1, 1) }
    }

    /// The byte at which a place is. Lines and columns count from 1, columns in characters.
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
