//! Which interrupted system calls may be made anew without the program noticing.
//!
//! Most calls that a stop interrupts return one of the kernel's own `ERESTART*` codes, and the kernel restarts them when
//! the thread goes on and no handler has run. Some return a plain `EINTR`, which the program would see although no
//! signal ever came (signal(7), "Interruption of system calls and library functions by stop signals"). For these the
//! code is replaced by `ERESTARTNOHAND` while the thread stands: the kernel then restarts the call if no handler runs
//! and gives the program its `EINTR` if one does, which is what happens without us. That also settles the race with a
//! signal that arrives at the same moment: it is the kernel that decides, after us.
//!
//! What remains: a tool killed after it has asked a thread to stop and before it has seen it stand leaves that one `EINTR`
//! behind, as any SIGSTOP and SIGCONT does.
//!
//! The list holds only calls for which `EINTR` means that nothing has happened, so that making them anew is what every
//! correct program does. A restart begins a relative time-out anew; who stops the same thread often must mind that.

/// `MSG_FASTOPEN`: the call also connects.
const MSG_FASTOPEN: u64 = 0x2000_0000;
/// Not among libc's constants.
const SYS_IO_PGETEVENTS: i64 = 333;
/// `FALLOC_FL_COLLAPSE_RANGE | FALLOC_FL_INSERT_RANGE`: made twice, these move data twice.
const FALLOC_MOVES: u64 = 0x08 | 0x20;

/// Whether a call that returned `EINTR` may be made anew.
pub(crate) fn restartable(nr: u64, args: &[u64; 6]) -> bool {
    let send_flags = match nr as i64 {
        libc::SYS_sendto | libc::SYS_sendmmsg => args[3],
        libc::SYS_sendmsg => args[2],
        _ => 0,
    };
    match nr as i64 {
        // Waiting for events takes none away when it is interrupted (fs/eventpoll.c: -EINTR only with no event found).
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => true,
        // Sockets with SO_RCVTIMEO: sock_intr_errno() gives -EINTR only where nothing was received or accepted.
        libc::SYS_recvfrom | libc::SYS_recvmsg | libc::SYS_recvmmsg | libc::SYS_accept | libc::SYS_accept4 => true,
        // Sockets with SO_SNDTIMEO: -EINTR only where nothing was queued; but a connection may have been begun.
        libc::SYS_sendto | libc::SYS_sendmsg | libc::SYS_sendmmsg => send_flags & MSG_FASTOPEN == 0,
        // POSIX: EINTR from these means that no byte was transferred and the file offset has not moved.
        libc::SYS_read | libc::SYS_readv | libc::SYS_pread64 | libc::SYS_preadv | libc::SYS_preadv2 => true,
        libc::SYS_write | libc::SYS_writev | libc::SYS_pwrite64 | libc::SYS_pwritev | libc::SYS_pwritev2 => true,
        // No signal of the set was taken (kernel/signal.c: do_sigtimedwait dequeues before it reports).
        libc::SYS_rt_sigtimedwait => true,
        // The operations are done all or none (ipc/sem.c).
        libc::SYS_semop | libc::SYS_semtimedop => true,
        // -EINTR only with no completion copied out (fs/aio.c).
        libc::SYS_io_getevents | SYS_IO_PGETEVENTS => true,
        // The number of entries submitted takes precedence over -EINTR (io_uring/io_uring.c): none was.
        libc::SYS_io_uring_enter => true,
        // Nothing was copied out.
        libc::SYS_getrandom => true,
        // Reserving, punching and zeroing made twice is the same as once.
        libc::SYS_fallocate => args[1] & FALLOC_MOVES == 0,
        // Everything else keeps what it returned. Above all close (the descriptor is gone already) and connect (the
        // attempt goes on in the background).
        _ => false,
    }
}

/// Whether the kernel restarts the call by itself whenever a stop interrupts it. Of those in which threads of idle
/// servers wait; a call that does so only on some descriptors does not count.
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
