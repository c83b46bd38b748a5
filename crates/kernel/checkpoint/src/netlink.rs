//! Netlink messages: encode and decode. Bytes in, messages out.

use netlink_packet_core::{NetlinkBuffer, NetlinkMessage, NetlinkPayload, NetlinkSerializable};

/// Appends a message.
pub(crate) fn put<M: NetlinkSerializable + Into<NetlinkPayload<M>>>(into: &mut Vec<u8>, flags: u16, message: M) {
    let mut message = NetlinkMessage::from(message);
    message.header.flags = flags;
    message.finalize();
    let start = into.len();
    into.resize(start + message.buffer_len().next_multiple_of(4), 0);
    message.serialize(&mut into[start..]);
}

/// Returns each whole message in a packet.
pub(crate) fn messages(mut bytes: &[u8]) -> impl Iterator<Item = NetlinkBuffer<&[u8]>> {
    std::iter::from_fn(move || {
        let message = NetlinkBuffer::new_checked(bytes).ok()?;
        bytes = bytes.get((message.length() as usize).next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_packet_core::NLM_F_REQUEST;
    use netlink_packet_sock_diag::SockDiagMessage;
    use netlink_packet_sock_diag::unix::{ShowFlags, StateFlags, UnixRequest};

    fn request(inode: u32) -> SockDiagMessage {
        let (state_flags, show_flags) = (StateFlags::ESTABLISHED, ShowFlags::PEER);
        SockDiagMessage::UnixRequest(UnixRequest { state_flags, inode, show_flags, cookie: [0xff; 8] })
    }

    #[test]
    fn what_was_put_comes_out() {
        let mut packet = Vec::new();
        put(&mut packet, NLM_F_REQUEST, request(1));
        put(&mut packet, 0, request(2));
        let found: Vec<_> = messages(&packet).map(|message| (message.message_type(), message.flags())).collect();
        assert_eq!(found, [(20, NLM_F_REQUEST), (20, 0)]);
        let inodes: Vec<&[u8]> = messages(&packet).map(|message| &message.into_inner()[24..28]).collect();
        assert_eq!(inodes, [1u32.to_ne_bytes(), 2u32.to_ne_bytes()]);
    }

    #[test]
    fn what_is_cut_off_or_lies_about_its_length_ends_it() {
        let mut packet = Vec::new();
        put(&mut packet, 0, request(1));
        for end in 0..packet.len() {
            assert_eq!(messages(&packet[..end]).count(), 0, "{end}");
        }
        packet[0] = 3;
        assert_eq!(messages(&packet).count(), 0);
    }
}
