//! Choice of the interrupted system calls that may be made again without a visible effect.
//!
//! Most calls that a stop interrupts return one of the kernel's own `ERESTART*` codes, and the kernel restarts them if no handler has run
//! when the thread continues. Some return a plain `EINTR`, which the program would see although no signal came (signal(7), "Interruption of
//! system calls and library functions by stop signals"). For these the code is replaced by `ERESTARTNOHAND` while the thread is stopped.
//! The kernel then restarts the call if no handler runs, and returns `EINTR` to the program if one does, as it would without the tool. That
//! also settles the race with a signal that arrives at the same moment: the kernel decides, after the tool.
//!
//! One case remains: a tool killed after it has asked a thread to stop and before it has seen the thread stopped leaves that one `EINTR`,
//! as any SIGSTOP and SIGCONT does.
//!
//! The list holds only calls for which `EINTR` means that nothing has happened: every correct program makes them again. A restart begins a
//! relative time-out again; a caller that often stops the same thread must take account of that.

/// `MSG_FASTOPEN`: the call also connects.
const MSG_FASTOPEN: u64 = 0x2000_0000;
/// Number of the system call `io_pgetevents`, which the crate libc does not define.
const SYS_IO_PGETEVENTS: i64 = 333;
/// `FALLOC_FL_COLLAPSE_RANGE | FALLOC_FL_INSERT_RANGE`: executed twice, these move data twice.
const FALLOC_MOVES: u64 = 0x08 | 0x20;

/// Returns true if a call that returned `EINTR` may be made again.
pub(crate) fn restartable(nr: u64, args: &[u64; 6]) -> bool {
    let send_flags = match nr as i64 {
        libc::SYS_sendto | libc::SYS_sendmmsg => args[3],
        libc::SYS_sendmsg => args[2],
        _ => 0,
    };
    match nr as i64 {
        // An interrupted wait for events takes none away (fs/eventpoll.c: -EINTR only with no event found).
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => true,
        // Sockets with SO_RCVTIMEO: sock_intr_errno() returns -EINTR only if nothing was received or accepted.
        libc::SYS_recvfrom | libc::SYS_recvmsg | libc::SYS_recvmmsg | libc::SYS_accept | libc::SYS_accept4 => true,
        // Sockets with SO_SNDTIMEO: -EINTR only if nothing was queued; but a connection may have been begun.
        libc::SYS_sendto | libc::SYS_sendmsg | libc::SYS_sendmmsg => send_flags & MSG_FASTOPEN == 0,
        // POSIX: EINTR from these means that no byte was transferred and the file offset has not moved.
        libc::SYS_read | libc::SYS_readv | libc::SYS_pread64 | libc::SYS_preadv | libc::SYS_preadv2 => true,
        libc::SYS_write | libc::SYS_writev | libc::SYS_pwrite64 | libc::SYS_pwritev | libc::SYS_pwritev2 => true,
        // No signal of the set was taken (kernel/signal.c: do_sigtimedwait dequeues before it reports).
        libc::SYS_rt_sigtimedwait => true,
        // Either all operations are done or none (ipc/sem.c).
        libc::SYS_semop | libc::SYS_semtimedop => true,
        // -EINTR only with no completion copied out (fs/aio.c).
        libc::SYS_io_getevents | SYS_IO_PGETEVENTS => true,
        // The number of submitted entries takes precedence over -EINTR (io_uring/io_uring.c): none was submitted.
        libc::SYS_io_uring_enter => true,
        // Nothing was copied out.
        libc::SYS_getrandom => true,
        // Reserving, punching and zeroing have the same effect twice as once.
        libc::SYS_fallocate => args[1] & FALLOC_MOVES == 0,
        // All other calls keep their result. Above all close (the descriptor is already gone) and connect (the attempt continues in the
        // background).
        _ => false,
    }
}

/// Returns true if the kernel restarts the call by itself whenever a stop interrupts it. The list holds only calls in which threads of idle
/// servers wait, and no call that restarts only on some descriptors.
pub(crate) fn restarts_by_itself(nr: u64) -> bool {
    matches!(
        nr as i64,
        libc::SYS_futex
            | libc::SYS_poll
            | libc::SYS_ppoll
            | libc::SYS_select
            | libc::SYS_pselect6
            | libc::SYS_nanosleep
            | libc::SYS_clock_nanosleep
            | libc::SYS_wait4
            | libc::SYS_waitid
            | libc::SYS_pause
            | libc::SYS_rt_sigsuspend
            | libc::SYS_restart_syscall
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_close_connect_or_what_moves_data() {
        assert!(!restartable(libc::SYS_close as u64, &[0; 6]));
        assert!(!restartable(libc::SYS_connect as u64, &[0; 6]));
        assert!(!restartable(libc::SYS_ioctl as u64, &[0; 6]));
        assert!(!restartable(libc::SYS_sendto as u64, &[3, 0, 0, MSG_FASTOPEN, 0, 0]));
        assert!(!restartable(libc::SYS_sendmsg as u64, &[3, 0, MSG_FASTOPEN, 0, 0, 0]));
        assert!(!restartable(libc::SYS_fallocate as u64, &[3, 0x20, 0, 0, 0, 0]));
        assert!(restartable(libc::SYS_fallocate as u64, &[3, 0x03, 0, 0, 0, 0]));
        assert!(restartable(libc::SYS_sendto as u64, &[3, 0, MSG_FASTOPEN, 0, 0, 0]));
        assert!(restartable(libc::SYS_epoll_wait as u64, &[0; 6]));
    }

    #[test]
    fn what_needs_mending_does_not_restart_by_itself() {
        for nr in 0..512 {
            assert!(!(restarts_by_itself(nr) && restartable(nr, &[0; 6])), "{nr}");
        }
        assert!(restarts_by_itself(libc::SYS_poll as u64));
    }
}
