//! Rules of the tree. Each rule is a function from a [`Tree`] to [`Finding`]s, so that tests can pass small wrong trees.

mod docs;
mod file_access;
mod helpers;
mod language;
mod layers;
mod layout;
mod lexer;
mod packages;
mod purity;
mod text;
mod tree;

use anyhow::Result;
use std::fmt;
use std::path::Path;
pub(crate) use tree::{Package, SourceFile, Tree};

/// Place that breaks a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    /// File, relative to the root.
    pub(crate) path: String,
    /// Line from 1; 0 for the file as a whole.
    pub(crate) line: usize,
    /// Rule that is broken, and how to repair it.
    pub(crate) message: String,
}

impl Finding {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.message),
            line => write!(f, "{}:{line}: {}", self.path, self.message),
        }
    }
}

/// Returns all findings of all rules, sorted.
fn findings(tree: &Tree) -> Vec<Finding> {
    let rules = [
        layers::directions,
        layers::manifests,
        layout::one_home_for_each_kind,
        layout::no_large_cycle,
        helpers::written_once,
        purity::pure_crates,
        purity::unsafe_only_at_the_edge,
        file_access::opened_in_one_place,
        packages::no_package_by_name,
        text::markers,
        text::host_names,
        language::words_for_users,
        language::beginnings,
        language::everyday_names,
        docs::crate_headers,
        docs::commands_exist,
        docs::programs_exist,
        docs::fuzz_targets,
        docs::glossary,
        docs::licences,
        docs::lengths,
        docs::results,
    ];
    let mut all: Vec<Finding> = rules.iter().flat_map(|rule| rule(tree)).collect();
    all.sort();
    all
}

/// Prints all findings; returns true if there are none. Notes are hints and do not count.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let tree = Tree::load(root)?;
    for note in text::long_files(&tree) {
        println!("note: {note}");
    }
    let findings = findings(&tree);
    for finding in &findings {
        println!("{finding}");
    }
    println!("tidy: {} files, {} packages, {} findings", tree.files.len(), tree.packages.len(), findings.len());
    Ok(findings.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_tree_is_tidy() {
        let findings = findings(&Tree::load(&crate::root()).unwrap());
        let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
        assert!(lines.is_empty(), "{} findings:\n{}", lines.len(), lines.join("\n"));
    }
}
