//! Eviction of unused data: least recently used entries above the size limit, remains of killed processes.

use super::manifest::{self, Size};
use super::{Cache, Lock, beside, make_directory, removal};
use crate::Error;
use crate::error::At;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Suffix of trees to be removed.
const REMOVED: &str = ".removed";
/// Age after which a temporary file is a remain: writing a file takes less.
const TEMPORARY_AGE_MAX: Duration = Duration::from_secs(3600);

/// State of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// A directory with a manifest.
    Whole,
    /// A directory that its users fill over time.
    Grows,
    /// One file.
    File,
    /// Remains of a process that was killed, or an entry that is being made.
    Half,
}

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// Its kind.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// Time of the last lookup.
    pub last_use: SystemTime,
    /// State.
    pub state: State,
}

/// Result of an eviction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removed {
    /// Removed entries, as `KIND/NAME`.
    pub entries: Vec<String>,
    /// Bytes on disk of the removed entries.
    pub bytes: u64,
    /// Entries that stay because a process uses them.
    pub in_use: Vec<String>,
    /// Mounts below remains; they are left in place.
    pub mounts: Vec<PathBuf>,
}

impl Cache {
    /// All entries, least recently used ones first.
    ///
    /// # Errors
    /// A directory of the cache cannot be read.
    pub fn list(&self) -> Result<Vec<Item>, Error> {
        let mut items = Vec::new();
        for (kind, directory) in directories(&self.root)? {
            if !["locks", "trash", "scratch"].contains(&kind.as_str()) {
                self.list_kind(&kind, &directory, &mut items)?;
            }
        }
        items.sort_by(|a, b| (a.last_use, &a.name).cmp(&(b.last_use, &b.name)));
        Ok(items)
    }

    /// Lists the entries that a cache has put into the directory of a kind: a directory of the caller's choice may hold other files.
    fn list_kind(&self, kind: &str, directory: &Path, items: &mut Vec<Item>) -> Result<(), Error> {
        let files_are_ours = self.root.join("locks").join(format!("{kind}.files")).exists();
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(directory).at("reading", directory)? {
            let entry = entry.at("reading", directory)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let Ok(found) = entry.metadata() else { continue };
            let suffixes = [".manifest.half", ".manifest", ".half"];
            let stem = suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(&name);
            if self.root.join("locks").join(format!("{kind}-{stem}.use")).exists() {
                names.insert(stem.to_owned());
            } else if files_are_ours && found.is_file() {
                let last_use = found.modified().at("reading", &entry.path())?;
                let state = if name.starts_with(".tmp") { State::Half } else { State::File };
                items.push(Item { kind: kind.to_owned(), name, bytes: found.blocks() * 512, last_use, state });
            }
        }
        for name in names {
            let path = directory.join(&name);
            let (bytes, last_use, state) = measure(&path);
            items.push(Item { kind: kind.to_owned(), name, bytes, last_use, state });
        }
        Ok(())
    }

    /// Removes remains of killed processes, then unused entries, least recently used first, until the rest takes `limit_bytes` at most.
    ///
    /// # Errors
    /// A directory of the cache cannot be read, locked or changed. What was removed before stays removed.
    pub fn evict(&self, limit_bytes: u64) -> Result<Removed, Error> {
        let evicting = self.lock("evict")?;
        self.evict_under(limit_bytes, evicting)
    }

    fn evict_under(&self, limit_bytes: u64, _evicting: Lock) -> Result<Removed, Error> {
        let mut removed = Removed::default();
        self.sweep(&mut removed)?;
        let items = self.list()?;
        let mut total: u64 = items.iter().map(|item| item.bytes).sum();
        for item in items {
            if item.state != State::Half && total <= limit_bytes {
                continue;
            }
            let label = format!("{}/{}", item.kind, item.name);
            match self.take_away(&item)? {
                true => {
                    total -= item.bytes;
                    removed.bytes += item.bytes;
                    removed.entries.push(label);
                }
                false => removed.in_use.push(label),
            }
        }
        self.empty_trash(&mut removed)?;
        for mount in &removed.mounts {
            tracing::warn!(mount = %mount.display(), "a mount below a removed cache entry stays; unmount it");
        }
        Ok(removed)
    }

    /// Removes everything that no process uses.
    ///
    /// # Errors
    /// As [`Cache::evict`].
    pub fn clean(&self) -> Result<Removed, Error> {
        self.evict(0)
    }

    /// The size limit: `$STILLPOINT_CACHE_GIB`, or 24 GiB.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    pub(super) fn keep_to_limit(&self) {
        let evicted = Lock::try_exclusive(&self.root.join("locks/evict.lock"));
        // if another process evicts, it counts the new entry, or the next entry of that process does
        let evicted = evicted.and_then(|lock| lock.map(|lock| self.evict_under(self.limit_bytes, lock)).transpose());
        if let Err(error) = evicted {
            tracing::warn!(%error, "the cache was not brought to its size limit");
        }
    }

    /// Moves a tree or a file to the trash and removes it. A mount below it stays in the trash and is reported.
    pub(super) fn discard(&self, path: &Path) -> Result<(), Error> {
        if let Some(moved) = self.move_to_trash(path)? {
            for mount in removal::remove_tree(&moved)? {
                tracing::warn!(mount = %mount.display(), "a mount below a removed cache entry stays; unmount it");
            }
        }
        Ok(())
    }

    fn move_to_trash(&self, path: &Path) -> Result<Option<PathBuf>, Error> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        if fs::symlink_metadata(path).is_err() {
            return Ok(None);
        }
        let trash = self.root.join("trash");
        make_directory(&trash)?;
        // a process of another namespace may have the same number
        let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos());
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let moved = trash.join(format!("{}-{number}-{now:x}{REMOVED}", std::process::id()));
        match fs::rename(path, &moved) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            renamed => renamed.at("moving away", path).map(|()| Some(moved)),
        }
    }

    /// Moves an entry to the trash unless a process uses it.
    fn take_away(&self, item: &Item) -> Result<bool, Error> {
        let path = self.root.join(&item.kind).join(&item.name);
        if item.name.starts_with(".tmp") {
            let old = item.last_use.elapsed().is_ok_and(|age| age > TEMPORARY_AGE_MAX);
            return Ok(old && fs::remove_file(&path).is_ok());
        }
        if item.state == State::File {
            return Ok(fs::remove_file(&path).is_ok());
        }
        let lock = |role: &str| self.root.join("locks").join(format!("{}-{}.{role}", item.kind, item.name));
        let Some(exclusive) = Lock::try_exclusive(&lock("use"))? else { return Ok(false) };
        for part in super::parts(&path) {
            self.move_to_trash(&part)?;
        }
        // makers hold the other lock as well
        let _ = fs::remove_file(lock("make"));
        exclusive.remove();
        Ok(true)
    }

    /// Removes working directories of processes that have ended.
    fn sweep(&self, removed: &mut Removed) -> Result<(), Error> {
        let scratch = self.root.join("scratch");
        if !scratch.exists() {
            return Ok(());
        }
        for (name, path) in directories(&scratch)? {
            let lock = self.root.join("locks").join(format!("scratch-{name}.use"));
            if !lock.exists() {
                continue;
            }
            if let Some(exclusive) = Lock::try_exclusive(&lock)? {
                self.move_to_trash(&path)?;
                exclusive.remove();
                removed.entries.push(format!("scratch/{name}"));
            }
        }
        Ok(())
    }

    fn empty_trash(&self, removed: &mut Removed) -> Result<(), Error> {
        let trash = self.root.join("trash");
        if !trash.exists() {
            return Ok(());
        }
        for entry in fs::read_dir(&trash).at("reading", &trash)? {
            let entry = entry.at("reading", &trash)?;
            if entry.file_name().to_string_lossy().ends_with(REMOVED) {
                removed.mounts.extend(removal::remove_tree(&entry.path())?);
            }
        }
        Ok(())
    }
}

fn directories(path: &Path) -> Result<Vec<(String, PathBuf)>, Error> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path).at("reading", path)? {
        let entry = entry.at("reading", path)?;
        if let (Ok(name), true) = (entry.file_name().into_string(), entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            found.push((name, entry.path()));
        }
    }
    Ok(found)
}

/// Bytes, last use and state of a directory entry.
fn measure(path: &Path) -> (u64, SystemTime, State) {
    let beginning = || {
        let mut bytes = Vec::new();
        let file = File::open(beside(path, "manifest")).ok()?;
        let last_use = file.metadata().and_then(|found| found.modified()).ok()?;
        file.take(64).read_to_end(&mut bytes).ok()?;
        Some((manifest::size(&bytes)?, last_use))
    };
    match beginning() {
        Some((Size::Bytes(bytes), last_use)) if path.is_dir() => (bytes, last_use, State::Whole),
        Some((Size::Grows, last_use)) => (bytes_below(path), last_use, State::Grows),
        _ => {
            let half = bytes_below(path) + bytes_below(&beside(path, "half"));
            (half, SystemTime::UNIX_EPOCH, State::Half)
        }
    }
}

/// Bytes on disk of a tree, as far as it is readable; another file system below it does not count.
fn bytes_below(path: &Path) -> u64 {
    let Ok(own) = fs::symlink_metadata(path) else { return 0 };
    let (mut bytes, mut open) = (own.blocks() * 512, vec![path.to_owned()]);
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let Ok(found) = entry.metadata() else { continue };
            if found.dev() != own.dev() {
                continue;
            }
            bytes += found.blocks() * 512;
            if found.is_dir() {
                open.push(entry.path());
            }
        }
    }
    bytes
}
