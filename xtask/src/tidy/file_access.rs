//! Files are opened in one place: the files that root reads and writes on request are located where other users can change paths.

use super::lexer::{code_only, lines_outside_tests};
use super::{Finding, Tree};

/// Calls that open, make or change a file by its path.
const OPENING_CALLS: [&str; 8] = [
    "File::open",
    "File::create",
    "File::options",
    "OpenOptions",
    "DirBuilder",
    "read_dir",
    "rustix::fs::open",
    "openat",
];
/// Types of the standard library's module for files; they open none.
const TYPES: [&str; 2] = ["::File", "::Metadata"];
/// Folders of the packages whose commands root runs for other users.
const FOLDERS: [&str; 4] =
    ["crates/cli/src", "crates/kernel/engine/src", "crates/migrate/engine/src", "crates/patch/engine/src"];

/// Checks that no file of the product opens files by a path: all use `stillpoint_host::trusted`, `stillpoint_host::file` and
/// `stillpoint_host::kernel_files`.
pub(super) fn opened_in_one_place(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in FOLDERS.iter().flat_map(|folder| tree.rust_below(folder)).filter(|file| !file.is_test()) {
        let code = code_only(&file.text);
        if let Some((number, _)) = lines_outside_tests(&code).into_iter().find(|(_, line)| opens(line)) {
            let text = "opens files by itself: use stillpoint_host's trusted, file or kernel_files";
            findings.push(Finding::new(&file.path, number, text));
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
    let imports = |group: &str, wanted: &str| {
        line.split_once(group).is_some_and(|(_, names)| names.split(|c| !is_word(c)).any(|name| name == wanted))
    };
    OPENING_CALLS.iter().any(|call| line.contains(call))
        || line.split("std::fs").skip(1).any(|rest| !is_type(rest))
        || imports("std::{", "fs")
        || imports("rustix::fs::{", "open")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_opens_others_is_found() {
        let path = "crates/cli/src/patch/x.rs";
        let others = [
            "use std::fs;",
            "use std::{fs, io};",
            "use std::fs::{File, Metadata};",
            "std::fs::File::open_x",
            "use rustix::fs::{Mode, open};",
        ];
        for call in OPENING_CALLS.into_iter().chain(others) {
            let text = format!("//! std::fs\nfn f() {{ {call} }}\n#[cfg(test)]\nmod tests {{}}\n");
            let tree = Tree::of_files([(path, text.as_str()), ("crates/measure/src/x.rs", "use std::fs;\n")]);
            let found = opened_in_one_place(&tree);
            assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [2], "{call}");
        }
    }

    #[test]
    fn tests_and_types_open_none() {
        let tests = "use std::fs::File;\nuse std::fs::Metadata;\nuse rustix::fs::{Mode, OFlags};\n\
                     fn f(at: &std::fs::File) {}\n#[cfg(test)]\nmod tests {\n use std::fs;\n}\n";
        assert_eq!(opened_in_one_place(&Tree::of_files([("crates/cli/src/patch/x.rs", tests)])), []);
    }
}
