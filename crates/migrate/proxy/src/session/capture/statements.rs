//! Knowledge about a session's statements.

use super::CapturedSession;
use super::inbox::SMALL_MESSAGE_BYTES;
use super::replies::beginning;
use std::sync::Arc;
use stillpoint_migrate_capture::{Control, Effect, RewrittenStatement, rewrite};
use stillpoint_migrate_wire::touch;

/// Most texts that are remembered.
const KNOWN_TEXTS_MAX: usize = 1000;

/// A statement as it was parsed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Statement {
    pub(super) text: Vec<u8>,
    /// Number and types of its parameters, as in Parse.
    pub(super) types: Vec<u8>,
}

/// The original statement of a twin.
pub(super) type TwinKey = Arc<Statement>;

/// The types of parameters, as in Parse.
pub(super) fn types(oids: &[u32]) -> Vec<u8> {
    let mut bytes = u16::try_from(oids.len()).unwrap_or(u16::MAX).to_be_bytes().to_vec();
    oids.iter().for_each(|oid| bytes.extend(oid.to_be_bytes()));
    bytes
}

/// Effect of a statement.
#[derive(Debug)]
pub(super) enum StatementEffect {
    Nothing,
    Writes(Arc<RewrittenStatement>),
    Control(Control),
    /// A write that cannot be captured, with the reason.
    Beyond(String),
}

/// Effect of a statement; `touches` if others must be judged again after it.
#[derive(Debug)]
pub(super) struct StatementFacts {
    pub(super) what: StatementEffect,
    pub(super) touches: bool,
}

impl StatementFacts {
    pub(super) fn writes(&self) -> Option<&Arc<RewrittenStatement>> {
        match &self.what {
            StatementEffect::Writes(rewritten) => Some(rewritten),
            _ => None,
        }
    }
}

impl CapturedSession {
    /// Judges one statement; nothing is rewritten once the capture is over or the transaction has failed.
    pub(super) fn judge(&mut self, text: &[u8]) -> Arc<StatementFacts> {
        if let Some(known) = self.judged.get(text) {
            return known.clone();
        }
        let what = match std::str::from_utf8(text).map(|text| rewrite(text, &self.catalogue)) {
            Ok(Ok(Effect::Nothing)) => StatementEffect::Nothing,
            Ok(Ok(Effect::Writes(rewritten))) => StatementEffect::Writes(Arc::new(rewritten)),
            Ok(Ok(Effect::Control(control))) => StatementEffect::Control(control),
            Ok(Ok(Effect::Barrier(_))) => StatementEffect::Beyond(format!("{} is not captured", named(text))),
            Ok(Err(refusal)) => StatementEffect::Beyond(format!("{}: {refusal}", named(text))),
            Err(_) => StatementEffect::Beyond("a statement is not UTF-8".into()),
        };
        let word = first_words(text);
        let sets =
            ["SET", "RESET", "DISCARD", "DEALLOCATE", "DROP"].iter().any(|known| word.split(' ').next() == Some(known));
        let judged = Arc::new(StatementFacts { what, touches: sets || touch(text).state });
        if self.judged.len() >= KNOWN_TEXTS_MAX {
            self.judged.clear();
        }
        // A large one would take more memory than its message.
        if text.len() <= SMALL_MESSAGE_BYTES {
            self.judged.insert(text.to_vec(), judged.clone());
        }
        judged
    }

    /// Records a statement after which others must be judged again, and twins may be gone.
    pub(super) fn touched(&mut self) {
        self.stale = true;
        self.transaction.touched = true;
        // Twins that still exist end with the session: a new twin has a new name.
        self.forgotten.extend(self.twins.drain().map(|(_, twin)| twin));
    }
}

/// Returns true if the meaning of a statement depends on the facts.
pub(super) fn depends_on_facts(text: &[u8]) -> bool {
    let words = first_words(text);
    let plain =
        ["SELECT", "BEGIN", "START", "COMMIT", "END", "ROLLBACK", "SET", "SHOW", "FETCH", "SAVEPOINT", "RELEASE", ""];
    !plain.contains(&words.split(' ').next().unwrap_or_default().trim_end_matches(';'))
}

/// The first two words, unless they may be values; for messages.
fn named(text: &[u8]) -> String {
    beginning(&first_words(text))
}

/// The first two words.
fn first_words(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(200)]).into_owned();
    let words = text.split_whitespace().take(2).map(str::to_ascii_uppercase);
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_is_named_without_values() {
        assert_eq!(named(b"call note('secret')"), "CALL");
        assert_eq!(named(b"truncate t, u"), "TRUNCATE");
        assert_eq!(named(b"DO 'secret words'"), "DO");
        assert_eq!(named(b"COPY t FROM STDIN"), "COPY T");
        assert_eq!(named(b"'secret"), "");
    }
}
