//! The memory of another process, through the userfaultfd that it was registered with.

use super::Error;
use linux_raw_sys::general::{uffdio_copy, uffdio_range, uffdio_zeropage};
use linux_raw_sys::ioctl::{UFFDIO_COPY, UFFDIO_WAKE, UFFDIO_ZEROPAGE};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use stillpoint_base::PAGE;

/// Result of an attempt to place pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// Number of bytes from the front that are resident now.
    Done(u64),
    /// The first page was resident before; threads that waited for it have been woken.
    AlreadyResident,
    /// The process is changing its memory: an event will report the change. Read it, then try again.
    LayoutChanging,
    /// The memory does not exist any more.
    Unmapped,
    /// The process has ended.
    ProcessEnded,
}

/// A userfaultfd of another process, named by its number: processes that watch each other share the table of
/// descriptors, so no value in Rust can own an entry of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Memory(RawFd);

impl Memory {
    /// Takes over an open userfaultfd.
    pub fn of(descriptor: RawFd) -> Self {
        Memory(descriptor)
    }

    /// Returns the number of the descriptor.
    pub fn descriptor(self) -> RawFd {
        self.0
    }

    /// Copies pages to a place without pages, and wakes threads that wait for them.
    ///
    /// # Errors
    /// The kernel refuses the call for a reason that [`PutOutcome`] does not cover.
    pub fn copy(self, address: u64, pages: &[u8]) -> Result<PutOutcome, Error> {
        let (src, len) = (pages.as_ptr() as u64, pages.len() as u64);
        let mut copy = uffdio_copy { dst: address, src, len, mode: 0, copy: 0 };
        let done = self.call(UFFDIO_COPY, &mut copy);
        self.put("UFFDIO_COPY", address, done, copy.copy)
    }

    /// Places zeros where there are no pages, and wakes threads that wait for them.
    ///
    /// # Errors
    /// The kernel refuses the call for a reason that [`PutOutcome`] does not cover.
    pub fn zero(self, address: u64, bytes: u64) -> Result<PutOutcome, Error> {
        let mut zero = uffdio_zeropage { range: uffdio_range { start: address, len: bytes }, mode: 0, zeropage: 0 };
        let done = self.call(UFFDIO_ZEROPAGE, &mut zero);
        self.put("UFFDIO_ZEROPAGE", address, done, zero.zeropage)
    }

    fn put(self, what: &'static str, address: u64, done: Result<(), Errno>, bytes: i64) -> Result<PutOutcome, Error> {
        match done {
            Ok(()) => Ok(PutOutcome::Done(bytes.unsigned_abs())),
            // a part was placed before something else happened
            Err(_) if bytes > 0 => Ok(PutOutcome::Done(bytes.unsigned_abs())),
            Err(Errno::EXIST) => {
                self.wake(address)?;
                Ok(PutOutcome::AlreadyResident)
            }
            Err(Errno::AGAIN) => Ok(PutOutcome::LayoutChanging),
            Err(Errno::NOENT | Errno::FAULT | Errno::INVAL) => Ok(PutOutcome::Unmapped),
            Err(Errno::SRCH) => Ok(PutOutcome::ProcessEnded),
            Err(source) => Err(Error::Call { what, source: source.into() }),
        }
    }

    /// Wakes all threads that wait for a page of this memory; a thread that still needs the page faults again.
    ///
    /// # Errors
    /// The kernel refuses the call.
    pub fn wake_all(self) -> Result<(), Error> {
        // from the lowest address that can be mapped to the end of four-level page tables
        self.wake_range(0x1_0000, (1 << 47) - 0x2_0000)
    }

    fn wake(self, address: u64) -> Result<(), Error> {
        self.wake_range(address, PAGE)
    }

    fn wake_range(self, start: u64, len: u64) -> Result<(), Error> {
        let mut range = uffdio_range { start, len };
        match self.call(UFFDIO_WAKE, &mut range) {
            // no thread waits in memory that is gone
            Ok(()) | Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => Ok(()),
            Err(source) => Err(Error::Call { what: "UFFDIO_WAKE", source: source.into() }),
        }
    }

    fn call<T>(self, request: u32, argument: &mut T) -> Result<(), Errno> {
        // SAFETY: every caller passes the structure that the kernel's headers give for its request, by exclusive
        // reference; `UFFDIO_COPY` reads from memory that its caller borrows for as long. A descriptor of another kind
        // returns an error.
        let done = unsafe { libc::ioctl(self.0, libc::c_ulong::from(request), std::ptr::from_mut(argument)) };
        match done {
            0 => Ok(()),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        }
    }

    /// Closes it, for every process that shares the table. Memory that is not resident then reads as zeros.
    pub fn close(self) {
        // SAFETY: closing a number touches no memory. The caller's log ensures that no other process uses the number.
        unsafe { libc::close(self.0) };
    }
}

impl AsFd for Memory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the number stays open until `close`; after that the caller's log says so and the number is not used.
        // A number that has been closed nevertheless makes calls fail, and touches no memory.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux_raw_sys::general::{uffdio_api, uffdio_register};
    use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_REGISTER};
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

    /// Opens a userfaultfd for this process's own memory, and registers a range.
    fn own(start: u64, bytes: u64) -> Result<Memory, Error> {
        // SAFETY: the call takes flags only and returns a new descriptor or -1.
        let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        if descriptor < 0 {
            return Err(Error::call("userfaultfd"));
        }
        let memory = Memory(descriptor as RawFd);
        let features =
            linux_raw_sys::general::UFFD_FEATURE_EVENT_REMOVE | linux_raw_sys::general::UFFD_FEATURE_EVENT_UNMAP;
        let mut api = uffdio_api { api: 0xaa, features: u64::from(features), ioctls: 0 };
        memory
            .call(UFFDIO_API, &mut api)
            .map_err(|source| Error::Call { what: "UFFDIO_API", source: source.into() })?;
        let range = uffdio_range { start, len: bytes };
        let mut register = uffdio_register { range, mode: 1, ioctls: 0 };
        let registered = memory.call(UFFDIO_REGISTER, &mut register);
        registered.map_err(|source| Error::Call { what: "UFFDIO_REGISTER", source: source.into() })?;
        Ok(memory)
    }

    #[test]
    fn pages_come_once_and_only_where_there_are_none() {
        let bytes = 4 * 4096;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let start = start.unwrap() as u64;
        let memory = match own(start, bytes as u64) {
            Ok(memory) => memory,
            Err(error) => stillpoint_testing::skip!("no userfaultfd here: {error}"),
        };
        let pages = vec![7u8; 2 * 4096];
        assert_eq!(memory.copy(start, &pages).unwrap(), PutOutcome::Done(2 * 4096));
        assert_eq!(memory.copy(start, &pages).unwrap(), PutOutcome::AlreadyResident);
        assert_eq!(memory.zero(start + 2 * 4096, 4096).unwrap(), PutOutcome::Done(4096));
        assert_eq!(memory.zero(start + 2 * 4096, 4096).unwrap(), PutOutcome::AlreadyResident);
        assert_eq!(memory.copy(0x1000, &pages).unwrap(), PutOutcome::Unmapped);
        // SAFETY: both addresses are in the mapping, whose pages are resident.
        let read = unsafe { ((start as *const u8).read(), ((start + 2 * 4096) as *const u8).read()) };
        assert_eq!(read, (7, 0));
        memory.close();
    }
}
