//! Layout of the tree: one home for each pillar's integration tests, one for its benchmarks, and no large import cycle
//! inside a crate.

use super::lexer::{code_only, lines_outside_tests};
use super::{Finding, SourceFile, Tree};
use std::collections::{BTreeMap, BTreeSet};

/// Folders of `crates/` that are pillars.
const PILLARS: [&str; 3] = ["patch", "migrate", "kernel"];
/// Maximum number of files in an import cycle of a crate.
pub(super) const CYCLE_MAX: usize = 5;

/// Integration tests of a pillar must all be in `crates/PILLAR/tests`, programs that measure or demonstrate in
/// `crates/PILLAR/bench`.
pub(super) fn one_home_for_each_kind(tree: &Tree) -> Vec<Finding> {
    let misplaced = |file: &SourceFile| {
        let parts: Vec<&str> = file.path.split('/').collect();
        match parts[..] {
            ["crates", pillar, folder, "tests", _, ..] if PILLARS.contains(&pillar) && folder != "tests" => {
                Some("integration tests belong into crates/PILLAR/tests/it/CRATE")
            }
            ["crates", pillar, folder, "src", "bin", ..] if PILLARS.contains(&pillar) && folder != "bench" => {
                Some("benchmarks and demonstrations belong into crates/PILLAR/bench/src/bin")
            }
            _ => None,
        }
    };
    let files = tree.files.iter().filter(|file| file.is_rust());
    files.filter_map(|file| Some(Finding::new(&file.path, 0, misplaced(file)?))).collect()
}

/// Finds import cycles of more than [`CYCLE_MAX`] files.
pub(super) fn no_large_cycle(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in &tree.packages {
        for cycle in Sources::read(tree, &package.dir).cycles().iter().filter(|cycle| cycle.len() > CYCLE_MAX) {
            let text = format!("{} files import each other: {}", cycle.len(), cycle.join(", "));
            findings.push(Finding::new(&package.dir, 0, text));
        }
    }
    findings
}

/// Path of a module as names; empty for the root.
type Module = Vec<String>;

/// Modules of a crate, each a file.
struct Sources {
    /// Code without comments, strings and tests.
    code: BTreeMap<Module, String>,
    /// Names that a module imports, with their full paths.
    imported: BTreeMap<Module, BTreeMap<String, Vec<String>>>,
}

impl Sources {
    fn read(tree: &Tree, dir: &str) -> Sources {
        let source = format!("{dir}/src");
        let mut code = BTreeMap::new();
        for file in tree.rust_below(&source).filter(|file| !file.is_test()) {
            let Some(module) = file.path.strip_prefix(&source).map(module_of) else { continue };
            let text = code_only(&file.text);
            let lines: Vec<&str> = lines_outside_tests(&text).into_iter().map(|(_, line)| line).collect();
            code.insert(module, lines.join("\n"));
        }
        let imported = code.iter().map(|(module, text)| (module.clone(), imports(module, text))).collect();
        Sources { code, imported }
    }

    /// Returns the module in which a path of names ends, followed through re-exports.
    fn home(&self, path: &[String], depth: usize) -> Option<Module> {
        let known = (0..=path.len()).rev().find(|length| self.code.contains_key(&path[..*length]))?;
        let module = path[..known].to_vec();
        let Some(name) = path.get(known) else { return Some(module) };
        match self.imported.get(&module).and_then(|names| names.get(name)) {
            Some(from) if depth > 0 => self.home(from, depth - 1),
            _ => Some(module),
        }
    }

    /// Returns the modules whose items a module names.
    fn used_by(&self, module: &Module) -> BTreeSet<Module> {
        let paths = self.imported[module].values().cloned().chain(paths_in(module, &self.code[module]));
        let homes = paths.filter_map(|path| self.home(&path, 8));
        homes.filter(|home| home != module).collect()
    }

    /// Returns the sets of files that all import each other, directly or through others.
    fn cycles(&self) -> Vec<Vec<String>> {
        let uses: BTreeMap<&Module, BTreeSet<Module>> = self
            .code
            .keys()
            .map(|module| (module, if is_facade(module, self) { BTreeSet::new() } else { self.used_by(module) }))
            .collect();
        let reach = |from: &Module| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![from.clone()]);
            while let Some(module) = next.pop() {
                for used in uses.get(&module).into_iter().flatten() {
                    if seen.insert(used.clone()) {
                        next.push(used.clone());
                    }
                }
            }
            seen
        };
        let reached: BTreeMap<&Module, BTreeSet<Module>> =
            self.code.keys().map(|module| (module, reach(module))).collect();
        let mut cycles: BTreeSet<Vec<String>> = BTreeSet::new();
        for (module, others) in &reached {
            let cycle: Vec<String> =
                others.iter().filter(|other| reached[other].contains(*module)).map(|other| other.join("::")).collect();
            if cycle.len() > 1 {
                cycles.insert(cycle);
            }
        }
        cycles.into_iter().collect()
    }
}

/// Returns true for a module that only declares and re-exports others.
fn is_facade(module: &Module, sources: &Sources) -> bool {
    let is_item = |line: &str| {
        ["fn ", "impl ", "impl<"].iter().any(|word| line.trim_start().trim_start_matches("pub ").starts_with(word))
    };
    !sources.code[module].lines().any(is_item)
}

/// Module of a file, by its path below `src`.
fn module_of(path: &str) -> Module {
    let mut names: Module =
        path.trim_start_matches('/').trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if matches!(names.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        names.pop();
    }
    names
}

/// Resolves a path in code to a path from the crate's root; none for paths into other crates.
fn absolute(module: &Module, path: &[&str]) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    let mut base = match *first {
        "crate" => Vec::new(),
        "self" => module.clone(),
        "super" => module[..module.len().checked_sub(1)?].to_vec(),
        _ => return None,
    };
    let mut rest = rest;
    while let Some((&"super", after)) = rest.split_first() {
        base.pop()?;
        rest = after;
    }
    base.extend(rest.iter().map(|name| (*name).to_owned()));
    Some(base)
}

/// Returns the names that the module's `use` items import, and their paths.
fn imports(module: &Module, code: &str) -> BTreeMap<String, Vec<String>> {
    let mut names = BTreeMap::new();
    for item in code.split(';').filter_map(|item| item.rsplit_once("use ").map(|(_, tree)| tree)) {
        let tree: String = item.split_whitespace().collect::<Vec<_>>().join(" ");
        flatten("", &tree, &mut |path, name| {
            let parts: Vec<&str> = path.split("::").map(str::trim).collect();
            // a module's own child needs no `self::`
            let with_self: Vec<&str> = std::iter::once("self").chain(parts.iter().copied()).collect();
            let found = absolute(module, &parts).or_else(|| absolute(module, &with_self));
            if let Some(found) = found.filter(|found| found != module) {
                names.insert(name.to_owned(), found);
            }
        });
    }
    names
}

/// Calls back with each path of a `use` tree, and the name that it has in the module.
fn flatten(prefix: &str, tree: &str, found: &mut impl FnMut(&str, &str)) {
    let tree = tree.trim();
    if let Some((before, inside)) = tree.split_once('{') {
        let prefix = format!("{prefix}{before}");
        let inside = inside.strip_suffix('}').unwrap_or(inside);
        let (mut depth, mut begin) = (0_usize, 0);
        for (at, letter) in inside.char_indices() {
            match letter {
                '{' => depth += 1,
                '}' => depth = depth.saturating_sub(1),
                ',' if depth == 0 => {
                    flatten(&prefix, &inside[begin..at], found);
                    begin = at + 1;
                }
                _ => {}
            }
        }
        flatten(&prefix, &inside[begin..], found);
    } else if !tree.is_empty() {
        let (path, alias) = tree.split_once(" as ").unwrap_or((tree, ""));
        let path = format!("{prefix}{path}");
        let path = path.strip_suffix("::self").unwrap_or(&path);
        let name = if alias.is_empty() { path.rsplit("::").next().unwrap_or(path) } else { alias };
        found(path, name);
    }
}

/// Returns the paths in the code itself that begin with `crate` or `super`.
fn paths_in(module: &Module, code: &str) -> Vec<Vec<String>> {
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let words = code.split(|c: char| !is_path(c));
    let ours =
        words.filter(|word| word.starts_with("crate::") || word.starts_with("super::") || word.starts_with("self::"));
    ours.filter_map(|word| absolute(module, &word.split("::").filter(|part| !part.is_empty()).collect::<Vec<_>>()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::Package;
    use super::*;

    fn tree(files: &[(&str, &str)]) -> Tree {
        let package = Package { name: "a".into(), dir: "crates/a".into(), ..Package::default() };
        let file = |(path, text): &(&str, &str)| SourceFile { path: (*path).into(), text: (*text).into() };
        Tree { packages: vec![package], files: files.iter().map(file).collect(), ..Tree::default() }
    }

    #[test]
    fn tests_of_a_pillar_have_one_home() {
        let wrong = "crates/patch/engine/tests/it/apply.rs";
        let program = "crates/patch/tests/src/bin/bench.rs";
        let right = ["crates/patch/tests/it/engine/apply.rs", "crates/patch/bench/src/bin/bench.rs"];
        let files = [wrong, program, right[0], right[1], "crates/host/tests/it/main.rs"].map(|path| (path, ""));
        let found: Vec<String> =
            one_home_for_each_kind(&tree(&files)).into_iter().map(|finding| finding.path).collect();
        assert_eq!(found, [wrong, program]);
    }

    #[test]
    fn files_that_import_each_other_are_a_cycle() {
        let files = [
            ("crates/a/src/lib.rs", "mod one; mod two; mod three; pub use one::One;"),
            ("crates/a/src/one.rs", "use crate::two::{self, Two};\npub struct One;\nfn f() { two::g() }"),
            ("crates/a/src/two.rs", "pub struct Two;\nfn g() { crate::three::h() }"),
            ("crates/a/src/three.rs", "use super::One;\nfn h() {}"),
            ("crates/a/src/four.rs", "use crate::three;\nfn i() {}"),
        ];
        let tree = tree(&files);
        assert_eq!(Sources::read(&tree, "crates/a").cycles(), [["one", "three", "two"]]);
        assert_eq!(no_large_cycle(&tree), []);
    }

    #[test]
    fn a_tree_of_imports_is_taken_apart() {
        let mut all = Vec::new();
        flatten("", "crate::{a::{self, B as C}, d::*}", &mut |path, name| all.push(format!("{path} {name}")));
        assert_eq!(all, ["crate::a a", "crate::a::B C", "crate::d::* *"]);
    }
}
