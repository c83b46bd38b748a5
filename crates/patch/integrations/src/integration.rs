//! A directory of edits and files, and the tree in which they are placed.

use crate::edits::Edits;
use crate::error::Error;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::Path;
use stillpoint_host::file::{read_regular, read_regular_text};
use stillpoint_host::untrusted::{Entry, FILE_MAX, Tree};

/// File in the tree that lists the files which differ from the shipped ones.
const RECORD_FILE: &str = ".stillpoint-integration";

/// All edits of a program, and the files that are added to it.
#[derive(Debug, Clone)]
pub struct Integration {
    edits: Edits,
    files: BTreeMap<String, Vec<u8>>,
    digest: String,
}

/// Result of an integration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// Files that differ from the shipped ones, or are not among them.
    pub files: Vec<String>,
    /// Files that were written, restored ones included.
    pub written: Vec<String>,
}

impl Integration {
    /// Reads `DIR/*.edits` and everything below `DIR/files`.
    ///
    /// # Errors
    /// A file cannot be read, an `.edits` file has an error, or there is none.
    pub fn read(dir: &Path) -> Result<Integration, Error> {
        let mut edits = Edits::default();
        let mut hash = Sha256::new();
        let mut add = |name: &str, bytes: &[u8]| {
            for part in [name.as_bytes(), bytes] {
                hash.update((part.len() as u64).to_le_bytes());
                hash.update(part);
            }
        };
        // edits of the caller: links to files that several programs share are followed
        let entries = Tree::open(dir)?.entries()?;
        for Entry { name, .. } in &entries {
            if name.components().count() == 1 && name.extension().is_some_and(|extension| extension == "edits") {
                let text = read_regular_text(&dir.join(name), FILE_MAX)?;
                let name = name.to_string_lossy();
                edits.add(&name, &text)?;
                add(&name, text.as_bytes());
            }
        }
        if edits.files().next().is_none() {
            return Err(Error::Integration(format!("{} contains no edits", dir.display())));
        }
        let mut files = BTreeMap::new();
        for entry in entries.iter().filter(|entry| !entry.is_directory()) {
            if let Ok(name) = entry.name.strip_prefix("files") {
                files.insert(name.to_string_lossy().into_owned(), read_regular(&dir.join(&entry.name), FILE_MAX)?);
            }
        }
        files.iter().for_each(|(name, bytes)| add(name, bytes));
        let digest = hex::encode(&hash.finalize()[..16]);
        Ok(Integration { edits, files, digest })
    }

    /// Returns a digest that changes exactly when an edit or a file changes.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Returns the paths of the files with edits, in the tree.
    pub fn edited(&self) -> impl Iterator<Item = &str> {
        self.edits.files().map(|(path, _)| path)
    }

    /// Changes `tree`, a copy of `pristine`, to the state of this integration.
    ///
    /// # Errors
    /// A file cannot be read or written, an anchor has no match, or a file to be added exists already.
    pub fn apply(&self, pristine: &Path, tree: &Path) -> Result<Applied, Error> {
        let (pristine, tree) = (Tree::open(pristine)?, Tree::open(tree)?);
        let mut wanted: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for (file, edits) in self.edits.files() {
            let text = String::from_utf8(pristine.read(file)?)
                .map_err(|_| Error::Integration(format!("{file} is not UTF-8: it cannot be edited")))?;
            wanted.insert(file.to_owned(), edits.apply(file, &text)?.into_bytes());
        }
        for (file, bytes) in &self.files {
            if pristine.has(file) {
                return Err(Error::Integration(format!("{file} would be added, but it already exists")));
            }
            wanted.insert(file.clone(), bytes.clone());
        }
        let earlier = tree.read_existing(RECORD_FILE)?.unwrap_or_default();
        let earlier = String::from_utf8_lossy(&earlier);
        let files: Vec<String> = wanted.keys().cloned().collect();
        // Write the record before the files: the next run restores files that a failed run has written.
        let mut touched: Vec<&str> = earlier.lines().chain(files.iter().map(String::as_str)).collect();
        touched.sort_unstable();
        touched.dedup();
        tree.write(RECORD_FILE, touched.join("\n").as_bytes())?;
        let mut written = Vec::new();
        for file in touched {
            let bytes = match wanted.get(file) {
                Some(bytes) => Some(bytes.clone()),
                None => pristine.read_existing(file)?,
            };
            if put(&tree, file, bytes.as_deref())? {
                written.push(file.to_owned());
            }
        }
        tree.write(RECORD_FILE, files.join("\n").as_bytes())?;
        Ok(Applied { files, written })
    }
}

/// Writes these bytes to a file, or removes the file; returns true if that made a change.
fn put(tree: &Tree, file: &str, bytes: Option<&[u8]>) -> Result<bool, Error> {
    if tree.read_existing(file)?.as_deref() == bytes {
        return Ok(false);
    }
    match bytes {
        Some(bytes) => tree.write(file, bytes)?,
        None => drop(tree.remove(file)?),
    }
    Ok(true)
}
