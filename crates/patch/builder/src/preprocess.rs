//! The text that the compiler sees, and its files.

use crate::unused_declarations;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;

/// A unit after preprocessing, with the data that verify that it is still the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Text {
    /// Hash of the text without line markers, empty lines and, in C, declarations that nothing uses: equal texts make
    /// equal code.
    pub(crate) text: String,
    /// Hash of the whole text, line markers included: equal hashes make equal objects.
    pub(crate) full: String,
    /// Files that the compiler read; those in the source directory are relative to it.
    pub(crate) files: BTreeSet<String>,
}

/// Evaluates the output of `cc -E` for a unit in `directory`; `source` is the source directory, both as the compiler
/// sees them.
pub(crate) fn evaluate(output: &[u8], directory: &Path, source: &Path, is_c: bool) -> Text {
    let mut files = BTreeSet::new();
    let mut kept: Vec<&[u8]> = Vec::new();
    for line in output.split(|b| *b == b'\n') {
        if let Some(rest) = marker(line) {
            if let Some(name) = file_name(rest) {
                let path = crate::commands::resolve(directory, Path::new(&name));
                let path = path.strip_prefix(source).unwrap_or(&path);
                files.insert(path.to_string_lossy().into_owned());
            }
        } else {
            let line = line.trim_ascii();
            if !line.is_empty() {
                kept.push(line);
            }
        }
    }
    // the rules of C++ find functions that no text names
    let text = if is_c {
        // each line with the end of the one before it, so that whole lines are removed
        let joined: Vec<u8> = kept.iter().flat_map(|line| b"\n".iter().chain(*line)).copied().collect();
        stillpoint_host::cache::key(unused_declarations::without(&joined))
    } else {
        stillpoint_host::cache::key(kept)
    };
    Text { text, full: stillpoint_host::cache::key([output]), files }
}

/// Returns the part of a line marker (`# 12 "a.h" 2`) after `# `.
fn marker(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"# ")?;
    rest.first().is_some_and(u8::is_ascii_digit).then_some(rest)
}

fn file_name(marker: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(marker);
    let (_, rest) = text.split_once('"')?;
    let (name, _) = rest.rsplit_once('"')?;
    // the command line and the compiler itself are in brackets, the working directory has a trailing //
    let real = !name.starts_with('<') && !name.ends_with("//");
    real.then(|| name.replace("\\\"", "\"").replace("\\\\", "\\"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_do_not_count_and_files_do() {
        let evaluate_as = |text: &str, is_c| evaluate(text.as_bytes(), Path::new("/b/src"), Path::new("/b"), is_c);
        let evaluate = |text: &str| evaluate_as(text, true);
        let one = evaluate(
            "# 0 \"a.c\"\n# 0 \"<built-in>\"\n# 1 \"/b/src//\"\n# 1 \"../inc/x.h\" 1\nint x;\n# 2 \"a.c\" 2\n\n  int y;\n",
        );
        let two = evaluate("# 0 \"a.c\"\n# 9 \"../inc/x.h\" 1\n\nint x;\nint y;\n");
        assert_eq!(one.text, two.text);
        assert_ne!(one.full, two.full);
        assert_eq!(one.files, BTreeSet::from(["src/a.c".to_owned(), "inc/x.h".to_owned()]));
        assert_ne!(one.text, evaluate("int x;\nint z;\n").text);
        assert_ne!(one.text, evaluate("int x;int y;\n").text, "what __LINE__ or a directive could see stays apart");
        let more = "extern int f(int);\nint x;\nint y;\n";
        assert_eq!(one.text, evaluate(more).text, "nothing uses f");
        assert_ne!(one.full, evaluate(more).full);
        assert_ne!(evaluate_as("int x;\nint y;\n", false).text, evaluate_as(more, false).text);
    }
}
