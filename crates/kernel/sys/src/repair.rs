//! TCP connections that neither send nor receive because the process that repaired them died (`TCP_REPAIR`).
//!
//! **The caller must** provide a descriptor of the connection, and be sure that the process that repaired it is gone;
//! this needs `CAP_NET_ADMIN`.
//!
//! **Guaranteed:** a descriptor that is not a TCP connection, and one that is not in repair mode, stay as they are.
//!
//! **It does not** know which process a connection belongs to.
//!
//! ```
//! use std::net::{Ipv4Addr, TcpListener};
//! let healthy = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
//! assert!(!stillpoint_kernel_sys::repair::leave_repair_mode(&healthy));
//! ```
//!
//! Follows tcp(7) and `do_tcp_setsockopt` in `net/ipv4/tcp.c` of Linux.

use std::os::fd::{AsFd, AsRawFd};

/// Takes a connection out of repair mode; returns true if it was in it.
pub fn leave_repair_mode(socket: impl AsFd) -> bool {
    let descriptor = socket.as_fd().as_raw_fd();
    let (mut state, mut length) = (0 as libc::c_int, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the descriptor is borrowed for as long; the kernel writes at most `length` bytes into `state`, which is
    // that long. A descriptor that is not a TCP socket returns an error.
    let got = unsafe {
        libc::getsockopt(descriptor, libc::IPPROTO_TCP, libc::TCP_REPAIR, (&raw mut state).cast(), &raw mut length)
    };
    if got != 0 || state == 0 {
        return false;
    }
    let off: libc::c_int = 0;
    // SAFETY: as above; the kernel reads the four bytes of `off`.
    let set =
        unsafe { libc::setsockopt(descriptor, libc::IPPROTO_TCP, libc::TCP_REPAIR, (&raw const off).cast(), length) };
    set == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    #[test]
    fn a_connection_goes_on_that_was_left_under_repair() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        let on: libc::c_int = 1;
        // SAFETY: the kernel reads the four bytes of `on`.
        let set = unsafe {
            libc::setsockopt(ours.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, (&raw const on).cast(), 4)
        };
        if set != 0 {
            stillpoint_testing::skip!("connections cannot be repaired here: {}", std::io::Error::last_os_error());
        }
        assert!(leave_repair_mode(&ours));
        assert!(!leave_repair_mode(&ours), "once is enough");
        ours.write_all(b"x").unwrap();
        let mut byte = [0];
        theirs.read_exact(&mut byte).unwrap();
        assert_eq!(byte, *b"x");
        assert!(!leave_repair_mode(std::io::stderr()), "no socket");
    }
}
