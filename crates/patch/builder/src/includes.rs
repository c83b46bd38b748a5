//! Units that could read a file, when no build has recorded it: the includes of a tree, followed backwards.
//!
//! The obvious way is to preprocess every unit, which takes an hour for a large program. This module does not evaluate
//! conditions or follow search paths. So it names more units than read the file; the preprocessor then decides.

use crate::commands::CompileCommand;
use crate::{Error, tree};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_host::untrusted::Tree;

/// Name of the file that keeps the includes of a build.
const FILE: &str = "includes.json";

/// Includes of a source tree.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Includes {
    /// Text of an include directive, to the files that have it.
    by_text: BTreeMap<String, BTreeSet<String>>,
    /// Files that include the value of a macro.
    by_macro: BTreeMap<String, BTreeSet<String>>,
    /// File names that macros have as their values.
    macros: BTreeMap<String, BTreeSet<String>>,
}

impl Includes {
    /// Reads every source file of a tree.
    pub(crate) fn of_tree(tree: &Tree) -> Result<Self, Error> {
        let mut includes = Includes::default();
        for entry in tree.entries()?.iter().filter(|entry| !entry.is_directory()) {
            let name = entry.name.to_string_lossy();
            if tree::is_source(&name) {
                // a symbolic link may be broken, or point out of the tree, where no diff makes changes
                let bytes = tree.read(&entry.name).unwrap_or_default();
                includes.add(&name, &String::from_utf8_lossy(&bytes));
            }
        }
        Ok(includes)
    }

    /// Writes the includes to the directory of a build.
    pub(crate) fn write(&self, own: &Tree) -> Result<(), Error> {
        Ok(own.write(FILE, &serde_json::to_vec(self).map_err(malformed)?)?)
    }

    /// Reads the file that [`Self::write`] wrote.
    pub(crate) fn read(own: &Tree) -> Result<Self, Error> {
        serde_json::from_slice(&own.read(FILE)?).map_err(malformed)
    }

    /// Records the includes and macros of one file.
    fn add(&mut self, file: &str, text: &str) {
        for line in text.lines() {
            let Some(directive) = line.trim_start().strip_prefix('#').map(str::trim_start) else { continue };
            if let Some(rest) = after(directive, "include").or_else(|| after(directive, "include_next")) {
                match quoted(rest) {
                    Some(name) => drop(self.by_text.entry(tail(name)).or_default().insert(file.to_owned())),
                    None => drop(self.by_macro.entry(word(rest)).or_default().insert(file.to_owned())),
                }
            } else if let Some(rest) = after(directive, "define") {
                let name = word(rest);
                if let Some(value) = quoted(rest[name.len()..].trim_start()) {
                    self.macros.entry(name).or_default().insert(tail(value));
                }
            }
        }
    }

    /// Returns files that could read one of `changed`, directly or through other files; `changed` included.
    pub(crate) fn readers(&self, changed: &BTreeSet<String>) -> BTreeSet<String> {
        let mut found = changed.clone();
        let mut open: Vec<String> = changed.iter().cloned().collect();
        while let Some(file) = open.pop() {
            for text in endings(&file) {
                let named = |values: &BTreeSet<String>| values.contains(text);
                // a macro without a value in the tree could name any file
                let by_macro = self.by_macro.iter().filter(|(name, _)| self.macros.get(*name).is_none_or(named));
                let files = self.by_text.get(text).into_iter().chain(by_macro.map(|(_, files)| files)).flatten();
                let new: Vec<String> = files.filter(|f| !found.contains(*f)).cloned().collect();
                found.extend(new.iter().cloned());
                open.extend(new);
            }
        }
        found
    }

    /// Returns true if a unit is among the readers, or if its command makes it include one.
    pub(crate) fn reads(readers: &BTreeSet<String>, unit: &str, command: &CompileCommand) -> bool {
        let forced = command.argv.windows(2).filter(|w| w[0] == "-include" || w[0] == "-imacros").map(|w| tail(&w[1]));
        let is_reader = |text: &String| readers.iter().any(|r| endings(r).any(|e| e == text));
        readers.contains(unit) || forced.into_iter().any(|text| is_reader(&text))
    }
}

fn malformed(error: serde_json::Error) -> Error {
    Error::Malformed { what: FILE.to_owned(), why: error.to_string() }
}

fn after<'a>(directive: &'a str, name: &str) -> Option<&'a str> {
    let rest = directive.strip_prefix(name)?;
    rest.starts_with([' ', '\t', '"', '<']).then(|| rest.trim_start())
}

fn word(text: &str) -> String {
    text.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()
}

/// Returns `a.h` of `"a.h"` or `<a.h>`.
fn quoted(text: &str) -> Option<&str> {
    let (rest, end) = text.strip_prefix('"').map(|r| (r, '"')).or_else(|| Some((text.strip_prefix('<')?, '>')))?;
    rest.split_once(end).map(|(name, _)| name)
}

/// Returns the part of an included name that must be the end of the file's path.
fn tail(name: &str) -> String {
    let parts: Vec<&str> = name.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
    let from = parts.iter().rposition(|p| *p == "..").map_or(0, |at| at + 1);
    parts[from..].join("/")
}

/// Returns `a/b/c`, `b/c`, `c`.
fn endings(path: &str) -> impl Iterator<Item = &str> {
    std::iter::once(path).chain(path.match_indices('/').map(|(at, _)| &path[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn readers(files: &[(&str, &str)], changed: &str) -> Vec<String> {
        let mut includes = Includes::default();
        for (file, text) in files {
            includes.add(file, text);
        }
        includes.readers(&BTreeSet::from([changed.to_owned()])).into_iter().collect()
    }

    #[test]
    fn readers_are_found_through_others() {
        let files = [
            ("sql/a.cc", "#include \"../include/one.h\"\n"),
            ("sql/b.cc", "  #  include <two.h>\n"),
            ("sql/c.cc", "// #include \"one.h\"\n#include \"other/one.h\"\n"),
            ("include/two.h", "#ifdef NEVER\n#include \"one.h\"\n#endif\n"),
        ];
        assert_eq!(readers(&files, "include/one.h"), ["include/one.h", "include/two.h", "sql/a.cc", "sql/b.cc"]);
        assert_eq!(readers(&files, "sql/c.cc"), ["sql/c.cc"]);
    }

    #[test]
    fn a_file_named_by_a_macro_is_found() {
        let files = [
            ("a.cc", "#include TABLE\n"),
            ("b.h", "#define TABLE \"gen/table.h\"\n#define OTHER 5\n"),
            ("c.cc", "#include FROM_THE_COMMAND_LINE\n"),
        ];
        assert_eq!(readers(&files, "gen/table.h"), ["a.cc", "c.cc", "gen/table.h"]);
        assert_eq!(readers(&files, "gen/chair.h"), ["c.cc", "gen/chair.h"]);
    }

    #[test]
    fn a_header_forced_by_the_command_counts() {
        let argv = ["cc", "-include", "/b/src/pre.h", "-c", "a.c"].map(str::to_owned).to_vec();
        let command = crate::commands::compile(Path::new("/b/src"), argv, Vec::new()).unwrap();
        let readers = BTreeSet::from(["src/pre.h".to_owned()]);
        assert!(!Includes::reads(&readers, "a.c", &command), "/b/src/pre.h is not src/pre.h");
        let readers = BTreeSet::from(["/b/src/pre.h".to_owned()]);
        assert!(Includes::reads(&readers, "a.c", &command));
    }
}
