//! Executables and libraries that a process maps, without stopping it and without the right to trace it.

use crate::{ElfIdentity, Error};
use rustix::fs::{major, minor};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use stillpoint_host::kernel_files;
use stillpoint_patch_tracee::{Mapping, Pid, Stat};

/// Limit of files that are taken of one process.
const FILES_MAX: usize = 20_000;
/// Beginnings of names that the kernel gives to memory without a file.
const NO_FILES: [&str; 4] = ["/memfd:", "/dev/zero", "/SYSV", "/anon_hugepage"];

/// Executable or library that a process maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedFile {
    /// Path in the root file system of the process, without the kernel's ` (deleted)`.
    pub path: PathBuf,
    /// True if the file was deleted, or replaced by another one of this name.
    pub deleted: bool,
    /// True for the program that the process executes.
    pub is_executable: bool,
    /// Device and inode, as the list of mappings has them.
    pub key: ((u32, u32), u64),
    pid: Pid,
    /// Name of the link below `map_files`.
    range: String,
    /// Path in the list of mappings.
    listed: String,
}

impl MappedFile {
    /// Opens the mapped file, also if it was deleted or replaced: through the links of the kernel, else by its path if device and inode are
    /// the same.
    ///
    /// # Errors
    /// [`Error::Unreadable`] if this user may open it in no way, or the process has ended.
    pub fn open(&self) -> Result<File, Error> {
        let own = |found: &std::fs::Metadata| found.is_file() && self.is(found);
        let by_link = kernel_files::open_expected(format!("/proc/{}/map_files/{}", self.pid, self.range), |found| {
            found.is_file()
        });
        let by_name = |_| match self.is_executable {
            true => kernel_files::open_expected(format!("/proc/{}/exe", self.pid), |found| found.ino() == self.key.1),
            false => Err(io::ErrorKind::PermissionDenied.into()),
        };
        let below = Path::new(&self.listed).strip_prefix("/").unwrap_or(Path::new(""));
        let by_path = |_| kernel_files::open_expected(Path::new("/proc/self/root").join(below), own);
        let by_root =
            |_| kernel_files::open_expected(PathBuf::from(format!("/proc/{}/root", self.pid)).join(below), own);
        by_link.or_else(by_name).or_else(by_path).or_else(by_root).map_err(|error| Error::Unreadable {
            pid: self.pid,
            path: self.path.clone(),
            why: error.to_string(),
        })
    }

    fn is(&self, found: &std::fs::Metadata) -> bool {
        ((major(found.dev()), minor(found.dev())), found.ino()) == self.key
    }
}

/// Executables and libraries of one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessFiles {
    /// Number of the process.
    pub pid: Pid,
    /// Command name.
    pub name: String,
    /// The files, the executable first.
    pub files: Vec<MappedFile>,
    /// True if its root file system is not that of this process: a container, or a changed root.
    pub has_other_root: bool,
}

impl ProcessFiles {
    /// Looks at a process; `None` for one that runs no program: a thread of the kernel, or a process that has exited.
    ///
    /// # Errors
    /// [`Error::Ended`], [`Error::Permission`], or the list of mappings has another form.
    pub fn of(pid: Pid) -> Result<Option<ProcessFiles>, Error> {
        let started = Stat::of(pid).ok_or(Error::Ended(pid))?.start_time;
        let mappings = mappings(pid)?;
        if mappings.is_empty() {
            return Ok(None);
        }
        let denied = |error: io::Error| Error::Permission { pid, why: error.to_string() };
        let root = kernel_files::metadata(format!("/proc/{pid}/root")).map_err(denied)?;
        let own_root = kernel_files::metadata("/proc/self/root").map_err(denied)?;
        let link = kernel_files::link(format!("/proc/{pid}/root")).map_err(denied)?;
        let exe = format!("/proc/{pid}/exe");
        let (exe, exe_link) =
            (kernel_files::metadata(&exe).map(|found| found.ino()).unwrap_or_default(), kernel_files::link(&exe));
        let exe_link = exe_link.unwrap_or_default().to_string_lossy().trim_end_matches(" (deleted)").to_owned();
        let name = kernel_files::text(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned();
        if Stat::of(pid).map(|stat| stat.start_time) != Some(started) {
            return Err(Error::Ended(pid));
        }
        let mut files: Vec<MappedFile> = Vec::new();
        for mapping in mappings.into_iter().filter(|mapping| mapping.execute && mapping.inode != 0) {
            let Some(listed) = mapping.path.clone().filter(|path| path.starts_with('/')) else { continue };
            let is_executable = mapping.inode == exe && listed == exe_link;
            let is_memory = NO_FILES.iter().any(|start| listed.starts_with(start)) && !is_executable;
            let key = (mapping.device, mapping.inode);
            if is_memory || files.iter().any(|known| known.key == key) || files.len() >= FILES_MAX {
                continue;
            }
            // a changed root in this mount namespace: the list has the path from our root
            let path = Path::new(&listed)
                .strip_prefix(&link)
                .map_or_else(|_| PathBuf::from(&listed), |rest| Path::new("/").join(rest));
            let range = format!("{:x}-{:x}", mapping.start.0, mapping.end.0);
            files.push(MappedFile { path, deleted: mapping.deleted, is_executable, key, pid, range, listed });
        }
        files.sort_by_key(|file| !file.is_executable);
        let has_other_root = (root.dev(), root.ino()) != (own_root.dev(), own_root.ino());
        Ok(Some(ProcessFiles { pid, name, files, has_other_root }))
    }

    /// Finds a mapped library by its file name, by the name that programs request it by, or by the beginning of its file name before a
    /// version (`libz.so.1` for `libz.so.1.2.13`).
    ///
    /// # Errors
    /// [`Error::Mapped`] if no library has this name, or several have it.
    pub fn library(&self, name: &str) -> Result<&MappedFile, Error> {
        let libraries = || self.files.iter().filter(|file| !file.is_executable);
        let file_name = |file: &MappedFile| {
            file.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
        };
        let exact = libraries().filter(|file| file_name(file) == name || file.path == Path::new(name));
        let mut found: Vec<&MappedFile> = exact.collect();
        if found.is_empty() {
            let requested = |file: &&MappedFile| {
                file.open()
                    .ok()
                    .and_then(|file| ElfIdentity::of_file(&file)?.soname)
                    .is_some_and(|soname| soname == name)
            };
            found = libraries().filter(requested).collect();
        }
        if found.is_empty() {
            let start = format!("{name}.");
            found = libraries().filter(|file| file_name(file).starts_with(&start)).collect();
        }
        let paths = |files: &mut dyn Iterator<Item = &MappedFile>| {
            files.map(|file| file.path.display().to_string()).collect::<Vec<_>>().join(", ")
        };
        match found[..] {
            [one] => Ok(one),
            [] => Err(Error::Mapped {
                pid: self.pid,
                why: format!("maps no library {name}; it maps {}", paths(&mut libraries())),
            }),
            _ => Err(Error::Mapped {
                pid: self.pid,
                why: format!("maps several libraries {name}: {}", paths(&mut found.into_iter())),
            }),
        }
    }
}

/// Returns the mappings of a process; those of another thread if the first one has ended.
fn mappings(pid: Pid) -> Result<Vec<Mapping>, Error> {
    let read = |path: String| -> Result<Vec<Mapping>, Error> {
        let bytes = kernel_files::bytes(path).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => Error::Permission { pid, why: error.to_string() },
            _ => Error::Ended(pid),
        })?;
        let malformed = |why| Error::Malformed { what: format!("the mappings of process {pid}"), why };
        Mapping::list(&String::from_utf8_lossy(&bytes)).map_err(malformed)
    };
    let own = read(format!("/proc/{pid}/maps"))?;
    if !own.is_empty() {
        return Ok(own);
    }
    let threads = kernel_files::names(format!("/proc/{pid}/task"));
    let others = threads.iter().filter_map(|tid| read(format!("/proc/{pid}/task/{}/maps", tid.to_str()?)).ok());
    Ok(others.into_iter().find(|mappings| !mappings.is_empty()).unwrap_or_default())
}

/// Returns the numbers of all processes, ascending.
pub fn all_processes() -> Vec<Pid> {
    let names = kernel_files::names("/proc");
    let mut pids: Vec<i32> = names.iter().filter_map(|name| name.to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids.into_iter().map(Pid).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> ProcessFiles {
        ProcessFiles::of(Pid(std::process::id() as i32)).unwrap().unwrap()
    }

    #[test]
    fn this_process_maps_itself_and_the_c_library() {
        let own = own();
        assert!(own.files[0].is_executable && !own.has_other_root);
        assert_eq!(own.files[0].path, std::env::current_exe().unwrap());
        let libc = own.library("libc.so.6").unwrap();
        let identity = ElfIdentity::of_file(&libc.open().unwrap()).unwrap();
        assert_eq!(identity.soname.as_deref(), Some("libc.so.6"));
        assert_eq!(own.library(libc.path.to_str().unwrap()).unwrap(), libc);
        assert_eq!(own.library("libc.so").unwrap(), libc, "the beginning before a version");
        let none = own.library("libnone.so.1").unwrap_err().to_string();
        assert!(none.contains("maps no library libnone.so.1; it maps /"), "{none}");
        assert!(all_processes().contains(&own.pid));
    }

    #[test]
    fn a_deleted_program_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let copy = dir.path().join("sleep");
        // by another program: a process that a test starts at this moment would inherit the open copy, which cannot be executed then
        assert!(std::process::Command::new("cp").arg("/bin/sleep").arg(&copy).status().unwrap().success());
        let mut child = std::process::Command::new(&copy).arg("60").spawn().unwrap();
        std::fs::remove_file(&copy).unwrap();
        let files = loop {
            // the kernel lets the parent go on before the child has its new mappings
            let files = ProcessFiles::of(Pid(child.id() as i32)).unwrap().unwrap();
            if files.files.first().is_some_and(|program| program.path == copy) {
                break files;
            }
        };
        let program = &files.files[0];
        let read = program.open().and_then(|file| Ok(stillpoint_host::file::bounded(&file, &copy, 1 << 30)?));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(program.deleted && program.is_executable && program.path == copy, "{program:?}");
        assert_eq!(read.unwrap(), std::fs::read("/bin/sleep").unwrap());
        assert!(matches!(ProcessFiles::of(files.pid), Err(Error::Ended(_))));
    }
}
