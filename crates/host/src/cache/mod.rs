//! Cache of everything that takes long: entries are named by a hash of their inputs, made once, and never used incomplete.
//!
//! ```text
//!   ROOT/KIND/NAME             directory entry, or file entry with its checksum
//!   ROOT/KIND/NAME.half        directory entry that is being made
//!   ROOT/KIND/NAME.manifest    its contents; written last, its time is that of the last use
//!   ROOT/KIND/NAME/DIR.seal    contents of a directory whose users change it, as they left it
//!   ROOT/locks/KIND-NAME.make  held exclusively by the process that makes the entry
//!   ROOT/locks/KIND-NAME.use   held shared by processes that make or use it, exclusively while it is evicted
//!   ROOT/trash, ROOT/scratch   trees to be removed; working directories of processes
//! ```

mod eviction;
mod lock;
mod manifest;
mod removal;
mod seal;

pub use eviction::{Item, Removed, State};
pub use lock::Lock;
pub use seal::{is_sealed, seal, unseal};

use crate::Error;
use crate::error::At;
use crate::file::{self, Readable};
use manifest::Manifest;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::Write;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

/// Directory of the cache.
pub const ROOT_VARIABLE: &str = "STILLPOINT_CACHE";
/// Size limit in GiB.
pub const LIMIT_VARIABLE: &str = "STILLPOINT_CACHE_GIB";
/// File to which each lookup appends a line.
pub const LOG_VARIABLE: &str = "STILLPOINT_CACHE_LOG";

const DEFAULT_LIMIT_GIB: u64 = 24;
const GIB: u64 = 1 << 30;
const CHECKSUM_BYTES: usize = 32;

/// Cache that several processes may use at once. Returned entries are in use until its last clone is dropped or the process ends.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
    limit_bytes: u64,
    /// Entries that this process has checked, with the locks that prevent eviction.
    in_use: Arc<Mutex<HashMap<PathBuf, Lock>>>,
}

/// Name of a directory entry.
#[derive(Debug, Clone, Copy)]
pub struct EntryName<'a> {
    kind: &'a str,
    name: &'a str,
    changing: &'a [&'a str],
}

impl std::fmt::Display for EntryName<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.kind, self.name)
    }
}

impl<'a> EntryName<'a> {
    /// `name` ends in a hash of the recipe and its inputs.
    pub const fn new(kind: &'a str, name: &'a str) -> Self {
        EntryName { kind, name, changing: &[] }
    }

    /// Excludes the contents of these directories (relative paths) from the check of the entry, since its users change them.
    pub fn changing(self, directories: &'a [&'a str]) -> Self {
        EntryName { changing: directories, ..self }
    }
}

impl Cache {
    /// `$STILLPOINT_CACHE`; else `/var/cache/stillpoint` for root; else `stillpoint` below `$XDG_CACHE_HOME` or `~/.cache`.
    ///
    /// # Errors
    /// As [`Cache::at`]; also if neither `HOME` nor a variable names the directory.
    pub fn open() -> Result<Self, Error> {
        Cache::at(&default_root()?)
    }

    /// Opens a cache in a directory of the caller's choice, and makes the directory if necessary.
    ///
    /// # Errors
    /// The directory cannot be made or read, other users may write to it ([`Error::ForeignRoot`]), or `$STILLPOINT_CACHE_GIB` is no number.
    pub fn at(root: &Path) -> Result<Self, Error> {
        let limit_bytes = limit_bytes()?;
        make_directory(root)?;
        let root = root.canonicalize().at("resolving", root)?;
        let found = fs::metadata(&root).at("reading", &root)?;
        let (owner, user, mode) = (found.uid(), rustix::process::geteuid().as_raw(), found.mode() & 0o7777);
        if owner != user || mode & 0o022 != 0 {
            return Err(Error::ForeignRoot { path: root, owner, user, mode });
        }
        Ok(Cache { root, limit_bytes, in_use: Arc::default() })
    }

    /// The cache's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory `kind/name`; if there is no complete one, `make` fills an empty directory.
    ///
    /// # Errors
    /// The error of `make`, whose remains are removed; or the name is not allowed, or a directory, a lock or the manifest cannot be made.
    pub fn entry<E: From<Error>>(
        &self,
        entry: &EntryName,
        make: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<PathBuf, E> {
        let begin = Instant::now();
        let path = self.path(entry.kind, entry.name)?;
        if self.uses(&path) {
            return Ok(path);
        }
        let in_use = Lock::shared(&self.lock_path(entry, "use")?)?;
        let mut made = Ok(false);
        if !is_whole(&path) {
            let _making = Lock::exclusive(&self.lock_path(entry, "make")?)?;
            if !is_whole(&path) {
                made = self.make(entry, &path, make).map(|()| true);
            }
        }
        let hit = matches!(made, Ok(false));
        self.log(hit, entry.kind, entry.name, begin);
        let made = made?;
        touch(&beside(&path, "manifest"));
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner).insert(path.clone(), in_use);
        if made {
            self.keep_to_limit();
        }
        Ok(path)
    }

    /// Returns true if another process makes the entry at this moment: [`Cache::entry`] would wait for it.
    pub fn is_being_made(&self, entry: &EntryName) -> bool {
        let is_locked = |path: PathBuf| matches!(Lock::try_exclusive(&path), Ok(None));
        !self.holds(entry.kind, entry.name) && self.lock_path(entry, "make").is_ok_and(is_locked)
    }

    /// Returns true if there is a complete directory entry.
    pub fn holds(&self, kind: &str, name: &str) -> bool {
        self.path(kind, name).is_ok_and(|path| self.uses(&path) || is_whole(&path))
    }

    fn make<E: From<Error>>(
        &self,
        entry: &EntryName,
        path: &Path,
        make: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<(), E> {
        let half = beside(path, "half");
        for remains in parts(path) {
            self.discard(&remains)?;
        }
        make_directory(&half)?;
        let made = make(&half).and_then(|()| {
            let manifest = Manifest::of_tree(&half, entry.changing)?;
            fs::rename(&half, path).at("naming", path)?;
            Ok(write_manifest(path, &manifest)?)
        });
        if made.is_err() {
            // the maker's error is the one to report; the next process removes the remains
            let _ = self.discard(&half);
        }
        made
    }

    /// Returns a directory that its users fill. Its contents are not checked, and it is evicted as a whole.
    ///
    /// # Errors
    /// The name is not allowed, or the directory, its manifest or a lock cannot be made.
    pub fn directory(&self, kind: &str, name: &str) -> Result<PathBuf, Error> {
        let path = self.path(kind, name)?;
        if self.uses(&path) {
            return Ok(path);
        }
        let entry = EntryName::new(kind, name);
        let in_use = Lock::shared(&self.lock_path(&entry, "use")?)?;
        {
            let _making = Lock::exclusive(&self.lock_path(&entry, "make")?)?;
            make_directory(&path)?;
            if !is_whole(&path) {
                write_manifest(&path, &Manifest::growing())?;
            }
            touch(&beside(&path, "manifest"));
        }
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner).insert(path.clone(), in_use);
        Ok(path)
    }

    /// Reads a file entry; `None` when it is missing or damaged.
    pub fn load(&self, kind: &str, name: &str) -> Option<Vec<u8>> {
        let begin = Instant::now();
        let path = self.path(kind, name).ok()?;
        let found = fs::read(&path).ok().and_then(|mut bytes| {
            let end = bytes.len().checked_sub(CHECKSUM_BYTES)?;
            let whole = sha256(&bytes[..end])[..] == bytes[end..];
            bytes.truncate(end);
            whole.then_some(bytes)
        });
        if found.is_some() {
            touch(&path);
        }
        self.log(found.is_some(), kind, name, begin);
        found
    }

    /// Stores a file entry whole or not at all, with its checksum.
    ///
    /// # Errors
    /// The name is not allowed, or the file cannot be written; an earlier file of this name is unchanged then.
    pub fn store(&self, kind: &str, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let path = self.path(kind, name)?;
        let directory = path.parent().unwrap_or(&self.root);
        make_directory(directory)?;
        // shows eviction that the regular files of this kind belong to the cache
        let marker = self.locks()?.join(format!("{kind}.files"));
        if !marker.exists() {
            File::create(&marker).at("making", &marker)?;
        }
        let bytes = [bytes, &sha256(bytes)].concat();
        // the checksum detects a file that a power loss truncated
        file::write(&path, &bytes, Readable::ByOwner, false)
    }

    /// Locks `name` against other threads and processes until the guard is dropped or this process ends.
    ///
    /// # Errors
    /// The name is not allowed, or the lock file cannot be made or locked.
    pub fn lock(&self, name: &str) -> Result<Lock, Error> {
        check_name("lock", name)?;
        Lock::exclusive(&self.locks()?.join(format!("{name}.lock")))
    }

    /// Makes an empty directory. It is removed when the guard is dropped, or by eviction after this process was killed.
    ///
    /// # Errors
    /// The directory or its lock cannot be made.
    pub fn scratch(&self) -> Result<Scratch, Error> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let lock = Lock::exclusive(&self.locks()?.join(format!("scratch-{name}.use")))?;
        let path = self.root.join("scratch").join(name);
        // remains of an earlier process with the same number
        self.discard(&path)?;
        make_directory(&path)?;
        Ok(Scratch { path, lock: Some(lock) })
    }

    fn uses(&self, path: &Path) -> bool {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner).contains_key(path)
    }

    fn path(&self, kind: &str, name: &str) -> Result<PathBuf, Error> {
        let reserved = ["locks", "trash", "scratch"].contains(&kind);
        if reserved || kind.is_empty() || !kind.bytes().all(|byte| byte.is_ascii_lowercase()) {
            return Err(Error::Name { kind: kind.to_owned(), name: name.to_owned() });
        }
        check_name(kind, name)?;
        Ok(self.root.join(kind).join(name))
    }

    fn locks(&self) -> Result<PathBuf, Error> {
        let path = self.root.join("locks");
        make_directory(&path)?;
        Ok(path)
    }

    fn lock_path(&self, entry: &EntryName, role: &str) -> Result<PathBuf, Error> {
        let kind = self.root.join(entry.kind);
        make_directory(&kind)?;
        Ok(self.locks()?.join(format!("{}-{}.{role}", entry.kind, entry.name)))
    }

    /// Appends a line to `$STILLPOINT_CACHE_LOG`.
    fn log(&self, hit: bool, kind: &str, name: &str, begin: Instant) {
        let Some(log) = std::env::var_os(LOG_VARIABLE).filter(|value| !value.is_empty()) else { return };
        let line = match hit {
            true => format!("hit {kind}/{name}\n"),
            false => format!("miss {kind}/{name} {:.3}\n", begin.elapsed().as_secs_f64()),
        };
        // a failure to write the log does not fail the run
        let _ = File::options().append(true).create(true).open(log).and_then(|mut log| log.write_all(line.as_bytes()));
    }
}

/// Working directory in the cache.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    lock: Option<Lock>,
}

impl Scratch {
    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // eviction removes the remains
        if removal::remove_tree(&self.path).is_ok_and(|mounts| mounts.is_empty())
            && let Some(lock) = self.lock.take()
        {
            lock.remove();
        }
    }
}

/// SHA-256 over parts, each with its length, so that different lists of parts have different digests.
pub fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// First half of [`digest`] as text, for names of entries.
pub fn key<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    hex::encode(&digest(parts)[..16])
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// Removes a directory tree or a file if it exists, without entering mounts.
///
/// # Errors
/// A part cannot be removed, or a mount is below the directory. The rest may be removed.
pub fn remove(path: &Path) -> Result<(), Error> {
    without_mounts(&removal::remove_tree(path)?)
}

/// Removes a directory tree or a file of an open directory in the same way; `path` is for errors.
pub(crate) fn remove_in(parent: BorrowedFd, name: &OsStr, path: &Path) -> Result<(), Error> {
    without_mounts(&removal::remove_in(parent, name, path)?)
}

fn without_mounts(mounts: &[PathBuf]) -> Result<(), Error> {
    mounts.first().map_or(Ok(()), |mount| Err(rustix::io::Errno::BUSY).at("removing the mounted", mount))
}

/// Default directory of the cache, if the caller names none.
///
/// # Errors
/// No variable names a directory.
pub fn default_root() -> Result<PathBuf, Error> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let absolute = |path: &PathBuf| path.is_absolute();
    set(ROOT_VARIABLE)
        .or_else(|| rustix::process::geteuid().is_root().then(|| PathBuf::from("/var/cache/stillpoint")))
        .or_else(|| set("XDG_CACHE_HOME").filter(absolute).map(|directory| directory.join("stillpoint")))
        .or_else(|| set("HOME").map(|directory| directory.join(".cache/stillpoint")))
        .ok_or(Error::NoRoot)
}

fn limit_bytes() -> Result<u64, Error> {
    let Some(value) = std::env::var_os(LIMIT_VARIABLE).filter(|value| !value.is_empty()) else {
        return Ok(DEFAULT_LIMIT_GIB * GIB);
    };
    let value = value.to_string_lossy().into_owned();
    value.parse().ok().and_then(|gib: u64| gib.checked_mul(GIB)).ok_or(Error::Limit(value))
}

fn check_name(kind: &str, name: &str) -> Result<(), Error> {
    let ours = [".half", ".manifest"].iter().any(|suffix| name.ends_with(suffix));
    // names of lock files consist of kind, name and role
    let fits = kind.len() + name.len() < 240;
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) || ours || !fits {
        return Err(Error::Name { kind: kind.to_owned(), name: name.to_owned() });
    }
    Ok(())
}

/// Makes a directory with its parents, writable for this user and readable for all, as far as the umask allows.
fn make_directory(path: &Path) -> Result<(), Error> {
    DirBuilder::new().recursive(true).mode(0o755).create(path).at("making", path)
}

/// Returns `path` with a dot and a suffix appended.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    PathBuf::from(name)
}

/// Paths of all parts of an entry; without the first part there is no entry.
fn parts(path: &Path) -> [PathBuf; 4] {
    [beside(path, "manifest"), path.to_owned(), beside(path, "half"), beside(path, "manifest.half")]
}

/// Commits an entry: its directory and the manifest's bytes are on disk before the manifest gets its final name.
fn write_manifest(path: &Path, manifest: &Manifest) -> Result<(), Error> {
    write_listed(path, "manifest", manifest)
}

fn write_listed(path: &Path, suffix: &str, manifest: &Manifest) -> Result<(), Error> {
    let listed = beside(path, suffix);
    let half = beside(&listed, "half");
    let mut file = File::create(&half).at("making", &half)?;
    file.write_all(&manifest.to_bytes()).at("writing", &half)?;
    file.sync_all().at("writing", &half)?;
    fs::rename(&half, &listed).at("naming", &listed)
}

/// Returns true if the entry has a complete manifest, and everything that the manifest lists.
fn is_whole(path: &Path) -> bool {
    is_whole_by(path, "manifest")
}

fn is_whole_by(path: &Path, suffix: &str) -> bool {
    let Some(manifest) = fs::read(beside(path, suffix)).ok().and_then(|bytes| Manifest::parse(&bytes)) else {
        return false;
    };
    match manifest.difference(path) {
        None => true,
        Some(different) => {
            tracing::warn!(entry = %path.display(), different = %different.display(), "a damaged cache entry is made again");
            false
        }
    }
}

/// Sets the time of last use to now.
fn touch(path: &Path) {
    // a failure only changes the order of eviction, which is not guaranteed
    let _ = File::options().append(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
}

#[cfg(test)]
mod tests {
    use super::key;

    #[test]
    fn parts_do_not_run_into_each_other() {
        assert_ne!(key([&b"ab"[..], b"c"]), key([&b"a"[..], b"bc"]));
    }
}
