//! Errors of a checkpoint or a restore.

use std::io;
use std::path::PathBuf;
use stillpoint_kernel_criu::Error as Format;
use stillpoint_kernel_foam::{Error as Foam, Object};
use stillpoint_kernel_sys::uffd::Error as Uffd;

/// Reason for the failure of an operation of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of an image could not be used.
    #[error("{action} {path}")]
    File {
        /// Operation that failed, as a verb.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A system call failed.
    #[error("{action}")]
    System {
        /// Operation that failed, as a phrase.
        action: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Another user can change an image, the state of a switch, or a directory above them.
    #[error(transparent)]
    Host(#[from] stillpoint_host::Error),
    /// The journal or the guardian of an operation.
    #[error(transparent)]
    Operation(#[from] stillpoint_operation::Error),
    /// A test requested this failure.
    #[error(transparent)]
    Fault(#[from] stillpoint_operation::Fault),
    /// There is a checkpoint where a new one should go.
    #[error("{0} already contains a checkpoint")]
    Occupied(PathBuf),
    /// There is no seal: the checkpoint was never finished.
    #[error("{0} contains no sealed checkpoint")]
    Unsealed(PathBuf),
    /// The image is not as it was sealed.
    #[error("{path} is damaged: {why}")]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Description of the damage.
        why: String,
    },
    /// The bytes of a page do not have the checksum in the index.
    #[error("page {address:#x} of {object} is damaged")]
    Page {
        /// Process or shared memory that the page belongs to.
        object: Object,
        /// Its address in the image.
        address: u64,
    },
    /// Memory cannot be recorded, or an index cannot be read.
    #[error("image")]
    Foam(#[from] Foam),
    /// A message or a file of criu violates its formats.
    #[error("criu's formats")]
    Format(#[from] Format),
    /// A userfaultfd, or the log beside it.
    #[error("userfaultfd")]
    Uffd(#[from] Uffd),
    /// criu cannot be started, or is too old.
    #[error("{program}: {why}")]
    Criu {
        /// Path of the program.
        program: PathBuf,
        /// Description of the fault.
        why: String,
    },
    /// criu did not execute a request.
    #[error("criu could not {what}{}", .messages.iter().map(|line| format!("; {line}")).collect::<String>())]
    Failed {
        /// The request, as a verb.
        what: &'static str,
        /// Errors in its log.
        messages: Vec<String>,
    },
    /// criu was killed while its own instructions were in these processes: they ended with it.
    #[error("criu was killed during its work, and {} ended with it", process_list(.0))]
    ProcessesLost(Vec<i32>),
    /// A process does not exist.
    #[error("process {0} does not exist")]
    NoProcess(i32),
    /// Something that cannot be taken along; nothing has been touched.
    #[error("{}", .0.join("; "))]
    Refused(Vec<String>),
    /// The daemon that serves memory did not start, or aborted.
    #[error("lazy-pages daemon: {0}")]
    Daemon(String),
    /// A step of a switch did not succeed.
    #[error("could not {what}: {why}")]
    Step {
        /// The step, as a verb.
        what: &'static str,
        /// Known details of the failure.
        why: String,
    },
    /// A unit of a switch did not come along.
    #[error("{unit}: {why}")]
    Unit {
        /// Name of the unit.
        unit: String,
        /// Known details of the failure.
        why: String,
    },
}

fn process_list(pids: &[i32]) -> String {
    let list: Vec<String> = pids.iter().map(ToString::to_string).collect();
    let processes = if pids.len() == 1 { "process" } else { "processes" };
    format!("{processes} {}", list.join(", "))
}

impl Error {
    /// Makes a refusal for one reason.
    pub fn refused(why: impl std::fmt::Display) -> Error {
        Error::Refused(vec![why.to_string()])
    }

    /// Returns the error and its causes, in one line.
    pub fn with_causes(&self) -> String {
        let chain = std::iter::successors(Some(self as &dyn std::error::Error), |error| error.source());
        chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
    }

    /// Returns true if it is a refusal before anything was touched.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Error::Occupied(_)
                | Error::Unsealed(_)
                | Error::Damaged { .. }
                | Error::Page { .. }
                | Error::NoProcess(_)
                | Error::Refused(_)
                | Error::Criu { .. }
                | Error::Host(stillpoint_host::Error::Untrusted { .. })
                | Error::Operation(stillpoint_operation::Error::Host(stillpoint_host::Error::Untrusted { .. }))
                | Error::Operation(
                    stillpoint_operation::Error::Damaged { .. } | stillpoint_operation::Error::Newer { .. }
                )
        )
    }
}

/// Adds the failed operation and its file to an error.
pub trait ErrorContext<T> {
    /// Adds the operation, as a verb, and the path of the file.
    ///
    /// # Errors
    /// The error itself.
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T, Error>;
    /// Adds the operation, as a phrase.
    ///
    /// # Errors
    /// The error itself.
    fn with_action(self, action: &'static str) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> ErrorContext<T> for Result<T, E> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T, Error> {
        self.map_err(|error| Error::File { action, path: path.into(), source: error.into() })
    }

    fn with_action(self, action: &'static str) -> Result<T, Error> {
        self.map_err(|error| Error::System { action, source: error.into() })
    }
}
