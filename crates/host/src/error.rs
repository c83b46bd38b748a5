//! Errors of the machine's services.

use std::path::{Path, PathBuf};

/// Failure of the cache, of reading or writing a file, or of finding a service.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read, written or made.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// Action that failed, for instance `reading`.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The environment names no place for a cache.
    #[error("no directory for the cache: none of STILLPOINT_CACHE, XDG_CACHE_HOME and HOME is set")]
    NoRoot,
    /// Another user owns the cache's directory, or can write to it.
    #[error("cache {} is owned by uid {owner} with mode {mode:04o}: uid {user} uses only its own, writable by no other", path.display())]
    ForeignRoot {
        /// The cache's directory.
        path: PathBuf,
        /// Uid of its owner.
        owner: u32,
        /// Uid of this process.
        user: u32,
        /// Permission bits.
        mode: u32,
    },
    /// Another user can redirect a path, or change the file at its end.
    #[error("{} is not used: {why}", path.display())]
    Untrusted {
        /// The component of the path.
        path: PathBuf,
        /// Problem with that component.
        why: String,
    },
    /// An entry's name cannot be a file name in the cache.
    #[error("cache entry {kind:?}/{name:?} has no valid name")]
    Name {
        /// Kind as given.
        kind: String,
        /// Name as given.
        name: String,
    },
    /// The size limit is not a number.
    #[error("STILLPOINT_CACHE_GIB={0:?} is no number of GiB")]
    Limit(String),
    /// A text cannot be the name of a service.
    #[error("{name:?} is not the name of a service: {why}")]
    ServiceName {
        /// Text as given, at most 64 characters of it.
        name: String,
        /// Rule that the text breaks.
        why: &'static str,
    },
    /// The control group of a service cannot be found or read.
    #[error("service {service}: {why}")]
    Service {
        /// Complete name.
        service: String,
        /// Reason, in one line.
        why: String,
    },
    /// A process belongs to no service of the system's manager.
    #[error("process {0} is in no system service's control group")]
    NotInService(i32),
}

impl Error {
    /// Returns true if a file or directory does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    }
}

impl From<Error> for std::io::Error {
    /// Returns the error of the system alone, if there is one: for callers that name the file themselves.
    fn from(error: Error) -> Self {
        match error {
            Error::Io { source, .. } => source,
            other => std::io::Error::other(other),
        }
    }
}

/// Attaches an action and a path to an error of the system.
pub trait At<T> {
    /// Returns the value, or the error with the action, for instance `reading`, and the path.
    ///
    /// # Errors
    /// That of the system, as [`Error::Io`].
    fn at(self, doing: &'static str, path: &Path) -> Result<T, Error>;
}

impl<T, E: Into<std::io::Error>> At<T> for Result<T, E> {
    fn at(self, doing: &'static str, path: &Path) -> Result<T, Error> {
        self.map_err(|source| Error::Io { doing, path: path.to_owned(), source: source.into() })
    }
}
