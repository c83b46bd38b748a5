//! Words that are forbidden in every file, and the length of files.

use super::{Finding, SourceFile, Tree};

/// Files with more lines are listed.
const LINES_GUIDE: usize = 800;

/// Marks of unfinished work. Written in halves so that this file does not match itself.
const MARKERS: [[&str; 2]; 8] = [
    ["TO", "DO"],
    ["FIX", "ME"],
    ["XX", "X"],
    ["dbg", "!("],
    ["todo", "!("],
    ["unimplemented", "!("],
    ["#[ign", "ore]"],
    ["assert!(tr", "ue"],
];

/// Finds marks of unfinished work.
pub(super) fn markers(tree: &Tree) -> Vec<Finding> {
    let markers: Vec<String> = MARKERS.iter().map(|halves| halves.concat()).collect();
    lines_with(tree, &markers, is_source, |marker| {
        format!("`{marker}`: finish it, or write an issue about the missing part")
    })
}

/// Hosts that serve packages, in halves as above: a machine has its own archive configured, and a tree that names another host does not
/// build behind mirrors and firewalls.
const HOSTS: [[&str; 2]; 10] = [
    ["crates", ".io"],
    ["deb.deb", "ian.org"],
    ["security.deb", "ian.org"],
    ["snapshot.deb", "ian.org"],
    ["ftp.deb", "ian.org"],
    ["archive.deb", "ian.org"],
    ["pypi", ".org"],
    ["npmjs", ".org"],
    ["docker", ".io"],
    ["/work/sh", "ared"],
];

/// Finds names of registries, and of the machine where this tree was once developed.
pub(super) fn host_names(tree: &Tree) -> Vec<Finding> {
    let hosts: Vec<String> = HOSTS.iter().map(|halves| halves.concat()).collect();
    // Cargo writes its registry's address into the lock file; only cargo changes that file.
    let is_ours = |file: &SourceFile| !file.path.ends_with("Cargo.lock");
    lines_with(tree, &hosts, is_ours, |host| format!("names `{host}`: read it from the machine's own configuration"))
}

fn is_source(file: &SourceFile) -> bool {
    !file.path.ends_with(".lock") && !file.path.starts_with("LICENSE")
}

fn lines_with(
    tree: &Tree,
    words: &[String],
    applies: impl Fn(&SourceFile) -> bool,
    message: impl Fn(&str) -> String,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| applies(file)) {
        for (number, line) in file.text.lines().enumerate() {
            for word in words.iter().filter(|word| contains_alone(line, word)) {
                findings.push(Finding::new(&file.path, number + 1, message(word)));
            }
        }
    }
    findings
}

/// Returns true if `line` contains `word` and not only as part of a longer word (`XXXXXX` of a temporary name is not a mark).
fn contains_alone(line: &str, word: &str) -> bool {
    let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(word).any(|(at, _)| {
        let goes_on = word.ends_with(char::is_alphanumeric) && is_word(line[at + word.len()..].chars().next());
        !goes_on && !is_word(line[..at].chars().next_back())
    })
}

/// Returns the Rust and C files that are longer than the guide, with their length.
pub(super) fn long_files(tree: &Tree) -> Vec<String> {
    tree.files
        .iter()
        .filter(|file| [".rs", ".c", ".h", ".sh"].iter().any(|ext| file.path.ends_with(ext)))
        .map(|file| (file, file.text.lines().count()))
        .filter(|(_, lines)| *lines > LINES_GUIDE)
        .map(|(file, lines)| format!("{} has {lines} lines; {LINES_GUIDE} is the guide", file.path))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_marker_is_found_where_it_stands() {
        for halves in MARKERS {
            let text = format!("fine\n  {} x\n", halves.concat());
            let found = markers(&Tree::of_files([("a.rs", text.as_str())]));
            assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [2], "{halves:?}");
        }
    }

    #[test]
    fn parts_of_longer_words_are_no_markers() {
        let text = format!("mktemp /tmp/a.{}\n", "X".repeat(6));
        assert_eq!(markers(&Tree::of_files([("a.sh", text.as_str())])), []);
    }

    #[test]
    fn every_host_is_found_but_in_the_lock_file() {
        for halves in HOSTS {
            let text = format!("see https://{}/x\n", halves.concat());
            assert_eq!(host_names(&Tree::of_files([("a.md", text.as_str())])).len(), 1, "{halves:?}");
            assert_eq!(host_names(&Tree::of_files([("Cargo.lock", text.as_str())])), []);
        }
    }

    #[test]
    fn long_files_are_mentioned() {
        let long = "x\n".repeat(LINES_GUIDE + 1);
        let tree = Tree::of_files([("a.rs", long.as_str()), ("b.rs", "x\n"), ("c.txt", long.as_str())]);
        assert_eq!(long_files(&tree).len(), 1);
    }
}
