//! Statements that may change what a session carries, judged by their text without parsing it.
//!
//! The obvious way is a parser. It costs microseconds for each statement and knows one dialect, and a function may hide
//! anything from it. The proxy asks the server what the session carries. This module decides only *when to ask again*.
//! Asking once too often costs a millisecond, so everything doubtful counts as a change.

use aho_corasick::{AhoCorasick, AhoCorasickKind};
use std::sync::LazyLock;

/// Possible effect of a statement on what its session carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Touch {
    /// Settings, role, prepared statements, channels, locks, cursors or temporary tables may differ afterwards.
    pub state: bool,
    /// The statement may name settings with a dot, which no catalogue lists.
    pub custom: bool,
}

/// First words of statements that change what a session carries.
const STATE_FIRST_WORDS: [&str; 13] = [
    "SET",
    "RESET",
    "LISTEN",
    "UNLISTEN",
    "PREPARE",
    "DEALLOCATE",
    "EXECUTE",
    "DISCARD",
    "DECLARE",
    "CLOSE",
    "LOAD",
    "CALL",
    "DO",
];
/// Words after SET for a change that lasts one transaction only.
const TRANSIENT_SET_WORDS: [&str; 3] = ["LOCAL", "TRANSACTION", "CONSTRAINTS"];

/// Words that count anywhere in the text; the first is the one that names settings.
const STATE_WORDS: [&str; 4] = ["set_config", "advisory", "temp", "setseed"];

static STATE_WORD_MATCHER: LazyLock<Option<AhoCorasick>> = LazyLock::new(|| {
    AhoCorasick::builder().ascii_case_insensitive(true).kind(Some(AhoCorasickKind::DFA)).build(STATE_WORDS).ok()
});

/// Judges the text of one Query or Parse, which may hold several statements.
pub fn touch(sql: &[u8]) -> Touch {
    let mut touch = Touch::default();
    let mut rest = sql;
    loop {
        let (word, after) = first_word(rest);
        if STATE_FIRST_WORDS.iter().any(|known| word.eq_ignore_ascii_case(known.as_bytes())) {
            let is_set = word.eq_ignore_ascii_case(b"SET");
            let second = first_word(after).0;
            let transient =
                is_set && TRANSIENT_SET_WORDS.iter().any(|known| second.eq_ignore_ascii_case(known.as_bytes()));
            touch.state |= !transient;
            touch.custom |= is_set;
        }
        // A semicolon inside a string begins no statement; if it counts as one, the proxy asks once too often.
        match rest.iter().position(|b| *b == b';') {
            Some(at) => rest = &rest[at + 1..],
            None => break,
        }
    }
    match STATE_WORD_MATCHER.as_ref() {
        Some(words) => {
            for found in words.find_iter(sql) {
                touch.state = true;
                touch.custom |= found.pattern().as_usize() == 0;
            }
        }
        None => touch = Touch { state: true, custom: true },
    }
    touch
}

/// The first word and the text after it; spaces, parentheses and comments before the word are skipped.
pub fn first_word(mut sql: &[u8]) -> (&[u8], &[u8]) {
    loop {
        sql = sql.trim_ascii_start();
        if let Some(comment) = sql.strip_prefix(b"--") {
            let Some(end) = comment.iter().position(|b| *b == b'\n') else { return (&[], &[]) };
            sql = &comment[end..];
        } else if let Some(comment) = sql.strip_prefix(b"/*") {
            // Comments nest; at worst the words inside an outer comment count as a statement.
            let Some(end) = comment.windows(2).position(|pair| pair == b"*/") else { return (&[], &[]) };
            sql = &comment[end + 2..];
        } else {
            let end = sql.iter().position(|b| !(b.is_ascii_alphanumeric() || *b == b'_')).unwrap_or(sql.len());
            return sql.split_at(end);
        }
    }
}

/// Names with a dot to which `sql` may give a value: `SET a.b = ...`, `set_config('a.b', ...)`.
pub fn custom_settings(sql: &str) -> Vec<String> {
    let name_of = |text: &str| -> Option<String> {
        let text = text.trim_start().trim_start_matches(['\'', '"']);
        let end = text.find(|c: char| !(c.is_alphanumeric() || "_.$".contains(c))).unwrap_or(text.len());
        let name = &text[..end];
        (name.contains('.') && name.len() <= 128).then(|| name.to_ascii_lowercase())
    };
    let lower = sql.to_ascii_lowercase();
    let mut names: Vec<String> = Vec::new();
    for (at, _) in lower.match_indices("set_config") {
        let after = lower[at + "set_config".len()..].trim_start();
        names.extend(after.strip_prefix('(').and_then(name_of));
    }
    for (at, _) in lower.match_indices("set") {
        let after = lower[at + 3..].trim_start();
        let after = after.strip_prefix("session").map_or(after, str::trim_start);
        names.extend(name_of(after));
    }
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_that_change_nothing_are_left_alone() {
        for sql in [
            "select 1",
            "UPDATE t SET a = 1 WHERE b = 2",
            "BEGIN; UPDATE t SET a = 1; COMMIT",
            "SET LOCAL work_mem = 1",
            "set transaction read only",
            "SET CONSTRAINTS ALL IMMEDIATE",
            "/* set */ insert into t values (1) -- set",
            "",
            ";;",
            "--",
            "/* open",
        ] {
            assert!(!touch(sql.as_bytes()).state, "{sql:?}");
        }
    }

    #[test]
    fn statements_that_may_change_something_are_noticed() {
        for sql in [
            "set work_mem = 1",
            "  /* a */ -- b\n SeT role x",
            "begin; listen c; commit",
            "select pg_advisory_lock(1)",
            "select Set_Config('a.b', 'c', false)",
            "create temp table t (a int)",
            "create temporary table t (a int)",
            "select * into temp t2 from t",
            "DO $$ begin end $$",
            "call p()",
            "execute s",
            "prepare s as select 1",
            "discard all",
            "select setseed(0.5)",
            "declare c cursor with hold for select 1",
        ] {
            assert!(touch(sql.as_bytes()).state, "{sql:?}");
        }
    }

    #[test]
    fn names_of_custom_settings_are_found() {
        assert_eq!(custom_settings("SELECT set_config('App.Tenant', $1, false)"), ["app.tenant"]);
        assert_eq!(custom_settings("set session app.user to 'x'; SET \"a.b\" = 1"), ["a.b", "app.user"]);
        assert_eq!(custom_settings("select 1 set"), [""; 0]);
        assert_eq!(custom_settings("set work_mem = '4MB'"), [""; 0]);
    }

    #[test]
    fn any_bytes_are_judged() {
        assert!(!touch(b"\xff\xfe;\0;/*;--").state);
    }
}
