//! Memory of another process, through `/proc/PID/mem`.

use crate::{Error, Pid, sys};
use std::fs::File;
use std::io;
use stillpoint_patch_format::Avma;

const PAGE: u64 = 4096;

/// Memory of a process. Reading and writing need no stop; what is read from a running process may be torn.
///
/// It is the memory that the process had when it was opened: after an exec every access fails.
#[derive(Debug)]
pub struct Memory {
    pid: Pid,
    file: File,
}

impl Memory {
    pub(crate) fn new(pid: Pid, file: File) -> Memory {
        Memory { pid, file }
    }

    /// Whether the memory is gone: the process has ended (or is about to), or has called exec. The kernel then reads
    /// nothing at any address, and without an error; of memory that is there the second page cannot be read.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(sys::read_at(&self.file, &mut [0], PAGE), Ok(0))
    }

    /// Reads exactly `buf.len()` bytes.
    pub fn read(&self, at: Avma, buf: &mut [u8]) -> Result<(), Error> {
        let mut done = 0;
        while done < buf.len() {
            match sys::read_at(&self.file, &mut buf[done..], at.0.wrapping_add(done as u64)) {
                Ok(0) => return Err(self.fault(at, buf.len(), "read", io::Error::from_raw_os_error(libc::ESRCH))),
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.fault(at, buf.len(), "read", error)),
            }
        }
        Ok(())
    }

    /// Reads up to `buf.len()` bytes, stopping at the first unreadable page; the number read, 0 if none.
    pub fn read_some(&self, at: Avma, buf: &mut [u8]) -> usize {
        let mut done = 0;
        while done < buf.len() {
            match sys::read_at(&self.file, &mut buf[done..], at.0.wrapping_add(done as u64)) {
                Ok(n) if n > 0 => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => break,
            }
        }
        done
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

    /// Reads a string that ends in NUL (not included), at most `limit` bytes.
    pub fn read_c_string(&self, at: Avma, limit: usize) -> Result<Vec<u8>, Error> {
        let mut string = vec![0; limit];
        let available = self.read_some(at, &mut string);
        match string[..available].iter().position(|&b| b == 0) {
            Some(end) => {
                string.truncate(end);
                Ok(string)
            }
            None => {
                Err(self.fault(at, limit, "read", io::Error::new(io::ErrorKind::InvalidData, "no end of the string")))
            }
        }
    }

    /// Writes, also to read-only private mappings (copy on write). Bytes within one page are written at once: being
    /// killed leaves all of them or none. Page by page otherwise, in ascending order.
    pub fn write(&self, at: Avma, bytes: &[u8]) -> Result<(), Error> {
        self.write_parts(at, bytes).map_err(|error| self.fault(at, bytes.len(), "written", error))
    }

    /// Writes one little-endian word.
    pub fn write_u64(&self, at: Avma, value: u64) -> Result<(), Error> {
        self.write(at, &value.to_le_bytes())
    }

    /// As [`Memory::write`]; where the kernel forbids writing through `mem` (`proc_mem.force_override=never`), by
    /// ptrace through a thread that the caller holds. Words are written whole then, so the bytes must lie in one word
    /// to be written at once.
    pub(crate) fn write_through(&self, holder: i32, at: Avma, bytes: &[u8]) -> Result<(), Error> {
        match self.write_parts(at, bytes) {
            Ok(()) => Ok(()),
            Err(first) => self.poke(holder, at, bytes).map_err(|_| self.fault(at, bytes.len(), "written", first)),
        }
    }

    fn write_parts(&self, at: Avma, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let here = at.0.wrapping_add(done as u64);
            let room = (PAGE - here % PAGE) as usize;
            let part = &bytes[done..bytes.len().min(done + room)];
            match sys::write_at(&self.file, part, here) {
                Ok(0) => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whole words at any address, the last one placed so that it ends with the bytes: words need not be aligned, and
    /// five bytes inside one page are one write wherever they lie.
    fn poke(&self, holder: i32, at: Avma, bytes: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
        let mut done = 0;
        while done < bytes.len() {
            let here = at.0 + done as u64;
            let (start, room) = if here % PAGE > PAGE - 8 {
                let start = here / PAGE * PAGE + PAGE - 8;
                (start, (start + 8 - here) as usize)
            } else {
                (here, 8)
            };
            let mut word = [0; 8];
            self.read(Avma(start), &mut word)?;
            let part = &bytes[done..bytes.len().min(done + room)];
            let offset = (here - start) as usize;
            word[offset..offset + part.len()].copy_from_slice(part);
            sys::poke(holder, start, u64::from_le_bytes(word))?;
            done += part.len();
        }
        Ok(())
    }

    fn fault(&self, at: Avma, len: usize, what: &'static str, source: io::Error) -> Error {
        Error::Memory { pid: self.pid, at, len, what, source }
    }
}
