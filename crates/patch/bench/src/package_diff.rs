//! Unified diffs of a package's series.

use std::fs;
use std::path::{Path, PathBuf};
use stillpoint_patch_builder::Diff;

/// Returns true if a diff changes a file of C or C++.
pub fn changes_code(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text);
    let files = text.lines().filter_map(|line| line.strip_prefix("+++ "));
    files.filter_map(|rest| rest.split('\t').next()).any(is_code)
}

/// Returns true if a file has the name of a source, header or grammar of C or C++.
pub fn is_code(path: &str) -> bool {
    const SUFFIXES: [&str; 12] = ["c", "cc", "cpp", "cxx", "h", "hh", "hpp", "hxx", "S", "y", "l", "inc"];
    Path::new(path).extension().is_some_and(|suffix| SUFFIXES.contains(&suffix.to_string_lossy().as_ref()))
}

/// Writes the reverse of a diff into a directory.
///
/// # Errors
/// The file cannot be written.
pub fn write_reversed(directory: &Path, diff: &Diff) -> Result<PathBuf, String> {
    let path = directory.join(diff.name.replace('/', "%"));
    fs::write(&path, reversed(&diff.text)).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(path)
}

/// Exchanges the two sides of a unified diff.
pub fn reversed(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    // lines of the present hunk that are still to come, on the old and on the new side
    let mut left = (0usize, 0usize);
    let mut header: Option<Vec<u8>> = None;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        if left != (0, 0) {
            let (kind, rest) = line.split_first().unwrap_or((&b' ', b""));
            let other = match kind {
                b'-' => (left.0 = left.0.saturating_sub(1), b'+').1,
                b'+' => (left.1 = left.1.saturating_sub(1), b'-').1,
                b'\\' => b'\\',
                _ => {
                    left = (left.0.saturating_sub(1), left.1.saturating_sub(1));
                    *kind
                }
            };
            out.push(other);
            out.extend_from_slice(rest);
        } else if line.starts_with(b"--- ") {
            header = Some(line[4..].to_vec());
        } else if let (true, Some(old)) = (line.starts_with(b"+++ "), header.take()) {
            out.extend([b"--- ", &line[4..], b"+++ ", &old[..]].concat());
        } else if let Some((old, new, rest)) = hunk(line) {
            left = (lines_of(old), lines_of(new));
            out.extend(format!("@@ -{new} +{old} @@{rest}").into_bytes());
        } else if line.starts_with(b"\\") {
            out.extend_from_slice(line);
        }
    }
    out
}

/// Splits `@@ -OLD +NEW @@REST`.
fn hunk(line: &[u8]) -> Option<(&str, &str, &str)> {
    let rest = str::from_utf8(line).ok()?.strip_prefix("@@ -")?;
    let (old, rest) = rest.split_once(" +")?;
    let (new, rest) = rest.split_once(" @@")?;
    Some((old, new, rest))
}

fn lines_of(range: &str) -> usize {
    range.split_once(',').map_or(Some(1), |(_, count)| count.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_are_exchanged() {
        let text =
            b"Subject: x\n--- a/one.c\n+++ b/one.c\n@@ -1,3 +1,2 @@ f()\n a\n-b\n--- c\n+d\n@@ -9 +8 @@\n-x\n+y\n";
        let back = b"--- b/one.c\n+++ a/one.c\n@@ -1,2 +1,3 @@ f()\n a\n+b\n+-- c\n-d\n@@ -8 +9 @@\n+x\n-y\n";
        assert_eq!(String::from_utf8_lossy(&reversed(text)), String::from_utf8_lossy(back));
        assert_eq!(reversed(&reversed(text)), reversed(back));
    }
}
