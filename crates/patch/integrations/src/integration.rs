//! A directory of edits and files, and the tree in which they are placed.

use crate::edits::Edits;
use crate::error::Error;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

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
        for path in sorted(dir)? {
            if path.extension().is_some_and(|extension| extension == "edits") {
                let text = fs::read_to_string(&path).map_err(io_error("reading", &path))?;
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                edits.add(&name, &text)?;
                add(&name, text.as_bytes());
            }
        }
        if edits.files().next().is_none() {
            return Err(Error::Integration(format!("{} contains no edits", dir.display())));
        }
        let mut files = BTreeMap::new();
        let added = dir.join("files");
        if added.is_dir() {
            collect(&added, "", &mut files)?;
        }
        files.iter().for_each(|(name, bytes)| add(name, bytes));
        let digest = hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Ok(Integration { edits, files, digest })
    }

    /// Returns a digest that changes exactly when an edit or a file changes.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Changes `tree`, a copy of `pristine`, to the state of this integration.
    ///
    /// # Errors
    /// A file cannot be read or written, an anchor has no match, or a file to be added exists already.
    pub fn apply(&self, pristine: &Path, tree: &Path) -> Result<Applied, Error> {
        let mut wanted: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for (file, edits) in self.edits.files() {
            let path = pristine.join(file);
            let bytes = fs::read(&path).map_err(io_error("reading", &path))?;
            let text = String::from_utf8(bytes)
                .map_err(|_| Error::Integration(format!("{file} is not UTF-8: it cannot be edited")))?;
            wanted.insert(file.to_owned(), edits.apply(file, &text)?.into_bytes());
        }
        for (file, bytes) in &self.files {
            if pristine.join(file).exists() {
                return Err(Error::Integration(format!("{file} would be added, but it already exists")));
            }
            wanted.insert(file.clone(), bytes.clone());
        }
        let record = tree.join(RECORD_FILE);
        let earlier = fs::read_to_string(&record).unwrap_or_default();
        let files: Vec<String> = wanted.keys().cloned().collect();
        // Write the record before the files: the next run restores files that a failed run has written.
        let mut touched: Vec<&str> = earlier.lines().chain(files.iter().map(String::as_str)).collect();
        touched.sort_unstable();
        touched.dedup();
        fs::write(&record, touched.join("\n")).map_err(io_error("writing", &record))?;
        let mut written = Vec::new();
        for file in touched {
            let path = tree.join(file);
            let bytes = match wanted.get(file) {
                Some(bytes) => Some(bytes.clone()),
                None => optional(fs::read(pristine.join(file))).map_err(io_error("reading", &path))?,
            };
            if put(&path, bytes.as_deref())? {
                written.push(file.to_owned());
            }
        }
        fs::write(&record, files.join("\n")).map_err(io_error("writing", &record))?;
        Ok(Applied { files, written })
    }
}

/// Writes these bytes to a file, or removes the file; returns true if that made a change.
fn put(path: &Path, bytes: Option<&[u8]>) -> Result<bool, Error> {
    let now = optional(fs::read(path)).map_err(io_error("reading", path))?;
    if now.as_deref() == bytes {
        return Ok(false);
    }
    match bytes {
        Some(bytes) => {
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent).map_err(io_error("making", parent))?;
            }
            fs::write(path, bytes).map_err(io_error("writing", path))?;
        }
        None => fs::remove_file(path).map_err(io_error("removing", path))?,
    }
    Ok(true)
}

fn optional(read: io::Result<Vec<u8>>) -> io::Result<Option<Vec<u8>>> {
    match read {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn collect(dir: &Path, prefix: &str, files: &mut BTreeMap<String, Vec<u8>>) -> Result<(), Error> {
    for path in sorted(dir)? {
        let name = format!("{prefix}{}", path.file_name().unwrap_or_default().to_string_lossy());
        if path.is_dir() {
            collect(&path, &format!("{name}/"), files)?;
        } else {
            files.insert(name, fs::read(&path).map_err(io_error("reading", &path))?);
        }
    }
    Ok(())
}

fn sorted(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries =
        fs::read_dir(dir).and_then(Iterator::collect::<io::Result<Vec<_>>>).map_err(io_error("listing", dir))?;
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.sort();
    Ok(paths)
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { what, path, source }
}
