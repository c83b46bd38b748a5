//! Established TCP connections, as `files.img` and `tcp-stream-*.img` have them, and the message that wakes a peer.

use crate::Error;
use crate::image::{Kind, entries, message};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use prost::Message;

/// One end of a connection: ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connection {
    /// Inode, by which its stream's image is called.
    pub ino: u32,
    /// Our address.
    pub local: IpAddr,
    /// Our port.
    pub local_port: u16,
    /// The peer's address.
    pub peer: IpAddr,
    /// The peer's port.
    pub peer_port: u16,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct Socket {
    #[prost(uint32, required, tag = "2")]
    ino: u32,
    #[prost(uint32, required, tag = "4")]
    kind: u32,
    #[prost(uint32, required, tag = "6")]
    state: u32,
    #[prost(uint32, required, tag = "7")]
    src_port: u32,
    #[prost(uint32, required, tag = "8")]
    dst_port: u32,
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    src_addr: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    dst_addr: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct File {
    #[prost(message, optional, tag = "4")]
    inet: Option<Socket>,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct Stream {
    #[prost(uint32, required, tag = "2")]
    inq_seq: u32,
}

/// The connections that `files.img` names.
pub fn connections(files: &[u8]) -> Result<Vec<Connection>, Error> {
    let mut found = Vec::new();
    for entry in entries(Kind::Files, files)? {
        let Some(socket) = message::<File>("an open file", entry)?.inet else { continue };
        let (Some(local), Some(peer)) = (address(&socket.src_addr), address(&socket.dst_addr)) else { continue };
        if (socket.kind, socket.state) == (1, 1) {
            let port = |number: u32| number as u16;
            let (local_port, peer_port) = (port(socket.src_port), port(socket.dst_port));
            found.push(Connection { ino: socket.ino, local, local_port, peer, peer_port });
        }
    }
    Ok(found)
}

/// Words as the kernel has them in memory; an IPv4 address in IPv6's clothes is one of IPv4.
fn address(words: &[u32]) -> Option<IpAddr> {
    match words {
        [word] => Some(Ipv4Addr::from(word.to_le_bytes()).into()),
        [_, _, _, _] => {
            let mut bytes = [0; 16];
            for (part, word) in bytes.chunks_mut(4).zip(words) {
                part.copy_from_slice(&word.to_le_bytes());
            }
            let address = Ipv6Addr::from(bytes);
            Some(address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4))
        }
        _ => None,
    }
}

/// The number of the next byte that a `tcp-stream-*.img` waits for.
pub fn next_expected(stream: &[u8]) -> Result<u32, Error> {
    let entries = entries(Kind::TcpStream, stream)?;
    let entry = entries.first().ok_or(Error::Short(stream.len()))?;
    Ok(message::<Stream>("a TCP stream", entry)?.inq_seq)
}

/// An ICMP message, "host unreachable", about a segment of the peer's that begins with the byte we wait for. RFC 6069 has
/// the peer try again at once; it ends no connection. Only for IPv4.
pub fn unreachable(connection: &Connection, next: u32) -> Option<Vec<u8>> {
    let (IpAddr::V4(local), IpAddr::V4(peer)) = (connection.local, connection.peer) else { return None };
    // IPv4: version and length, no service, 52 bytes, id 1, do not fragment, 64 hops, TCP
    let mut quoted = vec![0x45, 0, 0, 52, 0, 1, 0x40, 0, 64, 6, 0, 0];
    quoted.extend_from_slice(&peer.octets());
    quoted.extend_from_slice(&local.octets());
    let sum = checksum(&quoted);
    quoted[10..12].copy_from_slice(&sum.to_be_bytes());
    quoted.extend_from_slice(&connection.peer_port.to_be_bytes());
    quoted.extend_from_slice(&connection.local_port.to_be_bytes());
    quoted.extend_from_slice(&next.to_be_bytes());
    let mut icmp = vec![3, 1, 0, 0, 0, 0, 0, 0];
    icmp.extend_from_slice(&quoted);
    let sum = checksum(&icmp);
    icmp[2..4].copy_from_slice(&sum.to_be_bytes());
    Some(icmp)
}

fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::{begin, put};
    use proptest::prelude::*;

    fn socket(state: u32, src_addr: Vec<u32>, dst_addr: Vec<u32>) -> File {
        let (ino, kind, src_port, dst_port) = (77, 1, 6379, 40_000);
        File { inet: Some(Socket { ino, kind, state, src_port, dst_port, src_addr, dst_addr }) }
    }

    #[test]
    fn connections_are_found_among_files() {
        let mut bytes = begin(Kind::Files);
        put(&mut bytes, &socket(10, vec![0], vec![0]));
        put(&mut bytes, &socket(1, vec![0x0200_4d0a], vec![0x0100_4d0a]));
        put(&mut bytes, &socket(1, vec![0, 0, 0xffff_0000, 0x0200_4d0a], vec![0, 0, 0xffff_0000, 0x0100_4d0a]));
        let found = connections(&bytes).unwrap();
        let (local, peer) = (Ipv4Addr::new(10, 77, 0, 2).into(), Ipv4Addr::new(10, 77, 0, 1).into());
        assert_eq!(found, [Connection { ino: 77, local, local_port: 6379, peer, peer_port: 40_000 }; 2]);
    }

    #[test]
    fn the_message_quotes_the_peers_segment() {
        let (local, peer) = (Ipv4Addr::new(10, 77, 0, 2).into(), Ipv4Addr::new(10, 77, 0, 1).into());
        let connection = Connection { ino: 77, local, local_port: 6379, peer, peer_port: 40_000 };
        let icmp = unreachable(&connection, 0x0102_0304).unwrap();
        assert_eq!((icmp[0], icmp[1], icmp.len()), (3, 1, 8 + 20 + 8));
        assert_eq!(checksum(&icmp), 0);
        assert_eq!(checksum(&icmp[8..28]), 0);
        assert_eq!(icmp[20..24], [10, 77, 0, 1]);
        assert_eq!(icmp[28..36], [0x9c, 0x40, 0x18, 0xeb, 1, 2, 3, 4]);
        assert!(unreachable(&Connection { peer: Ipv6Addr::LOCALHOST.into(), ..connection }, 1).is_none());
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_connections(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for kind in [Kind::Files, Kind::TcpStream] {
                let mut image = begin(kind);
                image.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
                image.extend_from_slice(&bytes);
                let _ = connections(&image);
                let _ = next_expected(&image);
            }
        }
    }
}
