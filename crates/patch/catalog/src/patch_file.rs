//! Patch files, read once.

use crate::error::{Error, Of};
use std::path::{Path, PathBuf};
use stillpoint_host::file::read_regular;
use stillpoint_host::trusted::Directory;
use stillpoint_patch_format::Patch;

/// Size limit of a patch file in bytes; a larger file is not read.
const PATCH_LEN_MAX: u64 = 300 << 20;

/// Patch file that was read: the checked bytes are the used bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PatchFile {
    /// The file.
    pub path: PathBuf,
    /// Its content.
    pub bytes: Vec<u8>,
}

impl PatchFile {
    /// Reads a file once; any user may own it, since trust depends on its signature.
    ///
    /// # Errors
    /// It is not a regular file, is larger than a patch can be, or cannot be read.
    pub fn read(path: &Path) -> Result<PatchFile, Error> {
        Ok(PatchFile { path: path.to_owned(), bytes: read_regular(path, PATCH_LEN_MAX)? })
    }

    /// Reads the `*.patch` files of a directory that root alone can change, in the order of their names.
    ///
    /// # Errors
    /// Another user can change the directory or one of the files, or one cannot be read.
    pub fn all_in(directory: &Directory) -> Result<Vec<PatchFile>, Error> {
        let names = directory.names()?.into_iter().filter(|name| name.ends_with(".patch"));
        let read = |name: String| {
            let bytes = directory.read(&name, PATCH_LEN_MAX)?;
            Ok(PatchFile { path: directory.path().join(name), bytes })
        };
        names.map(read).collect()
    }

    /// Decodes the patch without checking its signature.
    ///
    /// # Errors
    /// It is not a patch.
    pub fn patch(&self) -> Result<Patch, Error> {
        Ok(stillpoint_patch_format::decode(&self.bytes).of(|| self.path.display().to_string())?.patch)
    }
}
