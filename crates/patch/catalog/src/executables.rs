//! Programs that a unit starts, as files.

use crate::error::Error;
use crate::unit_file::Service;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// Files of the programs that a unit starts.
#[derive(Debug)]
pub struct Executables {
    /// Device and inode of each.
    files: Vec<(u64, u64)>,
}

impl Executables {
    /// Finds the programs of a unit.
    pub fn of(service: &Service) -> Executables {
        let files = service.programs().filter_map(|program| program.metadata().ok());
        Executables { files: files.map(|file| (file.dev(), file.ino())).collect() }
    }

    /// Returns true if a file is one of them, or the target of a patch.
    ///
    /// # Errors
    /// It is, and users other than root can change it.
    pub fn include(&self, file: &Metadata, is_target: bool) -> Result<bool, Error> {
        let is_meant = is_target || self.files.contains(&(file.dev(), file.ino()));
        if is_meant && (file.uid() != 0 || file.mode() & 0o022 != 0) {
            return Err(Error::Refused("users other than root can change its program's file".into()));
        }
        Ok(is_meant)
    }
}
