//! Directory trees whose contents others wrote: unpacked packages, the remains of a build, a user's sources, working directories of
//! compilers.
//!
//! The caller chooses the path of the tree. Nothing below it is trusted: a file may be a link, a pipe or a device, or longer than memory,
//! and another user may exchange files at any time. A tree is an open directory, and every path below is walked from there, component by
//! component. A link is followed only to another place in the same tree. Only regular files are read, up to a limit. A file is written
//! under a new inode, and replaces a link: its other names do not change.
//!
//! `openat2(2)` with `RESOLVE_BENEATH` would walk a path in one call. But a build makes links that contain the path that the tree had
//! during the build; here they lead to the same place of the tree as then.

use crate::Error;
use crate::cache::remove_in;
use crate::error::At;
use crate::file::bounded;
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fchmod, fstat, linkat, mkdirat, openat, readlinkat, renameat,
    statat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Size limit of a file that is read, in bytes: the largest are programs with debug information.
pub const FILE_MAX: u64 = 2 << 30;
/// Limit of links on one path, as in the kernel.
const LINKS_MAX: usize = 40;
/// Directories of version control, which neither a build nor a compiler reads.
const LEFT_OUT: &str = ".git";
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const WAY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Permissions of new files, before the umask.
const FILE: Mode = Mode::from_raw_mode(0o666);
/// Permissions of new directories, before the umask.
const DIRECTORY: Mode = Mode::from_raw_mode(0o777);
/// Permissions of programs, independent of the umask.
const PROGRAM: Mode = Mode::from_raw_mode(0o755);

/// Open directory with contents of others.
#[derive(Debug)]
pub struct Tree {
    fd: OwnedFd,
    path: PathBuf,
    known_as: PathBuf,
}

/// File, link or directory of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Path relative to the tree.
    pub name: PathBuf,
    /// Length in bytes.
    pub length: u64,
    kind: FileType,
}

impl Entry {
    /// Returns true for a regular file.
    pub fn is_file(&self) -> bool {
        self.kind == FileType::RegularFile
    }

    /// Returns true for a directory.
    pub fn is_directory(&self) -> bool {
        self.kind == FileType::Directory
    }

    /// Returns true for a symbolic link.
    pub fn is_link(&self) -> bool {
        self.kind == FileType::Symlink
    }
}

/// Place of a tree that a path leads to.
struct Place {
    /// Directories on the way to it.
    above: Vec<(OsString, OwnedFd)>,
    /// Remaining path: a name, or several if a directory is missing; empty for a directory that `above` ends with.
    rest: PathBuf,
    /// Attributes of a file; `None` if it does not exist.
    stat: Option<Stat>,
}

impl Tree {
    /// Opens a tree. Links in this path are followed: the caller has chosen it.
    ///
    /// # Errors
    /// It is no directory, or cannot be opened.
    pub fn open(path: &Path) -> Result<Tree, Error> {
        let fd = openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        Ok(Tree { fd: fd.at("opening", path)?, path: path.to_owned(), known_as: path.to_owned() })
    }

    /// Opens a tree, and makes the directory and those above it as far as they do not exist.
    ///
    /// # Errors
    /// Those of [`Tree::open`]; or a directory cannot be made.
    pub fn make(path: &Path) -> Result<Tree, Error> {
        std::fs::create_dir_all(path).at("making", path)?;
        Tree::open(path)
    }

    /// Sets the absolute path under which the links of the tree know it; by default, the path by which it was opened.
    pub fn known_as(self, path: &Path) -> Tree {
        Tree { known_as: path.to_owned(), ..self }
    }

    /// Path by which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Absolute path under which its links know it.
    pub fn own_name(&self) -> &Path {
        &self.known_as
    }

    /// Reads a regular file of [`FILE_MAX`] bytes at most. A path that is absolute begins with the path that the links know.
    ///
    /// # Errors
    /// It does not exist, is no such file, cannot be read, or a link on the way leads out of the tree.
    pub fn read(&self, name: impl AsRef<Path>) -> Result<Vec<u8>, Error> {
        let name = name.as_ref();
        bounded(&self.file(name)?, &self.path.join(name), FILE_MAX)
    }

    /// Reads a file in the same way as [`Tree::read`], if it exists.
    ///
    /// # Errors
    /// Those of [`Tree::read`], except for a file that does not exist.
    pub fn read_existing(&self, name: impl AsRef<Path>) -> Result<Option<Vec<u8>>, Error> {
        match self.read(name) {
            Err(error) if error.is_not_found() => Ok(None),
            read => read.map(Some),
        }
    }

    /// Reads a text in the same way as [`Tree::read`].
    ///
    /// # Errors
    /// Those of [`Tree::read`]; or it is not UTF-8.
    pub fn read_text(&self, name: impl AsRef<Path>) -> Result<String, Error> {
        let name = name.as_ref();
        String::from_utf8(self.read(name)?).map_err(std::io::Error::other).at("reading", &self.path.join(name))
    }

    /// Opens a regular file for reading.
    ///
    /// # Errors
    /// Those of [`Tree::read`], except for the length.
    pub fn file(&self, name: impl AsRef<Path>) -> Result<File, Error> {
        let path = self.path.join(&name);
        let place = self.place(name.as_ref(), true)?;
        if place.stat.is_none() && !place.rest.as_os_str().is_empty() {
            return Err(Errno::NOENT).at("opening", &path);
        }
        // looked at before it is opened, since opening a device can be a command
        if !place.stat.as_ref().is_some_and(is_regular) {
            return untrusted(path, "it is no regular file");
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(self.parent(&place), &place.rest, flags, Mode::empty()).at("opening", &path)?;
        if !is_regular(&fstat(&file).at("looking at", &path)?) {
            return untrusted(path, "it is no regular file");
        }
        Ok(file.into())
    }

    /// Returns the path of the file that a path leads to through links, relative to the tree. The file need not exist.
    ///
    /// # Errors
    /// A link on the way leads out of the tree, or there are too many of them.
    pub fn real(&self, name: impl AsRef<Path>) -> Result<PathBuf, Error> {
        let place = self.place(name.as_ref(), true)?;
        let mut real: PathBuf = place.above.iter().map(|(name, _)| name).collect();
        real.extend(place.rest.components());
        Ok(real)
    }

    /// Returns the text of a link.
    ///
    /// # Errors
    /// It is no link, or a link on the way leads out of the tree.
    pub fn link(&self, name: impl AsRef<Path>) -> Result<PathBuf, Error> {
        let place = self.place(name.as_ref(), false)?;
        target(self.parent(&place), place.rest.as_os_str()).at("reading the link", &self.path.join(name))
    }

    /// Returns true if there is a file, link or directory of this name.
    pub fn has(&self, name: impl AsRef<Path>) -> bool {
        self.place(name.as_ref(), false).is_ok_and(|place| place.stat.is_some())
    }

    /// Length of a regular file in bytes; `None` for all others.
    pub fn length(&self, name: impl AsRef<Path>) -> Option<u64> {
        let stat = self.place(name.as_ref(), false).ok()?.stat.filter(is_regular)?;
        u64::try_from(stat.st_size).ok()
    }

    /// Lists everything below the directory, sorted by path; follows no link, and leaves out `.git`.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub fn entries(&self) -> Result<Vec<Entry>, Error> {
        let mut found = Vec::new();
        self.collect(self.folder()?, Path::new(""), &mut found)?;
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    fn collect(&self, folder: OwnedFd, at: &Path, found: &mut Vec<Entry>) -> Result<(), Error> {
        for name in names(&folder).at("reading", &self.path.join(at))? {
            let below = at.join(&name);
            let path = self.path.join(&below);
            let stat = match statat(&folder, &name, AtFlags::SYMLINK_NOFOLLOW) {
                // it was removed since
                Err(Errno::NOENT) => continue,
                stat => stat.at("looking at", &path)?,
            };
            let kind = FileType::from_raw_mode(stat.st_mode);
            if kind == FileType::Directory {
                let folder = openat(&folder, &name, FOLDER, Mode::empty()).at("opening", &path)?;
                self.collect(folder, &below, found)?;
            }
            found.push(Entry { name: below, kind, length: u64::try_from(stat.st_size).unwrap_or_default() });
        }
        Ok(())
    }

    /// Writes a file, completely or not at all, and makes the directories above it. It replaces a file of that name, and keeps its
    /// permissions.
    ///
    /// # Errors
    /// It cannot be written, or a link on the way leads out of the tree.
    pub fn write(&self, name: impl AsRef<Path>, bytes: &[u8]) -> Result<(), Error> {
        self.put(name.as_ref(), bytes, None)
    }

    /// Writes a file in the same way as [`Tree::write`], which every user can execute.
    ///
    /// # Errors
    /// Those of [`Tree::write`].
    pub fn write_program(&self, name: impl AsRef<Path>, bytes: &[u8]) -> Result<(), Error> {
        self.put(name.as_ref(), bytes, Some(PROGRAM))
    }

    fn put(&self, name: &Path, bytes: &[u8], mode: Option<Mode>) -> Result<(), Error> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let path = self.path.join(name);
        let mut place = self.place(name, false)?;
        let replaced = place.stat.filter(is_regular).map(|stat| Mode::from_raw_mode(stat.st_mode & 0o777));
        let mode = mode.or(replaced);
        let Some(last) = place.rest.file_name().map(OsStr::to_owned) else {
            return untrusted(path, "this is not the name of a file");
        };
        if let Some(missing) = place.rest.parent() {
            self.make_below(&mut place.above, missing).at("making the directory of", &path)?;
        }
        let parent = place.above.last().map_or(self.fd.as_fd(), |(_, fd)| fd.as_fd());
        let half = format!(".half.{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // remains of a killed process with the same number
        let _ = unlinkat(parent, &half, AtFlags::empty());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(parent, &half, flags, FILE).at("making", &path)?);
        let filled = file.write_all(bytes).and_then(|()| mode.map_or(Ok(()), |mode| Ok(fchmod(&file, mode)?)));
        let named = filled.and_then(|()| Ok(renameat(parent, &half, parent, &last)?));
        if named.is_err() {
            let _ = unlinkat(parent, &half, AtFlags::empty());
        }
        named.at("writing", &path)
    }

    /// Makes a directory, and those above it, as far as they do not exist.
    ///
    /// # Errors
    /// It cannot be made, or a link on the way leads out of the tree.
    pub fn make_directory(&self, name: impl AsRef<Path>) -> Result<(), Error> {
        let mut place = self.place(name.as_ref(), true)?;
        self.make_below(&mut place.above, &place.rest).at("making", &self.path.join(name))
    }

    /// Makes directories below the last one of `above`, and adds them to it.
    fn make_below(&self, above: &mut Vec<(OsString, OwnedFd)>, missing: &Path) -> Result<(), Errno> {
        for name in missing {
            let parent = above.last().map_or(self.fd.as_fd(), |(_, fd)| fd.as_fd());
            match mkdirat(parent, name, DIRECTORY) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error),
            }
            let fd = openat(parent, name, WAY, Mode::empty())?;
            above.push((name.to_owned(), fd));
        }
        Ok(())
    }

    /// Removes a file or a link; returns false if there is none of this name.
    ///
    /// # Errors
    /// It cannot be removed, or a link on the way leads out of the tree.
    pub fn remove(&self, name: impl AsRef<Path>) -> Result<bool, Error> {
        let place = self.place(name.as_ref(), false)?;
        match unlinkat(self.parent(&place), &place.rest, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error).at("removing", &self.path.join(name)),
        }
    }

    /// Removes a directory with all its contents, or a file, if it exists; enters no mount.
    ///
    /// # Errors
    /// Something cannot be removed, or a link on the way leads out of the tree.
    pub fn remove_all(&self, name: impl AsRef<Path>) -> Result<(), Error> {
        let place = self.place(name.as_ref(), false)?;
        match place.stat {
            Some(_) => remove_in(self.parent(&place), place.rest.as_os_str(), &self.path.join(name)),
            None => Ok(()),
        }
    }

    /// Makes the same directories, links and files in another tree, which has none of them. Files get a second name instead of a copy if
    /// the file system allows it. `.git`, pipes and devices are left out, and files that would have to be copied and are too long to be
    /// read.
    ///
    /// # Errors
    /// Something cannot be read or made.
    pub fn copy_to(&self, other: &Tree) -> Result<(), Error> {
        self.copy_folder(&self.folder()?, other, Path::new(""))
    }

    fn copy_folder(&self, from: &OwnedFd, other: &Tree, at: &Path) -> Result<(), Error> {
        let into = other.place(at, true)?;
        let into = other.parent(&into);
        for name in names(from).at("reading", &self.path.join(at))? {
            let below = at.join(&name);
            let path = self.path.join(&below);
            let stat = statat(from, &name, AtFlags::SYMLINK_NOFOLLOW).at("looking at", &path)?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => {
                    mkdirat(into, &name, DIRECTORY).at("making", &other.path.join(&below))?;
                    let folder = openat(from, &name, FOLDER, Mode::empty()).at("opening", &path)?;
                    self.copy_folder(&folder, other, &below)?;
                }
                FileType::Symlink => {
                    let target = target(from, &name).at("reading the link", &path)?;
                    symlinkat(target, into, &name).at("linking", &other.path.join(&below))?;
                }
                FileType::RegularFile => {
                    let linked = linkat(from, &name, into, &name, AtFlags::empty());
                    if linked.is_err() && u64::try_from(stat.st_size).is_ok_and(|length| length <= FILE_MAX) {
                        other.write(&below, &self.read(&below)?)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn folder(&self) -> Result<OwnedFd, Error> {
        openat(&self.fd, ".", FOLDER, Mode::empty()).at("reading", &self.path)
    }

    fn parent<'a>(&'a self, place: &'a Place) -> BorrowedFd<'a> {
        place.above.last().map_or(self.fd.as_fd(), |(_, fd)| fd.as_fd())
    }

    /// Walks a path. `last`: a link at its end is followed as well, and a directory there is entered.
    fn place(&self, name: &Path, last: bool) -> Result<Place, Error> {
        let path = self.path.join(name);
        let leads_out =
            || Error::Untrusted { path: path.clone(), why: format!("it leads out of {}", self.path.display()) };
        let mut open = self.below(name).ok_or_else(leads_out)?;
        let (mut above, mut links) = (Vec::<(OsString, OwnedFd)>::new(), 0);
        while let Some(part) = open.pop_front() {
            if part == ".." {
                above.pop().ok_or_else(leads_out)?;
                continue;
            }
            let parent = above.last().map_or(self.fd.as_fd(), |(_, fd)| fd.as_fd());
            let ends = open.is_empty();
            let stat = match statat(parent, &part, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) if !open.iter().any(|part| part == "..") => None,
                stat => Some(stat.at("looking at", &path)?),
            };
            match stat.as_ref().map(|stat| FileType::from_raw_mode(stat.st_mode)) {
                Some(FileType::Symlink) if last || !ends => {
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(Errno::LOOP).at("looking at", &path);
                    }
                    let target = target(parent, &part).at("reading the link", &path)?;
                    if target.is_absolute() {
                        above.clear();
                    }
                    let mut parts = self.below(&target).ok_or_else(leads_out)?;
                    parts.append(&mut open);
                    open = parts;
                }
                Some(FileType::Directory) if last || !ends => {
                    let fd = openat(parent, &part, WAY, Mode::empty()).at("opening", &path)?;
                    above.push((part, fd));
                }
                Some(_) if !ends => return Err(Errno::NOTDIR).at("looking at", &path),
                _ => {
                    let rest = [part].into_iter().chain(open).collect();
                    return Ok(Place { above, rest, stat });
                }
            }
        }
        Ok(Place { above, rest: PathBuf::new(), stat: None })
    }

    /// Components of a path, without `.`; `None` for an absolute one that is not in the tree.
    fn below(&self, path: &Path) -> Option<VecDeque<OsString>> {
        let relative = if path.is_absolute() { path.strip_prefix(&self.known_as).ok()? } else { path };
        let parts = relative.components().filter(|part| *part != Component::CurDir);
        Some(parts.map(|part| part.as_os_str().to_owned()).collect())
    }
}

fn is_regular(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

fn target(parent: impl AsFd, name: &OsStr) -> Result<PathBuf, Errno> {
    Ok(OsString::from_vec(readlinkat(parent, name, Vec::<u8>::new())?.into_bytes()).into())
}

/// Names in a directory, without `.git`.
fn names(folder: &OwnedFd) -> Result<Vec<OsString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if ![".", "..", LEFT_OUT].iter().any(|other| name == *other) {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

fn untrusted<T>(path: PathBuf, why: &str) -> Result<T, Error> {
    Err(Error::Untrusted { path, why: why.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::mknodat;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    fn why<T>(result: Result<T, Error>) -> String {
        result.map_or_else(|error| error.to_string(), |_| String::new())
    }

    /// A tree beside a secret, with links that lead to it.
    fn sample() -> (tempfile::TempDir, Tree) {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir_all(path("tree/src")).unwrap();
        fs::write(path("secret"), "stays").unwrap();
        fs::write(path("tree/src/a.c"), "int a;").unwrap();
        symlink("../../secret", path("tree/src/up.c")).unwrap();
        symlink(path("secret"), path("tree/src/absolute.c")).unwrap();
        symlink("../..", path("tree/src/out")).unwrap();
        symlink("/build/x/src/a.c", path("tree/built.c")).unwrap();
        symlink("src", path("tree/flavour")).unwrap();
        symlink("loop", path("tree/loop")).unwrap();
        let tree = Tree::open(&path("tree")).unwrap().known_as(Path::new("/build/x"));
        (dir, tree)
    }

    #[test]
    fn links_are_followed_inside_of_the_tree_only() {
        let (_dir, tree) = sample();
        for name in ["src/a.c", "flavour/a.c", "built.c", "flavour/../src/./a.c", "/build/x/src/a.c"] {
            assert_eq!(tree.read(name).unwrap(), b"int a;", "{name}");
            assert_eq!(tree.real(name).unwrap(), Path::new("src/a.c"), "{name}");
        }
        for name in
            ["src/up.c", "src/absolute.c", "src/out/secret", "../secret", "src/../../secret", "/etc/passwd", ".."]
        {
            assert!(why(tree.read(name)).contains("it leads out of"), "{name}");
            assert!(why(tree.real(name)).contains("it leads out of"), "{name}");
            assert!(why(tree.read_existing(name)).contains("it leads out of"), "{name}");
        }
        assert!(tree.read("loop").is_err() && tree.read("src/a.c/x").is_err() && tree.read("src").is_err());
        assert!(tree.read("").is_err() && tree.write("", b"").is_err() && tree.remove("src/out/secret").is_err());
        assert_eq!(tree.read_existing("src/none/x").unwrap(), None);
        assert_eq!(tree.real("flavour/new/x.c").unwrap(), Path::new("src/new/x.c"));
        assert_eq!(tree.link("src/up.c").unwrap(), Path::new("../../secret"));
        assert!(tree.has("src/up.c") && tree.has("loop") && !tree.has("src/b.c"));
        assert_eq!((tree.length("src/a.c"), tree.length("src/up.c"), tree.length("src")), (Some(6), None, None));
    }

    #[test]
    fn what_is_written_replaces_links_and_changes_no_other_name() {
        let (dir, tree) = sample();
        fs::hard_link(dir.path().join("secret"), dir.path().join("tree/second")).unwrap();
        for name in ["src/up.c", "src/absolute.c", "second", "flavour/new/deep/b.c"] {
            tree.write(name, b"new").unwrap();
            assert_eq!(tree.read(name).unwrap(), b"new", "{name}");
        }
        assert!(tree.has("src/new/deep/b.c"));
        for name in ["src/out/secret", "src/out/new", "../new", "/etc/stillpoint-none"] {
            assert!(why(tree.write(name, b"new")).contains("it leads out of"), "{name}");
            assert!(why(tree.make_directory(name)).contains("it leads out of"), "{name}");
        }
        assert_eq!(fs::read(dir.path().join("secret")).unwrap(), b"stays");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        tree.write_program("run", b"#!/bin/sh\n").unwrap();
        tree.write("run", b"#!/bin/sh\ntrue\n").unwrap();
        assert_eq!(fs::metadata(dir.path().join("tree/run")).unwrap().mode() & 0o777, 0o755);
        tree.make_directory("flavour/more/x").unwrap();
        assert!(tree.has("src/more/x") && tree.remove("run").unwrap() && !tree.remove("run").unwrap());
        assert!(tree.write("src", b"").is_err() && tree.write("built.c/x", b"").is_err());
        assert!(why(tree.remove_all("src/out/tree")).contains("it leads out of"));
        for name in ["src/out", "flavour/new", "flavour", "none/x"] {
            tree.remove_all(name).unwrap();
        }
        assert!(tree.has("src/a.c") && !tree.has("src/new") && !tree.has("src/out") && !tree.has("flavour"));
    }

    #[test]
    fn pipes_devices_and_sparse_files_are_not_read() {
        let (dir, tree) = sample();
        mknodat(CWD, dir.path().join("tree/fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        File::create(dir.path().join("tree/sparse")).unwrap().set_len(1 << 40).unwrap();
        assert!(why(tree.read("fifo")).contains("no regular file"));
        assert!(why(tree.read("sparse")).contains("more than"));
        symlink("/dev/null", dir.path().join("tree/null")).unwrap();
        assert!(why(tree.read("null")).contains("it leads out of"));
        let root = Tree::open(Path::new("/")).unwrap();
        assert!(why(root.read("dev/null")).contains("no regular file"));
        assert!(root.read("etc/passwd").is_ok());
    }

    #[test]
    fn a_tree_is_listed_and_copied_with_names_of_any_bytes() {
        let (dir, tree) = sample();
        let odd = OsStr::from_bytes(b"\xff\n.c");
        fs::write(dir.path().join("tree/src").join(odd), "odd").unwrap();
        fs::create_dir_all(dir.path().join("tree/.git/objects")).unwrap();
        mknodat(CWD, dir.path().join("tree/fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let entries = tree.entries().unwrap();
        let names: Vec<&Path> = entries.iter().map(|entry| entry.name.as_path()).collect();
        let wanted = ["built.c", "fifo", "flavour", "loop", "src", "src/a.c", "src/absolute.c", "src/out", "src/up.c"];
        assert_eq!(names[..9], wanted.map(Path::new));
        assert_eq!(entries[9], Entry { name: Path::new("src").join(odd), kind: FileType::RegularFile, length: 3 });
        let copy = Tree::make(&dir.path().join("a/copy")).unwrap();
        tree.copy_to(&copy).unwrap();
        let mut copied = copy.entries().unwrap();
        assert_eq!(copied.len(), entries.len() - 1, "without the pipe");
        copied.retain(Entry::is_file);
        assert_eq!(copied.len(), 2);
        copy.write("src/a.c", b"changed").unwrap();
        assert_eq!(tree.read("src/a.c").unwrap(), b"int a;");
        assert!(why(copy.read("src/out/secret")).contains("it leads out of"));
    }
}
