//! Established TCP connections and local addresses, as `files.img` and `tcp-stream-*.img` have them.

use crate::Error;
use crate::image::{IpOptions, Kind, first, inet_sockets, message};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Our end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connection {
    /// Inode, which names the image of its stream.
    pub ino: u32,
    /// Address and port of our end.
    pub local: SocketAddr,
    /// Address and port of the peer.
    pub peer: SocketAddr,
}

/// A local address that a socket is bound to: a restore needs it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Local {
    /// The address; never the unspecified one.
    pub address: IpAddr,
    /// Interface of an address that is valid on one alone.
    pub interface: Option<String>,
}

/// State of a connection when it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Sequence number of the next byte that our end waits for.
    pub expects: u32,
    /// Sequence number of our first byte that the peer had not acknowledged.
    pub unacknowledged: u32,
    /// Sequence number of our first byte that had never been sent.
    pub next: u32,
    /// Window of our end in bytes, scaled as in its segments.
    pub window: u16,
    /// Window of the peer, in the same form.
    pub peer_window: u16,
}

messages! {
    struct Stream {
        inq_seq: u32 = (uint32, required, tag = "2"),
        outq_len: u32 = (uint32, required, tag = "3"),
        /// Sequence number after the whole queue.
        outq_seq: u32 = (uint32, required, tag = "4"),
        snd_wscale: u32 = (uint32, required, tag = "6"),
        rcv_wscale: Option<u32> = (uint32, optional, tag = "8"),
        unsq_len: Option<u32> = (uint32, optional, tag = "12"),
        snd_wnd: Option<u32> = (uint32, optional, tag = "14"),
        rcv_wnd: Option<u32> = (uint32, optional, tag = "16"),
    }
}

/// Returns the connections that `files.img` names.
///
/// # Errors
/// The bytes are not a complete image of files.
pub fn connections(files: &[u8]) -> Result<Vec<Connection>, Error> {
    let mut found = Vec::new();
    for socket in inet_sockets(files)? {
        let (Some(local), Some(peer)) = (address(&socket.src_addr), address(&socket.dst_addr)) else { continue };
        if (socket.kind, socket.state) == (1, 1) {
            let end = |address: IpAddr, port: u32| SocketAddr::from((address, port as u16));
            let (local, peer) = (end(local, socket.src_port), end(peer, socket.dst_port));
            found.push(Connection { ino: socket.ino, local, peer });
        }
    }
    Ok(found)
}

/// Lists the addresses that sockets of `files.img` are bound to, each once.
///
/// # Errors
/// The bytes are not such an image.
pub fn locals(files: &[u8]) -> Result<Vec<Local>, Error> {
    let mut found = Vec::new();
    for socket in inet_sockets(files)? {
        let is_free = socket.ip.as_ref().is_some_and(IpOptions::freebind);
        let bound = address(&socket.src_addr).filter(|address| !address.is_unspecified() && !is_free);
        found.extend(bound.map(|address| Local { address, interface: socket.ifname }));
    }
    found.sort();
    found.dedup();
    Ok(found)
}

/// Decodes words as the kernel has them in memory; an IPv4-mapped IPv6 address becomes one of IPv4.
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

/// Returns the state of a connection in a `tcp-stream-*.img`. The bytes of both queues follow its entry unchanged.
///
/// # Errors
/// The bytes are not an image of a TCP stream.
pub fn progress(stream: &[u8]) -> Result<Progress, Error> {
    let stream: Stream = message("a TCP stream", first(Kind::TcpStream, stream)?)?;
    let scaled = |window: u32, by: u32| window.checked_shr(by).unwrap_or(0).min(u32::from(u16::MAX)) as u16;
    Ok(Progress {
        expects: stream.inq_seq,
        unacknowledged: stream.outq_seq.wrapping_sub(stream.outq_len),
        next: stream.outq_seq.wrapping_sub(stream.unsq_len()),
        window: scaled(stream.rcv_wnd(), stream.rcv_wscale()),
        peer_window: scaled(stream.snd_wnd(), stream.snd_wscale),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::{File, InetSocket, begin, put};
    use proptest::prelude::*;

    fn socket(state: u32, src_addr: Vec<u32>, dst_addr: Vec<u32>) -> File {
        let (ino, kind, src_port, dst_port) = (77, 1, 6379, 40_000);
        let (ip, ifname) = (None, None);
        File { inet: Some(InetSocket { ino, kind, state, src_port, dst_port, src_addr, dst_addr, ip, ifname }) }
    }

    #[test]
    fn connections_are_found_among_files() {
        let mut bytes = begin(Kind::Files);
        put(&mut bytes, &socket(10, vec![0], vec![0]));
        put(&mut bytes, &socket(1, vec![0x0200_4d0a], vec![0x0100_4d0a]));
        put(&mut bytes, &socket(1, vec![0, 0, 0xffff_0000, 0x0200_4d0a], vec![0, 0, 0xffff_0000, 0x0100_4d0a]));
        let found = connections(&bytes).unwrap();
        let (local, peer) = ("10.77.0.2:6379".parse().unwrap(), "10.77.0.1:40000".parse().unwrap());
        assert_eq!(found, [Connection { ino: 77, local, peer }; 2]);
    }

    #[test]
    fn addresses_that_must_be_there_are_found_once() {
        let mut bytes = begin(Kind::Files);
        put(&mut bytes, &socket(10, vec![0], vec![0]));
        put(&mut bytes, &socket(10, vec![0x0200_4d0a], vec![0]));
        put(&mut bytes, &socket(1, vec![0x0200_4d0a], vec![0x0100_4d0a]));
        let mut free = socket(10, vec![0x0300_4d0a], vec![0]);
        free.inet.as_mut().unwrap().ip = Some(IpOptions { freebind: Some(true) });
        put(&mut bytes, &free);
        let mut scoped = socket(10, vec![0x80fe, 0, 0, 0x0100_0000], vec![0; 4]);
        scoped.inet.as_mut().unwrap().ifname = Some("eth0".into());
        put(&mut bytes, &scoped);
        let local = |address: &str, interface: Option<&str>| Local {
            address: address.parse().unwrap(),
            interface: interface.map(ToOwned::to_owned),
        };
        assert_eq!(locals(&bytes).unwrap(), [local("10.77.0.2", None), local("fe80::1", Some("eth0"))]);
    }

    #[test]
    fn a_stream_says_how_far_it_had_come() {
        let mut bytes = begin(Kind::TcpStream);
        let mut stream = Stream { inq_seq: 7, outq_len: 5, outq_seq: 3, snd_wscale: 7, ..Stream::default() };
        put(&mut bytes, &stream);
        let first = Progress { expects: 7, unacknowledged: u32::MAX - 1, next: 3, window: 0, peer_window: 0 };
        assert_eq!(progress(&bytes).unwrap(), first);
        (stream.unsq_len, stream.snd_wnd, stream.rcv_wnd, stream.rcv_wscale) = (Some(4), Some(640), Some(640), Some(5));
        let mut bytes = begin(Kind::TcpStream);
        put(&mut bytes, &stream);
        bytes.extend_from_slice(b"what no process has read yet");
        assert_eq!(progress(&bytes).unwrap(), Progress { next: u32::MAX, window: 20, peer_window: 5, ..first });
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_connections(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for kind in [Kind::Files, Kind::TcpStream] {
                let mut image = begin(kind);
                image.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
                image.extend_from_slice(&bytes);
                let _ = connections(&image);
                let _ = locals(&image);
                let _ = progress(&image);
            }
        }
    }
}
