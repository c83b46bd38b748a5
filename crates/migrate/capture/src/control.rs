//! Statements recognized by their first words: transaction control, and statements that touch no row.

use crate::error::Refusal;
use crate::rewrite::{Control, Effect};

/// First words of statements whose writes the server does not return.
const OPAQUE_WORDS: [&str; 4] = ["CALL", "DO", "EXECUTE", "REFRESH"];

/// Judges `text` by its first words; `None` if the statement needs the parser.
pub(crate) fn by_first_words(text: &str) -> Option<Result<Effect, Refusal>> {
    let body = without_comments(text)?.trim_end_matches(|c: char| c == ';' || c.is_whitespace());
    let words: Vec<String> = body.split_whitespace().take(6).map(str::to_ascii_uppercase).collect();
    let word = |at: usize| words.get(at).map_or("", String::as_str);
    let control = |control| Some(Ok(Effect::Control(control)));
    let chain = words.windows(2).any(|pair| pair[0] == "AND" && pair[1] == "CHAIN");
    if let Some(hidden) = OPAQUE_WORDS.iter().find(|hidden| **hidden == word(0)) {
        return Some(Err(Refusal::NoReturning(hidden)));
    }
    if body.contains(';') {
        return None;
    }
    match (word(0), word(1)) {
        ("", _) => Some(Ok(Effect::Nothing)),
        ("COMMIT" | "ROLLBACK", "PREPARED") | ("PREPARE", "TRANSACTION") => {
            Some(Err(Refusal::NoReturning("a two-phase commit")))
        }
        ("BEGIN" | "START", _) => control(Control::Begin),
        ("COMMIT" | "END", _) => control(Control::Commit { chain }),
        ("ROLLBACK" | "ABORT", _) if words.iter().any(|word| word == "TO") => {
            control(Control::RollbackTo(last_name(body)))
        }
        ("ROLLBACK" | "ABORT", _) => control(Control::Rollback { chain }),
        ("SAVEPOINT", _) => control(Control::Savepoint(last_name(body))),
        ("RELEASE", _) => control(Control::Release(last_name(body))),
        // statements that change no row of any table
        (
            "VACUUM" | "ANALYZE" | "ANALYSE" | "LOCK" | "CHECKPOINT" | "SHOW" | "SET" | "RESET" | "LISTEN" | "UNLISTEN"
            | "NOTIFY" | "MOVE" | "FETCH" | "CLOSE" | "DISCARD" | "DEALLOCATE" | "REINDEX" | "CLUSTER" | "LOAD"
            | "PREPARE" | "TABLE",
            _,
        ) => Some(Ok(Effect::Nothing)),
        _ => None,
    }
}

/// The text from its first word on; `None` if a comment does not end.
fn without_comments(mut text: &str) -> Option<&str> {
    loop {
        text = text.trim_start();
        if let Some(comment) = text.strip_prefix("--") {
            text = comment.split_once('\n').map_or("", |(_, after)| after);
        } else if let Some(comment) = text.strip_prefix("/*") {
            let (inside, after) = comment.split_once("*/")?;
            // Comments nest; only the parser counts the levels.
            if inside.contains("/*") {
                return None;
            }
            text = after;
        } else {
            return Some(text);
        }
    }
}

/// The last name in the text, folded as the server folds it.
fn last_name(body: &str) -> String {
    match body.strip_suffix('"').and_then(|body| body.rsplit_once('"')) {
        Some((_, quoted)) => quoted.to_owned(),
        None => body.split_whitespace().next_back().unwrap_or_default().to_lowercase(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(text: &str) -> Control {
        match by_first_words(text) {
            Some(Ok(Effect::Control(control))) => control,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn transactions_begin_and_end() {
        assert_eq!(control("begin isolation level serializable;"), Control::Begin);
        assert_eq!(control("-- now\nSTART TRANSACTION"), Control::Begin);
        assert_eq!(control("/* x */ END"), Control::Commit { chain: false });
        assert_eq!(control("commit work and chain"), Control::Commit { chain: true });
        assert_eq!(control("COMMIT AND NO CHAIN"), Control::Commit { chain: false });
        assert_eq!(control("abort ; "), Control::Rollback { chain: false });
        assert_eq!(control("ROLLBACK TO SAVEPOINT Sp1"), Control::RollbackTo("sp1".into()));
        assert_eq!(control("savepoint \"My Point\""), Control::Savepoint("My Point".into()));
        assert_eq!(control("release sp1;"), Control::Release("sp1".into()));
    }

    #[test]
    fn the_rest_is_told_apart() {
        assert_eq!(by_first_words("SET a = 1"), Some(Ok(Effect::Nothing)));
        assert_eq!(by_first_words("  "), Some(Ok(Effect::Nothing)));
        assert_eq!(by_first_words("BEGIN; DELETE FROM t"), None);
        assert_eq!(by_first_words("/* a /* b */ c */ select 1"), None);
        assert_eq!(by_first_words("update t set a = 1"), None);
        for text in
            ["DO $$ BEGIN; END $$", "execute s(1)", "prepare transaction 'x'", "commit prepared 'x'", "CALL p()"]
        {
            assert!(matches!(by_first_words(text), Some(Err(Refusal::NoReturning(_)))), "{text}");
        }
    }
}
