//! Files that no compiler reads, from which a build may still make sources: tables, scripts, templates.
//!
//! Generators do not run again, so a change of their inputs would have no effect. A build names its inputs: a file
//! whose name occurs in no rule, script or list of the source is no input of any generator.

use crate::Error;
use crate::tree::is_source;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use stillpoint_host::untrusted::Tree;

/// Suffixes of documents, from which no program makes code.
const DOCUMENTS: [&str; 24] = [
    "1", "2", "3", "4", "5", "6", "7", "8", "9", "adoc", "css", "gif", "html", "jpg", "md", "pdf", "png", "po", "rst",
    "sgml", "svg", "tex", "texi", "xhtml",
];
/// The package's own directory: rules, descriptions, and the diffs of the series, which name every file.
const PACKAGING: &str = "debian";
/// Rules of the package.
const RULES: &str = "debian/rules";
/// Size limit, in bytes, of files that count as rules, scripts and lists.
const BYTES_MAX: u64 = 1 << 20;

/// Finds files of a source that name some of `files` by base name, and returns one for each.
pub(crate) fn naming(tree: &Path, files: &BTreeSet<String>) -> Result<BTreeMap<String, String>, Error> {
    let wanted: Vec<(&String, &str)> = files.iter().filter(|f| may_be_input(f)).map(|f| (f, base_name(f))).collect();
    let mut found = BTreeMap::new();
    if wanted.is_empty() {
        return Ok(found);
    }
    let tree = Tree::open(tree)?;
    for entry in tree.entries()?.iter().filter(|entry| entry.is_file() && entry.length <= BYTES_MAX) {
        let name = entry.name.to_string_lossy().into_owned();
        if may_be_rule(&name) && !files.contains(&name) {
            let text = tree.read(&entry.name)?;
            let named = wanted.iter().filter(|(_, base)| names(&text, base));
            found.extend(named.map(|(file, _)| ((*file).clone(), name.clone())));
        }
    }
    Ok(found)
}

fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn is_document(path: &str) -> bool {
    let base = base_name(path);
    let suffix = base.rsplit_once('.').map(|(_, suffix)| suffix);
    // README, NEWS, COPYING: names in capitals
    let capital = !base.is_empty() && base.bytes().all(|b| b.is_ascii_uppercase() || b"._-0123456789".contains(&b));
    capital || base == "ChangeLog" || suffix.is_some_and(|suffix| DOCUMENTS.contains(&suffix))
}

fn may_be_input(path: &str) -> bool {
    !Path::new(path).starts_with(PACKAGING) && !is_document(path)
}

/// Returns true if a file may be a rule, a script or a list of the build.
pub(crate) fn may_be_rule(path: &str) -> bool {
    path == RULES || !Path::new(path).starts_with(PACKAGING) && !is_document(path) && !is_source(path)
}

/// Returns true if a text contains the name, and not as the end or the beginning of another name.
fn names(text: &[u8], name: &str) -> bool {
    let is_part = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
    let name = name.as_bytes();
    text.windows(name.len().max(1)).enumerate().any(|(at, window)| {
        let (before, after) = (&text[..at], &text[at + window.len()..]);
        let ends = |after: &[u8]| {
            !after.first().is_some_and(is_part) || after.starts_with(b".") && !after.get(1).is_some_and(is_part)
        };
        window == name && !before.last().is_some_and(is_part) && ends(after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_table_that_a_rule_names_may_become_a_source() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("src/Makefile", "errors.h: make.pl errors.txt\n\tperl make.pl errors.txt > $@\n");
        write("doc/guide.md", "See test.tcl.\n");
        write("debian/patches/fix.patch", "+++ b/test.tcl\n");
        write("debian/rules", "build:\n\tsh ./extra.sh.\n");
        write("src/a.c", "/* from test.tcl */\n");
        write("list", "other-test.tcl test.tcl.in\n");
        let files = ["src/errors.txt", "src/make.pl", "tests/test.tcl", "README", "doc/guide.md", "extra.sh"];
        let named = naming(dir.path(), &files.map(str::to_owned).into()).unwrap();
        let wanted = [("extra.sh", RULES), ("src/errors.txt", "src/Makefile"), ("src/make.pl", "src/Makefile")];
        assert_eq!(named, BTreeMap::from(wanted.map(|(file, by)| (file.to_owned(), by.to_owned()))));
    }
}
