//! Rules that compare documents with the tree: crate headers, commands, terms, licences, lengths, results.

use super::{Finding, SourceFile, Tree};
use std::collections::BTreeSet;

/// Every library begins with a header that states its guarantees.
pub(super) fn crate_headers(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.packages.iter().filter_map(|package| tree.file(&format!("{}/src/lib.rs", package.dir))) {
        let header: Vec<&str> = file.text.lines().map_while(|line| line.strip_prefix("//!")).collect();
        if header.is_empty() {
            findings.push(Finding::new(&file.path, 1, "a crate opens with a `//!` header"));
        } else if !header.iter().any(|line| line.to_lowercase().contains("guarantee")) {
            findings.push(Finding::new(&file.path, 1, "the crate's header does not state what it guarantees"));
        }
    }
    findings
}

/// Page with a table of fuzz targets.
const SECURITY: &str = "docs/security.md";

/// The table of fuzz targets has a line for each file of `fuzz/targets`, and no other.
pub(super) fn fuzz_targets(tree: &Tree) -> Vec<Finding> {
    let files = tree.rust_below("fuzz/targets").filter_map(|file| file.path.rsplit('/').next()?.strip_suffix(".rs"));
    let files: BTreeSet<&str> = files.collect();
    let table = tree.file(SECURITY).and_then(|page| page.text.split_once("## Bytes from outside\n"));
    let rows = table.into_iter().flat_map(|(_, table)| table.lines());
    let rows: BTreeSet<&str> = rows.filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let missing = files.difference(&rows).map(|name| format!("no line for fuzz target {name}"));
    let left = rows.difference(&files).map(|name| format!("there is no fuzz target {name}"));
    missing.chain(left).map(|text| Finding::new(SECURITY, 0, text)).collect()
}

/// Documents whose commands are checked.
const DOCUMENTS: [&str; 5] = ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "docs/status.md", ".ci/run"];

/// Every `make` target and every `stillpoint patch` subcommand in a document exists.
pub(super) fn commands_exist(tree: &Tree) -> Vec<Finding> {
    let targets: Vec<&str> = tree.file("Makefile").map(make_targets).unwrap_or_default();
    let mut findings = Vec::new();
    for file in DOCUMENTS.iter().filter_map(|path| tree.file(path)) {
        for (number, line) in file.text.lines().enumerate() {
            let missing = words_after(line, "make").filter(|word| !targets.contains(word));
            findings
                .extend(missing.map(|word| Finding::new(&file.path, number + 1, format!("no target `make {word}`"))));
            let missing = words_after(line, "stillpoint patch")
                .filter(|word| tree.file(&format!("crates/cli/src/patch/{word}.rs")).is_none());
            findings.extend(
                missing
                    .map(|word| Finding::new(&file.path, number + 1, format!("no command `stillpoint patch {word}`"))),
            );
        }
    }
    findings
}

fn make_targets(makefile: &SourceFile) -> Vec<&str> {
    let is_target = |name: &&str| !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    makefile.text.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name).filter(is_target).collect()
}

/// Returns the word after each `command` that is written as code: after a backtick, or at the start of an indented line. Prose may use the
/// word "make" with another meaning.
fn words_after<'a>(line: &'a str, command: &str) -> impl Iterator<Item = &'a str> {
    let indented = line.starts_with("    ") || line.starts_with("exec ");
    let pattern = format!("{command} ");
    let found: Vec<&str> = line
        .match_indices(&pattern)
        .filter(|(at, _)| {
            line[..*at].ends_with('`') || (indented && line[..*at].trim_start_matches("exec").trim().is_empty())
        })
        .map(|(at, _)| &line[at + pattern.len()..])
        .filter_map(|rest| rest.split(|c: char| !(c.is_ascii_lowercase() || c == '-')).next())
        .filter(|word| !word.is_empty() && !word.starts_with('-'))
        .collect();
    found.into_iter()
}

/// Programs that a script or a document runs by way of cargo exist.
pub(super) fn programs_exist(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| !file.is_rust()) {
        for (number, line) in file.text.lines().enumerate() {
            let Some(at) = line.to_lowercase().find("cargo").and_then(|at| Some(at + line[at..].find(" run ")?)) else {
                continue;
            };
            let words: Vec<&str> = line[at..]
                .split_whitespace()
                .map(|word| word.trim_matches(['`', '\'', '"', ',', ';', '.', ')']))
                .collect();
            let after = |option: &str| words.iter().position(|word| *word == option).and_then(|i| words.get(i + 1));
            let Some(package) = after("-p").and_then(|name| tree.packages.iter().find(|p| p.name == **name)) else {
                continue;
            };
            let exists = match after("--bin") {
                Some(program) => package.programs.iter().any(|name| name == program),
                None => !package.programs.is_empty(),
            };
            if !exists {
                let message = format!("{} has no such program: {}", package.name, line.trim());
                findings.push(Finding::new(&file.path, number + 1, message));
            }
        }
    }
    findings
}

/// Enforces the table of GLOSSARY.md: its third column lists words that must not be used for the term.
pub(super) fn glossary(tree: &Tree) -> Vec<Finding> {
    let Some(glossary) = tree.file("GLOSSARY.md") else {
        return vec![Finding::new("GLOSSARY.md", 0, "is missing")];
    };
    let mut findings = Vec::new();
    let mut terms: Vec<String> = Vec::new();
    let mut avoided: Vec<(String, String)> = Vec::new();
    for (number, line) in glossary.text.lines().enumerate() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let &[term, _, not] = cells.as_slice() else { continue };
        if !line.starts_with('|') || term == "term" || term.starts_with("--") {
            continue;
        }
        if terms.iter().any(|known| known.eq_ignore_ascii_case(term)) {
            findings.push(Finding::new("GLOSSARY.md", number + 1, format!("`{term}` is defined twice")));
        }
        terms.push(term.to_owned());
        avoided.extend(
            not.split(',')
                .map(str::trim)
                .filter(|word| !word.is_empty())
                .map(|word| (word.to_owned(), term.to_owned())),
        );
    }
    let is_ours = |file: &&SourceFile| file.path != "GLOSSARY.md" && (file.is_rust() || file.path.ends_with(".md"));
    for file in tree.files.iter().filter(is_ours) {
        for (number, line) in file.text.lines().enumerate() {
            let line = line.to_lowercase();
            for (word, term) in avoided.iter().filter(|(word, _)| line.contains(word.as_str())) {
                findings.push(Finding::new(&file.path, number + 1, format!("`{word}`: GLOSSARY.md calls it `{term}`")));
            }
        }
    }
    findings
}

/// All packages have one licence, and its texts exist.
pub(super) fn licences(tree: &Tree) -> Vec<Finding> {
    const LICENCE: &str = "MIT OR Apache-2.0";
    let mut findings: Vec<Finding> = tree
        .packages
        .iter()
        .filter(|package| package.license.as_deref() != Some(LICENCE))
        .map(|package| Finding::new(&format!("{}/Cargo.toml", package.dir), 0, format!("licence is not `{LICENCE}`")))
        .collect();
    let texts = ["LICENSE-MIT", "LICENSE-APACHE"];
    findings
        .extend(texts.iter().filter(|path| tree.file(path).is_none()).map(|path| Finding::new(path, 0, "is missing")));
    findings
}

/// Pages with the most kilobytes that they may have.
const LENGTHS: [(&str, usize); 3] = [("README.md", 9), ("ARCHITECTURE.md", 9), ("docs/status.md", 4)];

/// Finds pages that are missing or too long, and a diary of the progress.
pub(super) fn lengths(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, most) in LENGTHS {
        match tree.file(path).map(|file| file.text.len()) {
            None => findings.push(Finding::new(path, 0, "is missing")),
            Some(length) if length > most << 10 => {
                findings.push(Finding::new(path, 0, format!("has {length} bytes; {most} KB is the limit")));
            }
            Some(_) => {}
        }
    }
    if tree.file("PROGRESS.md").is_some() {
        let text = "open points are issues, results are pages of experiments, limits are in docs/limits.md";
        findings.push(Finding::new("PROGRESS.md", 0, text));
    }
    findings
}

/// Folder of committed results.
const RESULTS: &str = "experiments/";
/// Maximum size in bytes of all committed results.
const RESULTS_MAX: u64 = 512 << 10;
/// Endings of raw results, which stay on the machine that measured (`.gitignore`).
const RAW: [&str; 4] = [".json", ".jsonl", ".log", ".part"];

/// Checks that committed results are pages and small pictures.
pub(super) fn results(tree: &Tree) -> Vec<Finding> {
    let texts = tree.files.iter().map(|file| (&file.path, file.text.len() as u64));
    let all = texts.chain(tree.data.iter().map(|(path, size)| (path, *size)));
    let is_result = |path: &str| path.starts_with(RESULTS) && !RAW.iter().any(|end| path.ends_with(end));
    let sum: u64 = all.filter(|(path, _)| is_result(path)).map(|(_, size)| size).sum();
    let text = format!("{sum} bytes of results; {RESULTS_MAX} is the limit: drop the largest pictures");
    if sum > RESULTS_MAX { vec![Finding::new(RESULTS, 0, text)] } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::super::Package;
    use super::*;

    const MAKEFILE: (&str, &str) = ("Makefile", ".PHONY: test\ntest: setup ## all\n\t@x\nPREFIX ?= a:b\n");

    #[test]
    fn each_fuzz_target_has_a_line() {
        let page = "| `other` | x |\n## Bytes from outside\n| Target |\n| `a` | x |\n| `gone` | x |\n";
        let tree = Tree::of_files([("fuzz/targets/a.rs", ""), ("fuzz/targets/b.rs", ""), (SECURITY, page)]);
        let found: Vec<String> = fuzz_targets(&tree).into_iter().map(|finding| finding.message).collect();
        assert_eq!(found, ["no line for fuzz target b", "there is no fuzz target gone"]);
    }

    #[test]
    fn a_program_that_is_gone_is_found_where_a_script_runs_it() {
        let script = "cargo run -q -p a -- x\n\"$CARGO\" run --locked -p a --bin b\n# `cargo run -p a --bin c`.\ncargo test -p a\n";
        let mut tree = Tree::of_files([("setup/x", script)]);
        tree.packages =
            vec![Package { name: "a".into(), programs: vec!["a".into(), "c".into()], ..Package::default() }];
        let lines = |tree: &Tree| programs_exist(tree).iter().map(|finding| finding.line).collect::<Vec<_>>();
        assert_eq!(lines(&tree), [2]);
        tree.packages[0].programs.clear();
        assert_eq!(lines(&tree), [1, 2, 3]);
    }

    #[test]
    fn pages_that_are_too_long_or_missing_are_found() {
        let fine = "x".repeat(4 << 10);
        let long = fine.clone() + "x";
        let found = |status: &str| {
            let files = [("README.md", ""), ("ARCHITECTURE.md", ""), ("docs/status.md", status)];
            lengths(&Tree::of_files(files)).into_iter().map(|finding| finding.path).collect::<Vec<_>>()
        };
        assert_eq!(found(&fine), [""; 0]);
        assert_eq!(found(&long), ["docs/status.md"]);
        let all: Vec<String> = lengths(&Tree::of_files([("PROGRESS.md", "")])).into_iter().map(|f| f.path).collect();
        assert_eq!(all, ["README.md", "ARCHITECTURE.md", "docs/status.md", "PROGRESS.md"]);
    }

    #[test]
    fn results_that_are_too_large_are_found() {
        let half = "x".repeat(256 << 10);
        let mut tree = Tree::of_files([("experiments/a.svg", half.as_str()), ("experiments/b.json", half.as_str())]);
        tree.data.push(("experiments/c.svg".into(), 256 << 10));
        assert_eq!(results(&tree), []);
        tree.data.push(("experiments/d.svg".into(), 1));
        assert_eq!(results(&tree).len(), 1);
    }

    #[test]
    fn commands_that_exist_are_fine() {
        let tree = Tree::of_files([
            MAKEFILE,
            ("README.md", "Run `make test`; they make sure.\n\n    make test FAST=1\n    stillpoint patch apply x\n"),
            ("crates/cli/src/patch/apply.rs", ""),
        ]);
        assert_eq!(commands_exist(&tree), []);
    }

    #[test]
    fn commands_that_do_not_exist_are_found() {
        let tree = Tree::of_files([
            MAKEFILE,
            ("README.md", "`make tests`\n    make demo\n`stillpoint patch frobnicate`\n"),
            (".ci/run", "exec make all </dev/null\n"),
        ]);
        let lines: Vec<usize> = commands_exist(&tree).iter().map(|finding| finding.line).collect();
        assert_eq!(lines, [1, 2, 3, 1]);
    }

    #[test]
    fn words_that_the_glossary_avoids_are_found() {
        let glossary = "| term | meaning | not |\n|---|---|---|\n| blackout | no answer | standstill, outage |\n";
        let tree = Tree::of_files([("GLOSSARY.md", glossary), ("a.rs", "// fine\n// an Outage\n"), ("b.c", "outage")]);
        let found = glossary_findings(&tree);
        assert_eq!(found, ["a.rs:2: `outage`: GLOSSARY.md calls it `blackout`"]);
    }

    #[test]
    fn a_term_defined_twice_is_found() {
        let tree = Tree::of_files([("GLOSSARY.md", "| a | x | |\n| A | y | |\n")]);
        assert_eq!(glossary_findings(&tree), ["GLOSSARY.md:2: `A` is defined twice"]);
    }

    fn glossary_findings(tree: &Tree) -> Vec<String> {
        glossary(tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_crate_without_a_header_or_guarantee_is_found() {
        for (text, count) in [("//! Does.\n//! Guarantees: all.\n", 0), ("//! Does.\n", 1), ("fn f() {}\n", 1)] {
            let mut tree = Tree::of_files([("crates/x/src/lib.rs", text)]);
            tree.packages.push(Package { dir: "crates/x".into(), ..Package::default() });
            assert_eq!(crate_headers(&tree).len(), count, "{text:?}");
        }
    }

    #[test]
    fn another_licence_or_none_is_found() {
        for (license, count) in [(Some("MIT OR Apache-2.0"), 2), (Some("GPL-2.0"), 3), (None, 3)] {
            let package = Package { license: license.map(str::to_owned), ..Package::default() };
            let tree = Tree { packages: vec![package], ..Tree::default() };
            assert_eq!(licences(&tree).len(), count, "{license:?}: texts are missing as well");
        }
    }
}
