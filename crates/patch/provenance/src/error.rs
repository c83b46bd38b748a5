//! Errors of this crate.

use std::path::PathBuf;
use stillpoint_patch_tracee::Pid;

/// Reason why the origin of a file is not known. Nothing is changed on the machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The root file system has no database of dpkg.
    #[error("{} has no database of dpkg: only Debian's packages are known", .0.display())]
    NoDatabase(PathBuf),
    /// The process has ended, or another one has its number.
    #[error("process {0} has ended")]
    Ended(Pid),
    /// This user may not look at the process.
    #[error("no permission to look at process {pid}: {why}")]
    Permission {
        /// The process.
        pid: Pid,
        /// Error of the system.
        why: String,
    },
    /// The process maps no such file, or several.
    #[error("process {pid} {why}")]
    Mapped {
        /// The process.
        pid: Pid,
        /// Reason, which continues the sentence.
        why: String,
    },
    /// A file of a process cannot be read.
    #[error("{} of process {pid} cannot be read: {why}", path.display())]
    Unreadable {
        /// The process.
        pid: Pid,
        /// Path as the process knows it.
        path: PathBuf,
        /// Error of the system.
        why: String,
    },
    /// No installed package and no package that was seen has the file.
    #[error("{} is from no package: {why}", path.display())]
    NoPackage {
        /// The file.
        path: PathBuf,
        /// Places that were searched, and the result.
        why: String,
    },
    /// Text does not have the expected form.
    #[error("{what}: {why}")]
    Malformed {
        /// The file or text.
        what: String,
        /// The fault.
        why: String,
    },
    /// A program of the system failed, or could not be started.
    #[error("{program} failed: {why}")]
    Program {
        /// The program.
        program: &'static str,
        /// Its status and the end of its messages.
        why: String,
    },
    /// A file of the system cannot be read.
    #[error(transparent)]
    Host(#[from] stillpoint_host::Error),
}
