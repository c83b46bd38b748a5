//! Pairs of connected unix sockets, from the kernel's socket diagnosis.

use crate::Error;
use crate::socket_diagnosis::SocketDiagnosis;
use netlink_packet_core::{NLM_F_DUMP, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::unix::{ShowFlags, StateFlags, UnixRequest};
use std::collections::BTreeMap;

/// Returns the inode of each connected unix socket, and that of its peer.
pub(crate) fn unix_peers() -> Result<BTreeMap<u32, u32>, Error> {
    let diagnosis = SocketDiagnosis::open()?;
    let in_any_state = StateFlags::from_bits_retain(u32::MAX);
    let request = UnixRequest { state_flags: in_any_state, inode: 0, show_flags: ShowFlags::PEER, cookie: [0xff; 8] };
    diagnosis.send(NLM_F_DUMP, SockDiagMessage::UnixRequest(request))?;
    let mut peers = BTreeMap::new();
    loop {
        let answers = diagnosis.receive()?;
        if answers.is_empty() {
            return Ok(peers);
        }
        for answer in answers {
            let NetlinkPayload::InnerMessage(SockDiagMessage::UnixResponse(socket)) = answer else { return Ok(peers) };
            peers.extend(socket.peer().map(|peer| (socket.header.inode, peer)));
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
