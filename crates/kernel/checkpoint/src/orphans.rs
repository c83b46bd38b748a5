//! Orphaned connections: those of an image whose processes were killed in an earlier restore, and which still close.
//!
//! A guard keeps their last segments from their peers, so the kernel repeats these for minutes. Until then a restore cannot make the
//! connections again: their addresses are in use. They are destroyed before (`SOCK_DESTROY`, `include/uapi/linux/sock_diag.h`), which
//! their peers do not see behind the guard. A connection that a process has is left as it is.

use crate::Error;
use crate::criu_files::connections_of;
use crate::netlink::{ACK, REQUEST, u32_at};
use crate::socket_diagnosis::{BY_FAMILY, DESTROY, SocketDiagnosis};
use rustix::net::AddressFamily;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::tcp::Connection;

/// `TCP_LISTEN`, of `include/net/tcp_states.h`.
const LISTEN: u8 = 10;
/// Offsets in `struct inet_diag_msg`.
const STATE_AT: usize = 1;
const ID_AT: usize = 4;
const INODE_AT: usize = 68;
/// Bytes of the ports and addresses in `struct inet_diag_sockid`.
const ENDPOINT_BYTES: usize = 36;
/// Older kernels keep a connection that is destroyed while it closes for ever (Linux commit bac76cf89816).
const RELEASE_MIN: (u32, u32) = (6, 11);

/// Destroys the orphaned connections of an image; returns their number.
///
/// # Errors
///
/// The image cannot be read, or the kernel does not answer.
pub(crate) fn destroy(image: &Path) -> Result<usize, Error> {
    if !can_destroy_closing(&crate::host::kernel()) {
        return Ok(0);
    }
    let all = connections_of(&Directory::open(image)?)?;
    if all.is_empty() {
        return Ok(0);
    }
    let diagnosis = SocketDiagnosis::open()?;
    let mut destroyed = 0;
    for connection in &all {
        if is_orphan(&diagnosis, connection)? {
            query(&diagnosis, DESTROY, REQUEST | ACK, connection)?;
            destroyed += usize::from(!is_orphan(&diagnosis, connection)?);
        }
    }
    Ok(destroyed)
}

/// Returns true if a kernel of this release destroys connections that close.
fn can_destroy_closing(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(major), Some(minor)) => (major, minor) >= RELEASE_MIN,
        _ => false,
    }
}

/// Returns true if the kernel has a connection between these ends that no process has.
fn is_orphan(diagnosis: &SocketDiagnosis, connection: &Connection) -> Result<bool, Error> {
    let Some(found) = query(diagnosis, BY_FAMILY, REQUEST, connection)? else { return Ok(false) };
    let is_same = found.get(ID_AT..ID_AT + ENDPOINT_BYTES) == request(connection).get(8..8 + ENDPOINT_BYTES);
    Ok(is_same && found.get(STATE_AT) != Some(&LISTEN) && u32_at(&found, INODE_AT) == Some(0))
}

/// Sends one request, and returns the payload of the answer if it is a connection.
fn query(
    diagnosis: &SocketDiagnosis,
    kind: u16,
    flags: u16,
    connection: &Connection,
) -> Result<Option<Vec<u8>>, Error> {
    diagnosis.send(kind, flags, &request(connection))?;
    let answer = diagnosis.receive()?.into_iter().next();
    Ok(answer.filter(|(kind, _)| *kind == BY_FAMILY).map(|(_, payload)| payload))
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

    #[test]
    fn only_a_connection_that_no_process_has_is_destroyed() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, peer) = listener.accept().unwrap();
        let connection = Connection { ino: 0, local: peer, peer: listener.local_addr().unwrap() };
        let diagnosis = SocketDiagnosis::open().unwrap();
        assert!(!is_orphan(&diagnosis, &connection).unwrap(), "a process has it");
        // more than the peer takes, so that it closes for long
        ours.set_nonblocking(true).unwrap();
        while ours.write(&[0; 1 << 16]).is_ok() {}
        drop(ours);
        assert!(is_orphan(&diagnosis, &connection).unwrap());
        if !can_destroy_closing(&crate::host::kernel()) || !rustix::process::geteuid().is_root() {
            return stillpoint_testing::skipped("this kernel, or this user, destroys no connections");
        }
        query(&diagnosis, DESTROY, REQUEST | ACK, &connection).unwrap();
        assert!(!is_orphan(&diagnosis, &connection).unwrap());
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
        assert!(!is_orphan(&SocketDiagnosis::open().unwrap(), &connection).unwrap());
    }

    #[test]
    fn kernels_are_compared_by_number() {
        let able = ["6.11.0-1-amd64", "6.18.3", "7.2-rc1"].map(can_destroy_closing);
        let unable = ["6.1.0-40-amd64", "5.10.0", "6.9", "", "x.y"].map(can_destroy_closing);
        assert_eq!((able, unable), ([true; 3], [false; 5]));
    }
}
