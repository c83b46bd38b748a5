//! Input of the rules: packages from `cargo metadata`, and every text file.

use anyhow::{Context, Result};
use std::path::Path;

/// Source tree.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// Packages of the workspace.
    pub(crate) packages: Vec<Package>,
    /// Text files, with paths relative to the root.
    pub(crate) files: Vec<SourceFile>,
    /// Path and size of each file that is too large to be read, or is no text.
    pub(crate) data: Vec<(String, u64)>,
}

/// Package of the workspace.
#[derive(Debug, Default, Clone)]
pub(crate) struct Package {
    /// Name in its manifest.
    pub(crate) name: String,
    /// Directory relative to the root.
    pub(crate) dir: String,
    /// `license` of its manifest.
    pub(crate) license: Option<String>,
    /// Names of packages that it needs to be built and run; those that only its tests need are left out.
    pub(crate) dependencies: Vec<String>,
    /// Names of its programs.
    pub(crate) programs: Vec<String>,
}

/// Text file of the tree.
#[derive(Debug, Clone)]
pub(crate) struct SourceFile {
    /// Path relative to the root.
    pub(crate) path: String,
    /// Contents.
    pub(crate) text: String,
}

impl SourceFile {
    /// Returns true for a Rust file.
    pub(crate) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Returns true if the file is compiled for tests only, by its path.
    pub(crate) fn is_test(&self) -> bool {
        self.path.ends_with("_tests.rs") || self.path.split('/').any(|part| part == "tests" || part == "tests.rs")
    }
}

/// Directories without files of this tree.
const NOT_OURS: [&str; 3] = [".git", "target", "build"];
/// Size limit in bytes; larger files are data.
const TEXT_MAX: u64 = 2 << 20;

impl Tree {
    /// Reads the tree below `root`.
    pub(crate) fn load(root: &Path) -> Result<Tree> {
        let mut tree = Tree::default();
        walk(root, root, &mut tree)?;
        tree.files.sort_by(|a, b| a.path.cmp(&b.path));
        let metadata = crate::metadata(root)?;
        tree.packages = metadata.workspace_packages().into_iter().map(|package| package_of(root, package)).collect();
        Ok(tree)
    }

    /// Returns the file at `path`, if it exists.
    pub(crate) fn file(&self, path: &str) -> Option<&SourceFile> {
        self.files.iter().find(|file| file.path == path)
    }

    /// Returns the Rust files below `dir`.
    pub(crate) fn rust_below<'a>(&'a self, dir: &'a str) -> impl Iterator<Item = &'a SourceFile> {
        self.files
            .iter()
            .filter(move |file| file.is_rust() && file.path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/')))
    }
}

fn package_of(root: &Path, package: &cargo_metadata::Package) -> Package {
    let dir = package.manifest_path.parent().expect("a manifest lies in a directory");
    Package {
        name: package.name.to_string(),
        dir: dir.as_std_path().strip_prefix(root).unwrap_or(dir.as_std_path()).to_string_lossy().into_owned(),
        license: package.license.clone(),
        dependencies: package
            .dependencies
            .iter()
            .filter(|dependency| dependency.kind != cargo_metadata::DependencyKind::Development)
            .map(|dependency| dependency.name.clone())
            .collect(),
        programs: package.targets.iter().filter(|target| target.is_bin()).map(|target| target.name.clone()).collect(),
    }
}

fn walk(root: &Path, dir: &Path, tree: &mut Tree) -> Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() {
            if !NOT_OURS.iter().any(|name| entry.file_name() == *name) {
                walk(root, &path, tree)?;
            }
        } else if kind.is_file() {
            let size = entry.metadata()?.len();
            let name = path.strip_prefix(root).expect("the walk stays below the root").to_string_lossy().into_owned();
            let read = || std::fs::read(&path).with_context(|| format!("read {}", path.display()));
            // A file that is not UTF-8 is not text: object files and recorded data.
            let text = if size <= TEXT_MAX { String::from_utf8(read()?).ok() } else { None };
            match text {
                Some(text) => tree.files.push(SourceFile { path: name, text }),
                None => tree.data.push((name, size)),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
impl Tree {
    /// Makes a tree of files only, for the rules' tests.
    pub(crate) fn of_files<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Tree {
        let files = files.into_iter().map(|(path, text)| SourceFile { path: path.into(), text: text.into() }).collect();
        Tree { files, ..Tree::default() }
    }
}
