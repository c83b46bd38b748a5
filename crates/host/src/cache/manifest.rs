//! List of the contents of a cache entry. It is stored beside the entry, and a complete list makes the entry complete.
//!
//! ```text
//!   stillpoint-cache 1 BYTES\n        BYTES on disk, or `-` for a directory that may grow, which lists nothing
//!   d PATH\0                          directory
//!   f SIZE PATH\0                     regular file
//!   l PATH\0TARGET\0                  symbolic link
//!   CHECKSUM                          SHA-256 of all before, as text
//! ```

use crate::Error;
use crate::error::At;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const MAGIC: &str = "stillpoint-cache 1 ";
const CHECKSUM_BYTES: usize = 64;

/// Size in the first line of a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    /// Bytes on disk when the entry was made.
    Bytes(u64),
    /// A directory that may grow.
    Grows,
}

/// One file of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Item {
    Directory(PathBuf),
    File(PathBuf, u64),
    Link(PathBuf, PathBuf),
}

/// Contents of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Manifest {
    size: Size,
    items: Vec<Item>,
}

impl Manifest {
    /// A directory that may grow.
    pub(super) fn growing() -> Self {
        Manifest { size: Size::Grows, items: Vec::new() }
    }

    /// Lists a tree. Directories in `changing` (relative paths) are listed without their contents.
    pub(super) fn of_tree(root: &Path, changing: &[&str]) -> Result<Self, Error> {
        let own = fs::symlink_metadata(root).at("reading", root)?;
        let (mut bytes, mut items) = (own.blocks() * 512, Vec::new());
        let mut open = vec![PathBuf::new()];
        while let Some(directory) = open.pop() {
            let changes = changing.iter().any(|path| directory == Path::new(path));
            let at = root.join(&directory);
            for entry in fs::read_dir(&at).at("reading", &at)? {
                let entry = entry.at("reading", &at)?;
                let path = entry.path();
                let found = fs::symlink_metadata(&path).at("reading", &path)?;
                bytes += found.blocks() * 512;
                let relative = directory.join(entry.file_name());
                if changes || found.dev() != own.dev() {
                    continue;
                }
                if found.is_dir() {
                    open.push(relative.clone());
                    items.push(Item::Directory(relative));
                } else if found.is_symlink() {
                    let target = fs::read_link(&path).at("reading", &path)?;
                    items.push(Item::Link(relative, target));
                } else if found.is_file() {
                    items.push(Item::File(relative, found.len()));
                }
            }
        }
        Ok(Manifest { size: Size::Bytes(bytes), items })
    }

    /// Returns the first path that differs from the list.
    pub(super) fn difference(&self, root: &Path) -> Option<PathBuf> {
        let is_directory = |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
        if !is_directory(root) {
            return Some(root.to_owned());
        }
        let holds = |item: &Item| match item {
            Item::Directory(path) => is_directory(&root.join(path)),
            Item::File(path, size) => {
                fs::symlink_metadata(root.join(path)).is_ok_and(|found| found.is_file() && found.len() == *size)
            }
            Item::Link(path, target) => fs::read_link(root.join(path)).is_ok_and(|found| found == *target),
        };
        self.items.iter().find(|item| !holds(item)).map(|item| match item {
            Item::Directory(path) | Item::File(path, _) | Item::Link(path, _) => root.join(path),
        })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let size = match self.size {
            Size::Bytes(bytes) => bytes.to_string(),
            Size::Grows => "-".to_owned(),
        };
        let mut out = format!("{MAGIC}{size}\n").into_bytes();
        for item in &self.items {
            match item {
                Item::Directory(path) => put(&mut out, b"d ", path),
                Item::File(path, size) => put(&mut out, format!("f {size} ").as_bytes(), path),
                Item::Link(path, target) => {
                    put(&mut out, b"l ", path);
                    put(&mut out, b"", target);
                }
            }
        }
        let checksum = hex::encode(super::sha256(&out));
        out.extend(checksum.bytes());
        out
    }

    /// Parses a complete manifest; `None` for any other bytes.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (body, checksum) = bytes.split_at_checked(bytes.len().checked_sub(CHECKSUM_BYTES)?)?;
        if hex::encode(super::sha256(body)).as_bytes() != checksum {
            return None;
        }
        let size = size(body)?;
        let rest = &body[body.iter().position(|byte| *byte == b'\n')? + 1..];
        let mut items = Vec::new();
        let mut parts = rest.split(|byte| *byte == 0);
        while let Some(part) = parts.next().filter(|part| !part.is_empty()) {
            items.push(match part.split_at_checked(2)? {
                (b"d ", path) => Item::Directory(path_of(path)),
                (b"f ", rest) => {
                    let space = rest.iter().position(|byte| *byte == b' ')?;
                    let size = std::str::from_utf8(&rest[..space]).ok()?.parse().ok()?;
                    Item::File(path_of(&rest[space + 1..]), size)
                }
                (b"l ", path) => Item::Link(path_of(path), path_of(parts.next()?)),
                _ => return None,
            });
        }
        Some(Manifest { size, items })
    }
}

fn put(out: &mut Vec<u8>, prefix: &[u8], path: &Path) {
    out.extend(prefix);
    out.extend(path.as_os_str().as_bytes());
    out.push(0);
}

fn path_of(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes.to_vec()))
}

/// Parses the first line of a manifest; `beginning` may hold no more than that.
pub(super) fn size(beginning: &[u8]) -> Option<Size> {
    let end = beginning.iter().position(|byte| *byte == b'\n')?;
    match std::str::from_utf8(&beginning[..end]).ok()?.strip_prefix(MAGIC)? {
        "-" => Some(Size::Grows),
        bytes => Some(Size::Bytes(bytes.parse().ok()?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> (tempfile::TempDir, Manifest) {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        fs::create_dir_all(at.join("d/new\nline/tmp")).unwrap();
        fs::write(at.join("d/file"), "four").unwrap();
        fs::write(at.join("d/new\nline/tmp/comes"), "x").unwrap();
        std::os::unix::fs::symlink("d/file", at.join("link")).unwrap();
        let manifest = Manifest::of_tree(at, &["d/new\nline/tmp"]).unwrap();
        (dir, manifest)
    }

    #[test]
    fn what_was_written_is_read_again() {
        let (_dir, manifest) = sample();
        let bytes = manifest.to_bytes();
        assert_eq!(Manifest::parse(&bytes), Some(manifest.clone()));
        assert_eq!(size(&bytes[..40]), Some(manifest.size));
        let growing = Manifest::growing();
        assert_eq!(Manifest::parse(&growing.to_bytes()), Some(growing));
    }

    #[test]
    fn no_truncated_or_changed_manifest_is_read() {
        let (_dir, manifest) = sample();
        let bytes = manifest.to_bytes();
        for end in 0..bytes.len() {
            assert_eq!(Manifest::parse(&bytes[..end]), None, "{end} bytes");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert_eq!(Manifest::parse(&changed), None, "byte {at}");
        }
    }

    #[test]
    fn what_is_listed_must_be_there() {
        let (dir, manifest) = sample();
        let at = dir.path();
        assert_eq!(manifest.difference(at), None);
        fs::write(at.join("extra"), "may be there").unwrap();
        fs::remove_file(at.join("d/new\nline/tmp/comes")).unwrap();
        assert_eq!(manifest.difference(at), None);
        fs::write(at.join("d/file"), "three").unwrap();
        assert_eq!(manifest.difference(at), Some(at.join("d/file")));
        fs::write(at.join("d/file"), "four").unwrap();
        fs::remove_dir_all(at.join("d/new\nline/tmp")).unwrap();
        assert_eq!(manifest.difference(at), Some(at.join("d/new\nline/tmp")));
        fs::create_dir(at.join("d/new\nline/tmp")).unwrap();
        fs::remove_file(at.join("link")).unwrap();
        std::os::unix::fs::symlink("elsewhere", at.join("link")).unwrap();
        assert_eq!(manifest.difference(at), Some(at.join("link")));
    }
}
