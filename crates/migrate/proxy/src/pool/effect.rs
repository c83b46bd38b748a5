//! Effects of statements and functions on what a session keeps in its server process.

/// Effect on what a session keeps from one transaction to the next. A later value includes the earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) enum Effect {
    /// It keeps nothing.
    #[default]
    Nothing,
    /// Values of `currval` and `lastval` may differ.
    Sequences,
    /// The server must be asked what the session keeps.
    Unknown,
    /// It may keep something that no view of the server shows.
    Hidden,
}

/// Words that have an effect at any place of a text.
pub(super) const WORDS: [(&str, Effect); 10] = [
    ("set_config", Effect::Unknown),
    ("advisory", Effect::Unknown),
    ("temp", Effect::Unknown),
    // A name written by numbers of characters: it may be any name.
    ("u&\"", Effect::Unknown),
    ("setseed", Effect::Hidden),
    ("replication_origin", Effect::Hidden),
    ("nextval", Effect::Sequences),
    ("setval", Effect::Sequences),
    ("currval", Effect::Sequences),
    ("lastval", Effect::Sequences),
];

/// Functions that return what its sequences gave a session before.
pub(super) const SEQUENCE_READERS: [&str; 2] = ["currval", "lastval"];

/// Returns true if a text calls `set_config` with a name that it does not state: no question can name that setting.
pub(super) fn sets_unnamed_setting(text: &[u8]) -> bool {
    const CALL: &[u8] = b"set_config";
    let calls = text.windows(CALL.len()).enumerate().filter(|(_, word)| word.eq_ignore_ascii_case(CALL));
    let mut after = calls.map(|(at, _)| text[at + CALL.len()..].trim_ascii_start());
    after.any(|after| {
        let name = after.strip_prefix(b"\"").unwrap_or(after).trim_ascii_start();
        !name.strip_prefix(b"(").is_some_and(|name| name.trim_ascii_start().starts_with(b"'"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_settings_are_stated_or_not() {
        for (text, unnamed) in [
            ("select set_config('a.b', $1, false)", false),
            ("select pg_catalog.\"set_config\" ( 'a.b', '', true)", false),
            ("select 1", false),
            ("select SET_CONFIG($1, $2, false)", true),
            ("select set_config(E'a.b', '', false)", true),
            ("select set_config('a.b', '', false), set_config(name, '', false) from t", true),
            ("select set_config", true),
        ] {
            assert_eq!(sets_unnamed_setting(text.as_bytes()), unnamed, "{text}");
        }
    }
}
