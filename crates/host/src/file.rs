//! Files that are written completely or not at all, files of other users, and files that the caller of a command names.

use crate::Error;
use crate::error::At;
use crate::trusted::Directory;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, chmodat, fstat, mkdirat, openat, openat2};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Readers of a file that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readable {
    /// Its owner only.
    ByOwner,
    /// Every user that the umask allows.
    ByOthers,
}

/// Writes a temporary file beside `path`, synchronizes and renames it: the file is complete, or is not changed.
///
/// # Errors
/// The temporary file cannot be made, written or renamed. `path` is unchanged.
pub fn write_whole(path: &Path, bytes: &[u8], readable: Readable) -> Result<(), Error> {
    write(path, bytes, readable, true)
}

/// Writes like [`write_whole`]; without `durable`, a power loss may leave an empty or shorter file.
pub(crate) fn write(path: &Path, bytes: &[u8], readable: Readable, durable: bool) -> Result<(), Error> {
    let directory = parent(path);
    let mode = match readable {
        Readable::ByOwner => 0o600,
        Readable::ByOthers => 0o666,
    };
    let mut builder = tempfile::Builder::new();
    builder.permissions(fs::Permissions::from_mode(mode));
    let mut file = builder.tempfile_in(directory).at("writing in", directory)?;
    file.write_all(bytes).at("writing", path)?;
    if durable {
        file.as_file().sync_all().at("writing", path)?;
    }
    file.persist(path).map_err(|e| e.error).at("naming", path)?;
    Ok(())
}

/// Opens a mount point, a directory or a file, so that its file system can be written to disk.
///
/// # Errors
/// It cannot be opened.
pub fn open_mount_point(path: &Path) -> Result<File, Error> {
    // opening a pipe without a writer would block the caller
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    OpenOptions::new().read(true).custom_flags(flags).open(path).at("opening", path)
}

/// Opens a regular file for reading; any user may own it.
///
/// # Errors
/// It is not a regular file, or cannot be opened.
pub fn open_regular(path: &Path) -> Result<File, Error> {
    let opened = open_if(path, Metadata::is_file).at("opening", path)?;
    opened.ok_or_else(|| Error::Untrusted { path: path.to_owned(), why: "it is no regular file".into() })
}

/// Opens a file for reading if it is the wanted one. It is looked at before it is opened: opening a device can be a command, and opening a
/// pipe can wait.
pub(crate) fn open_if(path: &Path, is_wanted: impl FnOnce(&Metadata) -> bool) -> std::io::Result<Option<File>> {
    let found = File::from(openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
    if !is_wanted(&found.metadata()?) {
        return Ok(None);
    }
    File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).map(Some)
}

/// Reads a regular file of any owner, `limit` bytes at most.
///
/// # Errors
/// Those of [`open_regular`]; or the file is longer, or cannot be read.
pub fn read_regular(path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    bounded(&open_regular(path)?, path, limit)
}

/// Reads a regular text file in the same way as [`read_regular`].
///
/// # Errors
/// Those of [`read_regular`]; or the text is not UTF-8.
pub fn read_regular_text(path: &Path, limit: u64) -> Result<String, Error> {
    String::from_utf8(read_regular(path, limit)?).map_err(std::io::Error::other).at("reading", path)
}

/// Opens a file that the caller of a command has named as an operand: a pipe is allowed, and any length. Not for a path that another user
/// can choose.
///
/// # Errors
/// It is neither a regular file nor a pipe, or cannot be opened.
pub fn open_named(path: &Path) -> Result<File, Error> {
    let opened = open_if(path, |found| found.is_file() || found.file_type().is_fifo()).at("opening", path)?;
    opened.ok_or_else(|| Error::Untrusted { path: path.to_owned(), why: "it is neither a file nor a pipe".into() })
}

/// Reads a file that the caller of a command has named as an operand, `limit` bytes at most; see [`open_named`].
///
/// # Errors
/// It cannot be read, or is longer.
pub fn read_named(path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    bounded(&open_named(path)?, path, limit)
}

/// Reads a text in the same way as [`read_named`].
///
/// # Errors
/// Those of [`read_named`]; or the text is not UTF-8.
pub fn read_named_text(path: &Path, limit: u64) -> Result<String, Error> {
    String::from_utf8(read_named(path, limit)?).map_err(std::io::Error::other).at("reading", path)
}

/// Makes a file, or empties it, that the caller of a command has named for its output: pipes and devices are allowed. A link is followed
/// only in a directory that no other user can change, such as `/dev`. Not for a path that another user can choose.
///
/// # Errors
/// It cannot be made, or is a link in the directory of another user.
pub fn create_named(path: &Path) -> Result<File, Error> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::CLOEXEC;
    match openat(CWD, path, flags, Mode::from_raw_mode(0o666)) {
        Err(Errno::LOOP) => {
            // that of `/dev/fd` is a link itself
            Directory::open(&parent(path).canonicalize().at("resolving", path)?)?;
            File::create(path).at("making", path)
        }
        opened => opened.map(File::from).at("making", path),
    }
}

/// Directory of a file; that of a plain name is the current one.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes to a file that the caller of a command has named for its output; see [`create_named`].
///
/// # Errors
/// It cannot be written.
pub fn write_named(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    create_named(path)?.write_all(bytes).at("writing", path)
}

/// Lists the names in a directory, sorted; any user may own the directory. A name that is not UTF-8 is left out.
///
/// # Errors
/// It is not a directory, or cannot be read.
pub fn list(directory: &Path) -> Result<Vec<String>, Error> {
    let entries = fs::read_dir(directory).at("listing", directory)?;
    let mut names: Vec<String> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    Ok(names)
}

/// Opens a file for reading and appending in a directory tree that another process can change, and makes it (0644) if necessary. The path
/// is relative to `root`, and no link in it is followed.
///
/// # Errors
/// It cannot be opened, or is not a regular file with a single name.
pub fn open_below(root: &File, path: &Path) -> Result<File, Error> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let file = File::from(openat2(root, path, flags, Mode::from_raw_mode(0o644), resolve).at("opening", path)?);
    let found = file.metadata().at("looking at", path)?;
    if found.is_file() && found.nlink() == 1 {
        return Ok(file);
    }
    Err(Error::Untrusted { path: path.to_owned(), why: "it is no regular file of one name".into() })
}

/// Makes a directory for its owner alone (0700) in a directory that another user may own, and opens it. No link is followed.
///
/// # Errors
/// The name is taken, or the directory cannot be made.
pub fn make_directory(path: &Path) -> Result<OwnedFd, Error> {
    mkdirat(CWD, path, Mode::RWXU).at("making", path)?;
    // the owner of the parent directory can replace it by a link
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(CWD, path, flags, Mode::empty()).at("opening", path)
}

/// Listens at a socket with exactly these permissions, independent of the umask.
///
/// # Errors
/// The path is taken, or the socket cannot be made; or another user has put another file in its place.
pub fn listen(path: &Path, mode: u32) -> Result<UnixListener, Error> {
    let listener = UnixListener::bind(path).at("listening at", path)?;
    // a directory that others can write to, such as a database's for its sockets, is allowed here
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = openat(CWD, path, flags, Mode::empty()).at("opening", path)?;
    let found = fstat(&made).at("looking at", path)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket || found.st_uid != geteuid().as_raw() {
        return Err(Error::Untrusted { path: path.to_owned(), why: "another file has its place now".into() });
    }
    let exactly = format!("/proc/self/fd/{}", made.as_raw_fd());
    chmodat(CWD, exactly, Mode::from_raw_mode(mode), AtFlags::empty()).at("setting the mode of", path)?;
    Ok(listener)
}

/// Listens in the same way as [`listen`], in place of a socket that no process serves. The new one gets its permissions before its name.
///
/// # Errors
/// Those of [`listen`]; or there is a file that is no socket, or a process serves the socket.
pub fn listen_in_place(path: &Path, mode: u32) -> Result<UnixListener, Error> {
    let refused = |kind, why: &str| Err(std::io::Error::new(kind, why)).at("listening at", path);
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return refused(ErrorKind::AlreadyExists, "a file that is no socket is in the way");
        }
        if UnixStream::connect(path).is_ok() {
            return refused(ErrorKind::AddrInUse, "another process serves this socket");
        }
    }
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    let fresh = Path::new(&fresh);
    remove_socket(fresh);
    let listener = listen(fresh, mode)?;
    fs::rename(fresh, path).at("naming", path)?;
    Ok(listener)
}

/// Removes a socket, or what is in its place, if it exists.
pub fn remove_socket(path: &Path) {
    let _ = fs::remove_file(path);
}

/// Reads an open file from its position on, if it has `limit` bytes at most.
///
/// # Errors
/// It is longer, or cannot be read.
pub fn bounded(file: &File, path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    let too_long = || Error::Untrusted { path: path.to_owned(), why: format!("it has more than {limit} bytes") };
    // a sparse file is not read up to the limit
    if file.metadata().at("looking at", path)?.len() > limit {
        return Err(too_long());
    }
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).at("reading", path)?;
    if bytes.len() as u64 > limit { Err(too_long()) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::mknodat;

    #[test]
    fn files_of_other_users_neither_hold_their_reader_nor_fill_its_memory() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("text"), "four").unwrap();
        assert_eq!(read_regular(&path("text"), 4).unwrap(), b"four");
        assert!(read_regular(&path("text"), 3).unwrap_err().to_string().contains("more than 3 bytes"));
        File::create(path("sparse")).unwrap().set_len(60 << 30).unwrap();
        assert!(read_regular(&path("sparse"), 1 << 20).unwrap_err().to_string().contains("more than"));
        mknodat(CWD, path("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        for name in ["fifo", "."] {
            assert!(read_regular(&path(name), 4).unwrap_err().to_string().contains("no regular file"), "{name}");
        }
        fs::write(path("bytes"), [0xff]).unwrap();
        assert_eq!(read_regular_text(&path("text"), 4).unwrap(), "four");
        assert!(read_regular_text(&path("bytes"), 4).is_err());
        assert_eq!(list(dir.path()).unwrap(), ["bytes", "fifo", "sparse", "text"]);
        assert!(list(&path("none")).unwrap_err().is_not_found());
    }

    #[test]
    fn operands_may_be_pipes_and_outputs_follow_only_links_that_no_other_user_can_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let why = |result: Result<File, Error>| result.unwrap_err().to_string();
        write_named(&path("text"), b"longer").unwrap();
        write_named(&path("text"), b"four").unwrap();
        assert_eq!(read_named_text(&path("text"), 4).unwrap(), "four");
        assert!(read_named(&path("text"), 3).is_err() && read_named(&path("none"), 3).unwrap_err().is_not_found());
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(b"x").unwrap();
        drop(writer);
        let pipe = format!("/dev/fd/{}", reader.as_raw_fd());
        assert_eq!(read_named(Path::new(&pipe), 1).unwrap(), b"x");
        assert!(why(open_named(Path::new("/dev/null"))).contains("neither a file nor a pipe"));
        write_named(Path::new("/dev/null"), b"x").unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        write_named(Path::new(&format!("/dev/fd/{}", writer.as_raw_fd())), b"x").unwrap();
        let mut byte = [0];
        reader.read_exact(&mut byte).unwrap();
        std::os::unix::fs::symlink("text", path("link")).unwrap();
        write_named(&path("link"), b"by link").unwrap();
        assert_eq!(fs::read(path("text")).unwrap(), b"by link");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        assert!(why(create_named(&path("link"))).contains("others can write"));
        assert_eq!(fs::read(path("text")).unwrap(), b"by link");
    }

    #[test]
    fn a_file_in_another_process_s_tree_is_reached_by_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("tmp")).unwrap();
        fs::write(path("outside"), "stays").unwrap();
        std::os::unix::fs::symlink("../outside", path("tmp/link")).unwrap();
        std::os::unix::fs::symlink("tmp", path("way")).unwrap();
        fs::hard_link(path("outside"), path("tmp/second")).unwrap();
        mknodat(CWD, path("tmp/fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let root = File::open(dir.path()).unwrap();
        let open = |name: &str| open_below(&root, Path::new(name));
        open("tmp/new").unwrap().write_all(b"one").unwrap();
        let mut text = String::new();
        open("/tmp/new").unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "one");
        for name in ["tmp/link", "way/new", "tmp/second", "tmp/fifo", "tmp"] {
            assert!(open(name).is_err(), "{name}");
        }
        assert_eq!(fs::read(path("outside")).unwrap(), b"stays");
    }

    #[test]
    fn a_socket_has_the_permissions_that_were_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        for mode in [0o666, 0o600] {
            let path = dir.path().join(format!("{mode:o}"));
            let _listener = listen(&path, mode).unwrap();
            assert_eq!(fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o777, mode);
            assert!(listen(&path, mode).is_err());
            let served = listen_in_place(&path, mode).unwrap_err();
            assert!(served.to_string().contains("another process serves"), "{served}");
        }
    }

    #[test]
    fn a_socket_takes_the_place_of_one_that_is_not_served_and_of_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        drop(listen(&path, 0o600).unwrap());
        let _listener = listen_in_place(&path, 0o660).unwrap();
        assert_eq!(fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        let text = dir.path().join("text");
        fs::write(&text, "stays").unwrap();
        assert!(listen_in_place(&text, 0o600).unwrap_err().to_string().contains("no socket"));
        remove_socket(&path);
        assert_eq!(list(dir.path()).unwrap(), ["text"]);
    }
}
