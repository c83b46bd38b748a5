//! Files are opened in one place: what root reads and writes on request lies where other users have a part in it.

use super::lexer::{code_only, lines_outside_tests};
use super::{Finding, Tree};

/// Ways to open, make or change a file by its path.
const WAYS: [&str; 8] = [
    "std::fs",
    "File::open",
    "File::create",
    "File::options",
    "OpenOptions",
    "DirBuilder",
    "rustix::fs::open",
    "openat",
];
/// Types of the standard library's module for files, which open none.
const TYPES: [&str; 2] = ["::File", "::Metadata"];
/// Packages whose commands root runs for others, by their folders.
const FOLDERS: [&str; 4] =
    ["crates/cli/src", "crates/kernel/engine/src", "crates/migrate/engine/src", "crates/patch/engine/src"];
/// Files that open others by paths of root's own, and are to go through the opener as well.
const BY_THEMSELVES: &[&str] = &[
    "crates/kernel/engine/src/switch/boot.rs",
    "crates/kernel/engine/src/switch/handover.rs",
    "crates/kernel/engine/src/switch/journal.rs",
    "crates/kernel/engine/src/switch/loader.rs",
    "crates/kernel/engine/src/switch/meeting.rs",
    "crates/kernel/engine/src/switch/phases.rs",
    "crates/kernel/engine/src/switch/reserve.rs",
    "crates/kernel/engine/src/switch/resume.rs",
    "crates/kernel/engine/src/switch/system.rs",
    "crates/migrate/engine/src/journal.rs",
];

/// Only listed files open others by a path; all else goes through `stillpoint_host::trusted`, `stillpoint_host::file`
/// and `stillpoint_host::kernel_files`.
pub(super) fn opened_in_one_place(tree: &Tree) -> Vec<Finding> {
    opened_but_in(tree, BY_THEMSELVES)
}

fn opened_but_in(tree: &Tree, listed: &[&str]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in FOLDERS.iter().flat_map(|folder| tree.rust_below(folder)).filter(|file| !file.is_test()) {
        let code = code_only(&file.text);
        let lines = lines_outside_tests(&code);
        let found = lines.iter().find(|(_, line)| opens(line));
        match (found, listed.contains(&file.path.as_str())) {
            (Some((number, _)), false) => {
                let text = "opens files by itself: take stillpoint_host::trusted, or list it in xtask's tidy/files.rs";
                findings.push(Finding::new(&file.path, *number, text));
            }
            (None, true) => findings.push(Finding::new(&file.path, 0, "take it out of the list in tidy/files.rs")),
            _ => {}
        }
    }
    findings
}

/// Returns true if a line of code can open a file.
fn opens(line: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let is_type = |rest: &str| {
        TYPES
            .iter()
            .filter_map(|name| rest.strip_prefix(name))
            .any(|rest| !rest.starts_with(|c| is_word(c) || c == ':'))
    };
    WAYS[1..].iter().any(|way| line.contains(way)) || line.split("std::fs").skip(1).any(|rest| !is_type(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_opens_others_is_found_and_one_that_does_not_is_taken_out() {
        let path = "crates/cli/src/patch/x.rs";
        for way in WAYS {
            let text = format!("//! std::fs\nfn f() {{ {way}; }}\n#[cfg(test)]\nmod tests {{}}\n");
            let tree = Tree::of_files([(path, text.as_str()), ("crates/measure/src/x.rs", "use std::fs;\n")]);
            let found = opened_but_in(&tree, &[]);
            assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [2], "{way}");
            assert_eq!(opened_but_in(&tree, &[path]), []);
        }
        let tests = "fn f() {}\n#[cfg(test)]\nmod tests {\n use std::fs;\n}\n";
        let tree = Tree::of_files([(path, tests)]);
        assert_eq!(opened_but_in(&tree, &[]), []);
        assert_eq!(opened_but_in(&tree, &[path]).len(), 1);
    }
}
