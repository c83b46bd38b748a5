//! Unified diffs: splits them file by file.
//!
//! Written by hand: `diffy` 0.5 changes no file at a place whose context differs, as patch(1) does with fuzz. So patch(1) makes the
//! changes, and needs only the parts of the diff.

/// The part of a diff that changes one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileDiff {
    /// The file, relative to the source directory, first component of the path in the diff taken off.
    pub path: String,
    /// File that this one is a copy of before the hunks: git's diffs copy and rename files.
    pub from: Option<String>,
    /// True if the diff creates the file.
    pub creates: bool,
    /// True if the diff removes the file.
    pub removes: bool,
    /// Text from the `---` line to the end of the last hunk; empty for a file that is only copied or removed.
    pub text: Vec<u8>,
}

impl FileDiff {
    /// A file without hunks.
    fn whole(path: String, from: Option<String>) -> FileDiff {
        FileDiff { path, creates: from.is_some(), removes: from.is_none(), from, text: Vec::new() }
    }
}

/// A copied or renamed file, as the lines of git before its hunks say.
#[derive(Debug, Default)]
struct Moved {
    from: Option<String>,
    to: Option<String>,
    is_renamed: bool,
}

impl Moved {
    /// Reads a line between `diff --git` and the hunks.
    fn read(&mut self, line: &[u8]) {
        let word = |word: &str| line.strip_prefix(word.as_bytes()).map(name);
        if let Some(from) = word("rename from ") {
            (self.from, self.is_renamed) = (Some(from), true);
        } else if let Some(from) = word("copy from ") {
            self.from = Some(from);
        } else if let Some(to) = word("rename to ").or_else(|| word("copy to ")) {
            self.to = Some(to);
        }
    }

    /// Ends the lines of a file. Returns the file that the hunks of `path` begin with; a move without hunks is added to
    /// `files`, as is the removal of a renamed file.
    fn end(&mut self, path: Option<&str>, files: &mut Vec<FileDiff>) -> Option<String> {
        let Moved { from, to, is_renamed } = std::mem::take(self);
        let (from, to) = (from?, to?);
        let begins = path == Some(&to);
        if !begins {
            files.push(FileDiff::whole(to, Some(from.clone())));
        }
        if is_renamed {
            files.push(FileDiff::whole(from.clone(), None));
        }
        begins.then_some(from)
    }
}

/// Splits a diff. Text between the files (mail headers, modes) is dropped; a diff that neither has a hunk nor moves a file
/// gives nothing.
pub fn split(diff: &[u8]) -> Vec<FileDiff> {
    let lines: Vec<&[u8]> = diff.split_inclusive(|b| *b == b'\n').collect();
    let (mut files, mut moved) = (Vec::new(), None::<Moved>);
    let mut at = 0;
    while at < lines.len() {
        let header = at + 2 < lines.len()
            && lines[at].starts_with(b"--- ")
            && lines[at + 1].starts_with(b"+++ ")
            && hunk_lengths(lines[at + 2]).is_some();
        if !header {
            if lines[at].starts_with(b"diff --git ") {
                moved.replace(Moved::default()).and_then(|mut before| before.end(None, &mut files));
            } else if let Some(moved) = &mut moved {
                moved.read(lines[at]);
            }
            at += 1;
            continue;
        }
        let end = hunks_end(&lines, at + 2);
        let (old, new) = (name(&lines[at][4..]), name(&lines[at + 1][4..]));
        let path = strip(if new == "/dev/null" { &old } else { &new });
        let mut others = Vec::new();
        let from = moved.take().and_then(|mut moved| moved.end(Some(&path), &mut others));
        files.push(FileDiff {
            path,
            creates: from.is_some() || old == "/dev/null" || hunk_starts_at_nothing(lines[at + 2]),
            from,
            removes: new == "/dev/null",
            text: lines[at..end].concat(),
        });
        files.append(&mut others);
        at = end;
    }
    moved.and_then(|mut last| last.end(None, &mut files));
    files
}

/// Skips hunks by their stated lengths: otherwise a removed line `-- x` looks like a header.
fn hunks_end(lines: &[&[u8]], mut at: usize) -> usize {
    while let Some((mut old, mut new)) = lines.get(at).and_then(|line| hunk_lengths(line)) {
        at += 1;
        while old > 0 || new > 0 {
            match lines.get(at).and_then(|line| line.first()) {
                Some(b'-') => old = old.saturating_sub(1),
                Some(b'+') => new = new.saturating_sub(1),
                Some(b'\\') => {}
                Some(b' ' | b'\n' | b'\r' | b'\t') => (old, new) = (old.saturating_sub(1), new.saturating_sub(1)),
                _ => return at,
            }
            at += 1;
        }
        if lines.get(at).is_some_and(|line| line.starts_with(b"\\")) {
            at += 1;
        }
    }
    at
}

fn hunk_lengths(line: &[u8]) -> Option<(u64, u64)> {
    let text = std::str::from_utf8(line).ok().or_else(|| {
        // the part after the second @@ may be any text
        let end = line.windows(3).skip(3).position(|w| w == b" @@")? + 3;
        std::str::from_utf8(&line[..end]).ok()
    })?;
    let mut words = text.strip_prefix("@@ ")?.split(' ');
    let old = words.next()?.strip_prefix('-')?;
    let new = words.next()?.strip_prefix('+')?;
    let length = |range: &str| range.split_once(',').map_or(Some(1), |(_, n)| n.parse().ok());
    Some((length(old)?, length(new)?))
}

fn hunk_starts_at_nothing(line: &[u8]) -> bool {
    line.starts_with(b"@@ -0,0 ")
}

fn name(rest: &[u8]) -> String {
    let text = String::from_utf8_lossy(rest);
    let text = text.trim_end_matches(['\n', '\r']);
    text.split('\t').next().unwrap_or(text).trim_end().trim_matches('"').to_owned()
}

fn strip(path: &str) -> String {
    let rest = path.split_once('/').map_or(path, |(_, rest)| rest);
    rest.trim_start_matches('/').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIFF: &str = "From: someone\nSubject: x\n---\n a.c | 2 +-\n\ndiff --git a/src/a.c b/src/a.c\n--- a/src/a.c\n+++ b/src/a.c\t2020\n\
@@ -1,3 +1,3 @@ int f(void)\n one\n--- minus\n+++ plus\n three\n@@ -9 +9,2 @@\n nine\n+ten\n\
diff --git a/new.h b/new.h\n--- /dev/null\n+++ b/new.h\n@@ -0,0 +1 @@\n+int x;\n\\ No newline at end of file\n\
--- a/old.c\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n-- \n2.39\n";

    #[test]
    fn splits_by_hunk_lengths_and_not_by_looks() {
        let files = split(DIFF.as_bytes());
        let facts: Vec<(&str, bool, bool)> = files.iter().map(|f| (&f.path[..], f.creates, f.removes)).collect();
        assert_eq!(facts, [("src/a.c", false, false), ("new.h", true, false), ("old.c", false, true)]);
        assert!(files[0].text.ends_with(b"+ten\n"));
        assert!(files[1].text.ends_with(b"No newline at end of file\n"));
        assert!(files[2].text.ends_with(b"-gone\n"));
    }

    #[test]
    fn files_that_git_copies_and_renames_begin_with_their_origin() {
        let text = b"Subject: rename from x\nrename from y\n---\n{a => b}.c | 2\n\ndiff --git a/src/a.c b/src/b.c\n\
similarity index 90%\ncopy from src/a.c\ncopy to src/b.c\n--- a/src/a.c\n+++ b/src/b.c\n@@ -1 +1 @@\n-a\n+b\n\
diff --git a/old.h b/new.h\nsimilarity index 100%\nrename from old.h\nrename to new.h\n\
diff --git a/x.c b/y.c\nrename from x.c\nrename to y.c\n--- a/x.c\n+++ b/y.c\n@@ -1 +1 @@\n-x\n+y\n\
diff --git a/c.c b/c.c\n--- a/c.c\n+++ b/c.c\n@@ -1 +1 @@\n-c\n+d\n\
diff --git a/p b/q\ncopy from p\ncopy to q\n";
        let files = split(text);
        let facts: Vec<_> =
            files.iter().map(|f| (&f.path[..], f.from.as_deref(), f.removes, f.text.is_empty())).collect();
        let expected = [
            ("src/b.c", Some("src/a.c"), false, false),
            ("new.h", Some("old.h"), false, true),
            ("old.h", None, true, true),
            ("y.c", Some("x.c"), false, false),
            ("x.c", None, true, true),
            ("c.c", None, false, false),
            ("q", Some("p"), false, true),
        ];
        assert_eq!(facts, expected);
    }

    #[test]
    fn text_without_hunks_is_no_diff() {
        assert_eq!(split(b"--- a\n+++ b\nno hunk\n"), []);
        assert_eq!(split(b""), []);
        assert_eq!(
            split(b"--- a\n+++ b\n@@ -1,9999 +1,9999 @@\n x"),
            split(b"--- a\n+++ b\n@@ -1,9999 +1,9999 @@\n x")
        );
    }
}
