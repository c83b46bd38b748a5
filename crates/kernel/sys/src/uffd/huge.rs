//! Small pages of another process made into one huge page.

use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Bytes of a huge page, to which it is aligned.
pub const HUGE_PAGE: u64 = 2 << 20;

/// Makes the pages of a huge page's range one, now and not when the kernel comes round to it; nothing of what they hold
/// changes. The process is named by a descriptor of it. Without room for a huge page it is `NOMEM`, without pages that can be
/// moved `AGAIN` or `BUSY`; kernels before 6.1 do not know it (`INVAL`). See `process_madvise(2)`, `MADV_COLLAPSE`.
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
