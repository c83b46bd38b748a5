//! Removal of directory trees that enters no mount and follows no link.
//!
//! The obvious way is `remove_dir_all`. But a killed maker of a root file system leaves directories of this machine mounted below its tree
//! (`/proc`, `/dev/shm`), and `remove_dir_all` would delete their contents. Here the kernel is asked to open nothing across a mount (also
//! bind mounts of the same device); a mount is left in place and reported.

use crate::Error;
use crate::error::At;
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, ResolveFlags, fchmod, openat, openat2, unlinkat};
use rustix::io::Errno;
use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Removes a tree or a file, if it exists. Mounts below it are returned and stay, with the directories that lead to them.
pub(super) fn remove_tree(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(vec![path.to_owned()]) };
    let parent_fd = match openat(CWD, parent, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(Vec::new()),
        opened => opened.at("opening", parent)?,
    };
    remove_in(parent_fd.as_fd(), name, path)
}

/// Removes a tree or a file of an open directory in the same way; `path` is for errors.
pub(super) fn remove_in(parent: BorrowedFd, name: &OsStr, path: &Path) -> Result<Vec<PathBuf>, Error> {
    let name = CString::new(name.as_bytes()).map_err(|_| Errno::INVAL).at("removing", path)?;
    let mut mounts = Vec::new();
    remove_at(parent, &name, path, &mut mounts)?;
    Ok(mounts)
}

fn remove_at(parent: BorrowedFd, name: &CStr, path: &Path, mounts: &mut Vec<PathBuf>) -> Result<(), Error> {
    match unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(Errno::BUSY) => {
            mounts.push(path.to_owned());
            return Ok(());
        }
        Err(error) => return Err(error).at("removing", path),
    }
    let before = mounts.len();
    match open_directory(parent, name) {
        Ok(directory) => remove_contents(&directory, path, mounts)?,
        Err(Errno::XDEV) => mounts.push(path.to_owned()),
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error).at("opening", path),
    }
    if mounts.len() > before {
        return Ok(());
    }
    match unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::BUSY) => {
            mounts.push(path.to_owned());
            Ok(())
        }
        Err(error) => Err(error).at("removing", path),
    }
}

fn open_directory(parent: BorrowedFd, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || openat2(parent, name, flags, Mode::empty(), ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS);
    match open() {
        Err(Errno::ACCESS) => {
            rustix::fs::chmodat(parent, name, Mode::RWXU, AtFlags::empty())?;
            open()
        }
        opened => opened,
    }
}

fn remove_contents(directory: &OwnedFd, path: &Path, mounts: &mut Vec<PathBuf>) -> Result<(), Error> {
    if !rustix::process::geteuid().is_root() {
        // packages contain directories that their owner may not write to
        fchmod(directory, Mode::RWXU).at("changing the mode of", path)?;
    }
    let mut names = Vec::new();
    for entry in Dir::read_from(directory).at("reading", path)? {
        let entry = entry.at("reading", path)?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    for name in names {
        let below = path.join(OsStr::from_bytes(name.to_bytes()));
        remove_at(directory.as_fd(), &name, &below, mounts)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn links_are_removed_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (tree, other) = (dir.path().join("tree"), dir.path().join("other"));
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::create_dir(&other).unwrap();
        fs::write(other.join("stays"), "x").unwrap();
        symlink(&other, tree.join("a/link")).unwrap();
        fs::set_permissions(tree.join("a/b"), fs::Permissions::from_mode(0o500)).unwrap();
        assert!(remove_tree(&tree).unwrap().is_empty());
        assert!(!tree.exists() && other.join("stays").exists());
        assert!(remove_tree(&tree).unwrap().is_empty(), "what is not there needs no removal");
    }
}
