//! Crates that build and apply patches know no package by its name: a special case for one package hides that others of
//! its kind do not work.

use super::lexer::{code_only, lines_outside_tests, strings_only};
use super::{Finding, Tree};

/// List of the packages that the builder is measured with; a line begins with the name of the package.
const LIST: &str = "experiments/debian-fixes.txt";
const CRATES: [&str; 4] = ["crates/patch/builder", "crates/patch/differ", "crates/patch/engine", "crates/patch/tracee"];
/// Packages that are interfaces of the system too: the C library, and the manager of services.
const INTERFACES: [&str; 2] = ["glibc", "systemd"];

/// Finds strings that are the name of a package, or begin with one.
pub(super) fn no_package_by_name(tree: &Tree) -> Vec<Finding> {
    let list = tree.file(LIST).map_or("", |file| &file.text);
    let first = |line: &'_ str| line.split_whitespace().next().unwrap_or("").to_owned();
    let names: Vec<String> =
        list.lines().map(first).filter(|name| !name.is_empty() && !name.starts_with('#')).collect();
    // `postgresql-15` stands for every version
    let plain = |name: &String| name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-').to_owned();
    let names: Vec<String> = names.iter().map(plain).filter(|name| !INTERFACES.contains(&name.as_str())).collect();
    let mut findings = Vec::new();
    for file in CRATES.iter().flat_map(|dir| tree.rust_below(dir)).filter(|file| !file.is_test()) {
        let strings = strings_only(&file.text);
        let strings: Vec<&str> = strings.lines().collect();
        let code = code_only(&file.text);
        for (number, _) in lines_outside_tests(&code) {
            let literals = strings.get(number - 1).unwrap_or(&"").split('"');
            let is_named = |literal: &&str| names.iter().any(|name| begins_with(literal, name));
            if let Some(literal) = literals.into_iter().find(is_named) {
                let message =
                    format!("{literal:?} names a package: find out by what it does, so that others of its kind work");
                findings.push(Finding::new(&file.path, number, message));
            }
        }
    }
    findings
}

fn begins_with(literal: &str, name: &str) -> bool {
    literal.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_found_by_its_name_in_product_code_only() {
        let list = "# comment\nredis redis-server\npostgresql-15 postgres\nsystemd systemd\n";
        let code = "fn f(p: &str) -> bool {\n    p == \"redis\" || p.starts_with(\"postgresql-\") // \"redis\"\n}\n\
                    fn g() -> &'static str {\n    \"predisposed\"\n}\nconst S: &str = \"systemd\";\n\
                    #[cfg(test)]\nmod tests {\n    const A: &str = \"redis\";\n}\n";
        let tree = Tree::of_files([
            (LIST, list),
            ("crates/patch/builder/src/a.rs", code),
            ("crates/patch/tests/src/b.rs", code),
        ]);
        let found = no_package_by_name(&tree);
        assert_eq!(
            found.iter().map(|finding| (finding.path.as_str(), finding.line)).collect::<Vec<_>>(),
            [("crates/patch/builder/src/a.rs", 2)]
        );
    }
}
