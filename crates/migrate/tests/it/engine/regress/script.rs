//! Scripts of psql, split into definitions and statements that change or read rows.

/// Time at which a statement is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// Before the migration: it defines something that stays.
    Before,
    /// While the target follows.
    During,
    /// Both times: settings, and sources of psql's variables.
    Both,
    /// Never: it removes a definition, or has no effect on rows.
    Never,
}

/// A statement with its end, and the rows of a COPY.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Statement {
    pub(crate) text: String,
    /// Its words up to the first that is not one, in capitals, without comments.
    words: Vec<String>,
}

/// Splits a script. Unusual quoting may give a statement that fails; both servers see the same.
pub(crate) fn statements(script: &str) -> Vec<Statement> {
    let mut found = Vec::new();
    let (mut text, mut bare, mut depth) = (String::new(), String::new(), 0_usize);
    let mut rest = script;
    while !rest.is_empty() {
        if bare.trim().is_empty() && rest.starts_with('\\') {
            let line = up_to_line_end(rest);
            found.push(Statement { text: line.to_owned(), words: vec!["\\".into()] });
            (text, bare) = (String::new(), String::new());
            rest = &rest[line.len()..];
            continue;
        }
        let (taken, kind) = next_part(rest);
        let part = &rest[..taken];
        rest = &rest[taken..];
        text.push_str(part);
        match kind {
            Part::Comment => bare.push(' '),
            Part::Quoted => bare.push('\''),
            Part::Plain => {
                depth = if part == "(" { depth + 1 } else { depth.saturating_sub(usize::from(part == ")")) };
                bare.push_str(part);
            }
            // A rule may have several actions.
            Part::End if part == ";" && depth > 0 => bare.push(' '),
            Part::End => {
                depth = 0;
                // The rest of the line of a psql command belongs to it.
                if part.starts_with('\\') {
                    let line = up_to_line_end(rest);
                    text.push_str(line);
                    rest = &rest[line.len()..];
                }
                let words = words(&bare);
                if words.first().is_some_and(|word| word == "COPY") && bare.to_uppercase().contains("FROM STDIN") {
                    let data = data_of_copy(rest);
                    text.push_str(&rest[..data]);
                    rest = &rest[data..];
                    if data == 0 {
                        // If it is accepted after all, psql waits for this.
                        text.push_str("\n\\.\n");
                    }
                }
                found.push(Statement { text: std::mem::take(&mut text), words });
                bare.clear();
            }
        }
    }
    found
}

/// Length of the rows after a COPY, in bytes; 0 if the test expects an error.
fn data_of_copy(rest: &str) -> usize {
    let next = rest.lines().nth(1).unwrap_or("").trim_start().to_uppercase();
    let goes_on = ["--", "COPY ", "SELECT ", "INSERT ", "CREATE ", "DROP ", "ALTER ", "BEGIN", "ROLLBACK"];
    let none = next.is_empty() && !rest.starts_with("\n\n\\.") || goes_on.iter().any(|word| next.starts_with(word));
    if none { 0 } else { rest.find("\n\\.\n").map_or(rest.len(), |at| at + 4) }
}

enum Part {
    Comment,
    Quoted,
    Plain,
    End,
}

fn up_to_line_end(text: &str) -> &str {
    text.find('\n').map_or(text, |at| &text[..=at])
}

/// Length of the next part in bytes, and its kind.
fn next_part(rest: &str) -> (usize, Part) {
    let up_to = |end: &str, from: usize| rest[from..].find(end).map_or(rest.len(), |at| from + at + end.len());
    let first = rest.chars().next().map_or(1, char::len_utf8);
    if rest.starts_with("--") {
        return (up_to_line_end(rest).len(), Part::Comment);
    }
    if rest.starts_with("/*") {
        return (up_to("*/", 2), Part::Comment);
    }
    match rest.as_bytes()[0] {
        b'\'' => (up_to("'", 1), Part::Quoted),
        b'"' => (up_to("\"", 1), Part::Quoted),
        b'E' | b'e' if rest[1..].starts_with('\'') => (escaped(rest), Part::Quoted),
        b'$' => match dollar(rest) {
            Some(tag) => (up_to(tag, tag.len()), Part::Quoted),
            None => (1, Part::Plain),
        },
        b';' | b'\\' => (1, Part::End),
        // A whole word, so that no part begins within it.
        byte if byte.is_ascii_alphanumeric() || byte == b'_' => {
            (rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len()), Part::Plain)
        }
        _ => (first, Part::Plain),
    }
}

/// The end of a string in which a backslash escapes.
fn escaped(rest: &str) -> usize {
    let mut skip = false;
    let end = rest.char_indices().skip(2).find(|(_, c)| {
        let ends = !skip && *c == '\'';
        skip = !skip && *c == '\\';
        ends
    });
    end.map_or(rest.len(), |(at, _)| at + 1)
}

/// Tag `$tag$` at the beginning.
fn dollar(rest: &str) -> Option<&str> {
    let end = rest[1..].find('$')? + 1;
    let tag = &rest[1..end];
    let named =
        tag.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !tag.starts_with(|c: char| c.is_ascii_digit());
    named.then(|| &rest[..=end])
}

fn words(bare: &str) -> Vec<String> {
    bare.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
        .map(str::to_uppercase)
        .collect()
}

impl Statement {
    fn has(&self, word: &str) -> bool {
        self.words.iter().any(|other| other == word)
    }

    fn begins(&self, words: &[&str]) -> bool {
        self.words.len() >= words.len() && self.words.iter().zip(words).all(|(a, b)| a == b)
    }

    /// Returns true if its words show that it writes rows.
    pub(crate) fn writes(&self) -> bool {
        ["INSERT", "UPDATE", "DELETE", "MERGE", "TRUNCATE"]
            .iter()
            .any(|word| self.words.first().is_some_and(|w| w == word))
            || self.begins(&["COPY"]) && self.has("FROM")
    }

    pub(crate) fn when(&self) -> When {
        let Some(first) = self.words.first() else { return When::Never };
        let temporary = || self.words.iter().take(6).any(|word| word == "TEMP" || word == "TEMPORARY");
        match first.as_str() {
            "\\" => {
                let of_variables = ["\\set", "\\getenv", "\\unset", "\\if", "\\elif", "\\else", "\\endif"];
                if of_variables.iter().any(|command| self.text.starts_with(command)) { When::Both } else { When::Never }
            }
            "SET" | "RESET" if !self.has("CONSTRAINTS") && !self.has("LOCAL") => When::Both,
            "CREATE" if temporary() && (self.has("TABLE") || self.has("VIEW") || self.has("SEQUENCE")) => When::During,
            "CREATE" | "ALTER" | "COMMENT" | "GRANT" | "REVOKE" | "SECURITY" => When::Before,
            // SELECT INTO makes a table.
            "SELECT" | "WITH" if self.has("INTO") && !self.has("INSERT") && !self.has("MERGE") => {
                if temporary() || self.has("TEMP") { When::During } else { When::Before }
            }
            "SELECT" if self.text.contains("\\gset") => When::Both,
            _ if self.text.contains("\\gexec") => When::Never,
            "DO" => {
                let text = self.text.to_uppercase();
                if ["CREATE", "ALTER", "DROP"].iter().any(|word| text.contains(word)) {
                    When::Before
                } else {
                    When::During
                }
            }
            "DROP" | "VACUUM" | "CLUSTER" | "REINDEX" | "REASSIGN" | "ANALYZE" | "LOAD" | "REFRESH" | "IMPORT"
            | "EXPLAIN" => When::Never,
            _ => When::During,
        }
    }
}
