//! A C or C++ text as words, brackets and directives.

use std::ops::Range;

/// One word, number, literal or sign.
#[derive(Debug, Clone)]
pub(crate) struct Token {
    pub(crate) range: Range<usize>,
    /// Index of the bracket around it.
    pub(crate) parent: Option<usize>,
    /// Index of a bracket's partner.
    pub(crate) partner: Option<usize>,
}

/// A text with its tokens. Comments and directives are no tokens.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    pub(crate) text: &'a str,
    pub(crate) tokens: Vec<Token>,
    /// End of the first run of `#include` lines that no condition governs.
    pub(crate) includes_end: usize,
}

enum Piece {
    Token(Range<usize>),
    Directive(Range<usize>),
}

impl<'a> Source<'a> {
    pub(crate) fn read(text: &'a str) -> Source<'a> {
        let mut source = Source { text, tokens: Vec::new(), includes_end: 0 };
        let mut open: Vec<usize> = Vec::new();
        // The brackets open at each #if: all its branches start with these.
        let mut conditions: Vec<Vec<usize>> = Vec::new();
        for piece in Scanner::new(text, true) {
            match piece {
                Piece::Token(range) => source.token(range, &mut open),
                Piece::Directive(range) => {
                    let end = range.end;
                    let words = words(&text[range.start + 1..end]);
                    match words.first().map(String::as_str) {
                        Some("if" | "ifdef" | "ifndef") => conditions.push(open.clone()),
                        Some("else" | "elif") => {
                            if let Some(at_start) = conditions.last() {
                                open.clone_from(at_start);
                            }
                        }
                        Some("endif") => drop(conditions.pop()),
                        Some("include") if conditions.is_empty() && source.tokens.is_empty() => {
                            source.includes_end = end;
                        }
                        _ => {}
                    }
                }
            }
        }
        source
    }

    fn token(&mut self, range: Range<usize>, open: &mut Vec<usize>) {
        let index = self.tokens.len();
        let word = &self.text[range.clone()];
        let mut token = Token { range, parent: open.last().copied(), partner: None };
        match word {
            "(" | "[" | "{" => open.push(index),
            ")" | "]" | "}" => {
                let closes = |at: usize| matches!((self.word(at), word), ("(", ")") | ("[", "]") | ("{", "}"));
                if let Some(opening) = open.iter().rposition(|&at| closes(at)) {
                    let partner = open[opening];
                    open.truncate(opening);
                    token.partner = Some(partner);
                    token.parent = open.last().copied();
                    self.tokens[partner].partner = Some(index);
                }
            }
            _ => {}
        }
        self.tokens.push(token);
    }

    pub(crate) fn word(&self, at: usize) -> &'a str {
        self.tokens.get(at).map_or("", |token| &self.text[token.range.clone()])
    }

    /// Returns true if the tokens at `at` match `pattern`.
    pub(crate) fn matches(&self, at: usize, pattern: &[String]) -> bool {
        at + pattern.len() <= self.tokens.len() && pattern.iter().enumerate().all(|(i, word)| self.word(at + i) == word)
    }
}

/// Returns the tokens of a text, as text.
pub(crate) fn words(text: &str) -> Vec<String> {
    Scanner::new(text, false)
        .filter_map(|piece| match piece {
            Piece::Token(range) => Some(text[range].to_owned()),
            Piece::Directive(_) => None,
        })
        .collect()
}

struct Scanner<'a> {
    text: &'a str,
    at: usize,
    /// True if the line has only white space so far: a `#` here is a directive.
    line_start: bool,
}

const TWO_SIGNS: [&str; 2] = ["::", "->"];

impl<'a> Scanner<'a> {
    fn new(text: &'a str, line_start: bool) -> Scanner<'a> {
        Scanner { text, at: 0, line_start }
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn skip_to(&mut self, end: &str) {
        self.at = self.rest().find(end).map_or(self.text.len(), |found| self.at + found + end.len());
    }

    /// Reads a directive. It ends with its line, unless a backslash precedes the line's end.
    fn directive(&mut self) -> Range<usize> {
        let start = self.at;
        loop {
            self.skip_to("\n");
            let line = self.text[start..self.at].trim_end();
            if self.at == self.text.len() || !line.ends_with('\\') {
                return start..self.at;
            }
        }
    }

    fn literal(&mut self, quote: u8) -> Range<usize> {
        let start = self.at;
        let bytes = self.text.as_bytes();
        self.at += 1;
        while self.at < bytes.len() && bytes[self.at] != quote && bytes[self.at] != b'\n' {
            self.at += if bytes[self.at] == b'\\' { 2 } else { 1 };
        }
        self.at = (self.at + 1).min(bytes.len());
        while !self.text.is_char_boundary(self.at) {
            self.at += 1;
        }
        start..self.at
    }

    fn sign_or_word(&mut self) -> Range<usize> {
        let start = self.at;
        let rest = self.rest();
        let word = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        let two = TWO_SIGNS.iter().any(|sign| rest.starts_with(sign));
        let first = rest.chars().next().map_or(1, char::len_utf8);
        self.at += if word > 0 {
            word
        } else if two {
            2
        } else {
            first
        };
        start..self.at
    }
}

impl Iterator for Scanner<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        loop {
            let rest = self.rest();
            let first = rest.bytes().next()?;
            match first {
                b'\n' => {
                    self.line_start = true;
                    self.at += 1;
                }
                _ if first.is_ascii_whitespace() => self.at += 1,
                b'/' if rest.starts_with("//") => {
                    self.at = rest.find('\n').map_or(self.text.len(), |end| self.at + end);
                }
                b'/' if rest.starts_with("/*") => {
                    self.at += 2;
                    self.skip_to("*/");
                }
                b'#' if self.line_start => return Some(Piece::Directive(self.directive())),
                b'"' | b'\'' => {
                    self.line_start = false;
                    return Some(Piece::Token(self.literal(first)));
                }
                _ => {
                    self.line_start = false;
                    return Some(Piece::Token(self.sign_or_word()));
                }
            }
        }
    }
}
