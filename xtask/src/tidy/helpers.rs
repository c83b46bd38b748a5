//! Helpers of tests are written once: two functions of the same name and the same body are one helper too many.

use super::{Finding, SourceFile, Tree};
use std::collections::BTreeMap;

/// Minimum number of lines of a body: shorter ones, such as an options literal, cost less than a shared home.
const LINES_MIN: usize = 3;

/// Finds functions of tests that have the name and the body of another one.
pub(super) fn written_once(tree: &Tree) -> Vec<Finding> {
    let mut first: BTreeMap<(&str, String), String> = BTreeMap::new();
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| file.is_rust() && is_for_tests(file)) {
        for (line, name, body) in functions(&file.text) {
            let place = format!("{}:{line}", file.path);
            let known = first.entry((name, body)).or_insert_with(|| place.clone());
            if *known != place {
                let message = format!("`{name}` is the same as in {known}: move it to where both can use it");
                findings.push(Finding::new(&file.path, line, message));
            }
        }
    }
    findings
}

/// Returns true for files that only tests, benchmarks and demonstrations use.
fn is_for_tests(file: &SourceFile) -> bool {
    let is_home = |part: &str| ["tests", "testing", "bench", "demo"].contains(&part);
    file.is_test() || file.path.split('/').any(is_home)
}

/// Returns the functions of a formatted source with at least [`LINES_MIN`] lines: line number from 1, name, and body without indentation.
fn functions(text: &str) -> Vec<(usize, &str, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let indentation = &line[..line.len() - line.trim_start().len()];
        let Some(name) = function_name(line) else { continue };
        let end = format!("{indentation}}}");
        let body = lines[at + 1..].iter().take_while(|line| **line != end).map(|line| line.trim());
        let body: Vec<&str> = body.filter(|line| !line.is_empty() && !line.starts_with("//")).collect();
        if body.len() >= LINES_MIN && !line.ends_with('}') {
            found.push((at + 1, name, body.join("\n")));
        }
    }
    found
}

/// Returns the name of the function that a line begins.
fn function_name(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let is_prefix = |word: &str| word.starts_with("pub") || ["async", "const", "unsafe"].contains(&word);
    let is_item = before.split_whitespace().all(is_prefix);
    after.split(['(', '<']).next().filter(|name| is_item && !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELPER: &str = "pub(crate) fn load() {\n    one();\n    // why\n    two();\n    three();\n}\n";

    #[test]
    fn a_helper_that_exists_twice_is_found() {
        let indented = "impl X {\n    fn load(&self) {\n        one();\n        two();\n        three();\n    }\n}\n";
        let tree = Tree::of_files([("crates/a/tests/it/a.rs", HELPER), ("crates/a/tests/it/b.rs", indented)]);
        let found: Vec<String> = written_once(&tree).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "crates/a/tests/it/b.rs:2: `load` is the same as in crates/a/tests/it/a.rs:1: move it to where both can use it"
            ]
        );
    }

    #[test]
    fn other_names_bodies_and_product_code_are_not_found() {
        let other = HELPER.replace("two", "four");
        let renamed = HELPER.replace("load", "fill");
        let tree = Tree::of_files([
            ("crates/a/tests/it/a.rs", HELPER),
            ("crates/a/tests/it/b.rs", &other),
            ("crates/a/tests/it/c.rs", &renamed),
            ("crates/a/src/d.rs", HELPER),
        ]);
        assert_eq!(written_once(&tree), []);
    }
}
