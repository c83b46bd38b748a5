//! Source trees: the shipped tree, and copies of it with diffs applied. The shipped tree is only read.

use crate::debian::Diff;
use crate::diff::{self, FileDiff};
use crate::{Cache, Error, numbering};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use stillpoint_host::At;
use stillpoint_host::{EntryName, untrusted};

/// Suffixes of files that a C or C++ compiler reads.
const SOURCES: [&str; 19] = [
    "c", "cc", "cpp", "cxx", "C", "h", "hh", "hpp", "hxx", "inc", "def", "inl", "ipp", "tcc", "S", "s", "i", "ic", "x",
];
/// Suffixes of files that are compiled by themselves.
const UNITS: [&str; 7] = ["c", "cc", "cpp", "cxx", "C", "S", "s"];
/// Files that control how a program is built.
const BUILD_FILES: &str = "Makefile GNUmakefile makefile CMakeLists.txt meson.build configure configure.ac \
    configure.in Makefile.am rules";
/// Suffixes of build files, including inputs of generators, which do not run again.
const BUILD_SUFFIXES: [&str; 9] = ["mk", "cmake", "am", "m4", "in", "y", "yy", "l", "ll"];

/// Files that a package's rules make otherwise than as shipped; without contents where they do not make them.
pub(crate) type MadeFiles = BTreeMap<String, Option<Vec<u8>>>;

/// A copy of the shipped tree with diffs applied, numbered as shipped.
#[derive(Debug, Clone)]
pub(crate) struct Tree {
    /// Root of the copy.
    pub(crate) path: PathBuf,
    /// Files that the diffs changed, made or removed, relative to the root.
    pub(crate) touched: BTreeSet<String>,
    /// Changed copies of these files, and the file that each is a copy of.
    pub(crate) copies: BTreeMap<String, String>,
    /// Warnings for the user.
    pub(crate) warnings: Vec<String>,
}

fn suffix(path: &str) -> &str {
    Path::new(path).extension().and_then(|e| e.to_str()).unwrap_or("")
}

/// Returns true if a compiler may read the file.
pub(crate) fn is_source(path: &str) -> bool {
    SOURCES.contains(&suffix(path))
}

/// Returns true if the file is compiled by itself.
pub(crate) fn is_unit(path: &str) -> bool {
    UNITS.contains(&suffix(path))
}

pub(crate) fn is_build_file(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    BUILD_FILES.split(' ').any(|file| file == name) || BUILD_SUFFIXES.contains(&suffix(path))
}

/// Tests that decide which files of a diff count.
pub(crate) struct Selection<'a> {
    /// Returns true if a recorded compilation read a file although its name does not look like source.
    pub(crate) is_input: &'a dyn Fn(&str) -> bool,
    /// Returns true if the author of the patch states that a file makes no difference.
    pub(crate) left_out: &'a dyn Fn(&str) -> bool,
    /// True if the package's rules ran on both sides: build files are then compared by what they make.
    pub(crate) regenerated: bool,
}

/// Diffs, file by file.
#[derive(Debug, Default)]
pub(crate) struct Parts<'a> {
    parts: Vec<(&'a Diff, FileDiff)>,
    /// Files that a compiler may read.
    pub(crate) touched: BTreeSet<String>,
    /// Files that no compiler reads.
    pub(crate) others: BTreeSet<String>,
    /// Files that the author of the patch leaves out.
    pub(crate) left_out: BTreeSet<String>,
    warnings: Vec<String>,
}

impl<'a> Parts<'a> {
    /// Splits the diffs.
    pub(crate) fn of(diffs: &'a [Diff], selection: &Selection) -> Result<Self, Error> {
        let mut all = Parts::default();
        for diff in diffs {
            for file in diff::split(&diff.text) {
                [Some(&file.path), file.from.as_ref()]
                    .into_iter()
                    .flatten()
                    .try_for_each(|p| check_path(&diff.name, p))?;
                if (selection.left_out)(&file.path) {
                    all.warnings.push(format!("what {} changes in {} is left out, as requested", diff.name, file.path));
                    all.left_out.insert(file.path);
                } else if is_source(&file.path) || (selection.is_input)(&file.path) {
                    all.touched.insert(file.path.clone());
                    all.parts.push((diff, file));
                } else if is_build_file(&file.path) && !selection.regenerated {
                    return Err(Error::ChangesBuild { name: diff.name.clone(), file: file.path });
                } else {
                    all.others.insert(file.path);
                }
            }
        }
        if !all.others.is_empty() {
            tracing::info!(files = ?all.others, "no compiler reads these, left out");
        }
        Ok(all)
    }
}

/// Makes a copy of `shipped` with diffs applied in order, kept in the cache. `copies` are files of the shipped tree
/// that its build copied, and the file that each is a copy of: they change with it. `made` are files that the package's
/// rules make otherwise with the diffs.
pub(crate) fn patched(
    cache: &Cache,
    shipped: &untrusted::Tree,
    identity: &str,
    parts: &Parts,
    copies: &BTreeMap<String, String>,
    made: &MadeFiles,
) -> Result<Tree, Error> {
    let mut warnings = parts.warnings.clone();
    let touched: BTreeSet<String> = parts.touched.iter().chain(made.keys()).cloned().collect();
    if touched.is_empty() {
        return Ok(Tree { path: shipped.path().to_owned(), touched, copies: BTreeMap::new(), warnings });
    }
    let changed = Changed::apply(shipped, &touched, &parts.parts, &mut warnings)?;
    changed.replace(made)?;
    let copies = copies_of(shipped, &touched, copies);
    let places: Vec<&[u8]> = copies.keys().map(String::as_bytes).collect();
    let digest = changed.digest()?;
    let name = stillpoint_host::cache::key([identity.as_bytes(), &digest[..]].into_iter().chain(places));
    let path = cache.entry(&EntryName::new("tree", &name), |into| {
        let into = untrusted::Tree::open(into)?.known_as(shipped.own_name());
        shipped.copy_to(&into)?;
        changed.write(shipped, &into, &copies)
    })?;
    Ok(Tree { path, touched, copies, warnings })
}

/// Finds the copies of some files. A new file has a copy beside the copies of the other files.
fn copies_of(
    shipped: &untrusted::Tree,
    touched: &BTreeSet<String>,
    known: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let known = known.iter().filter(|(_, file)| touched.contains(*file));
    let mut copies: BTreeMap<String, String> = known.map(|(copy, file)| (copy.clone(), file.clone())).collect();
    let of_tree = |(copy, file): (&String, &String)| copy.strip_suffix(file.as_str()).map(str::to_owned);
    let places: BTreeSet<String> = copies.iter().filter_map(of_tree).filter(|place| place.ends_with('/')).collect();
    for file in touched.iter().filter(|file| !shipped.has(file)) {
        copies.extend(places.iter().map(|place| (format!("{place}{file}"), file.clone())));
    }
    copies
}

/// Checks that the path of a diff is inside of the tree: diffs are untrusted.
fn check_path(diff: &str, path: &str) -> Result<(), Error> {
    let inside = Path::new(path).components().all(|c| matches!(c, Component::Normal(_)));
    if path.is_empty() || !inside {
        return Err(Error::Malformed { what: format!("diff {diff}"), why: format!("it changes {path:?}") });
    }
    Ok(())
}

/// The touched files after all diffs, in a directory of their own. A diff may make a file of any kind there.
struct Changed {
    directory: tempfile::TempDir,
    own: untrusted::Tree,
    files: BTreeSet<String>,
}

impl Changed {
    fn apply(
        shipped: &untrusted::Tree,
        touched: &BTreeSet<String>,
        parts: &[(&Diff, FileDiff)],
        warnings: &mut Vec<String>,
    ) -> Result<Self, Error> {
        let directory = tempfile::tempdir().at("making", Path::new("a temporary directory"))?;
        let own = untrusted::Tree::open(directory.path())?;
        for file in touched {
            match shipped.read_existing(file)? {
                Some(bytes) => own.write(file, &bytes)?,
                None => own.make_directory(Path::new(file).parent().unwrap_or(Path::new("")))?,
            }
        }
        let changed = Changed { directory, own, files: touched.clone() };
        for (diff, file) in parts {
            if let Some(from) = &file.from {
                // an earlier diff may have changed it
                let origin = if touched.contains(from) { &changed.own } else { shipped };
                let text = origin.read_existing(from)?.ok_or_else(|| Error::DoesNotApply {
                    name: diff.name.clone(),
                    file: file.path.clone(),
                    output: format!("it is made of {from}, which is not there"),
                })?;
                changed.own.write(&file.path, &text)?;
            }
            match (file.text.is_empty(), file.removes) {
                (true, true) => drop(changed.own.remove(&file.path)?),
                (true, false) => {}
                (false, _) => changed.patch(diff, file, warnings)?,
            }
        }
        Ok(changed)
    }

    fn patch(&self, diff: &Diff, file: &FileDiff, warnings: &mut Vec<String>) -> Result<(), Error> {
        let failed = |source| Error::Spawn { program: "patch".into(), source, hint: "apt-get install patch".into() };
        let mut child = Command::new("patch")
            .args(["--batch", "--forward", "--no-backup-if-mismatch", "--reject-file=-", "-p0"])
            .arg(&file.path)
            .current_dir(self.directory.path())
            .env("LC_ALL", "C.UTF-8")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        if let Some(mut stdin) = child.stdin.take() {
            // if patch stops reading, its exit status reports the failure
            let _ = stdin.write_all(&file.text);
        }
        let output = child.wait_with_output().map_err(failed)?;
        if !output.status.success() {
            let output = crate::sandbox::tail(&output);
            return Err(Error::DoesNotApply { name: diff.name.clone(), file: file.path.clone(), output });
        }
        let text = String::from_utf8_lossy(&output.stdout);
        for line in text.lines().filter(|l| l.contains("with fuzz")) {
            warnings.push(format!("{} applies to {} only loosely: {}", diff.short_name(), file.path, line.trim()));
        }
        Ok(())
    }

    /// Takes the contents of files that the rules make.
    fn replace(&self, made: &MadeFiles) -> Result<(), Error> {
        made.iter().try_for_each(|(file, text)| match text {
            Some(text) => Ok(self.own.write(file, text)?),
            None => Ok(self.own.remove(file).map(drop)?),
        })
    }

    fn digest(&self) -> Result<[u8; 32], Error> {
        let mut parts: Vec<Vec<u8>> = Vec::new();
        for file in &self.files {
            parts.push(file.clone().into_bytes());
            // a removed file has no bytes, an empty one has an empty part
            parts.extend(self.own.read_existing(file)?);
        }
        Ok(stillpoint_host::cache::digest(parts.iter().map(Vec::as_slice)))
    }

    /// Puts the files into a copy of the shipped tree.
    fn write(
        &self,
        shipped: &untrusted::Tree,
        into: &untrusted::Tree,
        copies: &BTreeMap<String, String>,
    ) -> Result<(), Error> {
        let places = self.files.iter().map(|file| (file, file)).chain(copies);
        for (place, file) in places {
            let Some(after) = self.own.read_existing(file)? else {
                into.remove(place)?;
                continue;
            };
            let before = shipped.read(file).ok();
            let text = match (before.as_deref().map(std::str::from_utf8), std::str::from_utf8(&after)) {
                // a generator numbers lines itself
                (Some(Ok(before)), Ok(text)) if !text.contains("\n#line ") => {
                    numbering::number(before, text).into_bytes()
                }
                _ => after,
            };
            into.write(place, &text)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    const ALL: Selection = Selection { is_input: &|_| false, left_out: &|_| false, regenerated: false };

    fn sample() -> (tempfile::TempDir, Cache, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("cache")).unwrap();
        let source = dir.path().join("source");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("a.c"), "one\ntwo\nthree\n").unwrap();
        (dir, cache, source)
    }

    fn diff(text: &str) -> Diff {
        Diff::new("d.patch", text.into())
    }

    fn patched(cache: &Cache, shipped: &Path, diffs: &[Diff], selection: &Selection) -> Result<Tree, Error> {
        let shipped = untrusted::Tree::open(shipped)?;
        super::patched(cache, &shipped, "id", &Parts::of(diffs, selection)?, &BTreeMap::new(), &MadeFiles::new())
    }

    #[test]
    fn the_users_tree_is_only_read() {
        let (_dir, cache, source) = sample();
        let change = diff("--- a/a.c\n+++ b/a.c\n@@ -1,3 +1,4 @@\n one\n+more\n two\n three\n");
        let tree = patched(&cache, &source, std::slice::from_ref(&change), &ALL).unwrap();
        assert_eq!(fs::read_to_string(tree.path.join("a.c")).unwrap(), "one\nmore\n#line 2\ntwo\nthree\n");
        assert_eq!(fs::read_to_string(source.join("a.c")).unwrap(), "one\ntwo\nthree\n");
        let second = diff("--- a/a.c\n+++ b/a.c\n@@ -2,3 +2,2 @@\n more\n-two\n three\n");
        let tree = patched(&cache, &source, &[change, second], &ALL).unwrap();
        assert_eq!(fs::read_to_string(tree.path.join("a.c")).unwrap(), "one\nmore\nthree\n", "number 3 again");
    }

    #[test]
    fn diffs_that_do_not_fit_or_lead_out_or_change_the_build_are_named() {
        let (_dir, cache, source) = sample();
        let refuse = |text: &str| patched(&cache, &source, &[diff(text)], &ALL).unwrap_err();
        let error = refuse("--- a/a.c\n+++ b/a.c\n@@ -1 +1 @@\n-other\n+x\n");
        assert!(
            matches!(&error, Error::DoesNotApply { name, file, .. } if name == "d.patch" && file == "a.c"),
            "{error}"
        );
        let error = refuse("--- a/../../b.c\n+++ b/../../b.c\n@@ -0,0 +1 @@\n+x\n");
        assert!(matches!(error, Error::Malformed { .. }), "{error}");
        let error = refuse("--- a/Makefile\n+++ b/Makefile\n@@ -1 +1 @@\n-other\n+x\n");
        assert!(matches!(&error, Error::ChangesBuild { file, .. } if file == "Makefile"), "{error}");
        let selection = Selection { left_out: &|file| file == "Makefile", ..ALL };
        let change = diff("--- a/Makefile\n+++ b/Makefile\n@@ -1 +1 @@\n-other\n+x\n");
        let tree = patched(&cache, &source, &[change], &selection).unwrap();
        assert_eq!(tree.warnings, ["what d.patch changes in Makefile is left out, as requested"]);
    }

    #[test]
    fn copied_and_renamed_files_begin_with_what_earlier_diffs_made_of_their_origin() {
        let (_dir, cache, source) = sample();
        let first = diff("--- a/a.c\n+++ b/a.c\n@@ -1,3 +1,3 @@\n-one\n+first\n two\n three\n");
        let second = diff(
            "diff --git a/a.c b/b.c\ncopy from a.c\ncopy to b.c\n--- a/a.c\n+++ b/b.c\n@@ -1,3 +1,3 @@\n first\n-two\n+second\n three\n\
             diff --git a/a.c b/c.c\nrename from a.c\nrename to c.c\n",
        );
        let tree = patched(&cache, &source, &[first, second.clone()], &ALL).unwrap();
        let text = |name: &str| fs::read_to_string(tree.path.join(name)).unwrap();
        assert_eq!((text("b.c").as_str(), text("c.c").as_str()), ("first\nsecond\nthree\n", "first\ntwo\nthree\n"));
        assert!(!tree.path.join("a.c").exists());
        fs::remove_file(source.join("a.c")).unwrap();
        let error = patched(&cache, &source, &[second], &ALL).unwrap_err();
        assert!(matches!(&error, Error::DoesNotApply { file, .. } if file == "b.c"), "{error}");
    }

    #[test]
    fn files_come_and_go() {
        let (_dir, cache, source) = sample();
        let change = diff(
            "--- /dev/null\n+++ b/new/b.h\n@@ -0,0 +1 @@\n+int b;\n--- a/a.c\n+++ /dev/null\n@@ -1,3 +0,0 @@\n-one\n-two\n-three\n",
        );
        let tree = patched(&cache, &source, &[change], &ALL).unwrap();
        assert_eq!(fs::read_to_string(tree.path.join("new/b.h")).unwrap(), "int b;\n");
        assert!(!tree.path.join("a.c").exists());
        assert!(source.join("a.c").exists());
    }

    #[test]
    fn copies_change_with_their_file_and_new_files_have_copies_beside_them() {
        let (_dir, cache, source) = sample();
        fs::create_dir_all(source.join("build/one")).unwrap();
        fs::copy(source.join("a.c"), source.join("build/one/a.c")).unwrap();
        let change = [diff(
            "--- a/a.c\n+++ b/a.c\n@@ -1,3 +1,3 @@\n-one\n+ONE\n two\n three\n--- /dev/null\n+++ b/sub/b.h\n@@ -0,0 +1 @@\n+int b;\n",
        )];
        let copies = BTreeMap::from([("build/one/a.c".to_owned(), "a.c".to_owned())]);
        let parts = Parts::of(&change, &ALL).unwrap();
        let tree =
            super::patched(&cache, &untrusted::Tree::open(&source).unwrap(), "id", &parts, &copies, &MadeFiles::new())
                .unwrap();
        let read = |file: &str| fs::read_to_string(tree.path.join(file)).unwrap();
        assert_eq!(read("build/one/a.c"), read("a.c"));
        assert_eq!(read("build/one/sub/b.h"), "int b;\n");
        assert_eq!(tree.touched, BTreeSet::from(["a.c".to_owned(), "sub/b.h".to_owned()]));
        assert_eq!(fs::read_to_string(source.join("build/one/a.c")).unwrap(), "one\ntwo\nthree\n");
        let plain = super::patched(
            &cache,
            &untrusted::Tree::open(&source).unwrap(),
            "id",
            &parts,
            &BTreeMap::new(),
            &MadeFiles::new(),
        )
        .unwrap();
        assert_ne!(plain.path, tree.path, "a tree without the copies is another one");
    }

    #[test]
    fn files_of_others_are_reached_through_no_link() {
        let (dir, cache, source) = sample();
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("secret.c"), "secret\n").unwrap();
        symlink("../outside/secret.c", source.join("up.c")).unwrap();
        symlink(outside.join("secret.c"), source.join("absolute.c")).unwrap();
        symlink(&outside, source.join("away")).unwrap();
        symlink("/dev/zero", source.join("endless.c")).unwrap();
        for file in ["up.c", "absolute.c", "away/secret.c", "endless.c"] {
            let change = diff(&format!("--- a/{file}\n+++ b/{file}\n@@ -1 +1 @@\n-secret\n+known\n"));
            let refused = patched(&cache, &source, &[change], &ALL).unwrap_err().to_string();
            assert!(refused.contains("leads out of"), "{file}: {refused}");
        }
        let new = diff("--- /dev/null\n+++ b/away/new.c\n@@ -0,0 +1 @@\n+new\n");
        assert!(patched(&cache, &source, &[new], &ALL).unwrap_err().to_string().contains("leads out of"));
        let target = outside.join("secret.c");
        let link = format!(
            "diff --git a/made.c b/made.c\nnew file mode 120000\n--- /dev/null\n+++ b/made.c\n@@ -0,0 +1 @@\n+{}\n\\ No newline at end of file\n",
            target.display()
        );
        if let Ok(tree) = patched(&cache, &source, &[diff(&link)], &ALL) {
            assert!(
                !fs::read_to_string(tree.path.join("made.c")).unwrap().contains("secret\n"),
                "its target is not copied"
            );
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
        assert_eq!(fs::read_to_string(&target).unwrap(), "secret\n");
    }
}
