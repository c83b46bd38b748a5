//! Orphaned connections: those of an image whose processes were killed in an earlier restore, and which still close.
//!
//! A guard keeps their last segments from their peers, so the kernel repeats these for minutes. Until then a restore cannot make the
//! connections again: their addresses are in use. They are destroyed before (`SOCK_DESTROY`, `include/uapi/linux/sock_diag.h`), which
//! their peers do not see behind the guard. A connection that a process has is left as it is.

use crate::Error;
use crate::criu_files::connections_of;
use crate::host::{kernel, numbers};
use crate::socket_diagnosis::SocketDiagnosis;
use netlink_packet_core::{NLM_F_ACK, NetlinkPayload};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponseHeader, SocketId, StateFlags};
use netlink_packet_sock_diag::{AF_INET, AF_INET6, IPPROTO_TCP, SockDiagDestroy, SockDiagMessage, TCP_LISTEN};
use std::net::SocketAddr;
use std::path::Path;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::tcp::Connection;

/// Older kernels keep a connection that is destroyed while it closes for ever (Linux commit bac76cf89816).
const RELEASE_MIN: [u64; 2] = [6, 11];

/// Destroys the orphaned connections of an image; returns their number.
///
/// # Errors
///
/// The image cannot be read, or the kernel does not answer.
pub(crate) fn destroy(image: &Path) -> Result<usize, Error> {
    if !can_destroy_closing(&kernel()) {
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
            request_destruction(&diagnosis, connection)?;
            destroyed += usize::from(!is_orphan(&diagnosis, connection)?);
        }
    }
    Ok(destroyed)
}

/// Returns true if a kernel of this release destroys connections that close.
fn can_destroy_closing(release: &str) -> bool {
    numbers(release).as_slice() >= RELEASE_MIN.as_slice()
}

/// Returns true if the kernel has a connection between these ends that no process has.
fn is_orphan(diagnosis: &SocketDiagnosis, connection: &Connection) -> Result<bool, Error> {
    let request = request(connection);
    let ends = |id: &SocketId| (id.source_address, id.source_port, id.destination_address, id.destination_port);
    let wanted = ends(&request.socket_id);
    diagnosis.send(0, SockDiagMessage::InetRequest(request))?;
    Ok(match diagnosis.receive()?.into_iter().next() {
        Some(NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(found))) => {
            let InetResponseHeader { state, inode, ref socket_id, .. } = found.header;
            ends(socket_id) == wanted && state != TCP_LISTEN && inode == 0
        }
        _ => false,
    })
}

/// Asks the kernel to destroy a connection.
fn request_destruction(diagnosis: &SocketDiagnosis, connection: &Connection) -> Result<(), Error> {
    let message = SockDiagDestroy::new(SockDiagMessage::InetRequest(request(connection)));
    diagnosis.send(NLM_F_ACK, message)?;
    diagnosis.receive().map(drop)
}

/// Makes a request for one connection in any state, on any interface, by no cookie.
fn request(connection: &Connection) -> InetRequest {
    let [local, peer] =
        [connection.local, connection.peer].map(|end| SocketAddr::new(end.ip().to_canonical(), end.port()));
    InetRequest {
        family: if local.is_ipv4() { AF_INET } else { AF_INET6 },
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states: StateFlags::from_bits_retain(u32::MAX),
        socket_id: SocketId {
            source_port: local.port(),
            destination_port: peer.port(),
            source_address: local.ip(),
            destination_address: peer.ip(),
            interface_id: 0,
            cookie: [0xff; 8],
        },
    }
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
        request_destruction(&diagnosis, &connection).unwrap();
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
