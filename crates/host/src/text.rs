//! Untrusted text for a terminal or a log: names, messages and values of databases, processes, patches and peers.
//!
//! Such a text may contain escape sequences for a terminal (also with the one character U+009B), a line break that makes the rest look like
//! a line of this program, and marks that change the reading direction. Each of them becomes visible: `\n`, `\u{1b}`. All else stays, also
//! a backslash: the result is for people, not for programs to parse.

use std::borrow::Cow;
use std::fmt::Write;

/// Returns `text` as one line.
///
/// ```
/// use stillpoint_host::text::one_line;
/// assert_eq!(one_line("shop"), "shop");
/// assert_eq!(one_line("a\nstate: good\u{1b}[2K"), "a\\nstate: good\\u{1b}[2K");
/// ```
pub fn one_line(text: &str) -> Cow<'_, str> {
    shown(text, is_hidden, escape)
}

/// Returns `text` with its own line breaks and tabs, for texts of several lines. A name in such a text must go through [`one_line`] before.
pub fn lines(text: &str) -> Cow<'_, str> {
    shown(text, |c| is_hidden(c) && !matches!(c, '\n' | '\t'), escape)
}

/// Returns `text` with its line breaks, all lines but the first indented: none looks like a line of this program.
pub fn indented(text: &str) -> Cow<'_, str> {
    match lines(text) {
        text if text.contains('\n') => text.replace('\n', "\n    ").into(),
        text => text,
    }
}

/// Escapes such characters in a JSON text as numbers; its meaning does not change.
pub fn json(text: &str) -> Cow<'_, str> {
    // Outside of its strings JSON has none of them but blanks.
    let hide = |c: char| is_hidden(c) && !matches!(c, '\n' | '\r' | '\t');
    shown(text, hide, |character, written| {
        for unit in character.encode_utf16(&mut [0; 2]) {
            let _ = write!(written, "\\u{unit:04x}");
        }
    })
}

fn escape(character: char, written: &mut String) {
    written.extend(character.escape_default());
}

fn shown(text: &str, hide: impl Fn(char) -> bool, escape: impl Fn(char, &mut String)) -> Cow<'_, str> {
    if !text.contains(&hide) {
        return text.into();
    }
    let mut written = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if hide(character) {
            escape(character, &mut written);
        } else {
            written.push(character);
        }
    }
    written.into()
}

/// Returns true for a character that acts or is invisible on a terminal: controls, line separators, marks of direction, characters without
/// width.
fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(character,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_obeys_is_made_visible() {
        for (text, line) in [
            ("plain, äöü, 名前, \\, 'quoted'", "plain, äöü, 名前, \\, 'quoted'"),
            ("a\nb", "a\\nb"),
            ("a\r\tb", "a\\r\\tb"),
            ("\u{1b}]0;title\u{7}", "\\u{1b}]0;title\\u{7}"),
            ("\u{9b}31m\u{7f}\0", "\\u{9b}31m\\u{7f}\\u{0}"),
            ("a\u{202e}b\u{2066}c\u{200d}d\u{feff}", "a\\u{202e}b\\u{2066}c\\u{200d}d\\u{feff}"),
            ("a\u{2028}b\u{2029}\u{85}", "a\\u{2028}b\\u{2029}\\u{85}"),
            ("\u{e0041}", "\\u{e0041}"),
            ("", ""),
        ] {
            assert_eq!(one_line(text), line);
            assert_eq!(one_line(line), line, "what is visible stays");
        }
        assert!(matches!(one_line("shop"), Cow::Borrowed(_)));
    }

    #[test]
    fn every_character_is_one_that_a_terminal_shows() {
        let all: String = (0..=0x10_ffff).filter_map(char::from_u32).collect();
        for hidden in [one_line(&all), lines(&all), json(&all)] {
            let hidden = hidden.chars().find(|c| is_hidden(*c) && !matches!(c, '\n' | '\r' | '\t'));
            assert_eq!(hidden, None);
        }
    }

    #[test]
    fn lines_of_a_text_stay_and_none_looks_like_ours() {
        assert_eq!(lines("a\n\tb\u{1b}c\r\n"), "a\n\tb\\u{1b}c\\r\n");
        assert_eq!(indented("first\nstate: forged\ntry: it"), "first\n    state: forged\n    try: it");
        assert_eq!(indented("first\rsecond"), "first\\rsecond");
    }

    #[test]
    fn json_means_what_it_did() {
        assert_eq!(json("{\"a\":\"b\\n\"}"), "{\"a\":\"b\\n\"}");
        assert_eq!(json("[\"\u{9b}\u{202e}\u{e0041}\u{7f}\"]"), "[\"\\u009b\\u202e\\udb40\\udc41\\u007f\"]");
    }
}
