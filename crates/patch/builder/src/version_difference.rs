//! Difference between two versions of a source package: diffs that apply to the older one, in order.
//!
//! ```text
//!   older source + its series ----- remainder -----> newer source + the diffs that both series name ----- added diffs -----> newer version
//! ```
//!
//! Diffs that the newer series added are used as they are: each is a fix of its own. Everything else is one diff between both trees, the
//! *remainder*: another upstream version, diffs that were exported again or dropped, sources of the packaging. If the added diffs do not apply
//! without the rest of their series, all is the remainder.

use crate::debian::Diff;
use crate::package::{QUILT, SourcePackage};
use crate::sandbox::output;
use crate::tree::{is_build_file, is_source};
use crate::{Builder, Error, Parts};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_host::untrusted::Tree;
use stillpoint_host::{At, EntryName};
use stillpoint_patch_provenance::Changelog;

/// File of a cache entry: the remainder.
const REMAINDER: &str = "remainder.diff";
/// File of a cache entry: it exists if the remainder is the whole difference.
const IS_WHOLE: &str = "whole";

/// Version of the comparison of trees; increase it with every change.
const STEPS_VERSION: &[u8] = b"2";

impl Builder<'_> {
    /// Returns the diffs that lead from a version with the `shipped` diffs to a newer one. Compares trees once for each pair of versions.
    ///
    /// # Errors
    /// A tree cannot be made or read.
    pub(crate) fn diffs_between(
        &self,
        old: &SourcePackage,
        shipped: &[Diff],
        new: &SourcePackage,
    ) -> Result<Vec<Diff>, Error> {
        let is_known = |diff: &&Diff| shipped.iter().any(|old| old.name == diff.name || old.text == diff.text);
        let (common, added): (Vec<&Diff>, Vec<&Diff>) = new.series.diffs.iter().partition(is_known);
        let (common, added) = (cloned(&common), cloned(&added));
        let sides = [self.identity(old, shipped), self.identity(new, &new.series.diffs)];
        let key = stillpoint_host::cache::key(sides.iter().map(String::as_bytes).chain([STEPS_VERSION]));
        let entry = self.entry(&EntryName::new("difference", &key), |into| {
            self.progress(&format!("comparing {} {} with {}", old.name(), old.version(), new.version()));
            let own = Tree::open(into)?;
            own.make_directory("old")?;
            let from = Tree::open(&self.shipped_tree(old, shipped, &into.join("old"))?)?;
            let (to, is_whole) = match self.split_tree(new, &common, &added, into)? {
                Some(tree) => (tree, false),
                None => {
                    own.make_directory("new")?;
                    (self.shipped_tree(new, &new.series.diffs, &into.join("new"))?, true)
                }
            };
            own.write(REMAINDER, &difference(&from, &Tree::open(&to)?)?)?;
            if is_whole {
                own.write(IS_WHOLE, b"")?;
            }
            Ok(["old", "split", "new"].iter().try_for_each(|name| own.remove_all(name))?)
        })?;
        let own = Tree::open(&entry)?;
        let added = if own.has(IS_WHOLE) { Vec::new() } else { added };
        let remainder = remainder(old, new, own.read(REMAINDER)?);
        Ok(remainder.into_iter().chain(added).collect())
    }

    /// Returns the CVEs that the changelog of a source package's version names for the versions above `from`; `None` if it does not reach
    /// back to `from`.
    ///
    /// # Errors
    /// The source cannot be fetched, or its changelog cannot be read.
    pub fn cves_since(&self, package: &str, version: &str, from: &str) -> Result<Option<Vec<String>>, Error> {
        cves_since(from, &self.fetch_source(package, Some(version), Parts::Source)?)
    }

    /// Makes the newer source with the diffs that both series name; `None` if they, or the added ones, do not apply in this order.
    fn split_tree(
        &self,
        new: &SourcePackage,
        common: &[Diff],
        added: &[Diff],
        into: &Path,
    ) -> Result<Option<PathBuf>, Error> {
        let own = Tree::open(into)?;
        let trial = |diffs: &[Diff]| -> Result<Option<PathBuf>, Error> {
            own.remove_all("split")?;
            own.make_directory("split")?;
            match self.shipped_tree(new, diffs, &into.join("split")) {
                Ok(tree) => Ok(Some(tree)),
                Err(Error::Command { .. }) => Ok(None),
                Err(other) => Err(other),
            }
        };
        let is_in_order = new.series.diffs.starts_with(common);
        if !is_in_order && trial(&[common, added].concat())?.is_none() {
            return Ok(None);
        }
        trial(common)
    }
}

fn cloned(diffs: &[&Diff]) -> Vec<Diff> {
    diffs.iter().map(|diff| (*diff).clone()).collect()
}

/// Makes the diff of the remainder; `None` if both trees are the same.
fn remainder(old: &SourcePackage, new: &SourcePackage, text: Vec<u8>) -> Option<Diff> {
    let files = crate::diff::split(&text).len();
    let name = format!("{}-{}-to-{}", new.name(), old.version(), new.version());
    let subject = format!("{files} files differ between {} and {}", old.version(), new.version());
    (files > 0).then_some(Diff { name, cves: Vec::new(), subject, text })
}

/// Returns the CVEs that the changelog of a newer version names since an older one; `None` if it does not reach back to it. All of them are
/// fixed in a program that has every diff.
pub(crate) fn cves_since(from: &str, new: &SourcePackage) -> Result<Option<Vec<String>>, Error> {
    Ok(changelog(new)?.cves_between(from, new.version()))
}

fn changelog(source: &SourcePackage) -> Result<Changelog, Error> {
    let text = Tree::open(source.tree())?.read("debian/changelog")?;
    Ok(Changelog::parse(&String::from_utf8_lossy(&text)))
}

/// Returns the CVEs that the changelog of a newer source names since an older one, whose own changelog does not name them; none without
/// changelogs that can be read and reach back to it.
pub(crate) fn cves_gained(old: &SourcePackage, new: &SourcePackage) -> Vec<String> {
    let [Ok(older), Ok(newer)] = [old, new].map(changelog) else { return Vec::new() };
    newer.cves_gained(&older, old.version(), new.version()).unwrap_or_default()
}

/// Reason to compare a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// It may make a difference to a program: of the packaging, only sources and files that decide about the build.
    OfProgram,
    /// The package's rules may use it, whatever it is.
    OfRules,
}

fn part(name: &str) -> Option<Part> {
    match name.strip_prefix("debian/") {
        _ if name.contains('\n') => None,
        Some(own) if is_source(own) || is_build_file(own) => (!own.starts_with("patches/")).then_some(Part::OfProgram),
        Some(own) => (!own.starts_with("patches/") && own != "changelog").then_some(Part::OfRules),
        None => (!name.starts_with(QUILT)).then_some(Part::OfProgram),
    }
}

/// Makes a unified diff of the files of two trees; without text if only files differ that the rules use. A link whose target is
/// another one counts as the file that it leads to.
fn difference(from: &Tree, to: &Tree) -> Result<Vec<u8>, Error> {
    let mut names = BTreeSet::new();
    for tree in [from, to] {
        let entries = tree.entries()?.into_iter().filter(|entry| entry.is_file() || entry.is_link());
        names.extend(
            entries.filter_map(|entry| entry.name.to_str().map(str::to_owned)).filter(|name| part(name).is_some()),
        );
    }
    let (mut text, mut is_of_program) = (Vec::new(), false);
    for name in names {
        if from.link(&name).ok().is_some_and(|target| to.link(&name).ok() == Some(target)) {
            continue;
        }
        let sides = [content(from, &name), content(to, &name)];
        if sides[0] != sides[1] {
            text.extend(file_difference(&name, &sides)?);
            is_of_program |= part(&name) == Some(Part::OfProgram);
        }
    }
    Ok(if is_of_program { text } else { Vec::new() })
}

/// Returns the content of a file; `None` if a link leads to none, or to a directory.
fn content(tree: &Tree, name: &str) -> Option<Vec<u8>> {
    tree.read(name).ok()
}

fn file_difference(name: &str, sides: &[Option<Vec<u8>>; 2]) -> Result<Vec<u8>, Error> {
    let directory = tempfile::tempdir().at("making", Path::new("a temporary directory"))?;
    let own = Tree::open(directory.path())?;
    let mut command = Command::new("diff");
    command.args(["--unified", "--text"]).env("LC_ALL", "C").current_dir(directory.path());
    for (side, prefix) in sides.iter().zip(["a", "b"]) {
        let label = side.as_ref().map_or_else(|| "/dev/null".to_owned(), |_| format!("{prefix}/{name}"));
        command.arg("--label").arg(label);
        own.write(prefix, side.as_deref().unwrap_or_default())?;
    }
    let made = output(command.args(["a", "b"]))?;
    match made.status.code() {
        Some(0 | 1) => Ok(made.stdout),
        _ => Err(Error::Command {
            what: format!("comparing {name}"),
            status: made.status,
            output: crate::sandbox::tail(&made),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_difference_of_two_trees_leads_from_one_to_the_other() {
        let dir = tempfile::tempdir().unwrap();
        let write = |side: &str, name: &str, text: &str| {
            let path = dir.path().join(side).join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (name, old, new) in [
            ("src/a b.c", "int one;\n", "int two;\n"),
            ("same.c", "x", "x"),
            ("debian/changelog", "1", "2"),
            ("debian/rules", "a:\n", "b:\n"),
            ("debian/patches/own.c", "1", "2"),
            ("debian/control", "1", "2"),
            (".pc/own.c", "1", "2"),
        ] {
            write("old", name, old);
            write("new", name, new);
        }
        write("old", "gone.c", "int gone;\n");
        write("new", "made.c", "int made;\n");
        write("new", "empty.h", "");
        fs::write(dir.path().join("new/debian/more.tar"), b"\x00\xff\n\r\n\x01").unwrap();
        for (side, to) in [("old", "same.c"), ("new", "made.c")] {
            symlink("same.c", dir.path().join(side).join("link.c")).unwrap();
            symlink(to, dir.path().join(side).join("moved.c")).unwrap();
        }
        let trees = ["old", "new"].map(|side| Tree::open(&dir.path().join(side)).unwrap());
        let text = difference(&trees[0], &trees[1]).unwrap();
        let files = crate::diff::split(&text);
        let names: Vec<(&str, bool, bool)> = files.iter().map(|f| (f.path.as_str(), f.creates, f.removes)).collect();
        assert_eq!(
            names,
            [
                ("debian/control", false, false),
                ("debian/more.tar", true, false),
                ("debian/rules", false, false),
                ("gone.c", false, true),
                ("made.c", true, false),
                ("moved.c", false, false),
                ("src/a b.c", false, false)
            ]
        );
        assert!(difference(&trees[0], &trees[0]).unwrap().is_empty());
        let file = dir.path().join("text.diff");
        fs::write(&file, &files.iter().find(|f| f.path.ends_with(".tar")).unwrap().text).unwrap();
        let mut patch = Command::new("patch");
        patch.args(["-p1", "-s", "--batch", "-i"]).arg(&file).current_dir(dir.path().join("old"));
        assert!(patch.status().unwrap().success());
        assert_eq!(fs::read(dir.path().join("old/debian/more.tar")).unwrap(), b"\x00\xff\n\r\n\x01");
        let same = ["one", "two"].map(|side| {
            write(side, "debian/control", side);
            write(side, "a.c", "1");
            Tree::open(&dir.path().join(side)).unwrap()
        });
        assert!(difference(&same[0], &same[1]).unwrap().is_empty(), "no file of the program differs");
    }
}
