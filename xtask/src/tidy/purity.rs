//! Restrictions of the layers: pure packages decide from data alone, and unsafe code is at the edge.

use super::layers::{Layer, place};
use super::lexer::{code_only, lines_outside_tests};
use super::{Finding, SourceFile, Tree};

/// Accesses to the outside world: paths of the standard library, and macros that print.
const OUTSIDE: [&str; 10] = [
    "std::fs",
    "std::net",
    "std::process",
    "std::time",
    "std::thread",
    "std::env",
    "std::os",
    "println!",
    "print!(",
    "std::io::std",
];
/// Packages that give such access.
const OUTSIDE_PACKAGES: [&str; 6] = ["libc", "nix", "rustix", "procfs", "tempfile", "mio"];

/// Checks that pure packages forbid unsafe code and have no access to the outside world.
pub(super) fn pure_crates(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in tree.packages.iter().filter(|package| matches!(place(&package.name), Some((Layer::Pure, _)))) {
        let lib = format!("{}/src/lib.rs", package.dir);
        if !tree.file(&lib).is_some_and(|file| code_only(&file.text).contains("#![forbid(unsafe_code)]")) {
            findings.push(Finding::new(&lib, 0, "a pure crate must contain `#![forbid(unsafe_code)]`"));
        }
        for used in package.dependencies.iter().filter(|used| OUTSIDE_PACKAGES.contains(&used.as_str())) {
            let manifest = format!("{}/Cargo.toml", package.dir);
            findings.push(Finding::new(&manifest, 0, format!("a pure crate does not use `{used}`")));
        }
        let source_dir = format!("{}/src", package.dir);
        findings.extend(tree.rust_below(&source_dir).filter(|file| !file.is_test()).flat_map(ways_outside));
    }
    findings
}

fn ways_outside(file: &SourceFile) -> Vec<Finding> {
    let code = code_only(&file.text);
    let mut findings = Vec::new();
    for (number, line) in lines_outside_tests(&code) {
        for way in OUTSIDE.iter().filter(|way| line.contains(**way)) {
            findings.push(Finding::new(&file.path, number, format!("a pure crate does not use `{way}`")));
        }
    }
    findings
}

/// Checks that `unsafe` is only in edge packages, and in code that is compiled for tests only.
pub(super) fn unsafe_only_at_the_edge(tree: &Tree) -> Vec<Finding> {
    let edges: Vec<String> = tree
        .packages
        .iter()
        .filter(|package| matches!(place(&package.name), Some((Layer::Edge, _))))
        .map(|package| format!("{}/", package.dir))
        .collect();
    tree.files
        .iter()
        .filter(|file| file.is_rust() && !file.is_test() && !edges.iter().any(|edge| file.path.starts_with(edge)))
        .flat_map(|file| {
            let code = code_only(&file.text);
            let numbers: Vec<usize> = lines_outside_tests(&code)
                .into_iter()
                .filter(|(_, line)| has_word(line, "unsafe"))
                .map(|(n, _)| n)
                .collect();
            numbers.into_iter().map(|number| Finding::new(&file.path, number, "unsafe code outside of the edge crates"))
        })
        .collect()
}

fn has_word(line: &str, word: &str) -> bool {
    line.split(|c: char| !(c.is_alphanumeric() || c == '_')).any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::super::Package;
    use super::*;

    fn pure(text: &str, dependencies: &[&str]) -> Tree {
        let mut tree = Tree::of_files([("crates/patch/format/src/lib.rs", text)]);
        tree.packages.push(Package {
            name: "stillpoint-patch-format".into(),
            dir: "crates/patch/format".into(),
            dependencies: dependencies.iter().map(ToString::to_string).collect(),
            ..Package::default()
        });
        tree
    }

    #[test]
    fn a_pure_crate_that_decides_by_data_is_fine() {
        let text = "//! std::fs is not used\n#![forbid(unsafe_code)]\nfn f() {}\n#[cfg(test)]\nmod tests {\n use std::fs;\n}\n";
        assert_eq!(pure_crates(&pure(text, &["serde"])), []);
    }

    #[test]
    fn every_way_outside_is_found() {
        for way in OUTSIDE {
            let text = format!("#![forbid(unsafe_code)]\nfn f() {{ {way}; }}\n");
            let found = pure_crates(&pure(&text, &[]));
            assert!(found.iter().any(|finding| finding.line == 2), "{way}: {found:?}");
        }
        assert_eq!(pure_crates(&pure("#![forbid(unsafe_code)]\n", &["libc"])).len(), 1);
    }

    #[test]
    fn a_pure_crate_that_does_not_forbid_unsafe_code_is_found() {
        assert_eq!(pure_crates(&pure("// #![forbid(unsafe_code)]\n", &[])).len(), 1);
    }

    #[test]
    fn unsafe_code_outside_of_the_edge_is_found() {
        let tree = Tree::of_files([
            ("crates/a/src/lib.rs", "fn f() {\n unsafe { g() } }\n"),
            ("crates/b/src/lib.rs", "#![forbid(unsafe_code)] // unsafe\n"),
            ("crates/patch/tests/it/c.rs", "unsafe fn f() {}"),
        ]);
        let found = unsafe_only_at_the_edge(&tree);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].path.as_str(), found[0].line), ("crates/a/src/lib.rs", 2));
    }
}
