//! Where everything that takes long is kept: named by what it was made from, made once, never half.

use crate::Error;
use crate::error::At;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// A directory of results. Several processes may use it at once: each entry is made under a lock and appears whole.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// `$STILLPOINT_CACHE`, or `stillpoint` below `$XDG_CACHE_HOME` or `~/.cache`.
    pub fn open() -> Result<Self, Error> {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let root = set("STILLPOINT_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|d| d.join("stillpoint")))
            .or_else(|| set("HOME").map(|d| d.join(".cache/stillpoint")))
            .ok_or_else(|| Error::Environment("neither STILLPOINT_CACHE nor HOME is set".into()))?;
        Cache::at(&root)
    }

    /// A cache in a directory of the caller's choice.
    pub fn at(root: &Path) -> Result<Self, Error> {
        fs::create_dir_all(root).at("making", root)?;
        Ok(Cache { root: root.canonicalize().at("resolving", root)? })
    }

    /// The path of an entry, there or not.
    pub(crate) fn path(&self, kind: &str, name: &str) -> PathBuf {
        self.root.join(kind).join(name)
    }

    /// A directory that is always there.
    pub(crate) fn directory(&self, kind: &str) -> Result<PathBuf, Error> {
        let path = self.root.join(kind);
        fs::create_dir_all(&path).at("making", &path)?;
        Ok(path)
    }

    /// Holds others off `name` until the guard is dropped; also when this process is killed.
    pub(crate) fn lock(&self, name: &str) -> Result<Lock, Error> {
        let path = self.directory("locks")?.join(name.replace('/', "_"));
        let file = File::create(&path).at("making", &path)?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
            .map_err(std::io::Error::from)
            .at("locking", &path)?;
        Ok(Lock { _file: file })
    }

    /// The directory `kind/name`, made by `make` (into an empty directory) unless it is there already.
    pub(crate) fn entry(
        &self,
        kind: &str,
        name: &str,
        make: impl FnOnce(&Path) -> Result<(), Error>,
    ) -> Result<PathBuf, Error> {
        let path = self.path(kind, name);
        if path.exists() {
            return Ok(path);
        }
        let _lock = self.lock(&format!("{kind}-{name}"))?;
        if path.exists() {
            return Ok(path);
        }
        let half = self.path(kind, &format!("{name}.half"));
        remove(&half)?;
        fs::create_dir_all(&half).at("making", &half)?;
        make(&half)?;
        fs::rename(&half, &path).at("naming", &path)?;
        Ok(path)
    }

    /// Stores a file whole or not at all.
    pub(crate) fn store(&self, kind: &str, name: &str, bytes: &[u8]) -> Result<PathBuf, Error> {
        let directory = self.directory(kind)?;
        let path = directory.join(name);
        write_whole(&path, bytes, Readable::ByOwner)?;
        Ok(path)
    }
}

/// Held while an entry is made.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// Who may read a file that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readable {
    /// Its owner only.
    ByOwner,
    /// Whoever the umask lets.
    ByOthers,
}

/// Writes beside the final name and renames: the file is there whole, or not at all.
pub fn write_whole(path: &Path, bytes: &[u8], readable: Readable) -> Result<(), Error> {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mode = match readable {
        Readable::ByOwner => 0o600,
        Readable::ByOthers => 0o666,
    };
    let mut builder = tempfile::Builder::new();
    builder.permissions(fs::Permissions::from_mode(mode));
    let mut file = builder.tempfile_in(directory).at("writing in", directory)?;
    file.write_all(bytes).at("writing", path)?;
    file.as_file().sync_all().at("writing", path)?;
    file.persist(path).map_err(|e| e.error).at("naming", path)?;
    Ok(())
}

/// Removes a directory tree if it is there.
pub(crate) fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e).at("removing", path),
        _ => Ok(()),
    }
}

/// SHA-256 over parts, each with its length, so that no two lists of parts look alike.
pub(crate) fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// The same as text.
pub(crate) fn key<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    digest(parts).iter().take(16).map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_made_once_and_never_half() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let failed = cache.entry("tree", "a", |at| {
            fs::write(at.join("half"), "x").unwrap();
            Err(Error::Environment("interrupted".into()))
        });
        assert!(failed.is_err());
        assert!(!cache.path("tree", "a").exists());
        let path = cache
            .entry("tree", "a", |at| {
                assert!(!at.join("half").exists(), "what a failed run left must be gone");
                fs::write(at.join("whole"), "y").at("writing", at)
            })
            .unwrap();
        assert!(path.join("whole").exists());
        cache.entry("tree", "a", |_| panic!("made twice")).unwrap();
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        assert_ne!(key([&b"ab"[..], b"c"]), key([&b"a"[..], b"bc"]));
    }
}
