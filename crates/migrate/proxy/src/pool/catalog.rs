//! Effects of statements in one database: judged by their words, and by the functions that the database has.

use super::effect::{Effect, SEQUENCE_READERS, WORDS, sets_unnamed_setting};
use super::functions::{self, Function, FunctionEffects};
use super::words::Words;
use crate::clock::now_us;
use crate::mutex::lock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use stillpoint_migrate_wire::first_word;

/// Time after which the functions are read again: some may have changed without a statement that the proxy passed on.
const REFRESH_INTERVAL_US: u64 = 5_000_000;

/// First words of statements that keep nothing themselves.
const READS: [&str; 15] = [
    "SELECT",
    "TABLE",
    "VALUES",
    "SHOW",
    "BEGIN",
    "START",
    "COMMIT",
    "END",
    "ROLLBACK",
    "ABORT",
    "SAVEPOINT",
    "RELEASE",
    "FETCH",
    "MOVE",
    "NOTIFY",
];
/// First words of statements that write rows.
const WRITES: [&str; 11] =
    ["INSERT", "UPDATE", "DELETE", "MERGE", "COPY", "WITH", "LOCK", "TRUNCATE", "EXPLAIN", "VACUUM", "ANALYZE"];
/// First words of statements about the session only: no definition changes.
const SESSION: [&str; 10] =
    ["SET", "RESET", "LISTEN", "UNLISTEN", "PREPARE", "DEALLOCATE", "EXECUTE", "DISCARD", "DECLARE", "CLOSE"];

/// Verdict about a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Verdict {
    pub(crate) effect: Effect,
    /// It may return what its sequences gave a session before.
    pub(crate) reads_sequences: bool,
    /// Definitions may change, functions among them.
    pub(crate) defines: bool,
}

impl Verdict {
    pub(crate) fn and(self, other: Verdict) -> Verdict {
        Verdict {
            effect: self.effect.max(other.effect),
            reads_sequences: self.reads_sequences | other.reads_sequences,
            defines: self.defines | other.defines,
        }
    }
}

/// Judge of texts, by one reading of the functions.
#[derive(Debug)]
pub(crate) struct Judge {
    words: Words,
    readers: Words,
    functions: FunctionEffects,
    /// Number of the reading; 0 before the first.
    reading: u64,
}

impl Judge {
    fn new(functions: FunctionEffects, keep: &[String], reading: u64) -> Judge {
        let anywhere = keep.iter().map(|word| (word.as_str(), Effect::Hidden)).chain(WORDS);
        let words = Words::new(anywhere, functions.by_name.iter().map(|(name, effect)| (name.as_str(), *effect)));
        let readers = SEQUENCE_READERS.iter().copied().chain(functions.sequence_readers.iter().map(String::as_str));
        let readers = Words::names(readers);
        Judge { words, readers, functions, reading }
    }

    /// Judges the text of a Query or Parse, or a part of it that is not its beginning.
    pub(crate) fn judge(&self, text: &[u8], is_beginning: bool) -> Verdict {
        // The end of a Query.
        let text = text.strip_suffix(&[0]).unwrap_or(text);
        let mut verdict = if is_beginning { first_words_verdict(text) } else { Verdict::default() };
        verdict.effect = verdict.effect.max(self.words.effect(text));
        if verdict.effect == Effect::Unknown && (sets_unnamed_setting(text) || self.is_hidden_in_block(text)) {
            verdict.effect = Effect::Hidden;
        }
        let hidden = if verdict.effect == Effect::Nothing { self.functions.of_reads } else { self.functions.of_writes };
        verdict.effect = verdict.effect.max(hidden);
        verdict.reads_sequences = self.readers.effect(text) > Effect::Nothing;
        if self.reading == 0 {
            verdict.effect = verdict.effect.max(Effect::Unknown);
        }
        verdict
    }

    /// Returns true if functions of the database may read what its sequences gave a session.
    pub(crate) fn has_sequence_readers(&self) -> bool {
        self.functions.reads_sequences || !self.functions.sequence_readers.is_empty()
    }

    /// Judges the text of DO like a function's source.
    fn is_hidden_in_block(&self, text: &[u8]) -> bool {
        let is_block = text.split(|byte| *byte == b';').any(|part| first_word(part).0.eq_ignore_ascii_case(b"DO"));
        is_block && functions::source_effect(&String::from_utf8_lossy(text), &self.words) == Effect::Hidden
    }

    /// Names of functions that any statement may call and that change their session.
    pub(crate) fn causes(&self) -> &[String] {
        &self.functions.causes
    }
}

/// Verdict by the first word of each statement. A semicolon inside a string begins no statement; if it counts as one,
/// the server is asked once too often.
fn first_words_verdict(text: &[u8]) -> Verdict {
    let mut verdict = Verdict::default();
    for part in text.split(|byte| *byte == b';') {
        let (word, after) = first_word(part);
        let is = |words: &[&str]| words.iter().any(|known| word.eq_ignore_ascii_case(known.as_bytes()));
        let effect = match word {
            _ if is(&READS) => Effect::Nothing,
            _ if is(&WRITES) => Effect::Sequences,
            _ if is(&["LOAD"]) => Effect::Hidden,
            _ if is(&["SET"]) => set_effect(after),
            b"" if after.is_empty() => Effect::Nothing,
            // A query in parentheses.
            b"" if after.starts_with(b"(") => Effect::Sequences,
            _ => {
                verdict.defines |= !is(&SESSION);
                Effect::Unknown
            }
        };
        verdict.effect = verdict.effect.max(effect);
    }
    verdict
}

/// Effect of SET, by the text after it. A custom setting that a transaction has set is left empty, and not unknown as
/// before.
fn set_effect(after: &[u8]) -> Effect {
    let (second, rest) = first_word(after);
    let is = |word: &str| second.eq_ignore_ascii_case(word.as_bytes());
    match () {
        () if is("TRANSACTION") || is("CONSTRAINTS") => Effect::Nothing,
        () if is("LOCAL") && !rest.contains(&b'.') => Effect::Nothing,
        () => Effect::Unknown,
    }
}

/// The database's functions as they were read last, and if they may have changed.
#[derive(Debug)]
pub(crate) struct Catalog {
    judge: Mutex<Arc<Judge>>,
    /// Number of statements that may have changed definitions.
    changes: AtomicU64,
    /// Value of `changes` before the last reading.
    read_changes: AtomicU64,
    read_at_us: AtomicU64,
    is_being_read: AtomicBool,
    /// Number of readings so far.
    readings: AtomicU64,
    /// Number of the present judge's reading.
    reading: AtomicU64,
    /// A client has asked for values of sequences in a statement of its own.
    pub(crate) clients_read_sequences: AtomicBool,
}

impl Default for Catalog {
    fn default() -> Catalog {
        Catalog {
            judge: Mutex::new(Arc::new(Judge::new(FunctionEffects::default(), &[], 0))),
            changes: AtomicU64::new(0),
            read_changes: AtomicU64::new(0),
            read_at_us: AtomicU64::new(0),
            is_being_read: AtomicBool::new(false),
            readings: AtomicU64::new(0),
            reading: AtomicU64::new(0),
            clients_read_sequences: AtomicBool::new(false),
        }
    }
}

impl Catalog {
    /// The present judge.
    pub(crate) fn judge(&self) -> Arc<Judge> {
        lock(&self.judge).clone()
    }

    /// Returns true if this is the present judge.
    #[inline]
    pub(crate) fn is_present(&self, judge: &Judge) -> bool {
        self.reading.load(Ordering::Acquire) == judge.reading
    }

    /// Returns true if the judge may not know all functions.
    #[inline]
    pub(crate) fn is_stale(&self) -> bool {
        self.changes.load(Ordering::Acquire) != self.read_changes.load(Ordering::Acquire)
    }

    /// Returns true if the functions should be read now.
    #[inline]
    pub(crate) fn is_due(&self, now_us: u64) -> bool {
        let read_at_us = self.read_at_us.load(Ordering::Relaxed);
        let is_old = read_at_us == 0 || now_us.saturating_sub(read_at_us) >= REFRESH_INTERVAL_US;
        (is_old || self.is_stale()) && !self.is_being_read.load(Ordering::Relaxed)
    }

    /// Records that a statement may change, or has changed, definitions.
    pub(crate) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// Begins to read; `None` if another session is reading.
    pub(crate) fn begin(&self) -> Option<Reading<'_>> {
        if self.is_being_read.swap(true, Ordering::AcqRel) {
            return None;
        }
        Some(Reading { of: self, changes: self.changes.load(Ordering::Acquire) })
    }
}

/// A reading under way.
pub(crate) struct Reading<'a> {
    of: &'a Catalog,
    changes: u64,
}

impl Reading<'_> {
    pub(crate) const QUESTION: &'static str = functions::QUESTION;

    /// Takes the answer; returns the names with a dot of settings that functions set.
    pub(crate) fn end(self, rows: Vec<Vec<Option<Vec<u8>>>>, keep: &[String]) -> Vec<String> {
        let all: Vec<Function> = rows.into_iter().filter_map(Function::from_row).collect();
        let mut effects = functions::judge(&all, keep);
        let settings = std::mem::take(&mut effects.settings);
        let mut judge = lock(&self.of.judge);
        let judged = Judge::new(effects, keep, self.of.readings.fetch_add(1, Ordering::AcqRel) + 1);
        if judged.causes() != judge.causes() && !judged.causes().is_empty() {
            tracing::warn!(
                functions = judged.causes().join(", "),
                "functions that triggers or views call change their session: each transaction is followed by a question"
            );
        }
        self.of.reading.store(judged.reading, Ordering::Release);
        *judge = Arc::new(judged);
        self.of.read_changes.store(self.changes, Ordering::Release);
        self.of.read_at_us.store(now_us().max(1), Ordering::Relaxed);
        settings
    }
}

impl Reading<'_> {
    /// There is no answer: until the next reading everything is unknown.
    pub(crate) fn fail(self) {
        let mut judge = lock(&self.of.judge);
        self.of.reading.store(0, Ordering::Release);
        *judge = Arc::new(Judge::new(FunctionEffects::default(), &[], 0));
        self.of.read_at_us.store(now_us().max(1), Ordering::Relaxed);
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.of.is_being_read.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_catalog(functions: &[[&str; 6]]) -> Catalog {
        let catalog = Catalog::default();
        let rows = functions.iter().map(|row| row.iter().map(|text| Some(text.as_bytes().to_vec())).collect());
        catalog.begin().unwrap().end(rows.collect(), &[]);
        catalog
    }

    fn effect(catalog: &Catalog, sql: &str) -> Effect {
        catalog.judge().judge(sql.as_bytes(), true).effect
    }

    #[test]
    fn statements_are_judged_by_their_first_words() {
        let catalog = read_catalog(&[]);
        for (sql, expected) in [
            ("select abalance from accounts where aid = 1", Effect::Nothing),
            ("BEGIN; SELECT 1; -- x\n COMMIT;", Effect::Nothing),
            ("set local work_mem = 1; set constraints all deferred", Effect::Nothing),
            ("select 1;\n\0", Effect::Nothing),
            ("select 1; -- all\0", Effect::Nothing),
            ("(select 1)", Effect::Sequences),
            ("insert into t values (1)", Effect::Sequences),
            ("select nextval('s')", Effect::Sequences),
            ("with a as (delete from t returning *) select * from a", Effect::Sequences),
            ("set local a.b = 1", Effect::Unknown),
            ("set work_mem = 1", Effect::Unknown),
            ("select 1; /* a */ SET x = 1", Effect::Unknown),
            ("create table t ()", Effect::Unknown),
            ("do $$ $$", Effect::Unknown),
            ("select pg_advisory_lock(1)", Effect::Unknown),
            ("select * into temp t from u", Effect::Unknown),
            ("/* /* */ x */ select 1", Effect::Unknown),
            ("load 'x'", Effect::Hidden),
            ("select set_config($1, $2, false)", Effect::Hidden),
            ("do $$ begin execute 'set ' || x || '= 1'; end $$", Effect::Hidden),
            ("select setseed(1)", Effect::Hidden),
            ("\u{e9}", Effect::Unknown),
        ] {
            assert_eq!(effect(&catalog, sql), expected, "{sql}");
        }
        for (sql, defines) in
            [("create table t ()", true), ("call p()", true), ("set x = 1", false), ("select 1", false)]
        {
            assert_eq!(catalog.judge().judge(sql.as_bytes(), true).defines, defines, "{sql}");
        }
    }

    #[test]
    fn before_the_first_reading_everything_is_unknown() {
        assert_eq!(effect(&Catalog::default(), "select 1"), Effect::Unknown);
    }

    #[test]
    fn triggers_count_for_writes_and_views_for_everything() {
        let source = "BEGIN SET x = 1; END";
        let by_trigger = read_catalog(&[["f", "plpgsql", "v", source, "t", "f"]]);
        assert_eq!(
            (effect(&by_trigger, "select 1"), effect(&by_trigger, "delete from t")),
            (Effect::Nothing, Effect::Unknown)
        );
        assert_eq!(effect(&by_trigger, "select f()"), Effect::Unknown);
        let by_view = read_catalog(&[["f", "plpgsql", "v", source, "f", "t"]]);
        assert_eq!(effect(&by_view, "select * from v"), Effect::Unknown);
    }

    #[test]
    fn a_change_during_a_reading_needs_another_one() {
        let catalog = read_catalog(&[]);
        assert!(!catalog.is_stale());
        catalog.changed();
        let reading = catalog.begin().unwrap();
        assert!(catalog.begin().is_none());
        catalog.changed();
        reading.end(Vec::new(), &[]);
        assert!(catalog.is_stale() && catalog.is_due(now_us()));
        catalog.begin().unwrap().end(Vec::new(), &[]);
        assert!(!catalog.is_stale());
    }
}
