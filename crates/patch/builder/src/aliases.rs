//! Other names of source files: links to them, and copies that a build made; and files that a build made from them.
//!
//! Diffs name the files of a source package. Compilers may read others: rules copy a tree for each of their flavours,
//! or fill a directory with links. A comparison with the unpacked package separates files of the build from files of
//! the package.

use crate::Error;
use crate::tree::is_source;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use stillpoint_host::untrusted::{Entry, Tree};

/// Other names of some files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Aliases {
    /// Links, and the file that each points to.
    pub(crate) links: BTreeMap<String, String>,
    /// Copies that the build made, and the file that each is a copy of.
    pub(crate) copies: BTreeMap<String, String>,
    /// Files from which the build may have made others that are not exact copies, and these.
    pub(crate) derived: BTreeMap<String, BTreeSet<String>>,
}

/// A search through one tree.
pub(crate) struct Search<'a> {
    pub(crate) tree: &'a Tree,
    /// Returns true if a file is as in the package; `None` if that is not known.
    pub(crate) is_original: Option<&'a dyn Fn(&str) -> bool>,
    /// Files whose other names are searched for.
    pub(crate) touched: &'a BTreeSet<String>,
}

/// Known facts about the files during the walk of the tree.
#[derive(Default)]
struct Found {
    aliases: Aliases,
    /// Text of a touched file, to the touched files that have it.
    touched_by_text: HashMap<Vec<u8>, Vec<String>>,
    lengths: BTreeSet<u64>,
    /// A line of each touched file that distinguishes it from others.
    lines: Vec<(String, Vec<u8>)>,
    /// Original files by text, where a touched file has the same.
    originals: HashMap<Vec<u8>, Vec<String>>,
    /// Files that the build made, with their text, where a touched file has the same.
    made: Vec<(String, Vec<u8>)>,
}

impl Search<'_> {
    /// Searches for other names of the touched files.
    pub(crate) fn run(&self) -> Result<Aliases, Error> {
        let mut found = Found::default();
        for file in self.touched {
            let Ok(text) = self.tree.read(file) else { continue };
            found.lengths.insert(text.len() as u64);
            found.lines.extend(telling_line(&text).map(|line| (file.clone(), line.to_owned())));
            found.touched_by_text.entry(text).or_default().push(file.clone());
        }
        for entry in self.tree.entries()? {
            let name = entry.name.to_string_lossy();
            if entry.is_link() {
                self.link(&name, &mut found);
            } else if entry.is_file() && !self.touched.contains(&*name) {
                self.file(&name, &entry, &mut found)?;
            }
        }
        Ok(found.attribute(self.is_original.is_some()))
    }

    fn link(&self, name: &str, found: &mut Found) {
        let Ok(to) = self.tree.real(name) else { return };
        let to = to.to_string_lossy();
        for file in self.touched {
            if *file == to {
                found.aliases.links.insert(name.to_owned(), file.clone());
            } else if let Some(rest) = file.strip_prefix(&*to).filter(|rest| rest.starts_with('/')) {
                found.aliases.links.insert(format!("{name}{rest}"), file.clone());
            }
        }
    }

    fn file(&self, name: &str, entry: &Entry, found: &mut Found) -> Result<(), Error> {
        let may_be_copy = entry.length > 0 && found.lengths.contains(&entry.length);
        let may_be_made = is_source(name) && self.is_original.is_some_and(|is_original| !is_original(name));
        if !may_be_copy && !may_be_made {
            return Ok(());
        }
        let text = self.tree.read(&entry.name)?;
        if may_be_copy && found.touched_by_text.contains_key(&text) {
            match self.is_original {
                Some(is_original) if is_original(name) => {
                    found.originals.entry(text).or_default().push(name.to_owned());
                }
                _ => found.made.push((name.to_owned(), text)),
            }
        } else if may_be_made {
            let lines: BTreeSet<&[u8]> = text.split(|b| *b == b'\n').map(<[u8]>::trim_ascii).collect();
            for (file, _) in found.lines.iter().filter(|(_, line)| lines.contains(line.as_slice())) {
                found.aliases.derived.entry(file.clone()).or_default().insert(name.to_owned());
            }
        }
        Ok(())
    }
}

impl Found {
    /// Attributes each file that has the text of a touched one. If the package has the text several times, the path
    /// decides; if the package's files are not known, no file is certainly a copy.
    fn attribute(mut self, originals_known: bool) -> Aliases {
        for (name, text) in &self.made {
            let touched = self.touched_by_text.get(text).into_iter().flatten();
            let others = self.originals.get(text).into_iter().flatten();
            let all: Vec<&String> = touched.clone().chain(others).collect();
            let best = all.iter().map(|file| common_end(file, name)).max().unwrap_or_default();
            let likely: Vec<&String> = all.into_iter().filter(|file| common_end(file, name) == best).collect();
            match likely[..] {
                [one] if originals_known => {
                    if touched.clone().any(|file| file == one) {
                        self.aliases.copies.insert(name.clone(), one.clone());
                    }
                }
                _ => {
                    for file in touched.filter(|file| likely.contains(file)) {
                        self.aliases.derived.entry(file.clone()).or_default().insert(name.clone());
                    }
                }
            }
        }
        self.aliases
    }
}

/// Returns the number of components at the end that two paths have in common.
fn common_end(one: &str, other: &str) -> usize {
    one.rsplit('/').zip(other.rsplit('/')).take_while(|(a, b)| a == b).count()
}

/// Returns the longest line that looks like code: comments, above all licences, are the same in many files.
fn telling_line(text: &[u8]) -> Option<&[u8]> {
    /// Length limit, in bytes: shorter lines are in many files by chance.
    const LENGTH_MIN: usize = 24;
    let lines = text.split(|b| *b == b'\n').map(<[u8]>::trim_ascii);
    let is_code = |line: &&[u8]| {
        let comment = line.starts_with(b"*") || line.starts_with(b"/") || line.starts_with(b"#include");
        let code = line.starts_with(b"#define") || line.iter().any(|b| matches!(b, b';' | b'(' | b'{' | b'='));
        line.len() >= LENGTH_MIN && code && !comment
    };
    lines.filter(is_code).max_by_key(|line| line.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::{Path, PathBuf};

    const CODE: &str = "static int a_function_of_its_own(int value);\n";

    struct Package {
        directory: tempfile::TempDir,
        originals: BTreeSet<String>,
    }

    impl Package {
        /// Takes source files with their text, as in the package.
        fn new(files: &[(&str, &str)]) -> Self {
            let mut package = Package { directory: tempfile::tempdir().unwrap(), originals: BTreeSet::new() };
            for (name, text) in files {
                package.write(name, text);
                package.originals.insert((*name).to_owned());
            }
            package
        }

        fn path(&self, name: &str) -> PathBuf {
            let path = self.directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.path(name), text).unwrap();
        }

        fn link(&self, name: &str, to: &str) {
            std::os::unix::fs::symlink(to, self.path(name)).unwrap();
        }

        fn tree(&self) -> Tree {
            Tree::open(self.directory.path()).unwrap().known_as(Path::new("/b"))
        }

        fn aliases_of(&self, touched: &[&str]) -> Aliases {
            let touched = touched.iter().map(|file| (*file).to_owned()).collect();
            let is_original = |file: &str| self.originals.contains(file);
            let tree = self.tree();
            let is_original: Option<&dyn Fn(&str) -> bool> = Some(&is_original);
            Search { tree: &tree, is_original, touched: &touched }.run().unwrap()
        }
    }

    fn names(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, file)| ((*name).to_owned(), (*file).to_owned())).collect()
    }

    fn made_of(file: &str, made: &str) -> BTreeMap<String, BTreeSet<String>> {
        BTreeMap::from([(file.to_owned(), BTreeSet::from([made.to_owned()]))])
    }

    #[test]
    fn a_copy_belongs_to_the_file_with_its_text_and_the_most_of_its_path() {
        let package = Package::new(&[("src/a.c", CODE), ("src/b/v.h", "1"), ("src/c/v.h", "1"), ("d/v.h", "1")]);
        package.write("build/x/src/a.c", CODE);
        package.write("build/renamed.c", CODE);
        package.write("build/src/b/v.h", "1");
        package.write("build/src/c/v.h", "1");
        package.write("build/e/v.h", "1");
        let aliases = package.aliases_of(&["src/a.c", "src/b/v.h"]);
        let copies = [("build/renamed.c", "src/a.c"), ("build/src/b/v.h", "src/b/v.h"), ("build/x/src/a.c", "src/a.c")];
        assert_eq!(aliases.copies, names(&copies));
        assert_eq!(aliases.derived, made_of("src/b/v.h", "build/e/v.h"), "it may be a copy of another one");
    }

    #[test]
    fn links_are_followed_to_files_and_directories() {
        let package = Package::new(&[("src/a.c", CODE)]);
        package.link("build/one.c", "../src/a.c");
        package.link("build/two.c", "one.c");
        package.link("build/absolute.c", "/b/src/a.c");
        package.link("flavour", "src");
        package.link("out.c", "/etc/passwd");
        package.link("loop.c", "loop.c");
        let aliases = package.aliases_of(&["src/a.c"]);
        let links = ["build/absolute.c", "build/one.c", "build/two.c", "flavour/a.c"].map(|name| (name, "src/a.c"));
        assert_eq!(aliases.links, names(&links));
        package.link("far", "/b/flavour");
        let through = |name: &str| package.tree().real(name).ok();
        assert_eq!(through("far/a.c"), Some("src/a.c".into()));
        assert_eq!(through("src/a.c"), Some("src/a.c".into()));
        assert_eq!((through("out.c"), through("loop.c")), (None, None));
    }

    #[test]
    fn files_that_a_build_made_from_another_are_noticed() {
        let package = Package::new(&[("a.c", CODE), ("other.c", CODE)]);
        package.write("build/all.c", &format!("#define X 1\n{CODE}int more;\n"));
        let aliases = package.aliases_of(&["a.c"]);
        assert_eq!(aliases.derived, made_of("a.c", "build/all.c"));
        assert!(aliases.copies.is_empty() && aliases.links.is_empty(), "{aliases:?}");
    }
}
