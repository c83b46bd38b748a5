//! Unified diffs: splits them file by file.
//!
//! Written by hand: `diffy` 0.5 changes no file at a place whose context differs, as patch(1) does with fuzz. So patch(1) makes the
//! changes, and needs only the parts of the diff.

/// The part of a diff that changes one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileDiff {
    /// The file, relative to the source directory, first component of the path in the diff taken off.
    pub path: String,
    /// True if the diff creates the file.
    pub creates: bool,
    /// True if the diff removes the file.
    pub removes: bool,
    /// Text from the `---` line to the end of the last hunk.
    pub text: Vec<u8>,
}

/// Splits a diff. Text between the files (mail headers, `diff --git` lines) is dropped; a diff without a hunk gives
/// nothing.
pub fn split(diff: &[u8]) -> Vec<FileDiff> {
    let lines: Vec<&[u8]> = diff.split_inclusive(|b| *b == b'\n').collect();
    let mut files = Vec::new();
    let mut at = 0;
    while at + 2 < lines.len() {
        let header = lines[at].starts_with(b"--- ")
            && lines[at + 1].starts_with(b"+++ ")
            && hunk_lengths(lines[at + 2]).is_some();
        if !header {
            at += 1;
            continue;
        }
        let end = hunks_end(&lines, at + 2);
        let (old, new) = (name(&lines[at][4..]), name(&lines[at + 1][4..]));
        let path = if new == "/dev/null" { &old } else { &new };
        files.push(FileDiff {
            path: strip(path),
            creates: old == "/dev/null" || hunk_starts_at_nothing(lines[at + 2]),
            removes: new == "/dev/null",
            text: lines[at..end].concat(),
        });
        at = end;
    }
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
    fn text_without_hunks_is_no_diff() {
        assert_eq!(split(b"--- a\n+++ b\nno hunk\n"), []);
        assert_eq!(split(b""), []);
        assert_eq!(
            split(b"--- a\n+++ b\n@@ -1,9999 +1,9999 @@\n x"),
            split(b"--- a\n+++ b\n@@ -1,9999 +1,9999 @@\n x")
        );
    }
}
