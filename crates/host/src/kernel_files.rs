//! Files of the kernel's own file systems, `/proc` and `/sys`.
//!
//! What lies there is the kernel's, and belongs to the process that it is about. Links in it are magic: they lead to files, and not
//! to names, so that the rule of [`crate::trusted`] does not apply. A path that begins elsewhere, or leads upwards, is refused.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io;
use std::path::{Component, Path, PathBuf};

/// Reads a file as text.
///
/// # Errors
/// The path is none of the kernel's, or the file cannot be read, or is no UTF-8.
pub fn text(path: impl AsRef<Path>) -> io::Result<String> {
    fs::read_to_string(of_kernel(path.as_ref())?)
}

/// Reads a file.
///
/// # Errors
/// The path is none of the kernel's, or the file cannot be read.
pub fn bytes(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    fs::read(of_kernel(path.as_ref())?)
}

/// Writes a file that is there.
///
/// # Errors
/// The path is none of the kernel's, or the kernel does not take it.
pub fn write(path: impl AsRef<Path>, bytes: impl AsRef<[u8]>) -> io::Result<()> {
    fs::write(of_kernel(path.as_ref())?, bytes)
}

/// Opens a file to be read.
///
/// # Errors
/// The path is none of the kernel's, or the file cannot be opened.
pub fn open(path: impl AsRef<Path>) -> io::Result<File> {
    File::open(of_kernel(path.as_ref())?)
}

/// Reads what a magic link says of itself.
///
/// # Errors
/// The path is none of the kernel's, or it is no link.
pub fn link(path: impl AsRef<Path>) -> io::Result<PathBuf> {
    fs::read_link(of_kernel(path.as_ref())?)
}

/// Facts about the file behind a path, magic links followed.
///
/// # Errors
/// The path is none of the kernel's, or there is no such file.
pub fn metadata(path: impl AsRef<Path>) -> io::Result<Metadata> {
    fs::metadata(of_kernel(path.as_ref())?)
}

/// Names in a directory; none of one that cannot be read.
pub fn names(path: impl AsRef<Path>) -> Vec<OsString> {
    let entries = of_kernel(path.as_ref()).and_then(fs::read_dir);
    entries.into_iter().flatten().flatten().map(|entry| entry.file_name()).collect()
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
        assert!(names("/etc").is_empty() && write("/tmp/x", "").is_err());
    }
}
