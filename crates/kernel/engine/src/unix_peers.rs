//! Pairs of connected unix sockets, from the kernel's socket diagnosis.

use crate::Error;
use crate::error::ErrorContext;
use crate::netlink::{DUMP, REQUEST, attributes, messages, put, u32_at};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with};
use std::collections::BTreeMap;

/// `SOCK_DIAG_BY_FAMILY`.
const BY_FAMILY: u16 = 20;
/// `UNIX_DIAG_PEER`, as an attribute.
const PEER: u16 = 2;

/// Returns the inode of each connected unix socket, and that of its peer.
pub(crate) fn unix_peers() -> Result<BTreeMap<u32, u32>, Error> {
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))
        .with_action("query unix sockets")?;
    // AF_UNIX in any state; UDIAG_SHOW_PEER
    let mut asked = vec![1, 0, 0, 0];
    asked.extend_from_slice(&u32::MAX.to_ne_bytes());
    asked.extend_from_slice(&0u32.to_ne_bytes());
    asked.extend_from_slice(&4u32.to_ne_bytes());
    asked.extend_from_slice(&[0xff; 8]);
    let mut request = Vec::with_capacity(40);
    put(&mut request, BY_FAMILY, REQUEST | DUMP, &asked);
    send(&socket, &request, SendFlags::empty()).with_action("query unix sockets")?;
    let (mut peers, mut buffer) = (BTreeMap::new(), vec![0; 1 << 16]);
    loop {
        let n =
            recv(&socket, buffer.as_mut_slice(), RecvFlags::empty()).with_action("receive data about unix sockets")?.0;
        if n == 0 {
            return Ok(peers);
        }
        for (kind, payload) in messages(&buffer[..n]) {
            if kind != BY_FAMILY {
                return Ok(peers);
            }
            let peer = attributes(payload.get(16..).unwrap_or_default()).find(|(kind, _)| *kind == PEER);
            if let (Some(inode), Some(peer)) = (u32_at(payload, 4), peer.and_then(|(_, value)| u32_at(value, 0))) {
                peers.insert(inode, peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_pair_of_sockets_finds_itself() {
        let (one, two) = UnixStream::pair().unwrap();
        let inode = |socket: &UnixStream| {
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(socket));
            std::fs::metadata(path).unwrap().ino() as u32
        };
        let peers = unix_peers().unwrap();
        assert_eq!(peers.get(&inode(&one)), Some(&inode(&two)));
        assert_eq!(peers.get(&inode(&two)), Some(&inode(&one)));
    }
}
