//! Directories that no other user can redirect, and files in them.
//!
//! A path is walked from the root; each component is opened relative to the one before, without following a link. Root or this user must
//! own every component. Other users may write to one only if the sticky bit prevents them from renaming files of others, as in `/tmp`;
//! never to the last one. New directories and files are made exclusively: the last directory and files for their owner alone, unless a
//! function says otherwise. New directories on the way to the last one can be passed by all users, since data of several users is located
//! below `/var/lib/stillpoint` and `/run/stillpoint`.
//!
//! The obvious way is to check a path and then to open it. Between the two steps another user can exchange a component. `openat2(2)` would
//! walk a path in one call; but units with `RestrictSUIDSGID=` (most of Debian's) get ENOSYS for it, and a single component needs no more
//! than `O_NOFOLLOW`.
//!
//! Files are replaced by hand: `tempfile` and `atomic-write-file` find the directory again by its path, and here it is held open.

use crate::Error;
use crate::error::At;
use crate::file::bounded;
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, Uid, chmodat, fchmod, fchown, fstat, fsync, linkat, mkdirat,
    openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Permission bits by which other users can write.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;
/// Permissions of a directory and of a file that other users can read.
const READABLE_DIRECTORY: Mode = Mode::from_raw_mode(0o755);
const READABLE_FILE: Mode = Mode::from_raw_mode(0o644);

/// Users that may own a component of a path, and a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Root,
    RootOrCaller,
}

/// Directory that only root and this user can change.
#[derive(Debug)]
pub struct Directory {
    fd: OwnedFd,
    path: PathBuf,
    owner: Owner,
}

impl Directory {
    /// Opens an existing directory.
    ///
    /// # Errors
    /// A component is a link, is not a directory, or can be changed by another user; or the directory does not exist.
    pub fn open(path: &Path) -> Result<Directory, Error> {
        walk(path, Owner::RootOrCaller, None)
    }

    /// Opens a directory that root alone can change: this user counts as another user, unless it is root.
    ///
    /// # Errors
    /// Those of [`Directory::open`].
    pub fn open_of_root(path: &Path) -> Result<Directory, Error> {
        walk(path, Owner::Root, None)
    }

    /// Opens a directory in the same way as [`Directory::open`], and makes missing components: the last directory for its owner alone
    /// (0700).
    ///
    /// # Errors
    /// Those of [`Directory::open`]; or a component cannot be made.
    pub fn make(path: &Path) -> Result<Directory, Error> {
        walk(path, Owner::RootOrCaller, Some(Mode::RWXU))
    }

    /// Opens a directory in the same way as [`Directory::make`], but new ones are readable for every user (0755).
    ///
    /// # Errors
    /// Those of [`Directory::make`].
    pub fn make_public(path: &Path) -> Result<Directory, Error> {
        walk(path, Owner::RootOrCaller, Some(READABLE_DIRECTORY))
    }

    /// Makes a directory of root's that every user can read (0755, independent of the umask).
    ///
    /// # Errors
    /// Those of [`Directory::make`].
    pub fn make_readable(path: &Path) -> Result<Directory, Error> {
        walk(path, Owner::Root, Some(READABLE_DIRECTORY))
    }

    /// Checks that [`Directory::make`] would accept this path, and makes nothing.
    ///
    /// # Errors
    /// Those of [`Directory::open`], except for a component that does not exist.
    pub fn check(path: &Path) -> Result<(), Error> {
        match Directory::open(path) {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    /// Opens the directory of a file; returns it with the file's name.
    ///
    /// # Errors
    /// Those of [`Directory::open`]; or the path is not one of a file.
    pub fn of_file(path: &Path) -> Result<(Directory, &str), Error> {
        let Some(name) = path.file_name().and_then(OsStr::to_str) else {
            return untrusted(path, "this is not the name of a file");
        };
        // the parent of a plain name is empty
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok((Directory::open(directory)?, name))
    }

    /// Its absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names in the directory, sorted. Bytes that are not UTF-8 become U+FFFD: no file of this program has such a name.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn names(&self) -> Result<Vec<String>, Error> {
        let mut names = Vec::new();
        for entry in Dir::new(self.opened()?).at("listing", &self.path)? {
            let name = entry.at("listing", &self.path)?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Type of the file with this name; links are not followed.
    ///
    /// # Errors
    /// There is no file with this name.
    pub fn kind(&self, name: &str) -> Result<FileType, Error> {
        let path = self.path_of(name)?;
        let stat = statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW).at("looking at", &path)?;
        Ok(FileType::from_raw_mode(stat.st_mode))
    }

    /// Bytes that the files in the directory take on disk: sparse files are longer than that.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn allocated(&self) -> Result<u64, Error> {
        let stat = |name: &String| statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW).ok();
        Ok(self.names()?.iter().filter_map(stat).map(|file| file.st_blocks.cast_unsigned() * 512).sum())
    }

    /// Removes the directory with all its contents; follows no link.
    ///
    /// # Errors
    /// Something in it cannot be removed.
    pub fn remove_all(self) -> Result<(), Error> {
        std::fs::remove_dir_all(&self.path).at("removing", &self.path)
    }

    /// Removes the directory if it is empty; returns false if it is not.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove_if_empty(self) -> Result<bool, Error> {
        match unlinkat(CWD, &self.path, AtFlags::REMOVEDIR) {
            Ok(()) => Ok(true),
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
            Err(error) => Err(error).at("removing", &self.path),
        }
    }

    /// Closes the directory to all users but its owner (0700).
    ///
    /// # Errors
    /// It belongs to another user.
    pub fn close(&self) -> Result<(), Error> {
        fchmod(self.opened()?, Mode::RWXU).at("closing to other users", &self.path)
    }

    /// Writes a file for its owner alone (0600), completely or not at all; replaces a file of that name; returns its path.
    ///
    /// # Errors
    /// The name is not one of a file, or the file cannot be written.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, Error> {
        self.put(name, bytes, &Form { mode: None, owner: None, synced: false })
    }

    /// Writes a file in the same way as [`Directory::write`]; it is on disk when this returns.
    ///
    /// # Errors
    /// Those of [`Directory::write`].
    pub fn write_synced(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, Error> {
        self.put(name, bytes, &Form { mode: None, owner: None, synced: true })
    }

    /// Writes a file in the same way, readable for every user (0644, independent of the umask).
    ///
    /// # Errors
    /// Those of [`Directory::write`].
    pub fn write_readable(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, Error> {
        self.put(name, bytes, &Form { mode: Some(READABLE_FILE), owner: None, synced: true })
    }

    /// Replaces an existing file, and keeps its owner, group and permissions.
    ///
    /// # Errors
    /// Those of [`Directory::write`]; or there is no regular file of that name.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, Error> {
        let path = self.path_of(name)?;
        let was = statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW).at("looking at", &path)?;
        if FileType::from_raw_mode(was.st_mode) != FileType::RegularFile {
            return untrusted(&path, "it is no regular file");
        }
        let mode = Mode::from_raw_mode(was.st_mode & 0o777);
        let owner = (Uid::from_raw(was.st_uid), Gid::from_raw(was.st_gid));
        self.put(name, bytes, &Form { mode: Some(mode), owner: Some(owner), synced: true })
    }

    /// Writes a new file for its owner alone (0600), completely or not at all; it is on disk when this returns. Returns false if the name
    /// is taken.
    ///
    /// # Errors
    /// The name is not one of a file, or the file cannot be written.
    pub fn write_new(&self, name: &str, bytes: &[u8]) -> Result<bool, Error> {
        let path = self.path_of(name)?;
        let half = self.half(name, bytes, &Form { mode: None, owner: None, synced: true })?;
        // unlike a rename, a link never replaces an existing file
        let linked = linkat(&self.fd, &half, &self.fd, name, AtFlags::empty());
        let _ = unlinkat(&self.fd, &half, AtFlags::empty());
        match linked {
            Ok(()) => self.sync().map(|()| true),
            Err(Errno::EXIST) => Ok(false),
            Err(error) => Err(error).at("naming", &path),
        }
    }

    fn put(&self, name: &str, bytes: &[u8], form: &Form) -> Result<PathBuf, Error> {
        let path = self.path_of(name)?;
        let half = self.half(name, bytes, form)?;
        renameat(&self.fd, &half, &self.fd, name).at("naming", &path)?;
        if form.synced {
            self.sync()?;
        }
        Ok(path)
    }

    /// Writes a file under a temporary name beside its final one; returns the temporary name.
    fn half(&self, name: &str, bytes: &[u8], form: &Form) -> Result<String, Error> {
        // two threads may write the same file
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let path = self.path_of(name)?;
        let half = format!(".{name}.{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // remains of a killed process with the same number
        let _ = unlinkat(&self.fd, &half, AtFlags::empty());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut file = File::from(self.open_file(&half, flags, Mode::RUSR | Mode::WUSR).at("making", &path)?);
        file.write_all(bytes).at("writing", &path)?;
        if let Some((user, group)) = form.owner {
            fchown(&file, Some(user), Some(group)).at("giving away", &path)?;
        }
        if let Some(mode) = form.mode {
            fchmod(&file, mode).at("setting the mode of", &path)?;
        }
        if form.synced {
            file.sync_all().at("writing", &path)?;
        }
        Ok(half)
    }

    /// Makes an empty file for its owner alone (0600), for reading and writing; replaces a file of that name.
    ///
    /// # Errors
    /// The name is not one of a file, or the file cannot be made.
    pub fn create(&self, name: &str) -> Result<File, Error> {
        let path = self.path_of(name)?;
        match unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error).at("removing", &path),
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        self.open_file(name, flags, Mode::RUSR | Mode::WUSR).map(File::from).at("making", &path)
    }

    /// Opens a file for appending, and makes it for its owner alone (0600) if it does not exist.
    ///
    /// # Errors
    /// Those of [`Directory::file`]; or it cannot be made.
    pub fn append(&self, name: &str) -> Result<File, Error> {
        self.checked(name, OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE)
    }

    /// Renames a file, and replaces a file of the new name.
    ///
    /// # Errors
    /// One of the names is not one of a file, or the file cannot be renamed.
    pub fn rename(&self, from: &str, to: &str) -> Result<(), Error> {
        let path = self.path_of(to)?;
        self.path_of(from)?;
        renameat(&self.fd, from, &self.fd, to).at("naming", &path)
    }

    /// Writes the names in the directory to disk.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn sync(&self) -> Result<(), Error> {
        fsync(self.opened()?).at("writing", &self.path)
    }

    /// Opens a file for locking; makes it if it does not exist, and does not change it otherwise.
    ///
    /// # Errors
    /// Those of [`Directory::file`]; or it cannot be made.
    pub fn lock_file(&self, name: &str) -> Result<File, Error> {
        match self.file(name) {
            Err(error) if error.is_not_found() => {}
            opened => return opened,
        }
        let path = self.path_of(name)?;
        // another process may be first: both must get the same file
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        self.open_file(name, flags, Mode::RUSR | Mode::WUSR).at("making", &path)?;
        self.file(name)
    }

    /// Opens a regular file that belongs to root or this user and that no other user can write to; only root's if the directory was opened
    /// with [`Directory::open_of_root`].
    ///
    /// # Errors
    /// It is not such a file.
    pub fn file(&self, name: &str) -> Result<File, Error> {
        self.checked(name, OFlags::RDONLY)
    }

    /// Opens a file in the same way as [`Directory::file`], for writing as well.
    ///
    /// # Errors
    /// Those of [`Directory::file`].
    pub fn file_to_change(&self, name: &str) -> Result<File, Error> {
        self.checked(name, OFlags::RDWR)
    }

    /// Opens a file, and refuses one that belongs to another user or is not regular.
    fn checked(&self, name: &str, flags: OFlags) -> Result<File, Error> {
        let path = self.path_of(name)?;
        // opening a FIFO without a writer would block the caller
        let fd = self.open_file(name, flags | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
        let file = File::from(fd.map_err(|errno| link_or(errno, "opening", &path))?);
        let stat = fstat(&file).at("looking at", &path)?;
        is_safe(&path, &stat, self.owner, false)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return untrusted(&path, "it is no regular file");
        }
        Ok(file)
    }

    /// Reads a file that [`Directory::file`] accepts, `limit` bytes at most.
    ///
    /// # Errors
    /// Those of [`Directory::file`]; or the file is longer.
    pub fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Error> {
        bounded(&self.file(name)?, &self.path_of(name)?, limit)
    }

    /// Removes a file.
    ///
    /// # Errors
    /// There is no file of that name, or it cannot be removed.
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        let path = self.path_of(name)?;
        unlinkat(&self.fd, name, AtFlags::empty()).at("removing", &path)
    }

    /// Returns the path of a file of that name.
    fn path_of(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.path.join(name);
        let mut parts = Path::new(name).components();
        match (parts.next(), parts.next()) {
            (Some(Component::Normal(part)), None) if part == OsStr::new(name) => Ok(path),
            _ => untrusted(&path, "this is not the name of a file"),
        }
    }

    /// Opens the directory again, for uses that an `O_PATH` descriptor does not allow: reading, synchronizing, passing to another process.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn opened(&self) -> Result<OwnedFd, Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat(&self.fd, ".", flags, Mode::empty()).at("opening", &self.path)
    }

    /// Opens a name that [`Directory::path_of`] has accepted.
    fn open_file(&self, name: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        openat(&self.fd, name, flags | OFlags::NOFOLLOW, mode)
    }
}

/// Attributes of a file to write.
struct Form {
    /// Permissions; `None` for 0600.
    mode: Option<Mode>,
    /// Owner and group; `None` for those of this user.
    owner: Option<(Uid, Gid)>,
    /// True if the file is on disk when the write returns.
    synced: bool,
}

fn untrusted<T>(path: &Path, why: impl Into<String>) -> Result<T, Error> {
    Err(Error::Untrusted { path: path.to_owned(), why: why.into() })
}

/// Error for a component that could not be opened; names a link as such.
fn link_or(errno: Errno, doing: &'static str, path: &Path) -> Error {
    let why = "it is a symbolic link: name the directory or file that it leads to";
    match errno {
        Errno::LOOP => Error::Untrusted { path: path.to_owned(), why: why.into() },
        _ => Error::Io { doing, path: path.to_owned(), source: errno.into() },
    }
}

/// Opens a directory by a single component, or the root.
fn open_component(parent: impl AsFd, name: impl rustix::path::Arg) -> Result<(OwnedFd, Stat), Errno> {
    // without `DIRECTORY`, which would report a link as not a directory
    let fd = openat(parent, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&fd)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Ok((fd, stat)),
        FileType::Symlink => Err(Errno::LOOP),
        _ => Err(Errno::NOTDIR),
    }
}

/// Opens a path component by component; with `made` it makes missing ones, the last directory with these permissions.
fn walk(path: &Path, owner: Owner, made: Option<Mode>) -> Result<Directory, Error> {
    let absolute = std::path::absolute(path).at("looking for", path)?;
    let mut names = Vec::new();
    for component in absolute.components() {
        match component {
            Component::RootDir | Component::CurDir => {}
            Component::Normal(name) => names.push(name),
            Component::ParentDir | Component::Prefix(_) => return untrusted(&absolute, "it leads upwards"),
        }
    }
    let mut at = PathBuf::from("/");
    let (mut fd, mut last) = open_component(CWD, "/").at("opening", &at)?;
    for (place, name) in names.iter().enumerate() {
        is_safe(&at, &last, owner, true)?;
        at.push(name);
        if let Some(mode) = made {
            let mode = if place + 1 == names.len() { mode } else { READABLE_DIRECTORY };
            make_component(&fd, name, mode).at("making", &at)?;
        }
        (fd, last) = open_component(&fd, *name).map_err(|errno| link_or(errno, "opening", &at))?;
    }
    is_safe(&at, &last, owner, false)?;
    Ok(Directory { fd, path: at, owner })
}

fn make_component(parent: &OwnedFd, name: &OsStr, mode: Mode) -> Result<(), Errno> {
    match mkdirat(parent, name, mode) {
        // independent of the umask; only its owner can rename it, also below a sticky directory
        Ok(()) => chmodat(parent, name, mode, AtFlags::empty()),
        Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Refuses a file or directory that another user can change; `passed` is true for a directory on the way to the last one.
fn is_safe(path: &Path, stat: &Stat, owner: Owner, passed: bool) -> Result<(), Error> {
    let user = rustix::process::geteuid().as_raw();
    let is_trusted = stat.st_uid == 0 || (owner == Owner::RootOrCaller && stat.st_uid == user);
    if !is_trusted {
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
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    /// Reason for which a directory is refused.
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
        // other users may pass a directory on the way, since their data may be located beside this one
        assert_eq!((mode(made.path()), mode(&dir.path().join("a"))), (0o700, 0o755));
        let path = made.write("text", b"one").unwrap();
        made.write("text", b"two").unwrap();
        assert_eq!((mode(&path), fs::read(&path).unwrap()), (0o600, b"two".to_vec()));
        assert_eq!(fs::read_dir(made.path()).unwrap().count(), 1);
        assert_eq!(Directory::open(made.path()).unwrap().read("text", 3).unwrap(), b"two");
        assert!(why(made.read("text", 2)).contains("more than 2 bytes"));
    }

    #[test]
    fn what_is_removed_is_what_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let made = Directory::make(&dir.path().join("scratch")).unwrap();
        made.write("text", &[7; 5000]).unwrap();
        fs::File::create(made.path().join("sparse")).unwrap().set_len(1 << 30).unwrap();
        let outside = dir.path().join("outside");
        fs::write(&outside, "stays").unwrap();
        symlink(dir.path(), made.path().join("link")).unwrap();
        assert!((5000..1 << 20).contains(&made.allocated().unwrap()));
        assert!(!Directory::open(made.path()).unwrap().remove_if_empty().unwrap());
        assert!(Directory::make(&made.path().join("below")).unwrap().remove_if_empty().unwrap());
        made.remove_all().unwrap();
        assert_eq!((fs::read_dir(dir.path()).unwrap().count(), fs::read(&outside).unwrap()), (1, b"stays".to_vec()));
    }

    #[test]
    fn what_others_are_to_read_is_readable_whatever_the_umask() {
        let dir = tempfile::tempdir().unwrap();
        // a directory that another command made, with any umask
        let made = Directory::make(&dir.path().join("own")).unwrap();
        set(made.path(), 0o755);
        made.close().unwrap();
        assert_eq!(mode(made.path()), 0o700);
        if !rustix::process::geteuid().is_root() {
            return;
        }
        assert_eq!(mode(Directory::make_public(&dir.path().join("public")).unwrap().path()), 0o755);
        let shown = Directory::make_readable(&dir.path().join("a/b")).unwrap();
        let path = shown.write_readable("text", b"x").unwrap();
        assert_eq!((mode(&dir.path().join("a")), mode(shown.path()), mode(&path)), (0o755, 0o755, 0o644));
        assert_eq!(Directory::open_of_root(shown.path()).unwrap().read("text", 1).unwrap(), b"x");
    }

    #[test]
    fn what_replaces_a_file_has_its_owner_and_mode() {
        let dir = tempfile::tempdir().unwrap();
        let made = Directory::make(&dir.path().join("own")).unwrap();
        assert!(made.replace("text", b"x").unwrap_err().is_not_found());
        let path = made.write("text", b"one").unwrap();
        set(&path, 0o640);
        let owner = if rustix::process::geteuid().is_root() { 4711 } else { fs::metadata(&path).unwrap().uid() };
        chown(&path, Some(owner), None).unwrap();
        let outside = dir.path().join("outside");
        fs::write(&outside, "stays").unwrap();
        made.replace("text", b"two").unwrap();
        let found = fs::metadata(&path).unwrap();
        assert_eq!((found.uid(), found.mode() & 0o7777, fs::read(&path).unwrap()), (owner, 0o640, b"two".to_vec()));
        assert_eq!(made.names().unwrap(), ["text"]);
        symlink(&outside, made.path().join("link")).unwrap();
        assert!(why(made.replace("link", b"x")).contains("no regular file"));
        assert_eq!(fs::read(&outside).unwrap(), b"stays");
    }

    #[test]
    fn a_file_that_is_made_is_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let made = Directory::make(&dir.path().join("own")).unwrap();
        let outside = dir.path().join("outside");
        fs::write(&outside, "stays").unwrap();
        symlink(&outside, made.path().join("dump")).unwrap();
        made.create("dump").unwrap().write_all(b"secret").unwrap();
        assert_eq!((mode(&made.path().join("dump")), made.read("dump", 6).unwrap()), (0o600, b"secret".to_vec()));
        assert_eq!(fs::read(&outside).unwrap(), b"stays");
        assert_eq!(made.kind("dump").unwrap(), FileType::RegularFile);
        made.remove("dump").unwrap();
        assert!(made.read("dump", 6).unwrap_err().is_not_found());
    }

    #[test]
    fn a_log_is_added_to_and_renamed_where_it_lies() {
        let dir = tempfile::tempdir().unwrap();
        let made = Directory::make(&dir.path().join("own")).unwrap();
        made.append("log").unwrap().write_all(b"one").unwrap();
        made.append("log").unwrap().write_all(b"two").unwrap();
        assert_eq!((mode(&made.path().join("log")), made.read("log", 6).unwrap()), (0o600, b"onetwo".to_vec()));
        made.rename("log", "old").unwrap();
        made.sync().unwrap();
        assert_eq!(made.names().unwrap(), ["old"]);
        assert!(made.rename("old", "../old").is_err() && made.rename("../own/old", "new").is_err());
        let outside = dir.path().join("outside");
        fs::write(&outside, "stays").unwrap();
        symlink(&outside, made.path().join("log")).unwrap();
        assert!(why(made.append("log")).contains("symbolic link"));
        set(&made.path().join("old"), 0o666);
        assert!(why(made.append("old")).contains("others can write"));
    }

    #[test]
    fn of_several_that_make_a_file_one_does() {
        let dir = tempfile::tempdir().unwrap();
        let made = Directory::make(&dir.path().join("own")).unwrap();
        let write = |n: u8| made.write_new("key", &[n; 32]).unwrap().then_some(n);
        let first: Vec<u8> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8).map(|n| scope.spawn(move || write(n))).collect();
            writers.into_iter().filter_map(|writer| writer.join().unwrap()).collect()
        });
        assert_eq!(first.len(), 1);
        assert_eq!(made.read("key", 32).unwrap(), [first[0]; 32]);
        assert_eq!((made.names().unwrap(), mode(&made.path().join("key"))), (vec!["key".to_owned()], 0o600));
    }

    #[test]
    fn what_is_not_there_yet_is_checked_as_far_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let shared = dir.path().join("shared");
        fs::create_dir(&shared).unwrap();
        set(&shared, 0o1777);
        Directory::check(&shared.join("a/b")).unwrap();
        assert!(!shared.join("a").exists());
        set(&shared, 0o777);
        assert!(why(Directory::check(&shared.join("a/b"))).contains("others can write"));
    }

    #[test]
    fn where_root_decides_this_user_is_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let made = Directory::make(&dir.path().join("keys")).unwrap();
        made.write("text", b"x").unwrap();
        if rustix::process::geteuid().is_root() {
            let keys = Directory::open_of_root(made.path()).unwrap();
            chown(made.path().join("text"), Some(4711), None).unwrap();
            assert!(why(keys.read("text", 10)).contains("uid 4711"));
        } else {
            assert!(why(Directory::open_of_root(made.path())).contains("belongs to uid"));
        }
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
