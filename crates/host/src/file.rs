//! Files that appear whole or not at all.

use crate::Error;
use crate::error::At;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Readers of a file that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readable {
    /// Its owner only.
    ByOwner,
    /// Every user that the umask allows.
    ByOthers,
}

/// Writes beside the final name, synchronizes and renames: the file is there whole, or not at all.
pub fn write_whole(path: &Path, bytes: &[u8], readable: Readable) -> Result<(), Error> {
    write(path, bytes, readable, true)
}

/// The same; without `durable`, a loss of power may leave an empty or shorter file.
pub(crate) fn write(path: &Path, bytes: &[u8], readable: Readable, durable: bool) -> Result<(), Error> {
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mode = match readable {
        Readable::ByOwner => 0o600,
        Readable::ByOthers => 0o666,
    };
    let mut builder = tempfile::Builder::new();
    builder.permissions(fs::Permissions::from_mode(mode));
    let mut file = builder.tempfile_in(directory).at("writing in", directory)?;
    file.write_all(bytes).at("writing", path)?;
    if durable {
        file.as_file().sync_all().at("writing", path)?;
    }
    file.persist(path).map_err(|e| e.error).at("naming", path)?;
    Ok(())
}
