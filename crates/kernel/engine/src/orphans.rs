//! Orphaned connections: those of an image whose processes were killed in an earlier restore, and which still close.
//!
//! A guard keeps their last segments from their peers, so the kernel repeats these for minutes. Until then a restore cannot make the
//! connections again: their addresses are in use. They are destroyed before (`SOCK_DESTROY`, `include/uapi/linux/sock_diag.h`), which
//! their peers do not see behind the guard. A connection that a process has is left as it is.

use crate::Error;
use crate::error::ErrorContext;
use crate::netlink::{ACK, REQUEST, messages, put, u32_at};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::tcp::{Connection, connections};

/// `SOCK_DIAG_BY_FAMILY`.
const BY_FAMILY: u16 = 20;
/// `SOCK_DESTROY`.
const DESTROY: u16 = 21;
/// `TCP_LISTEN`, of `include/net/tcp_states.h`.
const LISTEN: u8 = 10;
/// Offsets in `struct inet_diag_msg`.
const STATE_AT: usize = 1;
const ID_AT: usize = 4;
const INODE_AT: usize = 68;
/// Bytes of the ports and addresses in `struct inet_diag_sockid`.
const ENDPOINT_BYTES: usize = 36;
/// Older kernels keep a connection that is destroyed while it closes for ever (Linux commit bac76cf89816).
const SINCE: (u32, u32) = (6, 11);
/// Bytes of a file of criu's about connections.
const FILE_MAX: u64 = 1 << 30;

/// Destroys the orphaned connections of an image; returns their number.
///
/// # Errors
///
/// The image cannot be read, or the kernel cannot be asked.
pub(crate) fn destroy(image: &Path) -> Result<usize, Error> {
    if !is_able(&crate::host::kernel()) {
        return Ok(0);
    }
    let all = connections(&Directory::open(image)?.read("files.img", FILE_MAX)?)?;
    if all.is_empty() {
        return Ok(0);
    }
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))
        .with_action("query connections")?;
    let mut destroyed = 0;
    for connection in &all {
        if is_orphan(&socket, connection)? {
            ask(&socket, DESTROY, REQUEST | ACK, connection)?;
            destroyed += usize::from(!is_orphan(&socket, connection)?);
        }
    }
    Ok(destroyed)
}

/// Returns true if a kernel of this release destroys connections that close.
fn is_able(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(major), Some(minor)) => (major, minor) >= SINCE,
        _ => false,
    }
}

/// Returns true if the kernel has a connection between these ends that no process has.
fn is_orphan(diagnosis: &SocketDiagnosis, connection: &Connection) -> Result<bool, Error> {
    let Some(found) = query(diagnosis, BY_FAMILY, REQUEST, connection)? else { return Ok(false) };
    let is_same = found.get(ID_AT..ID_AT + ENDPOINT_BYTES) == request(connection).get(8..8 + ENDPOINT_BYTES);
    Ok(is_same && found.get(STATE_AT) != Some(&LISTEN) && u32_at(&found, INODE_AT) == Some(0))
}

/// Sends one question, and returns the payload of the answer if it is a connection.
fn ask(socket: &OwnedFd, kind: u16, flags: u16, connection: &Connection) -> Result<Option<Vec<u8>>, Error> {
    let mut message = Vec::new();
    put(&mut message, kind, flags, &request(connection));
    send(socket, &message, SendFlags::empty()).with_action("query connections")?;
    let mut buffer = [0; 1 << 12];
    let n = recv(socket, buffer.as_mut_slice(), RecvFlags::empty()).with_action("receive data about connections")?.0;
    let answer = messages(&buffer[..n]).next();
    Ok(answer.filter(|(kind, _)| *kind == BY_FAMILY).map(|(_, payload)| payload.to_vec()))
}

/// `struct inet_diag_req_v2` for one connection in any state.
fn request(connection: &Connection) -> Vec<u8> {
    let [local, peer] =
        [connection.local, connection.peer].map(|end| SocketAddr::new(end.ip().to_canonical(), end.port()));
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let mut bytes = vec![family.as_raw() as u8, rustix::net::ipproto::TCP.as_raw().get() as u8, 0, 0];
    bytes.extend_from_slice(&u32::MAX.to_ne_bytes());
    bytes.extend_from_slice(&local.port().to_be_bytes());
    bytes.extend_from_slice(&peer.port().to_be_bytes());
    for end in [local, peer] {
        let mut address = [0; 16];
        match end.ip() {
            IpAddr::V4(four) => address[..4].copy_from_slice(&four.octets()),
            IpAddr::V6(six) => address = six.octets(),
        }
        bytes.extend_from_slice(&address);
    }
    // on any interface, by no cookie
    bytes.extend_from_slice(&0_u32.to_ne_bytes());
    bytes.extend_from_slice(&[0xff; 8]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    fn diagnosis() -> OwnedFd {
        socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG)).unwrap()
    }

    #[test]
    fn only_a_connection_that_no_process_has_is_destroyed() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, peer) = listener.accept().unwrap();
        let connection = Connection { ino: 0, local: peer, peer: listener.local_addr().unwrap() };
        let socket = diagnosis();
        assert!(!is_orphan(&socket, &connection).unwrap(), "a process has it");
        // more than the peer takes, so that it closes for long
        ours.set_nonblocking(true).unwrap();
        while ours.write(&[0; 1 << 16]).is_ok() {}
        drop(ours);
        assert!(is_orphan(&socket, &connection).unwrap());
        if !is_able(&crate::host::kernel()) || !rustix::process::geteuid().is_root() {
            return stillpoint_testing::skipped("this kernel, or this user, destroys no connections");
        }
        ask(&socket, DESTROY, REQUEST | ACK, &connection).unwrap();
        assert!(!is_orphan(&socket, &connection).unwrap());
        drop(theirs);
    }

    #[test]
    fn a_listener_is_no_connection() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let connection = Connection {
            ino: 0,
            local: listener.local_addr().unwrap(),
            peer: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
        };
        assert!(!is_orphan(&diagnosis(), &connection).unwrap());
    }

    #[test]
    fn kernels_are_compared_by_number() {
        let able = ["6.11.0-1-amd64", "6.18.3", "7.2-rc1"].map(is_able);
        let unable = ["6.1.0-40-amd64", "5.10.0", "6.9", "", "x.y"].map(is_able);
        assert_eq!((able, unable), ([true; 3], [false; 5]));
    }
}
