//! Collapse of small pages of another process into one huge page.

use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Bytes of a huge page, which are also its alignment.
pub const HUGE_PAGE: u64 = 2 << 20;

/// Collapses the pages in the range of a huge page at once, without waiting for the kernel's own thread; their content
/// does not change. `process` is a pidfd. Without free memory for a huge page the error is `NOMEM`, without pages that
/// can be moved `AGAIN` or `BUSY`; kernels before 6.1 return `INVAL`. See `process_madvise(2)`, `MADV_COLLAPSE`.
///
/// # Errors
/// The error number of the kernel, for instance `NOMEM` without free memory for a huge page.
pub fn collapse(process: BorrowedFd<'_>, start: u64) -> Result<(), Errno> {
    let range = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: HUGE_PAGE as usize };
    // SAFETY: the range is one of the other process's addresses, not dereferenced here; the vector is borrowed for the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process.as_raw_fd(),
            std::ptr::from_ref(&range),
            1,
            linux_raw_sys::general::MADV_COLLAPSE,
            0,
        )
    };
    match done {
        0.. => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}
