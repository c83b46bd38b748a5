//! Files of the kernel's own file systems, `/proc` and `/sys`.
//!
//! Their contents come from the kernel, and belong to the process that they describe. Links in them are magic: they lead to files, not to
//! names, so the rule of [`crate::trusted`] does not apply. A path that begins elsewhere, or contains `..`, is refused. Devices, which the
//! kernel makes below `/dev`, are opened here as well.

use crate::file::open_if;
use rustix::fs::{Mode, OFlags, openat};
use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};

/// Files of the running kernel, or files of a test that replace them.
///
/// Paths are those of the kernel, `/proc/...` and `/sys/...`, in both cases.
#[derive(Debug, Clone)]
pub struct Files {
    root: PathBuf,
}

impl Files {
    /// Files of the running kernel.
    pub fn of_kernel() -> Files {
        Files { root: "/".into() }
    }

    /// Files of a test that replace them, below a directory.
    pub fn below(root: &Path) -> Files {
        Files { root: root.to_owned() }
    }

    /// Reads a file as text.
    ///
    /// # Errors
    /// The path is not one of the kernel's, or the file cannot be read, or is not UTF-8.
    pub fn text(&self, path: impl AsRef<Path>) -> io::Result<String> {
        fs::read_to_string(self.at(path.as_ref())?)
    }

    /// Reads a file with one value, without white space around it; empty if the file cannot be read.
    pub fn value(&self, path: impl AsRef<Path>) -> String {
        self.text(path).map(|text| text.trim().to_owned()).unwrap_or_default()
    }

    /// Writes a file that the kernel has made.
    ///
    /// # Errors
    /// The path is not one of the kernel's, or the kernel refuses the write.
    pub fn write(&self, path: impl AsRef<Path>, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        fs::write(self.at(path.as_ref())?, bytes)
    }

    /// Lists the names in a directory; empty if the directory cannot be read.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<OsString> {
        let entries = self.at(path.as_ref()).and_then(fs::read_dir);
        entries.into_iter().flatten().flatten().map(|entry| entry.file_name()).collect()
    }

    /// Returns true if the file exists; links are followed.
    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.at(path.as_ref()).is_ok_and(|path| path.exists())
    }

    /// Resolves all links in a path.
    ///
    /// # Errors
    /// The path is not one of the kernel's, or leads to no file of the kernel.
    pub fn canonical(&self, path: impl AsRef<Path>) -> io::Result<PathBuf> {
        let found = fs::canonicalize(self.at(path.as_ref())?)?;
        let below = found.strip_prefix(fs::canonicalize(&self.root)?).map_err(io::Error::other)?;
        Ok(Path::new("/").join(below))
    }

    /// Makes a directory, such as a control group, if it does not exist.
    ///
    /// # Errors
    /// The path is not one of the kernel's, or the kernel refuses it.
    pub fn make_directory(&self, path: impl AsRef<Path>) -> io::Result<()> {
        match fs::create_dir(self.at(path.as_ref())?) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made,
        }
    }

    fn at(&self, path: &Path) -> io::Result<PathBuf> {
        let below = of_kernel(path)?.strip_prefix("/").map_err(io::Error::other)?;
        Ok(self.root.join(below))
    }
}

/// Reads a file as text.
///
/// # Errors
/// The path is not one of the kernel's, or the file cannot be read, or is not UTF-8.
pub fn text(path: impl AsRef<Path>) -> io::Result<String> {
    fs::read_to_string(of_kernel(path.as_ref())?)
}

/// Reads a file.
///
/// # Errors
/// The path is not one of the kernel's, or the file cannot be read.
pub fn bytes(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    fs::read(of_kernel(path.as_ref())?)
}

/// Writes an existing file.
///
/// # Errors
/// The path is not one of the kernel's, or the kernel refuses the write.
pub fn write(path: impl AsRef<Path>, bytes: impl AsRef<[u8]>) -> io::Result<()> {
    fs::write(of_kernel(path.as_ref())?, bytes)
}

/// Opens a file for reading.
///
/// # Errors
/// The path is not one of the kernel's, or the file cannot be opened.
pub fn open(path: impl AsRef<Path>) -> io::Result<File> {
    File::open(of_kernel(path.as_ref())?)
}

/// Opens a file for reading and writing, such as the memory of a process.
///
/// # Errors
/// The path is not one of the kernel's, or the file cannot be opened.
pub fn open_to_change(path: impl AsRef<Path>) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(of_kernel(path.as_ref())?)
}

/// Opens the regular file behind a path that a process chooses, such as one below `/proc/PID/root`, if it is the expected one. The file is
/// looked at before it is opened.
///
/// # Errors
/// The path is not one of the kernel's, or there is another file, or the file cannot be opened.
pub fn open_expected(path: impl AsRef<Path>, is_expected: impl FnOnce(&Metadata) -> bool) -> io::Result<File> {
    let opened = open_if(of_kernel(path.as_ref())?, |found| found.is_file() && is_expected(found))?;
    opened.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "another file has its path now"))
}

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Opens a directory, such as the root of the control groups.
///
/// # Errors
/// The path is not one of the kernel's, or ends in a link, or the directory cannot be opened.
pub fn open_directory(path: impl AsRef<Path>) -> io::Result<OwnedFd> {
    Ok(openat(rustix::fs::CWD, of_kernel(path.as_ref())?, FOLDER, Mode::empty())?)
}

/// Opens a directory in an open one by its name; follows no link.
///
/// # Errors
/// There is none, or it cannot be opened.
pub fn directory_in(directory: impl AsFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    openat(directory, name, FOLDER, Mode::empty())
}

/// Opens a file in an open directory by its name; follows no link.
///
/// # Errors
/// There is none, or it cannot be opened.
pub fn file_in(directory: impl AsFd, name: &str) -> rustix::io::Result<File> {
    openat(directory, name, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).map(File::from)
}

/// Opens a device with these flags, for instance `WRONLY`.
///
/// # Errors
/// The path is not below `/dev`, or is not a device, or the device cannot be opened.
pub fn device(path: &Path, flags: OFlags) -> io::Result<File> {
    if !path.starts_with("/dev") || path.components().any(|part| part == Component::ParentDir) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no path of a device"));
    }
    // checked before the open, since for some devices the open itself is a command
    let kind = fs::metadata(path)?.file_type();
    if !kind.is_char_device() && !kind.is_block_device() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no device"));
    }
    Ok(openat(rustix::fs::CWD, path, flags | OFlags::CLOEXEC, Mode::empty())?.into())
}

/// Removes a directory that the kernel allows to be removed, such as a control group without processes.
///
/// # Errors
/// The path is not one of the kernel's, or the kernel refuses it.
pub fn remove_directory(path: impl AsRef<Path>) -> io::Result<()> {
    fs::remove_dir(of_kernel(path.as_ref())?)
}

/// Reads the text of a magic link.
///
/// # Errors
/// The path is not one of the kernel's, or it is not a link.
pub fn link(path: impl AsRef<Path>) -> io::Result<PathBuf> {
    fs::read_link(of_kernel(path.as_ref())?)
}

/// Metadata of the file at a path, magic links followed.
///
/// # Errors
/// The path is not one of the kernel's, or there is no such file.
pub fn metadata(path: impl AsRef<Path>) -> io::Result<Metadata> {
    fs::metadata(of_kernel(path.as_ref())?)
}

/// Lists the names in a directory; empty if the directory cannot be read.
pub fn names(path: impl AsRef<Path>) -> Vec<OsString> {
    list(path).into_iter().flatten().flatten().collect()
}

/// Lists the names in a directory, one at a time: some directories have as many as another user wants.
///
/// # Errors
/// The path is not one of the kernel's, or the directory cannot be read.
pub fn list(path: impl AsRef<Path>) -> io::Result<impl Iterator<Item = io::Result<OsString>>> {
    Ok(fs::read_dir(of_kernel(path.as_ref())?)?.map(|entry| Ok(entry?.file_name())))
}

fn of_kernel(path: &Path) -> io::Result<&Path> {
    let begins = path.starts_with("/proc") || path.starts_with("/sys");
    if begins && path.components().all(|part| part != Component::ParentDir) {
        return Ok(path);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file of the kernel's"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_kernel_are_read_and_no_others() {
        let pid = std::process::id();
        assert!(text(format!("/proc/{pid}/status")).unwrap().starts_with("Name:"));
        assert_eq!(link("/proc/self").unwrap(), PathBuf::from(pid.to_string()));
        assert!(names("/proc").contains(&pid.to_string().into()));
        assert!(metadata(format!("/proc/{pid}/exe")).unwrap().is_file() && open("/proc/self/maps").is_ok());
        for path in ["/etc/passwd", "/proc/../etc/passwd", "/process", "proc/self/status", ""] {
            assert_eq!(bytes(path).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{path}");
        }
        assert!(names("/etc").is_empty() && write("/tmp/x", "").is_err() && remove_directory("/tmp/x").is_err());
        assert!(open_to_change("/etc/passwd").is_err() && open_directory("/etc").is_err() && list("/etc").is_err());
    }

    #[test]
    fn a_file_that_a_process_exchanged_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let open = |name: &str, inode: u64| {
            let path = Path::new("/proc/self/root").join(path(name).strip_prefix("/").unwrap());
            open_expected(path, |found| std::os::unix::fs::MetadataExt::ino(found) == inode)
        };
        fs::write(path("text"), "x").unwrap();
        let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(path("text")).unwrap());
        assert_eq!(io::read_to_string(open("text", inode).unwrap()).unwrap(), "x");
        assert!(open("text", inode + 1).is_err() && open("none", inode).is_err());
        rustix::fs::mknodat(rustix::fs::CWD, path("pipe"), rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        let pipe = std::os::unix::fs::MetadataExt::ino(&fs::metadata(path("pipe")).unwrap());
        assert!(open("pipe", pipe).is_err(), "it would wait");
    }

    #[test]
    fn files_of_a_test_stand_for_those_of_the_kernel() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::below(dir.path());
        fs::create_dir_all(dir.path().join("sys/class")).unwrap();
        files.make_directory("/sys/class/a").unwrap();
        files.make_directory("/sys/class/a").unwrap();
        files.write("/sys/class/a/value", "7\n").unwrap();
        std::os::unix::fs::symlink("a", dir.path().join("sys/class/b")).unwrap();
        assert_eq!((files.value("/sys/class/b/value"), files.value("/sys/class/none")), ("7".into(), String::new()));
        assert_eq!(files.canonical("/sys/class/b").unwrap(), Path::new("/sys/class/a"));
        assert!(files.exists("/sys/class/b") && !files.exists("/sys/class/c") && files.names("/sys/class").len() == 2);
        assert!(files.text(dir.path().join("sys/class/a/value")).is_err(), "a path is always one of the kernel's");
        assert!(Files::of_kernel().text("/proc/self/status").unwrap().starts_with("Name:"));
    }

    #[test]
    fn devices_are_opened_and_no_other_files() {
        assert!(device(Path::new("/dev/null"), OFlags::WRONLY).is_ok());
        for path in ["/etc/passwd", "/dev/../etc/passwd", "/dev/shm", "/dev/none"] {
            assert!(device(Path::new(path), OFlags::WRONLY).is_err(), "{path}");
        }
    }
}
