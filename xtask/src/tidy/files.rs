//! Files are opened in one place: the files that root reads and writes on request are located where other users can change paths.

use super::layers::{Layer, place};
use super::lexer::{code_only, lines_outside_tests};
use super::{Finding, SourceFile, Tree};

/// Calls that open, make or change a file by its path.
const WAYS: [&str; 11] = [
    "File::open",
    "File::create",
    "File::options",
    "OpenOptions",
    "DirBuilder",
    "read_dir",
    "rustix::fs::open",
    "openat",
    "tokio::fs",
    "fcntl::open",
    "libc::open",
];
/// Types of the standard library's module for files; they open none.
const TYPES: [&str; 2] = ["::File", "::Metadata"];
/// Files and folders that open files for all others. Each one states whom it trusts.
const HELPERS: [&str; 5] = [
    // directories that only root and this user can change
    "crates/host/src/trusted.rs",
    // trees whose contents others wrote
    "crates/host/src/untrusted.rs",
    // single files that the caller of a command or its configuration names
    "crates/host/src/file.rs",
    // `/proc`, `/sys` and devices
    "crates/host/src/kernel_files.rs",
    // entries of the cache, in a directory that belongs to this user alone
    "crates/host/src/cache/",
];

/// Checks that no file of the product opens files by a path, except for the helpers of `stillpoint_host`.
pub(super) fn opened_in_one_place(tree: &Tree) -> Vec<Finding> {
    let is_product = |name: &str| place(name).is_some_and(|(layer, _)| layer != Layer::Tool);
    let mut findings = Vec::new();
    for package in tree.packages.iter().filter(|package| is_product(&package.name)) {
        let folder = format!("{}/src", package.dir);
        for file in tree.rust_below(&folder).filter(|file| !file.is_test()) {
            let is_helper = HELPERS.iter().any(|helper| file.path.starts_with(helper));
            if let Some(number) = first_opening(file).filter(|_| !is_helper) {
                let text = "opens files by itself: take stillpoint_host's trusted, untrusted, file or kernel_files";
                findings.push(Finding::new(&file.path, number, text));
            }
        }
    }
    findings
}

/// Returns the number of the first line that can open a file.
fn first_opening(file: &SourceFile) -> Option<usize> {
    let code = code_only(&file.text);
    lines_outside_tests(&code).into_iter().find(|(_, line)| opens(line)).map(|(number, _)| number)
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
    WAYS.iter().any(|way| line.contains(way))
        || line.split("std::fs").skip(1).any(|rest| !is_type(rest))
        || imports("std::{", "fs")
        || imports("rustix::fs::{", "open")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::Package;

    /// Packages of the product and of its tests, with files.
    fn tree<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Tree {
        let packages = [
            ("stillpoint", "crates/cli"),
            ("stillpoint-host", "crates/host"),
            ("stillpoint-measure", "crates/measure"),
            ("stillpoint-patch-builder", "crates/patch/builder"),
            ("stillpoint-testing", "crates/testing"),
        ];
        let package = |(name, dir): (&str, &str)| Package { name: name.into(), dir: dir.into(), ..Package::default() };
        Tree { packages: packages.map(package).into(), ..Tree::of_files(files) }
    }

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
        for way in WAYS.into_iter().chain(others) {
            let text = format!("//! std::fs\nfn f() {{ {way} }}\n#[cfg(test)]\nmod tests {{}}\n");
            let found = opened_in_one_place(&tree([(path, text.as_str())]));
            assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [2], "{way}");
        }
    }

    #[test]
    fn every_package_of_the_product_counts_and_only_the_helpers_open_files() {
        let opens = "use std::fs;\n";
        let products = ["crates/host/src/systemd/x.rs", "crates/measure/src/x.rs", "crates/patch/builder/src/a/x.rs"];
        let others = [
            "crates/host/src/trusted.rs",
            "crates/host/src/cache/x.rs",
            "crates/testing/src/x.rs",
            "crates/patch/builder/src/x_tests.rs",
            "crates/patch/builder/tests/it/x.rs",
            "crates/cli/build.rs",
        ];
        let found = opened_in_one_place(&tree(products.into_iter().chain(others).map(|path| (path, opens))));
        assert_eq!(found.iter().map(|finding| finding.path.as_str()).collect::<Vec<_>>(), products);
    }

    #[test]
    fn tests_and_types_open_none() {
        let tests = "use std::fs::File;\nuse std::fs::Metadata;\nuse rustix::fs::{Mode, OFlags};\n\
                     fn f(at: &std::fs::File) {}\n#[cfg(test)]\nmod tests {\n use std::fs;\n}\n";
        assert_eq!(opened_in_one_place(&tree([("crates/cli/src/patch/x.rs", tests)])), []);
    }
}
