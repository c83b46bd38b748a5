//! Changes of ours to MariaDB's source: edits at anchors, and a statement whose answer shows if the change is active.
//!
//! A change is a file of `stillpoint_integrations` with directives in its comments:
//!
//! ```text
//! # What it does.
//! #: ask SELECT ASCII('a')        sent on one connection; the last answer counts
//! #: before 97                    answer of the server as shipped
//! #: after 197                    answer of the patched server
//! file sql/item_func.cc
//! ...
//! ```
//!
//! An answer is compared as a whole; `~text` must be part of it, `!text` must not; `\t` and `\n` separate columns and
//! rows.

use super::client::{Answer, Client};
use super::{MariaDb, PackagedServer};
use crate::cli::{Run, Stillpoint};
use crate::edited_source;
use crate::shipped_program::builder_cache;
use std::path::{Path, PathBuf};

/// One change.
#[derive(Debug, Clone)]
pub struct Change {
    /// Name of its file.
    pub name: String,
    /// First line of the file.
    pub about: String,
    /// The file of the source that it changes.
    pub file: String,
    ask: Vec<String>,
    before: String,
    after: String,
    edits: String,
}

/// Tables that the statements need.
const TABLES: [&str; 13] = [
    "CREATE TABLE on_aria (a INT PRIMARY KEY, b INT, c VARCHAR(40)) ENGINE=Aria TRANSACTIONAL=1",
    "INSERT INTO on_aria VALUES (1, 10, 'x'), (2, 20, 'y'), (3, 30, 'z')",
    "CREATE TABLE on_aria_checked (a INT) ENGINE=Aria CHECKSUM=1",
    "INSERT INTO on_aria_checked VALUES (1), (2), (3)",
    "CREATE TABLE long_unique (t TEXT, UNIQUE (t)) ENGINE=InnoDB",
    "CREATE TABLE on_myisam (a INT, b INT) ENGINE=MyISAM",
    "INSERT INTO on_myisam VALUES (1, 10), (2, 20), (3, 30)",
    "CREATE TABLE on_memory (a INT, b INT) ENGINE=MEMORY",
    "INSERT INTO on_memory VALUES (1, 10), (2, 20), (3, 30)",
    "CREATE TABLE on_innodb (a INT PRIMARY KEY, b INT, c VARCHAR(40), KEY (b)) ENGINE=InnoDB",
    "INSERT INTO on_innodb SELECT seq, seq % 100, CONCAT('row ', seq) FROM seq_1_to_2000",
    "CREATE TABLE on_csv (a INT NOT NULL, b INT NOT NULL) ENGINE=CSV",
    "INSERT INTO on_csv VALUES (1, 10), (2, 20), (3, 30)",
];

/// Returns the directory of the changes.
pub fn directory() -> PathBuf {
    crate::workspace_root().join("crates/patch/tests/patches/mariadb")
}

/// Returns all of them, by name.
pub fn all() -> Vec<Change> {
    let entries = std::fs::read_dir(directory()).expect("the changes are there").flatten();
    let mut names: Vec<String> =
        entries.filter_map(|e| Some(e.file_name().to_str()?.strip_suffix(".edits")?.to_owned())).collect();
    names.sort();
    names.iter().map(|name| named(name)).collect()
}

/// Returns the change of this name.
#[track_caller]
pub fn named(name: &str) -> Change {
    let path = directory().join(format!("{name}.edits"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()));
    Change::parse(name, &text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Makes the tables that the statements need.
#[track_caller]
pub fn prepare(server: &MariaDb) {
    let mut client = server.client();
    for statement in TABLES {
        client.done(statement).unwrap_or_else(|e| panic!("{e}"));
    }
}

impl Change {
    fn parse(name: &str, text: &str) -> Result<Change, String> {
        let about =
            text.lines().next().and_then(|l| l.strip_prefix("# ")).ok_or("no first line that says what it does")?;
        let directive = |wanted: &str| -> Vec<String> {
            let rest =
                |line: &str| line.strip_prefix("#: ")?.strip_prefix(wanted)?.strip_prefix(' ').map(str::to_owned);
            text.lines().filter_map(rest).collect()
        };
        let one = |wanted: &str| match &directive(wanted)[..] {
            [one] => Ok(one.replace("\\t", "\t").replace("\\n", "\n")),
            other => Err(format!("{} lines say {wanted}", other.len())),
        };
        let file = text.lines().find_map(|l| l.strip_prefix("file ")).ok_or("it edits no file")?.trim().to_owned();
        let (ask, before, after) = (directive("ask"), one("before")?, one("after")?);
        if ask.is_empty() || before == after {
            return Err("nothing would show its effect".into());
        }
        Ok(Change { name: name.into(), about: about.into(), file, ask, before, after, edits: text.into() })
    }

    /// Returns the edits, in the form of `stillpoint_integrations`.
    pub fn edits(&self) -> &str {
        &self.edits
    }

    /// Returns the change as a diff of the source.
    ///
    /// # Errors
    /// The source does not have the text that the change replaces, or cannot be read.
    pub fn diff(&self, source: &Path) -> Result<String, String> {
        edited_source::diff(&self.name, &self.edits, source)
    }

    /// Builds the live patch into `into`.
    ///
    /// # Errors
    /// The diff cannot be written, or the build fails.
    pub fn build(&self, packaged: &PackagedServer, into: &Path) -> Result<(PathBuf, Run), String> {
        let (diff, patch) = (into.join(format!("{}.diff", self.name)), into.join(format!("{}.patch", self.name)));
        std::fs::write(&diff, self.diff(&packaged.source)?).map_err(|e| format!("write {}: {e}", diff.display()))?;
        let run = Stillpoint::new()
            .args(["patch", "build"])
            .debian(&format!("mariadb={}", packaged.version))
            .arg("--diff")
            .arg(&diff)
            .arg("--target")
            .arg(&packaged.binary.path)
            .arg("--output")
            .arg(&patch)
            .arg("--cache")
            .arg(builder_cache())
            .run();
        Ok((patch, run))
    }

    /// Checks if the change is active. An answer that matches neither side is an error.
    ///
    /// # Errors
    /// The server does not answer, or answers in neither way.
    pub fn is_active(&self, server: &MariaDb) -> Result<bool, String> {
        let mut client: Client = server.client();
        let mut answer = Answer::Done(0);
        for statement in &self.ask {
            answer = client.query(statement).map_err(|e| format!("{statement}: the connection is lost: {e}"))?;
        }
        let text = answer.to_string();
        match (fits(&self.before, &text), fits(&self.after, &text)) {
            (true, false) => Ok(false),
            (false, true) => Ok(true),
            _ => Err(format!("{} is answered by {text:?}", self.ask.join("; "))),
        }
    }
}

fn fits(wanted: &str, text: &str) -> bool {
    if let Some(part) = wanted.strip_prefix('~') {
        text.contains(part)
    } else if let Some(part) = wanted.strip_prefix('!') {
        !text.contains(part)
    } else {
        text == wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_integrations::Edits;

    #[test]
    fn every_change_says_what_it_does_and_what_shows_it() {
        let all = all();
        assert!(all.len() >= 44, "{} changes", all.len());
        for change in &all {
            assert!(Edits::parse(&change.name, &change.edits).is_ok(), "{}", change.name);
        }
    }

    #[test]
    fn answers_are_compared_whole_or_in_part() {
        assert!(fits("a\tb", "a\tb") && !fits("a", "a\tb"));
        assert!(fits("~b", "a\tb") && !fits("!b", "a\tb") && fits("!c", "a\tb"));
    }
}
