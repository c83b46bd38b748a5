//! Effects of a database's own functions, judged by their sources.
//!
//! The obvious way is to believe the volatility that their owners declare. But a function declared STABLE may call
//! `set_config`, and a trigger function is in no client's statement. So the sources are read. What cannot be read counts
//! as the worst: functions in languages with memory of their own (Python, Perl) keep what they like. Functions in C are
//! trusted to keep nothing; the operator names those that do in `pool.keep`.

use super::effect::{Effect, SEQUENCE_READERS, WORDS, sets_unnamed_setting};
use super::words::Words;
use std::collections::BTreeMap;
use stillpoint_migrate_wire::custom_settings;

/// Question for the database's own functions; see [`Function::from_row`].
pub(super) const QUESTION: &str = include_str!("functions.sql");

/// Most rounds in which functions that call others are judged; after them all of the rest is unknown.
const ROUNDS_MAX: usize = 16;

/// Words before SET in a function's source that make it a statement of its own, not a part of UPDATE.
const BEFORE_STATEMENTS: [&str; 6] = ["begin", "then", "else", "loop", "atomic", "execute"];
/// Words of statements with an effect, wherever they are in a source.
const STATEMENT_WORDS: [(&str, Effect); 8] = [
    ("listen", Effect::Unknown),
    ("unlisten", Effect::Unknown),
    ("prepare", Effect::Unknown),
    ("deallocate", Effect::Unknown),
    ("discard", Effect::Unknown),
    ("reset", Effect::Unknown),
    ("hold", Effect::Unknown),
    ("load", Effect::Hidden),
];

/// A function of the database.
#[derive(Debug, Clone, Default)]
pub(super) struct Function {
    name: String,
    language: String,
    is_volatile: bool,
    source: String,
    /// A trigger or a default calls it.
    by_writes: bool,
    /// A view, a policy, a type or an operator calls it.
    by_reads: bool,
}

impl Function {
    /// Reads a row of the answer: name, language, volatility, source, and two truths.
    pub(super) fn from_row(row: Vec<Option<Vec<u8>>>) -> Option<Function> {
        let mut texts = row.into_iter().map(|text| text.map(|text| String::from_utf8_lossy(&text).into_owned()));
        let mut next = || texts.next().flatten();
        let (name, language, volatility) = (next()?, next()?, next()?);
        let source = next().unwrap_or_default();
        let (by_writes, by_reads) = (next()? == "t", next()? == "t");
        Some(Function { name, language, is_volatile: volatility == "v", source, by_writes, by_reads })
    }

    fn own_effect(&self, words: &Words) -> Effect {
        let by_volatility = if self.is_volatile { Effect::Sequences } else { Effect::Nothing };
        match self.language.as_str() {
            "c" => by_volatility,
            "sql" | "plpgsql" => source_effect(&self.source, words).max(by_volatility),
            // A call of a built-in function in a view or a default.
            "tree" if self.source == "set_config" => Effect::Hidden,
            "tree" => words.effect(self.source.as_bytes()),
            "internal" => Effect::Unknown,
            _ => Effect::Hidden,
        }
    }
}

/// Effect of the text of a function in SQL or PL/pgSQL, or of DO.
pub(super) fn source_effect(source: &str, words: &Words) -> Effect {
    let source = without_comments(&source.to_ascii_lowercase());
    let mut effect = words.effect(source.as_bytes());
    if sets_unnamed_setting(source.as_bytes()) {
        effect = Effect::Hidden;
    }
    let mut before = ";";
    let tokens: Vec<&str> = tokens(&source).collect();
    for (at, token) in tokens.iter().enumerate() {
        let stated = STATEMENT_WORDS.iter().find(|(word, _)| word == token);
        effect = effect.max(stated.map_or(Effect::Nothing, |(_, effect)| *effect));
        let begins =
            BEFORE_STATEMENTS.contains(&before) || !before.starts_with(|c: char| c.is_alphanumeric() || c == '_');
        if *token == "set" && begins && before != "\"" && before != ")" {
            let next = tokens.get(at + 1).copied().unwrap_or_default();
            let is_custom = tokens.get(at + 3) == Some(&".");
            let lasts = !matches!(next, "transaction" | "constraints") && (next != "local" || is_custom);
            effect = effect.max(match before {
                // The name may be put together when it runs.
                "'" | "$" => Effect::Hidden,
                _ if lasts => Effect::Unknown,
                _ => Effect::Nothing,
            });
        }
        before = token;
    }
    effect
}

/// Words and single other characters.
fn tokens(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        rest = rest.trim_start();
        let first = rest.chars().next()?;
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let len = match is_word(first) {
            true => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            false => first.len_utf8(),
        };
        let (token, more) = rest.split_at(len);
        rest = more;
        Some(token)
    })
}

/// The text with a space in the place of each comment. What looks like a comment in a string stays, too: only text
/// from `--` to the end of a line without quotes is left out.
fn without_comments(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    for line in text.lines() {
        match line.split_once("--") {
            Some((code, comment)) if !comment.contains('\'') => kept.push_str(code),
            _ => kept.push_str(line),
        }
        kept.push('\n');
    }
    while let Some(from) = kept.find("/*") {
        match kept[from..].find("*/") {
            Some(len) if !kept[from..from + len].contains('\'') => kept.replace_range(from..from + len + 2, " "),
            // A comment with a quote may be no comment.
            _ => kept.replace_range(from..from + 2, "; "),
        }
    }
    kept
}

/// Effects of all functions.
#[derive(Debug, Clone, Default)]
pub(super) struct FunctionEffects {
    /// Effects of the functions that have any, by name.
    pub(super) by_name: BTreeMap<String, Effect>,
    /// Functions that return values of sequences, by name.
    pub(super) sequence_readers: Vec<String>,
    /// Effect that any statement may have.
    pub(super) of_reads: Effect,
    /// Effect that any statement may have that writes rows.
    pub(super) of_writes: Effect,
    /// Any statement may read values of sequences.
    pub(super) reads_sequences: bool,
    /// Names with a dot of settings that functions set.
    pub(super) settings: Vec<String>,
    /// Names of functions that make it so that each statement is followed by a question.
    pub(super) causes: Vec<String>,
}

/// Judges all functions; `keep` are words that the operator gave.
pub(super) fn judge(functions: &[Function], keep: &[String]) -> FunctionEffects {
    let mut effects: Vec<Effect> = vec![Effect::Nothing; functions.len()];
    let mut readers = vec![false; functions.len()];
    for round in 0..=ROUNDS_MAX {
        let words = words_of(functions, &effects, keep);
        let reader_names = functions.iter().zip(&readers).filter(|(_, reads)| **reads);
        let reader_words = Words::names(
            SEQUENCE_READERS.iter().copied().chain(reader_names.map(|(function, _)| function.name.as_str())),
        );
        let mut changed = false;
        for (at, function) in functions.iter().enumerate() {
            let mut effect = function.own_effect(&words).max(effects[at]);
            let reads = readers[at] || reader_words.effect(function.source.as_bytes()) > Effect::Nothing;
            if round == ROUNDS_MAX {
                effect = effect.max(Effect::Unknown);
            }
            changed |= effect != effects[at] || reads != readers[at];
            (effects[at], readers[at]) = (effect, reads);
        }
        if !changed {
            break;
        }
    }
    let mut all = FunctionEffects::default();
    for ((function, effect), reads) in functions.iter().zip(effects).zip(readers) {
        if effect > Effect::Nothing && !function.name.is_empty() {
            let known = all.by_name.entry(function.name.clone()).or_default();
            *known = effect.max(*known);
        }
        if effect >= Effect::Unknown {
            all.settings.extend(custom_settings(&function.source));
        }
        let is_called = function.by_reads || function.by_writes;
        if function.by_reads {
            all.of_reads = all.of_reads.max(effect);
        }
        if function.by_writes {
            all.of_writes = all.of_writes.max(effect);
        }
        if is_called && effect >= Effect::Unknown {
            all.causes.push(if function.name.is_empty() { function.source.clone() } else { function.name.clone() });
        }
        if reads {
            all.reads_sequences |= is_called;
            all.sequence_readers.extend((!function.name.is_empty()).then(|| function.name.clone()));
        }
    }
    all.of_writes = all.of_writes.max(all.of_reads).max(Effect::Sequences);
    all
}

fn words_of(functions: &[Function], effects: &[Effect], keep: &[String]) -> Words {
    let own = functions.iter().zip(effects).filter(|(function, _)| !function.name.is_empty());
    let own = own
        .filter(|(_, effect)| **effect > Effect::Nothing)
        .map(|(function, effect)| (function.name.as_str(), *effect));
    Words::new(keep.iter().map(|word| (word.as_str(), Effect::Hidden)).chain(WORDS), own)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(name: &str, source: &str) -> Function {
        Function {
            name: name.into(),
            language: "plpgsql".into(),
            is_volatile: true,
            source: source.into(),
            ..Function::default()
        }
    }

    fn effect_of(source: &str) -> Effect {
        judge(&[function("f", source)], &[]).by_name["f"]
    }

    #[test]
    fn functions_that_write_rows_keep_nothing_but_values_of_sequences() {
        for source in [
            "BEGIN NEW.updated_at := now(); RETURN NEW; END",
            "BEGIN UPDATE t SET a = 1 WHERE b = 2; INSERT INTO u VALUES (1) ON CONFLICT (a) DO UPDATE SET b = 2; END",
            "DECLARE n int; BEGIN UPDATE ONLY s.\"t\" SET a = 1; END",
            "BEGIN IF x THEN UPDATE t AS a SET b = 1; END IF; END",
            "BEGIN SET LOCAL work_mem = '1MB'; -- SET x\n /* SET y = 1 */ RETURN; END",
        ] {
            assert_eq!(effect_of(source), Effect::Sequences, "{source}");
        }
    }

    #[test]
    fn functions_that_change_their_session_are_found() {
        for source in [
            "BEGIN PERFORM set_config('a.b', 'c', false); END",
            "BEGIN SET search_path = a; END",
            "BEGIN IF x THEN SET work_mem = 1; END IF; END",
            "BEGIN IF op = 'UPDATE' THEN set role x; END IF; END",
            "BEGIN SET LOCAL a.b = 1; END",
            "BEGIN CREATE TEMP TABLE t (a int); END",
            "BEGIN EXECUTE 'LISTEN ' || c; END",
            "BEGIN PERFORM pg_advisory_lock(1); END",
            "SET x = 1",
        ] {
            assert_eq!(effect_of(source), Effect::Unknown, "{source}");
        }
        assert_eq!(effect_of("BEGIN PERFORM setseed(0.5); END"), Effect::Hidden);
        for source in [
            "BEGIN LOAD 'x'; END",
            "BEGIN EXECUTE 'SET a.b = 1'; END",
            "BEGIN EXECUTE $q$SET a = 1$q$; END",
            "BEGIN PERFORM set_config('a.' || b, 'c', false); PERFORM set_config(name, 'c', false); END",
        ] {
            assert_eq!(effect_of(source), Effect::Hidden, "{source}");
        }
    }

    #[test]
    fn a_function_has_the_effects_of_those_that_it_calls() {
        let functions = [
            function("outermost", "SELECT middle()"),
            function("middle", "SELECT \"Inner\"(1)"),
            function("Inner", "BEGIN SET x = 1; END"),
            Function { by_writes: true, ..function("trigger_function", "PERFORM outermost()") },
            function("other", "SELECT middlemost()"),
        ];
        let all = judge(&functions, &[]);
        assert_eq!((all.by_name["outermost"], all.by_name["other"]), (Effect::Unknown, Effect::Sequences));
        assert_eq!((all.of_writes, all.of_reads), (Effect::Unknown, Effect::Nothing));
        assert_eq!(all.causes, ["trigger_function"]);
    }

    #[test]
    fn other_languages_and_words_of_the_operator_count_as_hidden() {
        let mut other = function("f", "x");
        other.language = "plpython3u".into();
        assert_eq!(judge(&[other], &[]).by_name["f"], Effect::Hidden);
        let mut in_c = function("make_link", "");
        in_c.language = "c".into();
        let caller = function("g", "SELECT make_link('x')");
        let all = judge(&[in_c.clone(), caller.clone()], &[]);
        assert_eq!((all.by_name["make_link"], all.by_name["g"]), (Effect::Sequences, Effect::Sequences));
        assert_eq!(judge(&[in_c, caller], &["make_link".into()]).by_name["g"], Effect::Hidden);
    }

    #[test]
    fn readers_of_sequences_are_found_through_other_functions() {
        let functions =
            [function("last_one", "SELECT lastval()"), function("caller", "SELECT last_one()"), function("x", "")];
        let all = judge(&functions, &[]);
        assert_eq!(all.sequence_readers, ["last_one", "caller"]);
        assert!(!all.reads_sequences);
        let in_view =
            Function { language: "tree".into(), source: "lastval".into(), by_reads: true, ..Function::default() };
        assert!(judge(&[in_view], &[]).reads_sequences);
    }
}
