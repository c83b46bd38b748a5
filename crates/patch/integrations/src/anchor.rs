//! Search for the place of an edit in a text.

use crate::edits::{Edit, Scope, Verb};
use crate::source::Source;
use std::ops::Range;

/// Bytes that the edit's text replaces, and the indentation of each of its lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) range: Range<usize>,
    pub(crate) indent: String,
}

/// Finds the place of an edit; the error states the fault of its anchor.
pub(crate) fn find(source: &Source, edit: &Edit) -> Result<Place, String> {
    if edit.scope == Scope::Line {
        return in_lines(source.text, edit);
    }
    let scope = scope(source, &edit.scope)?;
    match edit.verb {
        Verb::Begin | Verb::End => edge(source, edit, &scope),
        Verb::Above => {
            let name = one(definitions(source, &edit.pattern).map(|(name, _)| name).collect(), edit.occurrence)?;
            Ok(before(source, start_of_statement(source, name)))
        }
        _ => {
            let found = scope.clone().filter(|&at| source.matches(at, &edit.pattern)).collect();
            at_match(source, edit, one(found, edit.occurrence)?)
        }
    }
}

fn at_match(source: &Source, edit: &Edit, at: usize) -> Result<Place, String> {
    if edit.verb == Verb::Replace {
        let last = &source.tokens[at + edit.pattern.len() - 1];
        return Ok(Place { range: source.tokens[at].range.start..last.range.end, indent: String::new() });
    }
    // Leave all parentheses: the statement's own level.
    let mut own = at;
    while let Some(parent) = source.tokens[own].parent.filter(|&parent| source.word(parent) != "{") {
        own = parent;
    }
    let start = start_of_statement(source, own);
    let body = governed(source, start);
    match edit.verb {
        Verb::Into | Verb::AtEndOf => {
            let body = body.filter(|&body| own < body && source.word(body) == "{");
            let body = body.ok_or("controls no block in braces")?;
            let close = source.tokens[body].partner.ok_or("controls a block without an end")?;
            Ok(if edit.verb == Verb::Into { after(source, body, body + 1) } else { before_close(source, close) })
        }
        _ if source.word(start) == "else" || body.is_some_and(|body| own >= body) => {
            Err("another statement without braces controls the statement".into())
        }
        Verb::Before => Ok(before(source, start)),
        _ => Ok(after(source, end_of_statement(source, start)?, start)),
    }
}

/// Returns the tokens in which an edit searches for its words.
fn scope(source: &Source, scope: &Scope) -> Result<Range<usize>, String> {
    let bodies: Vec<usize> = match scope {
        Scope::File | Scope::Line => return Ok(0..source.tokens.len()),
        Scope::Function(name) => definitions(source, name).map(|(_, body)| body).collect(),
        Scope::Type(name) => type_bodies(source, name),
    };
    let body = one(bodies, (1, 1)).map_err(|problem| format!("its scope: {problem}"))?;
    let close = source.tokens[body].partner.ok_or("its scope has no end")?;
    Ok(body..close)
}

fn one(found: Vec<usize>, (which, of): (usize, usize)) -> Result<usize, String> {
    match found.len() {
        0 => Err("not found".into()),
        n if n != of => Err(format!("found {n} times, expected {of}")),
        _ => Ok(found[which - 1]),
    }
}

/// Returns names of functions at their definitions, and the brackets that open their bodies.
fn definitions<'a>(source: &'a Source, name: &'a [String]) -> impl Iterator<Item = (usize, usize)> + 'a {
    let candidates = (0..source.tokens.len()).filter(|&at| source.matches(at, name));
    candidates.filter(|&at| at == 0 || source.word(at - 1) != "::").filter_map(|at| {
        let parameters = at + name.len();
        (source.word(parameters) == "(").then_some(())?;
        let mut next = source.tokens[parameters].partner? + 1;
        loop {
            match source.word(next) {
                "{" => return Some((at, next)),
                "(" => next = source.tokens[next].partner? + 1,
                word if word.starts_with(|c: char| c.is_alphabetic() || c == '_') => next += 1,
                _ => return None,
            }
        }
    })
}

/// Returns brackets that open the bodies of a type.
fn type_bodies(source: &Source, name: &[String]) -> Vec<usize> {
    let candidates = (0..source.tokens.len()).filter(|&at| source.matches(at, name));
    let body = |at: usize| {
        let rest = at + name.len()..source.tokens.len();
        let end = rest.into_iter().find(|&at| matches!(source.word(at), "{" | ";" | "(" | ")" | "=" | "*" | ","));
        end.filter(|&at| source.word(at) == "{")
    };
    candidates.filter_map(body).collect()
}

/// Returns the first token of the statement (or definition) that a token on its level belongs to.
fn start_of_statement(source: &Source, own: usize) -> usize {
    let parent = source.tokens[own].parent;
    let mut start = own;
    while start > 0 && Some(start - 1) != parent {
        match source.word(start - 1) {
            ";" | "}" | "{" => break,
            ")" | "]" => start = source.tokens[start - 1].partner.unwrap_or(start - 1),
            _ => start -= 1,
        }
    }
    skip_labels(source, start, own)
}

/// Skips `case X:`, `default:` and `label:`, which are no part of a statement.
fn skip_labels(source: &Source, mut start: usize, own: usize) -> usize {
    loop {
        let colon = match source.word(start) {
            "case" => (start..own).find(|&at| source.word(at) == ":"),
            _ => Some(start + 1).filter(|&at| at < own && source.word(at) == ":"),
        };
        match colon {
            Some(colon) => start = colon + 1,
            None => return start,
        }
    }
}

/// Returns the first token of the code that a statement governs: after `if (...)`, `do` and similar words.
fn governed(source: &Source, start: usize) -> Option<usize> {
    match source.word(start) {
        "if" | "for" | "while" | "switch" => {
            let head = start + 1 + usize::from(source.word(start + 1) == "constexpr");
            source.tokens.get(head)?.partner.map(|close| close + 1)
        }
        "do" | "else" => Some(start + 1),
        _ => None,
    }
}

/// Returns the last token of a statement.
fn end_of_statement(source: &Source, start: usize) -> Result<usize, String> {
    let no_end = || "the statement has no end".to_owned();
    if source.word(start) == "{" {
        return source.tokens[start].partner.ok_or_else(no_end);
    }
    if let Some(body) = governed(source, start) {
        let end = end_of_statement(source, body)?;
        let goes_on = match (source.word(start), source.word(end + 1)) {
            ("if", "else") => true,
            ("do", "while") => return simple_end(source, end + 1).ok_or_else(no_end),
            _ => false,
        };
        return if goes_on { end_of_statement(source, end + 1) } else { Ok(end) };
    }
    simple_end(source, start).ok_or_else(no_end)
}

fn simple_end(source: &Source, start: usize) -> Option<usize> {
    let mut at = start;
    loop {
        match source.word(at) {
            ";" => return Some(at),
            "" | "}" => return None,
            _ => at = source.tokens[at].partner.filter(|&partner| partner > at).unwrap_or(at) + 1,
        }
    }
}

fn edge(source: &Source, edit: &Edit, scope: &Range<usize>) -> Result<Place, String> {
    let at_file = |at| Ok(Place { range: at..at, indent: String::new() });
    match (&edit.scope, &edit.verb) {
        (Scope::File, Verb::Begin) if source.includes_end == 0 => Err("the file begins with no #include".into()),
        (Scope::File, Verb::Begin) => at_file(source.includes_end),
        (Scope::File, _) => at_file(source.text.len()),
        (_, Verb::Begin) => Ok(after(source, scope.start, scope.start + 1)),
        _ => Ok(before_close(source, scope.end)),
    }
}

/// Returns the start of a token's line, and the white space at its beginning.
fn line_of(source: &Source, at: usize) -> (usize, String) {
    let start = source.tokens.get(at).map_or(source.text.len(), |token| token.range.start);
    let line = source.text[..start].rfind('\n').map_or(0, |end| end + 1);
    let indent = source.text[line..].chars().take_while(|c| matches!(c, ' ' | '\t')).collect();
    (line, indent)
}

/// Returns the place before a token: on lines of its own when the token is the first of its line.
fn before(source: &Source, at: usize) -> Place {
    let (line, indent) = line_of(source, at);
    let start = source.tokens[at].range.start;
    let range = if line + indent.len() == start { line..line } else { start..start };
    Place { range, indent }
}

fn before_close(source: &Source, close: usize) -> Place {
    let Place { range, indent } = before(source, close);
    Place { range, indent: format!("{indent}  ") }
}

/// Returns the place after a token, with the indentation of another one. The rest of the line is a comment at most: it
/// stays on its line if the line ends there.
fn after(source: &Source, at: usize, like: usize) -> Place {
    let end = source.tokens[at].range.end;
    let next = source.tokens.get(at + 1).map_or(source.text.len(), |token| token.range.start);
    let gap = &source.text[end..next];
    let simple = gap.find('\n').filter(|&n| !gap[..n].contains("/*") || gap[..n].contains("*/"));
    let place = simple.map_or(end, |n| end + n + 1);
    Place { range: place..place, indent: line_of(source, like).1 }
}

/// Finds anchors in text that is not C: the words of a pattern are adjacent on one line.
fn in_lines(text: &str, edit: &Edit) -> Result<Place, String> {
    let mut start = 0;
    let mut found = Vec::new();
    for line in text.split_inclusive('\n') {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.windows(edit.pattern.len()).any(|window| window == edit.pattern) {
            found.push(start);
        }
        start += line.len();
    }
    let start = one(found, edit.occurrence)?;
    let line = text[start..].split_inclusive('\n').next().unwrap_or_default();
    let end = start + line.len();
    let range = match edit.verb {
        Verb::Before => start..start,
        Verb::After => end..end,
        _ => start..start + line.trim_end().len(),
    };
    Ok(Place { range, indent: String::new() })
}
