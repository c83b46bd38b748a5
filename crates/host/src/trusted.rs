//! Directories that no other user can lead elsewhere, and files in them.
//!
//! A path is walked from the root, each component opened below the one before and without links (`openat2(2)`). Every one
//! belongs to root or to this user, and others may write to it only where the sticky bit keeps them from renaming what is
//! not theirs, as in `/tmp`; never to the last one. What is made is made exclusively, for its owner alone.
//!
//! The obvious way is to check a path and then to open it. Between the two another user exchanges a component.

use crate::Error;
use crate::error::At;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, mkdirat, openat2, renameat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

/// Permission bits of others.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// A directory that only root and this user can change.
#[derive(Debug)]
pub struct Directory {
    fd: OwnedFd,
    path: PathBuf,
}

impl Directory {
    /// Opens one that is there.
    ///
    /// # Errors
    /// A component is a link, is no directory, or can be changed by another user; or it is not there.
    pub fn open(path: &Path) -> Result<Directory, Error> {
        walk(path, false)
    }

    /// The same, and makes what is not there, for its owner alone (0700).
    ///
    /// # Errors
    /// As [`Directory::open`], or a component cannot be made.
    pub fn make(path: &Path) -> Result<Directory, Error> {
        walk(path, true)
    }

    /// Its absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file for its owner alone (0600), whole or not at all, in the place of one of that name; returns its path.
    ///
    /// # Errors
    /// The name is none of a file, or the file cannot be written.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, Error> {
        let path = self.file(name)?;
        let half = format!(".{name}.{}", std::process::id());
        // left by a process of this number that was killed
        let _ = unlinkat(&self.fd, &half, AtFlags::empty());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut file = File::from(self.open_file(&half, flags, Mode::RUSR | Mode::WUSR).at("making", &path)?);
        file.write_all(bytes).at("writing", &path)?;
        renameat(&self.fd, &half, &self.fd, name).at("naming", &path)?;
        Ok(path)
    }

    /// Reads a regular file of root's or this user's that no other can write to, once and at most `limit` bytes.
    ///
    /// # Errors
    /// It is not such a file, or is longer.
    pub fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Error> {
        let path = self.file(name)?;
        // a FIFO that nothing writes to would hold the caller
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = self.open_file(name, flags, Mode::empty());
        let file = File::from(fd.map_err(|errno| link_or(errno, "opening", &path))?);
        let stat = fstat(&file).at("looking at", &path)?;
        is_safe(&path, &stat, false)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return untrusted(&path, "it is no regular file");
        }
        let mut bytes = Vec::new();
        file.take(limit.saturating_add(1)).read_to_end(&mut bytes).at("reading", &path)?;
        if bytes.len() as u64 > limit {
            return untrusted(&path, format!("it has more than {limit} bytes"));
        }
        Ok(bytes)
    }

    /// Path of a file of that name.
    fn file(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.path.join(name);
        let mut parts = Path::new(name).components();
        match (parts.next(), parts.next()) {
            (Some(Component::Normal(part)), None) if part == OsStr::new(name) => Ok(path),
            _ => untrusted(&path, "this is not the name of a file"),
        }
    }

    fn open_file(&self, name: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        openat2(&self.fd, name, flags | OFlags::NOFOLLOW, mode, ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)
    }
}

fn untrusted<T>(path: &Path, why: impl Into<String>) -> Result<T, Error> {
    Err(Error::Untrusted { path: path.to_owned(), why: why.into() })
}

/// The error for what could not be opened.
fn link_or(errno: Errno, doing: &'static str, path: &Path) -> Error {
    match errno {
        Errno::LOOP => Error::Untrusted { path: path.to_owned(), why: "it is a symbolic link".into() },
        _ => Error::Io { doing, path: path.to_owned(), source: errno.into() },
    }
}

fn open_component(parent: impl AsFd, name: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    // without NOFOLLOW, which would call a link no directory
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat2(parent, name, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

fn walk(path: &Path, makes: bool) -> Result<Directory, Error> {
    let absolute = std::path::absolute(path).at("looking for", path)?;
    let mut at = PathBuf::from("/");
    let mut fd = open_component(CWD, "/").at("opening", &at)?;
    let mut last = fstat(&fd).at("looking at", &at)?;
    for component in absolute.components() {
        let name = match component {
            Component::RootDir | Component::CurDir => continue,
            Component::Normal(name) => name,
            Component::ParentDir | Component::Prefix(_) => return untrusted(&absolute, "it leads upwards"),
        };
        is_safe(&at, &last, true)?;
        at.push(name);
        if makes {
            match mkdirat(&fd, name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error).at("making", &at),
            }
        }
        fd = open_component(&fd, name).map_err(|errno| link_or(errno, "opening", &at))?;
        last = fstat(&fd).at("looking at", &at)?;
    }
    is_safe(&at, &last, false)?;
    Ok(Directory { fd, path: at })
}

/// Refuses what another user can change; `passed`: a directory on the way to another one.
fn is_safe(path: &Path, stat: &Stat, passed: bool) -> Result<(), Error> {
    let user = rustix::process::geteuid().as_raw();
    if stat.st_uid != 0 && stat.st_uid != user {
        return untrusted(path, format!("it belongs to uid {}", stat.st_uid));
    }
    let mode = stat.st_mode & 0o7777;
    if mode & OTHERS_WRITE != 0 && !(passed && mode & STICKY != 0) {
        return untrusted(path, format!("others can write to it (mode {mode:04o})"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    /// Reason why a directory is not used.
    fn why<T>(result: Result<T, Error>) -> String {
        match result {
            Err(Error::Untrusted { why, .. }) => why,
            Err(error) => error.to_string(),
            Ok(_) => String::new(),
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn set(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn what_is_made_is_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let made = Directory::make(&dir.path().join("a/b")).unwrap();
        assert_eq!((mode(made.path()), mode(&dir.path().join("a"))), (0o700, 0o700));
        let path = made.write("text", b"one").unwrap();
        made.write("text", b"two").unwrap();
        assert_eq!((mode(&path), fs::read(&path).unwrap()), (0o600, b"two".to_vec()));
        assert_eq!(fs::read_dir(made.path()).unwrap().count(), 1);
        assert_eq!(Directory::open(made.path()).unwrap().read("text", 3).unwrap(), b"two");
        assert!(why(made.read("text", 2)).contains("more than 2 bytes"));
    }

    #[test]
    fn links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let real = Directory::make(&dir.path().join("real/below")).unwrap();
        symlink("real", dir.path().join("link")).unwrap();
        symlink("below", dir.path().join("real/last")).unwrap();
        for path in ["link", "link/below", "real/last"] {
            assert!(why(Directory::make(&dir.path().join(path))).contains("symbolic link"), "{path}");
        }
        assert!(!why(Directory::make(&dir.path().join("real/below/.."))).is_empty());
        let outside = dir.path().join("outside");
        fs::write(&outside, "stays").unwrap();
        symlink(&outside, real.path().join("text")).unwrap();
        assert!(why(real.read("text", 100)).contains("symbolic link"));
        real.write("text", b"new").unwrap();
        assert_eq!(fs::read(&outside).unwrap(), b"stays");
    }

    #[test]
    fn directories_that_others_can_change_are_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let shared = dir.path().join("shared");
        fs::create_dir(&shared).unwrap();
        for bad in [0o777, 0o770, 0o702] {
            set(&shared, bad);
            assert!(why(Directory::open(&shared)).contains("others can write"), "{bad:o}");
            assert!(why(Directory::make(&shared.join("x"))).contains("others can write"), "{bad:o}");
        }
        set(&shared, 0o1777);
        assert!(why(Directory::open(&shared)).contains("others can write"), "a file in it may be another user's");
        Directory::make(&shared.join("x")).unwrap();
        if rustix::process::geteuid().is_root() {
            fs::create_dir(shared.join("decoy")).unwrap();
            chown(shared.join("decoy"), Some(4711), None).unwrap();
            assert!(why(Directory::make(&shared.join("decoy"))).contains("uid 4711"));
            assert!(why(Directory::make(&shared.join("decoy/below"))).contains("uid 4711"));
        }
    }

    #[test]
    fn only_regular_files_of_ours_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let made = Directory::make(&dir.path().join("keys")).unwrap();
        let fifo = made.path().join("fifo");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert!(why(made.read("fifo", 10)).contains("no regular file"));
        let path = made.write("text", b"x").unwrap();
        set(&path, 0o666);
        assert!(why(made.read("text", 10)).contains("others can write"));
        for name in ["..", ".", "", "a/b", "/etc/passwd", "../x", "x/"] {
            assert!(why(made.read(name, 10)).contains("not the name of a file"), "{name:?}");
            assert!(why(made.write(name, b"")).contains("not the name of a file"), "{name:?}");
        }
    }
}
