//! Files that appear whole or not at all, and files of other users that are read.

use crate::Error;
use crate::error::At;
use rustix::fs::OFlags;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
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

/// Reads a regular file, whose owner may be any user, once and at most `limit` bytes.
///
/// # Errors
/// It is no regular file, is longer, or cannot be read.
pub fn read_regular(path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    // a FIFO that nothing writes to would hold the caller
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).at("opening", path)?;
    if !file.metadata().at("looking at", path)?.is_file() {
        return Err(Error::Untrusted { path: path.to_owned(), why: "it is no regular file".into() });
    }
    bounded(file, path, limit)
}

/// Reads all of a file, at most `limit` bytes.
pub(crate) fn bounded(file: File, path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).at("reading", path)?;
    if bytes.len() as u64 > limit {
        return Err(Error::Untrusted { path: path.to_owned(), why: format!("it has more than {limit} bytes") });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    #[test]
    fn files_of_other_users_neither_hold_their_reader_nor_fill_its_memory() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("text"), "four").unwrap();
        assert_eq!(read_regular(&path("text"), 4).unwrap(), b"four");
        assert!(read_regular(&path("text"), 3).unwrap_err().to_string().contains("more than 3 bytes"));
        File::create(path("sparse")).unwrap().set_len(60 << 30).unwrap();
        assert!(read_regular(&path("sparse"), 1 << 20).unwrap_err().to_string().contains("more than"));
        mknodat(CWD, path("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        for name in ["fifo", "."] {
            assert!(read_regular(&path(name), 4).unwrap_err().to_string().contains("no regular file"), "{name}");
        }
    }
}
