//! Errors of patches on disk.

use crate::bases::MissingBase;
use std::path::PathBuf;

/// Refusal or failure, before a file was changed unless a write failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read, written or trusted.
    #[error(transparent)]
    Host(#[from] stillpoint_host::Error),
    /// The content of a file is not valid, or the file cannot be read.
    #[error("{object}")]
    Of {
        /// The file.
        object: String,
        /// Reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A unit, a key directory or a drop-in lacks something, or a patch is for another program.
    #[error("{0}")]
    Refused(String),
    /// The base of a patch would not be active at a start.
    #[error(transparent)]
    MissingBase(#[from] Box<MissingBase>),
    /// The patch changes what a patch below it changes, and does not contain the diffs of that one.
    #[error("patch {patch} changes `{object}`, and would undo the change that the enabled patch {below} makes to it")]
    Undoes {
        /// The patch.
        patch: String,
        /// Function or constant that both change.
        object: String,
        /// The enabled patch.
        below: String,
    },
    /// Another patch of the same name is enabled.
    #[error("another patch with the name {name} is enabled: {}", path.display())]
    NameTaken {
        /// Name of both.
        name: String,
        /// File of the enabled patch.
        path: PathBuf,
    },
}

/// Names the object of a failure.
pub(crate) trait Of<T> {
    fn of(self, object: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T, E: Into<Box<dyn std::error::Error + Send + Sync>>> Of<T> for Result<T, E> {
    fn of(self, object: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Of { object: object(), source: source.into() })
    }
}
