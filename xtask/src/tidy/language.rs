//! Rules of the language: words that users do not read, beginnings of doc comments, and names of files.

use super::lexer::{code_only, lines_outside_tests, strings_only};
use super::{Finding, SourceFile, Tree};
use std::collections::BTreeSet;
use std::path::Path;

/// Words that name no actor, or that the field does not use.
const BANNED: [&str; 11] =
    ["nobody", "whoever", "somebody", "anybody", "everybody", "anew", "mend", "mends", "mended", "mending", "whatever"];

/// Documents for users; a name that ends with a slash is a folder.
const DOCUMENTS: [&str; 6] = ["man/", "docs/", "README.md", "GLOSSARY.md", "ARCHITECTURE.md", "CONTRIBUTING.md"];

/// Package whose doc comments are the help of commands.
const HELP: &str = "crates/cli/src/";

/// Finds banned words in documents, in string literals of the product, and in the help of commands.
pub(super) fn words_for_users(tree: &Tree) -> Vec<Finding> {
    let is_document = |file: &&SourceFile| {
        DOCUMENTS.iter().any(|name| if name.ends_with('/') { file.path.starts_with(name) } else { file.path == *name })
    };
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(is_document) {
        findings.extend(banned_in(file, file.text.lines().enumerate().map(|(i, line)| (i + 1, line))));
    }
    for file in tree.rust_below("crates").filter(|file| is_product(file)) {
        let code = code_only(&file.text);
        let strings = strings_only(&file.text);
        let (strings, whole): (Vec<&str>, Vec<&str>) = (strings.lines().collect(), file.text.lines().collect());
        let numbers: Vec<usize> = lines_outside_tests(&code).into_iter().map(|(number, _)| number).collect();
        findings.extend(banned_in(file, numbers.iter().filter_map(|&at| Some((at, *strings.get(at - 1)?)))));
        if file.path.starts_with(HELP) {
            let help = numbers.iter().filter_map(|&at| Some((at, doc_text(whole.get(at - 1)?)?)));
            findings.extend(banned_in(file, help));
        }
    }
    findings
}

/// Returns true for source of a package under `crates/` that is no test.
fn is_product(file: &SourceFile) -> bool {
    file.path.contains("/src/") && !file.is_test() && !is_tool(&file.path)
}

/// Returns true for packages that only tests, benchmarks and demonstrations use.
fn is_tool(path: &str) -> bool {
    path.starts_with("crates/testing/") || path.split('/').nth(2).is_some_and(|part| part == "tests" || part == "bench")
}

fn banned_in<'a>(file: &SourceFile, lines: impl Iterator<Item = (usize, &'a str)>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in lines {
        let lower = line.to_lowercase();
        let words = lower.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '\''));
        for word in words.map(|word| word.trim_end_matches("'s")).filter(|word| BANNED.contains(word)) {
            findings.push(Finding::new(
                &file.path,
                number,
                format!("`{word}`: name the actor, or use the field's word"),
            ));
        }
    }
    findings
}

/// Words with which a doc comment must not begin: it starts with a noun or a verb.
const BEGINNINGS: [&str; 11] = ["What", "Whether", "How", "Where", "Of", "As", "Who", "Why", "Whose", "Which", "When"];

/// Finds doc comments that begin with a question word or a preposition.
pub(super) fn beginnings(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| file.is_rust()) {
        let mut inside = false;
        for (number, line) in file.text.lines().enumerate() {
            let text = doc_text(line);
            let first = text.and_then(|text| text.split(|c: char| !c.is_alphanumeric()).next()).unwrap_or_default();
            if !inside && BEGINNINGS.contains(&first) {
                let text = format!("a doc comment begins with a noun or a verb, not with `{first}`");
                findings.push(Finding::new(&file.path, number + 1, text));
            }
            inside = text.is_some();
        }
    }
    findings
}

/// Text of a line that is a doc comment.
fn doc_text(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))?;
    (!text.starts_with('/')).then(|| text.trim_start())
}

/// Everyday words: adverbs, participles and prepositions, which do not name what a file or a folder holds.
const EVERYDAY: &str = "again annotated apart asked before calm captured done early following given gone hands held kept \
    killed known late later light made meeting once own refused seen several since soon spoken steady taken told until \
    used wanted way while without";

/// Finds source files and folders whose name is not a noun of the field.
pub(super) fn everyday_names(tree: &Tree) -> Vec<Finding> {
    let is_source = |path: &str| [".rs", ".c", ".cc", ".h", ".s", ".sh", ".py"].iter().any(|end| path.ends_with(end));
    let mut found = BTreeSet::new();
    for file in tree.files.iter().filter(|file| file.path.starts_with("crates/") || file.path.starts_with("xtask/")) {
        let path = Path::new(&file.path);
        let is_everyday =
            |path: &&Path| path.file_stem().is_some_and(|name| EVERYDAY.split_whitespace().any(|word| name == word));
        found.extend(path.ancestors().skip(usize::from(!is_source(&file.path))).filter(is_everyday));
    }
    let text = "a file or a folder is named by a noun of the field";
    found.into_iter().map(|path| Finding::new(&path.to_string_lossy(), 0, text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(findings: &[Finding]) -> Vec<String> {
        findings.iter().map(|finding| format!("{}:{}", finding.path, finding.line)).collect()
    }

    #[test]
    fn banned_words_are_found_where_a_user_reads_them() {
        let code = "// nobody\nfn f() { g(\"Nobody's\", anew) }\nconst A: &str = \"amend\";\n#[cfg(test)]\nmod tests { const B: &str = \"anew\"; }\n";
        let help = "/// Mends it.\nstruct A;\n// mends\n";
        let tree = Tree::of_files([
            ("README.md", "fine\nWhatever it is\n"),
            ("man/x.1", "anew\n"),
            ("notes.md", "anew\n"),
            ("crates/patch/engine/src/x.rs", code),
            ("crates/cli/src/y.rs", help),
            ("crates/patch/tests/src/z.rs", "const A: &str = \"anew\";\n"),
            ("crates/testing/src/z.rs", "const A: &str = \"anew\";\n"),
        ]);
        let found = words_for_users(&tree);
        let expected = ["README.md:2", "man/x.1:1", "crates/patch/engine/src/x.rs:2", "crates/cli/src/y.rs:1"];
        assert_eq!(lines(&found), expected);
    }

    #[test]
    fn a_doc_comment_begins_with_a_noun_or_a_verb() {
        let text = "//! Whether.\n\n/// Returns it.\n/// When asked.\nfn f() {}\n/// Where it is.\nfn g() {}\n// What\n/// Whatsoever.\n";
        let found = beginnings(&Tree::of_files([("a.rs", text), ("b.md", "/// What\n")]));
        assert_eq!(lines(&found), ["a.rs:1", "a.rs:6"]);
    }

    #[test]
    fn everyday_words_as_names_are_found() {
        let tree = Tree::of_files([
            ("crates/a/src/again.rs", ""),
            ("crates/a/src/rendezvous.rs", ""),
            ("crates/a/src/kept/one.rs", ""),
            ("crates/a/src/kept/two.rs", ""),
            ("xtask/programs/late.c", ""),
            ("xtask/late.txt", ""),
            ("again.md", ""),
        ]);
        let expected = ["crates/a/src/again.rs:0", "crates/a/src/kept:0", "xtask/programs/late.c:0"];
        assert_eq!(lines(&everyday_names(&tree)), expected);
    }
}
