//! What can go wrong while a process is taken into an image or brought back.

use std::io;
use std::path::PathBuf;
use stillpoint_kernel_criu::Error as Format;
use stillpoint_kernel_foam::{Error as Foam, Object};
use stillpoint_kernel_sys::uffd::Error as Uffd;

/// Why an operation of this crate did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of an image could not be used.
    #[error("{doing} {path}")]
    File {
        /// What was tried.
        doing: &'static str,
        /// Which file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A call of the system's failed.
    #[error("{doing}")]
    System {
        /// What was tried.
        doing: &'static str,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// Another user can change an image, the state of a switch, or where they lie.
    #[error(transparent)]
    Host(#[from] stillpoint_host::Error),
    /// There is a checkpoint where a new one should go.
    #[error("{0} holds a checkpoint already")]
    Occupied(PathBuf),
    /// No seal: the checkpoint was never finished.
    #[error("{0} holds no sealed checkpoint")]
    Unsealed(PathBuf),
    /// The image is not as it was sealed.
    #[error("{path} is damaged: {why}")]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A page's bytes have not the sum that the index has.
    #[error("page {address:#x} of {object} is damaged")]
    Page {
        /// Whose page.
        object: Object,
        /// Its address in the image.
        address: u64,
    },
    /// What is to be recorded cannot be.
    #[error("image")]
    Foam(#[from] Foam),
    /// criu said what its formats do not allow.
    #[error("criu's formats")]
    Format(#[from] Format),
    /// A userfaultfd, or the log beside it.
    #[error("userfaultfd")]
    Uffd(#[from] Uffd),
    /// criu cannot be started, or is too old.
    #[error("{program}: {why}")]
    Criu {
        /// Which program.
        program: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// criu did not do what it was asked.
    #[error("criu could not {what}{}", .said.iter().map(|line| format!("; {line}")).collect::<String>())]
    Failed {
        /// What.
        what: &'static str,
        /// What it says in its log.
        said: Vec<String>,
    },
    /// criu was killed while its own instructions stood in these processes: they ended with it.
    #[error("criu was killed in the middle of its work, and {} ended with it", numbers(.0))]
    Lost(Vec<i32>),
    /// A process that is not there.
    #[error("process {0} is not there")]
    NoProcess(i32),
    /// Something that cannot be taken along; nothing has been touched.
    #[error("{}", .0.join("; "))]
    Refused(Vec<String>),
    /// The daemon that serves memory did not come up, or gave up.
    #[error("lazy-pages daemon: {0}")]
    Daemon(String),
    /// A step of a switch did not succeed.
    #[error("could not {what}: {why}")]
    Step {
        /// What was tried.
        what: &'static str,
        /// What is known of it.
        why: String,
    },
    /// A unit of a switch did not come along.
    #[error("{unit}: {why}")]
    Unit {
        /// Which one.
        unit: String,
        /// What is known of it.
        why: String,
    },
}

fn numbers(pids: &[i32]) -> String {
    let numbers: Vec<String> = pids.iter().map(ToString::to_string).collect();
    let processes = if pids.len() == 1 { "process" } else { "processes" };
    format!("{processes} {}", numbers.join(", "))
}

impl Error {
    /// It and what caused it, in one line.
    pub(crate) fn with_causes(&self) -> String {
        let chain = std::iter::successors(Some(self as &dyn std::error::Error), |error| error.source());
        chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
    }

    /// Whether it says no before anything was touched.
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
        )
    }
}

/// Says what was done to which file when it failed.
pub(crate) trait At<T> {
    fn at(self, doing: &'static str, path: impl Into<PathBuf>) -> Result<T, Error>;
    fn doing(self, doing: &'static str) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, doing: &'static str, path: impl Into<PathBuf>) -> Result<T, Error> {
        self.map_err(|error| Error::File { doing, path: path.into(), source: error.into() })
    }

    fn doing(self, doing: &'static str) -> Result<T, Error> {
        self.map_err(|error| Error::System { doing, source: error.into() })
    }
}
