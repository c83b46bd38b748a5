//! Pairs of connected unix sockets, from the kernel's socket diagnosis.

use crate::Error;
use crate::netlink::{DUMP, REQUEST, attributes, u32_at};
use crate::socket_diagnosis::{BY_FAMILY, SocketDiagnosis};
use std::collections::BTreeMap;

/// `UNIX_DIAG_PEER`, as an attribute.
const PEER: u16 = 2;

/// Returns the inode of each connected unix socket, and that of its peer.
pub(crate) fn unix_peers() -> Result<BTreeMap<u32, u32>, Error> {
    let diagnosis = SocketDiagnosis::open()?;
    // AF_UNIX in any state; UDIAG_SHOW_PEER
    let mut request = vec![1, 0, 0, 0];
    request.extend_from_slice(&u32::MAX.to_ne_bytes());
    request.extend_from_slice(&0u32.to_ne_bytes());
    request.extend_from_slice(&4u32.to_ne_bytes());
    request.extend_from_slice(&[0xff; 8]);
    diagnosis.send(BY_FAMILY, REQUEST | DUMP, &request)?;
    let mut peers = BTreeMap::new();
    loop {
        let answers = diagnosis.receive()?;
        if answers.is_empty() {
            return Ok(peers);
        }
        for (kind, payload) in &answers {
            if *kind != BY_FAMILY {
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
