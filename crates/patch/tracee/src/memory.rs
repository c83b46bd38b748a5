//! Memory of another process, through `/proc/PID/mem`.

use crate::{Error, Pid};
use stillpoint_patch_format::Avma;

/// Memory of a process. Reading and writing need no stop; what is read from a running process may be torn.
#[derive(Debug)]
pub struct Memory {
    pid: Pid,
}

impl Memory {
    /// Reads exactly `buf.len()` bytes.
    pub fn read(&self, _at: Avma, _buf: &mut [u8]) -> Result<(), Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Reads up to `buf.len()` bytes, stopping at the first unreadable page; the number read, 0 if none.
    pub fn read_some(&self, _at: Avma, _buf: &mut [u8]) -> usize {
        0
    }

    /// Reads `len` bytes into a new vector.
    pub fn read_vec(&self, at: Avma, len: usize) -> Result<Vec<u8>, Error> {
        let mut buf = vec![0; len];
        self.read(at, &mut buf)?;
        Ok(buf)
    }

    /// Reads one little-endian word.
    pub fn read_u64(&self, at: Avma) -> Result<u64, Error> {
        let mut buf = [0; 8];
        self.read(at, &mut buf)?;
        Ok(u64::from_le_bytes(buf))
    }

    /// Reads a string that ends in NUL, at most `limit` bytes.
    pub fn read_c_string(&self, _at: Avma, _limit: usize) -> Result<Vec<u8>, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Writes, also to read-only private mappings (copy on write). Bytes within one page are written at once: being
    /// killed leaves all of them or none.
    pub fn write(&self, _at: Avma, _bytes: &[u8]) -> Result<(), Error> {
        let _ = self.pid;
        Err(Error::Unsupported("this yet"))
    }

    /// Writes one little-endian word.
    pub fn write_u64(&self, at: Avma, value: u64) -> Result<(), Error> {
        self.write(at, &value.to_le_bytes())
    }
}
