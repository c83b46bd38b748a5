//! Root directory of all paths.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Root directory of units and enabled patches: that of the machine, or that of an image.
#[derive(Debug, Clone)]
pub struct Root(PathBuf);

impl From<OsString> for Root {
    fn from(path: OsString) -> Root {
        Root(path.into())
    }
}

impl Root {
    /// The directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns true if it is the machine's own root.
    pub fn is_machine(&self) -> bool {
        self.0 == Path::new("/")
    }

    /// Returns a path of the machine, below the root.
    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }
}
