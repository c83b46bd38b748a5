//! Splits a text into its statements.

use std::ops::Range;

use sqlparser::tokenizer::Token;

use crate::parse::{Places, tokens};

/// Returns the byte ranges of the statements in `text`, without the semicolons that end them and without empty statements.
/// `None` if the text cannot be split with certainty, or is too long to split.
pub fn split(text: &str) -> Option<Vec<Range<usize>>> {
    if !text.contains(';') {
        return Some(std::iter::once(0..text.len()).collect());
    }
    let tokens = tokens(text).ok()?;
    let (mut pieces, mut begin, mut depth, mut empty) = (Vec::new(), 0, 0_i32, true);
    let mut places = Places::of(text);
    for token in &tokens {
        match &token.token {
            Token::LParen => depth += 1,
            Token::RParen => depth -= 1,
            // Statements inside a statement: their semicolons do not end it.
            Token::Word(word) if word.value.eq_ignore_ascii_case("ATOMIC") => return None,
            Token::SemiColon if depth == 0 => {
                let at = places.byte(token.span.start);
                if !empty {
                    pieces.push(begin..at);
                }
                (begin, empty) = (at + 1, true);
                continue;
            }
            _ => {}
        }
        empty &= matches!(token.token, Token::Whitespace(_) | Token::EOF);
    }
    if !empty {
        pieces.push(begin..text.len());
    }
    Some(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: &str) -> Vec<&str> {
        split(text).expect("certain").into_iter().map(|range| text[range].trim()).collect()
    }

    #[test]
    fn semicolons_end_statements_but_not_inside_of_something() {
        assert_eq!(pieces("select 1"), ["select 1"]);
        assert_eq!(
            pieces("begin;\nupdate t set a = ';' ; -- x;\ncommit;"),
            ["begin", "update t set a = ';'", "-- x;\ncommit"]
        );
        assert_eq!(
            pieces("select 'ä;', $$;$$, \";\" /* ; */; select 2;;"),
            ["select 'ä;', $$;$$, \";\" /* ; */", "select 2"]
        );
        assert_eq!(
            pieces("create rule r as on insert to t do (delete from a; delete from b); x"),
            ["create rule r as on insert to t do (delete from a; delete from b)", "x"]
        );
        assert_eq!(split("create function f() begin atomic select 1; end;"), None);
        assert_eq!(pieces(" ; ; "), [""; 0]);
    }
}
