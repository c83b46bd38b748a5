//! Objects that a program has open on memory file systems: another kernel finds them empty.

use crate::Error;
use crate::error::ErrorContext;
use crate::process_tree::tree;
use procfs::process::Process;
use rustix::fs::{Gid, Mode, Uid, fchmod, fchown};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use stillpoint_host::file::make_directory;
use stillpoint_host::kernel_files;

/// A directory in memory that a program's sockets and open files are restored into.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directory {
    /// Absolute path.
    pub path: PathBuf,
    /// Permission bits of the directory.
    pub mode: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Group id of the owner.
    pub gid: u32,
}

/// Fate of a program's objects in memory when the kernel changes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VolatileObjects {
    /// Objects that would be lost, by process: files and named pipes with their content.
    pub lost: BTreeSet<(i32, String)>,
    /// Directories to be made again, parents first.
    pub directories: Vec<Directory>,
}

/// Kind of an object that a program holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    Pipe,
    Directory,
    /// A socket that is bound to a name.
    Socket,
    /// A device or a nameless object of the kernel.
    Other,
}

/// Decision about one object.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    Survives,
    /// It comes along, and this directory must exist at the restore.
    Needs(PathBuf),
    Lost,
}

/// Decides about one object. `name` is the kernel's name for it, with a mark when it is deleted; `links` is the number
/// of names that are left.
fn fate(name: &str, kind: Kind, links: u64) -> Fate {
    let parent = |name: &str| match Path::new(name).parent() {
        Some(parent) => Fate::Needs(parent.to_owned()),
        None => Fate::Survives,
    };
    match (kind, name.strip_suffix(" (deleted)")) {
        // objects that are only in memory: criu carries them
        _ if ["/memfd:", "/dev/zero ", "/SYSV", "/anon_hugepage"].iter().any(|known| name.starts_with(known)) => {
            Fate::Survives
        }
        (Kind::Other, _) => Fate::Survives,
        (Kind::Directory, None) => Fate::Needs(name.into()),
        (Kind::Socket, _) => parent(name),
        // criu carries objects that have no name any more, and finds those that have another one
        (Kind::File | Kind::Pipe | Kind::Directory, Some(name)) if links == 0 => parent(name),
        (Kind::File | Kind::Pipe | Kind::Directory, _) => Fate::Lost,
    }
}

/// Examines a process and all below it. Nothing is touched.
pub(crate) fn volatile(pid: i32) -> Result<VolatileObjects, Error> {
    let mut found = VolatileObjects::default();
    let mut needed = BTreeMap::new();
    let sockets: BTreeMap<u64, PathBuf> = procfs::net::unix()
        .into_iter()
        .flatten()
        .filter_map(|entry| Some((entry.inode, entry.path.filter(|path| path.is_absolute())?)))
        .collect();
    for process in tree(pid)? {
        for (name, kind, links) in objects_in_memory(&process, &sockets) {
            match fate(&name, kind, links) {
                Fate::Survives => {}
                Fate::Needs(directory) => needed.extend(directories_to_create(&directory)),
                Fate::Lost => {
                    let name = name.trim_end_matches(" (deleted)");
                    let how = if name.contains("/PostgreSQL.") { " (dynamic_shared_memory_type = mmap)" } else { "" };
                    let text = format!(
                        "has {name} open, which is located in memory and is lost with this kernel: keep it on a \
                         disk{how}"
                    );
                    found.lost.insert((process.pid, text));
                }
            }
        }
    }
    found.directories = needed.into_values().collect();
    Ok(found)
}

/// Returns all objects in memory that a process holds by a descriptor, by a mapping, or as its directory.
fn objects_in_memory(process: &Process, sockets: &BTreeMap<u64, PathBuf>) -> Vec<(String, Kind, u64)> {
    let of = PathBuf::from(format!("/proc/{}", process.pid));
    let mut links: Vec<PathBuf> = vec![of.join("cwd"), of.join("root")];
    for dir in ["fd", "map_files"] {
        let dir = of.join(dir);
        links.extend(kernel_files::names(&dir).into_iter().map(|name| dir.join(name)));
    }
    let mut held = Vec::new();
    for link in links {
        // one that is closed meanwhile is not an obstacle
        let (Ok(name), Ok(data)) = (kernel_files::link(&link), kernel_files::metadata(&link)) else { continue };
        if data.file_type().is_socket() {
            let bound = sockets.get(&data.ino()).filter(|path| path.parent().is_some_and(is_memory));
            held.extend(bound.map(|path| (path.to_string_lossy().into_owned(), Kind::Socket, 1)));
        } else if is_memory(&link) {
            held.push((name.to_string_lossy().into_owned(), kind_of(&data), data.nlink()));
        }
    }
    held
}

fn kind_of(data: &Metadata) -> Kind {
    match data.file_type() {
        kind if kind.is_file() => Kind::File,
        kind if kind.is_fifo() => Kind::Pipe,
        kind if kind.is_dir() => Kind::Directory,
        _ => Kind::Other,
    }
}

/// Returns a directory and those above it, up to the mount point of its file system, which need not be made.
fn directories_to_create(directory: &Path) -> Vec<(PathBuf, Directory)> {
    let mut found = Vec::new();
    for path in directory.ancestors() {
        let Ok(data) = path.metadata() else { continue };
        let above = path.parent().and_then(|above| above.metadata().ok());
        if !is_memory(path) || above.is_none_or(|above| above.dev() != data.dev()) {
            break;
        }
        let (mode, uid, gid) = (data.permissions().mode() & 0o7777, data.uid(), data.gid());
        found.push((path.to_owned(), Directory { path: path.to_owned(), mode, uid, gid }));
    }
    found
}

/// Makes the directories that are not there, parents first.
///
/// # Errors
/// A directory cannot be made, or another user has put something else in its place.
pub fn create_directories(directories: &[Directory]) -> Result<(), Error> {
    let mut made = Vec::new();
    for directory in directories.iter().filter(|directory| !directory.path.exists()) {
        let path = &directory.path;
        // its parent may belong to the unit's own user
        made.push((directory, make_directory(path)?));
    }
    // parents are given away last: until then no other user can change their content
    for (Directory { path, mode, uid, gid }, opened) in made.iter().rev() {
        fchown(opened, Some(Uid::from_raw(*uid)), Some(Gid::from_raw(*gid))).at("change the owner of", path)?;
        fchmod(opened, Mode::from_raw_mode(*mode)).at("set the mode of", path)?;
    }
    Ok(())
}

/// Returns true if a file's file system is lost with the kernel.
pub fn is_memory(path: &Path) -> bool {
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6;
    const HUGETLBFS: i64 = 0x9584_58f6;
    rustix::fs::statfs(path).is_ok_and(|system| [TMPFS, RAMFS, HUGETLBFS].contains(&system.f_type))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::unix::net::UnixListener;

    #[test]
    fn memory_is_told_from_disks() {
        assert!(is_memory(Path::new("/dev/shm")));
        assert!(!is_memory(Path::new("/proc")));
    }

    #[test]
    fn files_with_a_name_are_lost_and_everything_else_comes_along() {
        let needs = |path: &str| Fate::Needs(path.into());
        for (name, kind, links, expected) in [
            ("/run/redis/dump.rdb", Kind::File, 1, Fate::Lost),
            ("/run/x.fifo", Kind::Pipe, 1, Fate::Lost),
            ("/run/x.fifo (deleted)", Kind::Pipe, 0, needs("/run")),
            ("/dev/shm/pool (deleted)", Kind::File, 0, needs("/dev/shm")),
            ("/dev/shm/pool (deleted)", Kind::File, 1, Fate::Lost),
            ("/memfd:cache (deleted)", Kind::File, 0, Fate::Survives),
            ("/dev/zero (deleted)", Kind::File, 0, Fate::Survives),
            ("/anon_hugepage (deleted)", Kind::File, 0, Fate::Survives),
            ("/run/mysqld", Kind::Directory, 2, needs("/run/mysqld")),
            ("/run/mysqld/mysqld.sock", Kind::Socket, 1, needs("/run/mysqld")),
            ("/dev/null", Kind::Other, 1, Fate::Survives),
            ("pipe:[4121]", Kind::Pipe, 1, Fate::Lost),
        ] {
            assert_eq!(fate(name, kind, links), expected, "{name}");
        }
    }

    /// Examines this process itself; other tests run beside this one.
    #[test]
    fn what_a_process_holds_in_memory_is_found() {
        let dir =
            tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o711)).tempdir_in("/dev/shm").unwrap();
        let lost = |path: &Path| {
            let found = volatile(std::process::id() as i32).unwrap();
            let name = format!("has {} open", path.display());
            (found.lost.iter().any(|(_, text)| text.starts_with(&name)), found.directories)
        };
        let path = dir.path().join("file");
        let file = File::create(&path).unwrap();
        assert!(lost(&path).0);
        fs::remove_file(&path).unwrap();
        assert!(!lost(&path).0, "criu carries it");
        drop(file);
        let within = dir.path().join("run");
        fs::create_dir(&within).unwrap();
        let _listener = UnixListener::bind(within.join("socket")).unwrap();
        let directories: Vec<Directory> =
            lost(&path).1.into_iter().filter(|directory| directory.path.starts_with(dir.path())).collect();
        assert_eq!(directories.iter().map(|made| made.path.as_path()).collect::<Vec<_>>(), [dir.path(), &within]);
        assert_eq!(directories[0].mode, 0o711);
        fs::remove_dir_all(dir.path()).unwrap();
        create_directories(&directories).unwrap();
        assert_eq!(fs::metadata(dir.path()).unwrap().permissions().mode() & 0o7777, 0o711);
        assert!(within.is_dir());
    }
}
