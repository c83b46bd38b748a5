//! The language of `.edits` files.

use crate::anchor::{self, Place};
use crate::error::Error;
use crate::source::{Source, words};
use std::collections::BTreeMap;

/// Kind of a scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Scope {
    File,
    Function(Vec<String>),
    Type(Vec<String>),
    Line,
}

/// Position of an edit relative to its anchor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verb {
    Begin,
    End,
    Before,
    After,
    Into,
    AtEndOf,
    Replace,
    Above,
}

/// One edit: text, and its anchor.
#[derive(Debug, Clone)]
pub(crate) struct Edit {
    pub(crate) scope: Scope,
    pub(crate) verb: Verb,
    pub(crate) pattern: Vec<String>,
    /// Number of the occurrence, from 1, and the number of all occurrences.
    pub(crate) occurrence: (usize, usize),
    pub(crate) text: Vec<String>,
    /// Anchor in messages: `in F: before x (`.
    pub(crate) anchor: String,
    /// File and line of the edit, for messages.
    pub(crate) origin: String,
}

/// The edits of one file of the source tree.
#[derive(Debug, Clone, Default)]
pub struct FileEdits {
    edits: Vec<Edit>,
}

/// The edits of one or more `.edits` files.
#[derive(Debug, Clone, Default)]
pub struct Edits {
    files: BTreeMap<String, FileEdits>,
}

impl Edits {
    /// Reads the text of an `.edits` file; `name` is for messages.
    ///
    /// # Errors
    /// The first line that is not in the language of `.edits` files.
    pub fn parse(name: &str, text: &str) -> Result<Edits, Error> {
        let mut edits = Edits::default();
        edits.add(name, text)?;
        Ok(edits)
    }

    /// Adds the edits of another file.
    pub(crate) fn add(&mut self, name: &str, text: &str) -> Result<(), Error> {
        let mut reader = Reader { edits: self, name, file: None, scope: (Scope::File, String::new()), last: None };
        for (at, line) in text.lines().enumerate() {
            reader.line(at + 1, line).map_err(|problem| Error::Syntax {
                file: name.to_owned(),
                line: at + 1,
                problem,
            })?;
        }
        for (file, edits) in &self.files {
            if let Some(empty) = edits.edits.iter().find(|e| e.text.is_empty()) {
                let (anchor, edits) = (empty.anchor.clone(), empty.origin.clone());
                return Err(Error::Anchor { file: file.clone(), anchor, edits, problem: "has no text".into() });
            }
        }
        Ok(())
    }

    /// Returns paths in the source tree, each with its edits.
    pub fn files(&self) -> impl Iterator<Item = (&str, &FileEdits)> {
        self.files.iter().map(|(path, edits)| (path.as_str(), edits))
    }
}

impl FileEdits {
    /// Returns the text of `file` with all edits in it.
    ///
    /// # Errors
    /// An anchor that is not found as often as stated, or two edits that overlap.
    pub fn apply(&self, file: &str, text: &str) -> Result<String, Error> {
        let source = Source::read(text);
        let mut insertions = Vec::new();
        for (order, edit) in self.edits.iter().enumerate() {
            let place = anchor::find(&source, edit).map_err(|problem| Error::Anchor {
                file: file.to_owned(),
                anchor: edit.anchor.clone(),
                edits: edit.origin.clone(),
                problem,
            })?;
            insertions.push((place, order, edit));
        }
        insertions.sort_by_key(|(place, order, _)| (place.range.start, place.range.end, *order));
        let mut out = String::with_capacity(text.len() * 2);
        let mut done = 0;
        for (Place { range, indent }, _, edit) in insertions {
            if range.start < done {
                let (anchor, edits) = (edit.anchor.clone(), edit.origin.clone());
                let problem = "overlaps another edit".into();
                return Err(Error::Anchor { file: file.to_owned(), anchor, edits, problem });
            }
            out.push_str(&text[done..range.start]);
            push(&mut out, edit, &indent);
            done = range.end;
        }
        out.push_str(&text[done..]);
        Ok(out)
    }
}

/// Adds an edit's text: a replacement within its line, every other text on lines of its own.
fn push(out: &mut String, edit: &Edit, indent: &str) {
    if edit.verb == Verb::Replace {
        out.push_str(&edit.text.join("\n"));
        return;
    }
    if !out.is_empty() && !out.ends_with('\n') {
        out.push('\n');
    }
    for line in &edit.text {
        if !line.is_empty() && !line.starts_with('#') {
            out.push_str(indent);
        }
        out.push_str(line);
        out.push('\n');
    }
}

struct Reader<'a> {
    edits: &'a mut Edits,
    name: &'a str,
    file: Option<String>,
    scope: (Scope, String),
    /// File whose last edit receives the following text.
    last: Option<String>,
}

impl Reader<'_> {
    fn line(&mut self, number: usize, line: &str) -> Result<(), String> {
        let trimmed = line.trim();
        if let Some(text) = trimmed.strip_prefix('|') {
            return self.text(text.strip_prefix(' ').unwrap_or(text));
        }
        let (word, rest) = trimmed.split_once(' ').map_or((trimmed, ""), |(word, rest)| (word, rest.trim()));
        match word {
            "" => Ok(()),
            _ if word.starts_with('#') => Ok(()),
            "file" if !rest.is_empty() => {
                self.file = Some(rest.to_owned());
                self.scope = (Scope::File, String::new());
                self.last = None;
                Ok(())
            }
            "in" => self.enter(rest),
            _ => self.edit(number, word, rest),
        }
    }

    fn text(&mut self, text: &str) -> Result<(), String> {
        let file = self.last.as_ref().ok_or("text without an anchor")?;
        let edits = self.edits.files.get_mut(file).expect("the file of the last edit has edits");
        edits.edits.last_mut().expect("there is a last edit").text.push(text.to_owned());
        Ok(())
    }

    fn enter(&mut self, rest: &str) -> Result<(), String> {
        self.last = None;
        let scope = match rest.split_whitespace().next() {
            Some("file") => Scope::File,
            Some("line") => Scope::Line,
            Some("struct" | "class" | "union" | "enum") => Scope::Type(words(rest)),
            Some(_) => Scope::Function(words(rest)),
            None => return Err("`in` without a name".into()),
        };
        let shown = if scope == Scope::File { String::new() } else { format!("in {rest}: ") };
        self.scope = (scope, shown);
        Ok(())
    }

    fn edit(&mut self, number: usize, word: &str, rest: &str) -> Result<(), String> {
        let file = self.file.clone().ok_or("an edit before any `file`")?;
        let (verb, rest) = match word {
            "begin" => (Verb::Begin, rest),
            "end" => (Verb::End, rest),
            "before" => (Verb::Before, rest),
            "after" => (Verb::After, rest),
            "into" => (Verb::Into, rest),
            "at" => (Verb::AtEndOf, rest.strip_prefix("end of ").ok_or("`at` is followed by `end of`")?),
            "replace" => (Verb::Replace, rest),
            "above" => (Verb::Above, rest),
            _ => return Err(format!("`{word}` is not an anchor")),
        };
        let (pattern, occurrence) = split_occurrence(rest)?;
        let by_line = self.scope.0 == Scope::Line;
        let pattern = if by_line { pattern.split_whitespace().map(str::to_owned).collect() } else { words(pattern) };
        let takes_pattern = !matches!(verb, Verb::Begin | Verb::End);
        if takes_pattern == pattern.is_empty() {
            return Err(format!(
                "`{word}` {}",
                if takes_pattern { "needs words to search for" } else { "takes no words" }
            ));
        }
        if by_line && !matches!(verb, Verb::Before | Verb::After | Verb::Replace) {
            return Err(format!("`{word}` has no meaning in lines"));
        }
        let anchor = format!("{}{word} {rest}", self.scope.1).trim_end().to_owned();
        let origin = format!("{}:{number}", self.name);
        let edit = Edit { scope: self.scope.0.clone(), verb, pattern, occurrence, text: Vec::new(), anchor, origin };
        self.edits.files.entry(file.clone()).or_default().edits.push(edit);
        self.last = Some(file);
        Ok(())
    }
}

/// Parses the occurrence: `words #2/3` means the second of three; without it, the only one.
fn split_occurrence(rest: &str) -> Result<(&str, (usize, usize)), String> {
    let Some((pattern, counts)) = rest.rsplit_once('#').filter(|(_, counts)| counts.contains('/')) else {
        return Ok((rest, (1, 1)));
    };
    let numbers = counts.trim().split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    match numbers {
        Some((which, of)) if 1 <= which && which <= of => Ok((pattern.trim(), (which, of))),
        _ => Err(format!("`#{counts}` is not of the form #2/3")),
    }
}
