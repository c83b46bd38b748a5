//! Text from clients and servers, in errors and log lines: it may hold a line break, or codes that move a terminal's
//! cursor.

use std::fmt;
use stillpoint_host::text::one_line;

/// Most characters that are shown; errors are lines.
const SHOWN_CHARS_MAX: usize = 500;

/// Text from outside. It is shown as a part of one line, and goes back to a client unchanged.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct UntrustedText(String);

impl UntrustedText {
    pub(crate) fn new(text: impl Into<String>) -> UntrustedText {
        UntrustedText(text.into())
    }

    /// The text unchanged, for a protocol that marks its end.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for UntrustedText {
    fn from(text: String) -> Self {
        UntrustedText(text)
    }
}

impl From<&str> for UntrustedText {
    fn from(text: &str) -> Self {
        UntrustedText(text.into())
    }
}

impl fmt::Display for UntrustedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cut = self.0.char_indices().nth(SHOWN_CHARS_MAX).map(|(at, _)| at);
        f.write_str(&one_line(&self.0[..cut.unwrap_or(self.0.len())]))?;
        if cut.is_some() { f.write_str("...") } else { Ok(()) }
    }
}

impl fmt::Debug for UntrustedText {
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
            ("a\u{2028}\u{202e}b\\n", "a\\u{2028}\\u{202e}b\\n"),
        ] {
            let untrusted = UntrustedText::new(text);
            assert_eq!((untrusted.to_string().as_str(), untrusted.as_str()), (shown, text));
            assert_eq!(format!("{untrusted:?}"), format!("\"{shown}\""));
        }
        assert_eq!(UntrustedText::new("x".repeat(9_000)).to_string().len(), SHOWN_CHARS_MAX + 3);
    }
}
