//! Memory of another process, through `/proc/PID/mem`.

use crate::priority::yield_if_idle_class;
use crate::{Error, Pid, sys};
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use stillpoint_base::{PAGE, crosses_page, page_start};
use stillpoint_patch_format::Avma;

/// Bytes read by one system call. A kernel that is not preemptible (PREEMPT_NONE, as on many servers) gives the processor to no other
/// thread before a call ends; a read of this size takes some microseconds.
const AT_ONCE: usize = 32 << 10;
/// Size of the first read of a name in bytes; most names are not longer.
const NAME: usize = 64;

/// Memory of a process. Reads and writes need no stop; data read from a running process may be torn.
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

    /// Returns true if the memory is gone: the process has ended (or is about to), or has called exec. The kernel then reads zero bytes at
    /// any address, without an error. In existing memory the second page cannot be read.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(sys::read_at(&self.file, &mut [0], PAGE), Ok(0))
    }

    /// Reads exactly `buf.len()` bytes.
    ///
    /// # Errors
    /// [`Error::Memory`] if one of the bytes cannot be read, or the process has ended.
    pub fn read(&self, at: Avma, buf: &mut [u8]) -> Result<(), Error> {
        yield_if_idle_class();
        let mut done = 0;
        while done < buf.len() {
            match self.read_part(at, buf, done) {
                Ok(0) => return Err(self.fault(at, buf.len(), "read", io::Error::from_raw_os_error(libc::ESRCH))),
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.fault(at, buf.len(), "read", error)),
            }
        }
        Ok(())
    }

    /// Reads up to `buf.len()` bytes and stops at the first unreadable page; returns the number of bytes read, 0 if none.
    pub fn read_some(&self, at: Avma, buf: &mut [u8]) -> usize {
        let mut done = 0;
        while done < buf.len() {
            match self.read_part(at, buf, done) {
                Ok(n) if n > 0 => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => break,
            }
        }
        done
    }

    /// Reads exactly `buf.len()` bytes as threads in no address-space generation see them. All other functions here read what the first
    /// thread sees. Without such generations both are the same.
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn read_base(&self, at: Avma, buf: &mut [u8]) -> Result<(), Error> {
        match sys::read_of_process(self.pid.0, buf, at.0) {
            Ok(n) if n == buf.len() => Ok(()),
            Ok(_) => Err(self.fault(at, buf.len(), "read", io::Error::from_raw_os_error(libc::EFAULT))),
            Err(error) => Err(self.fault(at, buf.len(), "read", error)),
        }
    }

    /// Reads `len` bytes into a new vector.
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn read_vec(&self, at: Avma, len: usize) -> Result<Vec<u8>, Error> {
        let mut buf = vec![0; len];
        self.read(at, &mut buf)?;
        Ok(buf)
    }

    /// Passes `len` bytes, as far as they can be read, to `look`, window by window, until `look` breaks. `look` receives the address of a
    /// window and its bytes. A window begins with the last `overlap` bytes of the previous one, so that no pattern of up to `overlap` + 1
    /// bytes is missed between two windows.
    pub fn look_through(
        &self,
        at: Avma,
        len: u64,
        overlap: usize,
        mut look: impl FnMut(Avma, &[u8]) -> ControlFlow<()>,
    ) {
        let (end, mut at) = (at.0.saturating_add(len), at.0);
        let mut window = vec![0; AT_ONCE + overlap];
        let mut kept = 0;
        while at < end {
            let wanted = (end - at).min(AT_ONCE as u64) as usize;
            let read = self.read_some(Avma(at), &mut window[kept..kept + wanted]);
            let filled = kept + read;
            if read == 0 || look(Avma(at - kept as u64), &window[..filled]).is_break() {
                return;
            }
            at += read as u64;
            kept = overlap.min(filled);
            window.copy_within(filled - kept..filled, 0);
        }
    }

    /// Reads one little-endian word.
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn read_u64(&self, at: Avma) -> Result<u64, Error> {
        self.read_array(at).map(u64::from_le_bytes)
    }

    /// Reads a number of bytes that is known at compile time.
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn read_array<const N: usize>(&self, at: Avma) -> Result<[u8; N], Error> {
        let mut bytes = [0; N];
        self.read(at, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the next part of `buf`, of which `done` bytes have been read.
    fn read_part(&self, at: Avma, buf: &mut [u8], done: usize) -> io::Result<usize> {
        let end = buf.len().min(done + AT_ONCE);
        sys::read_at(&self.file, &mut buf[done..end], at.0.wrapping_add(done as u64))
    }

    /// Reads a string that ends in NUL (not included), at most `limit` bytes.
    ///
    /// # Errors
    /// [`Error::Memory`] if no NUL is found within the limit, or before an unreadable page.
    pub fn read_c_string(&self, at: Avma, limit: usize) -> Result<Vec<u8>, Error> {
        let mut string = Vec::new();
        while string.len() < limit {
            let (have, len) = (string.len(), string.len().max(NAME).min(limit - string.len()));
            string.resize(have + len, 0);
            let read = self.read_some(Avma(at.0.wrapping_add(have as u64)), &mut string[have..]);
            if let Some(end) = string[have..have + read].iter().position(|&b| b == 0) {
                string.truncate(have + end);
                return Ok(string);
            }
            if read < len {
                break;
            }
        }
        Err(self.fault(at, limit, "read", io::Error::new(io::ErrorKind::InvalidData, "no end of the string")))
    }

    /// Writes, also to read-only private mappings (copy on write). Bytes within one page are written at once: a kill leaves all of them or
    /// none. Other writes go page by page, in ascending order.
    ///
    /// # Errors
    /// [`Error::Memory`] if a page cannot be written; those before it are written.
    pub fn write(&self, at: Avma, bytes: &[u8]) -> Result<(), Error> {
        self.write_parts(at, bytes).map_err(|error| self.fault(at, bytes.len(), "written", error))
    }

    /// Writes one little-endian word.
    ///
    /// # Errors
    /// As [`Memory::write`].
    pub fn write_u64(&self, at: Avma, value: u64) -> Result<(), Error> {
        self.write(at, &value.to_le_bytes())
    }

    /// Writes as [`Memory::write`] does. If the kernel forbids writing through `mem` (`proc_mem.force_override=never`), writes by ptrace
    /// through a thread that the caller holds. ptrace writes whole words, so only bytes within one word are written at once.
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
            match self.file.write_at(part, here) {
                Ok(0) => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes whole words at any address; a word that would cross the end of a page is placed to end with the page. Words need not be
    /// aligned, and five bytes inside one page are one write at any address.
    fn poke(&self, holder: i32, at: Avma, bytes: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
        let mut done = 0;
        while done < bytes.len() {
            let here = at.0 + done as u64;
            let (start, room) = if crosses_page(here, 8) {
                let start = page_start(here) + PAGE - 8;
                (start, (start + 8 - here) as usize)
            } else {
                (here, 8)
            };
            let mut word: [u8; 8] = self.read_array(Avma(start))?;
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
