//! Text from clients and servers, in errors and lines of the log: it may hold a line of its own, or what moves a terminal's cursor.

use std::fmt::{self, Write};

/// Characters that are shown; errors are lines.
const SHOWN_MAX: usize = 500;

/// A text from outside. It shows as a part of one line, and goes back to a client as it is.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Untrusted(String);

impl Untrusted {
    pub(crate) fn new(text: impl Into<String>) -> Untrusted {
        Untrusted(text.into())
    }

    /// As it came, for a protocol that says where it ends.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for Untrusted {
    fn from(text: String) -> Self {
        Untrusted(text)
    }
}

impl From<&str> for Untrusted {
    fn from(text: &str) -> Self {
        Untrusted(text.into())
    }
}

/// Returns true if a character does more than stand in its line: controls, and those that end lines or turn their direction.
fn is_special(c: char) -> bool {
    c.is_control()
        || matches!(c, '\\' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

impl fmt::Display for Untrusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, c) in self.0.chars().enumerate() {
            if at == SHOWN_MAX {
                return f.write_str("...");
            }
            if is_special(c) { write!(f, "{}", c.escape_default())? } else { f.write_char(c)? }
        }
        Ok(())
    }
}

impl fmt::Debug for Untrusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_stays_in_its_line() {
        for (text, shown) in [
            ("plain \"text\", äö", "plain \"text\", äö"),
            ("a\nb\r\tc", "a\\nb\\r\\tc"),
            ("\u{1b}[2K\u{7f}\0\u{85}", "\\u{1b}[2K\\u{7f}\\u{0}\\u{85}"),
            ("a\u{2028}\u{202e}b\\n", "a\\u{2028}\\u{202e}b\\\\n"),
        ] {
            let untrusted = Untrusted::new(text);
            assert_eq!((untrusted.to_string().as_str(), untrusted.as_str()), (shown, text));
            assert_eq!(format!("{untrusted:?}"), format!("\"{shown}\""));
        }
        assert_eq!(Untrusted::new("x".repeat(9_000)).to_string().len(), SHOWN_MAX + 3);
    }
}
