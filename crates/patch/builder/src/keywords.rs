//! Keywords in sources (`$Libraries: -lodbc $`) that a build's scripts read from the text: no compiler sees that they change.

use crate::Error;
use crate::debian::Diff;
use crate::diff;
use crate::generators::may_be_rule;
use crate::tree::is_source;
use std::collections::BTreeSet;
use std::path::Path;
use stillpoint_host::untrusted::Tree;

/// Keywords of version control: a script that has one in a comment of its own does not read it from sources.
const VERSION_CONTROL: [&str; 17] = [
    "Author",
    "CVSHeader",
    "Date",
    "FreeBSD",
    "Header",
    "HeadURL",
    "Id",
    "LastChangedBy",
    "LastChangedDate",
    "LastChangedRevision",
    "Log",
    "Name",
    "NetBSD",
    "OpenBSD",
    "Rev",
    "Revision",
    "Source",
];
/// Size limit, in bytes, of files that count as rules and scripts.
const BYTES_MAX: u64 = 4 << 20;
/// Limits of the length of a keyword.
const LENGTHS: std::ops::RangeInclusive<usize> = 2..=32;

/// A keyword on a line that a diff changes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Keyword {
    pub(crate) diff: String,
    pub(crate) file: String,
    name: String,
}

/// Returns a keyword on a changed line of a source that is not left out, and the rule or script that reads it.
pub(crate) fn reader(
    tree: &Path,
    diffs: &[Diff],
    left_out: &dyn Fn(&str) -> bool,
) -> Result<Option<(Keyword, String)>, Error> {
    let changed: BTreeSet<Keyword> = diffs.iter().flat_map(changed).filter(|word| !left_out(&word.file)).collect();
    if changed.is_empty() {
        return Ok(None);
    }
    let tree = Tree::open(tree)?;
    for entry in tree.entries()?.iter().filter(|entry| entry.is_file() && entry.length <= BYTES_MAX) {
        let name = entry.name.to_string_lossy().into_owned();
        if may_be_rule(&name) {
            let text = tree.read(&entry.name)?;
            if let Some(keyword) = changed.iter().find(|keyword| keyword.is_read_by(&text)) {
                return Ok(Some((keyword.clone(), name)));
            }
        }
    }
    Ok(None)
}

/// Returns the keywords on lines that a diff changes in sources.
fn changed(diff: &Diff) -> Vec<Keyword> {
    let files = diff::split(&diff.text).into_iter().filter(|file| is_source(&file.path));
    let words = files.flat_map(|file| {
        let lines: Vec<&[u8]> = file.text.split(|byte| *byte == b'\n').skip(2).collect();
        let is_changed = |line: &&[u8]| matches!(line.first(), Some(b'+' | b'-'));
        let names: Vec<String> = lines.into_iter().filter(is_changed).flat_map(names).collect();
        names.into_iter().map(move |name| Keyword { diff: diff.name.clone(), file: file.path.clone(), name })
    });
    words.collect()
}

/// Returns each `Name` of a line that has `$Name: ... $`.
fn names(line: &[u8]) -> Vec<String> {
    let parts: Vec<&[u8]> = line.split(|byte| *byte == b'$').collect();
    let closed = parts.len().saturating_sub(1);
    let word = |part: &[u8]| {
        let length = part.iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
        let is_keyword = LENGTHS.contains(&length) && part.get(length) == Some(&b':');
        is_keyword.then(|| String::from_utf8_lossy(&part[..length]).into_owned())
    };
    parts[..closed].iter().skip(1).copied().filter_map(word).collect()
}

impl Keyword {
    /// Returns the file and the keyword, for people.
    pub(crate) fn described(&self, by: &str) -> String {
        format!("{} (its `${}:`, which {by} reads)", self.file, self.name)
    }

    /// Returns true if a text has the keyword; one of version control only in a pattern, where its `$` is escaped.
    fn is_read_by(&self, text: &[u8]) -> bool {
        let word = format!("{}:", self.name);
        let is_marked = |before: &[u8]| {
            let dollars = before.strip_suffix(b"]").unwrap_or(before);
            let rest = dollars.iter().rposition(|byte| *byte != b'$').map_or(0, |at| at + 1);
            let is_escaped = dollars.len() < before.len() || dollars[..rest].ends_with(b"\\");
            rest < dollars.len() && (is_escaped || !VERSION_CONTROL.contains(&self.name.as_str()))
        };
        let mut places = text.windows(word.len()).enumerate().filter(|(_, window)| *window == word.as_bytes());
        places.any(|(at, _)| is_marked(&text[..at]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_keyword_counts_where_it_changes_and_a_script_reads_it() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("src")).unwrap();
        fs::write(directory.path().join("src/b.c"), "/* $Needs: b $ */\n").unwrap();
        fs::write(
            directory.path().join("configure"),
            "# $Id: 7 $\nsed -n 's/.*\\$Libraries: \\(.*\\)\\$/\\1/p' src/a.c\n",
        )
        .unwrap();
        let found = |file: &str, lines: &str| {
            let text = format!("--- a/{file}\n+++ b/{file}\n@@ -1,2 +1,2 @@\n{lines}");
            let diffs = [Diff::new("fix.patch", text.into_bytes())];
            reader(directory.path(), &diffs, &|file| file == "src/out.c").unwrap()
        };
        let (keyword, by) = found("src/a.c", "-/* $Libraries: -la $ */\n+/* */\n one\n").unwrap();
        assert_eq!(keyword.described(&by), "src/a.c (its `$Libraries:`, which configure reads)");
        let others = [
            ("src/a.c", " /* $Libraries: -la $ */\n-one\n+two\n"),
            ("src/a.c", "-/* $Id: 1 $ */\n+/* $Id: 2 $ */\n one\n"),
            ("src/a.c", "-/* $Needs: a $ */\n+/* $Needs: c $ */\n one\n"),
            ("src/a.c", "-price = \"$5:$\";\n+price = \"$Libraries: \";\n one\n"),
            ("src/out.c", "-/* $Libraries: -la $ */\n+/* */\n one\n"),
            ("notes.md", "-$Libraries: -la $\n+\n one\n"),
        ];
        for (file, lines) in others {
            assert_eq!(found(file, lines), None, "{file}: {lines}");
        }
    }
}
