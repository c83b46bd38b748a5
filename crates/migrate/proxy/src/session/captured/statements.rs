//! What is known of a session's statements.

use super::Captured;
use super::inbox::SMALL;
use super::replies::beginning;
use std::sync::Arc;
use stillpoint_migrate_capture::{Control, Rewritten, Seen, rewrite};
use stillpoint_migrate_wire::touch;

/// Texts that are remembered.
const JUDGED_MAX: usize = 1000;

/// A statement as it was parsed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Statement {
    pub(super) text: Vec<u8>,
    /// Number and types of its parameters, as in Parse.
    pub(super) types: Vec<u8>,
}

/// The statement that a twin is of.
pub(super) type TwinKey = Arc<Statement>;

/// The types of parameters, as in Parse.
pub(super) fn types(oids: &[u32]) -> Vec<u8> {
    let mut bytes = u16::try_from(oids.len()).unwrap_or(u16::MAX).to_be_bytes().to_vec();
    oids.iter().for_each(|oid| bytes.extend(oid.to_be_bytes()));
    bytes
}

/// What a statement does.
#[derive(Debug)]
pub(super) enum What {
    Nothing,
    Writes(Arc<Rewritten>),
    Control(Control),
    /// What it writes cannot be captured, and why.
    Beyond(String),
}

/// What a statement does, and whether others are to be judged anew after it.
#[derive(Debug)]
pub(super) struct Judged {
    pub(super) what: What,
    pub(super) touches: bool,
}

impl Judged {
    pub(super) fn writes(&self) -> Option<&Arc<Rewritten>> {
        match &self.what {
            What::Writes(rewritten) => Some(rewritten),
            _ => None,
        }
    }
}

impl Captured {
    /// Judges one statement; when nothing is captured any more, or the transaction has failed, nothing is rewritten.
    pub(super) fn judge(&mut self, text: &[u8]) -> Arc<Judged> {
        if let Some(known) = self.judged.get(text) {
            return known.clone();
        }
        let what = match std::str::from_utf8(text).map(|text| rewrite(text, &self.catalogue)) {
            Ok(Ok(Seen::Nothing)) => What::Nothing,
            Ok(Ok(Seen::Writes(rewritten))) => What::Writes(Arc::new(rewritten)),
            Ok(Ok(Seen::Control(control))) => What::Control(control),
            Ok(Ok(Seen::Barrier(_))) => What::Beyond(format!("{} is not captured", named(text))),
            Ok(Err(refusal)) => What::Beyond(format!("{}: {refusal}", named(text))),
            Err(_) => What::Beyond("a statement is not UTF-8".into()),
        };
        let word = first_words(text);
        let sets =
            ["SET", "RESET", "DISCARD", "DEALLOCATE", "DROP"].iter().any(|known| word.split(' ').next() == Some(known));
        let judged = Arc::new(Judged { what, touches: sets || touch(text).state });
        if self.judged.len() >= JUDGED_MAX {
            self.judged.clear();
        }
        // A large one would take more room than its message does.
        if text.len() <= SMALL {
            self.judged.insert(text.to_vec(), judged.clone());
        }
        judged
    }

    /// A statement was executed after which others are to be judged anew, and twins may be gone.
    pub(super) fn touched(&mut self) {
        self.stale = true;
        self.transaction.touched = true;
        // Those that are still there go with the session: a new twin has a new name.
        self.forgotten.extend(self.twins.drain().map(|(_, twin)| twin));
    }
}

/// Whether what a statement means depends on the facts.
pub(super) fn leans_on_facts(text: &[u8]) -> bool {
    let words = first_words(text);
    let plain =
        ["SELECT", "BEGIN", "START", "COMMIT", "END", "ROLLBACK", "SET", "SHOW", "FETCH", "SAVEPOINT", "RELEASE", ""];
    !plain.contains(&words.split(' ').next().unwrap_or_default().trim_end_matches(';'))
}

/// The first two words, unless they may be values: for people.
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
