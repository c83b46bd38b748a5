//! IP packets that make a TCP sender retry: addresses and numbers in, bytes out. Their addresses are of one family.

use etherparse::icmpv4::DestUnreachableHeader;
use etherparse::icmpv6::DestUnreachableCode;
use etherparse::{Icmpv4Type, Icmpv6Type, IpHeaders, PacketBuilder, PacketBuilderStep, TcpHeader};
use std::net::{IpAddr, SocketAddr};

/// Number of hops.
const TTL: u8 = 64;
/// Bytes of a TCP header that a message of ICMP quotes: the ports and the sequence number.
const QUOTED_TCP_BYTES: usize = 8;

/// Makes a segment without data: its acknowledgement lets `to` send data that has been waiting.
pub(crate) fn acknowledgement(from: SocketAddr, to: SocketAddr, (seq, ack, window): (u32, u32, u16)) -> Vec<u8> {
    let mut packet = Vec::new();
    let segment = headers(from.ip(), to.ip()).tcp(from.port(), to.port(), seq, window).ack(ack);
    // only a payload that is too long for a packet is an error
    let _ = segment.write_to_vec(&mut packet, &[]);
    packet
}

/// Makes ICMP's "host unreachable", or ICMPv6's "no route", about a segment that `to` has sent to `from` and that
/// begins with the byte `first`. By RFC 6069 `to` takes back one doubling of its time-out; it ends no connection.
pub(crate) fn unreachable(from: SocketAddr, to: SocketAddr, first: u32) -> Vec<u8> {
    let mut quoted = acknowledgement(to, from, (first, 0, 0));
    quoted.truncate(quoted.len() + QUOTED_TCP_BYTES - TcpHeader::MIN_LEN);
    let (mut packet, headers) = (Vec::new(), headers(from.ip(), to.ip()));
    let _ = if to.is_ipv4() {
        let host = Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::Host);
        headers.icmpv4(host).write_to_vec(&mut packet, &quoted)
    } else {
        let no_route = Icmpv6Type::DestinationUnreachable(DestUnreachableCode::NoRoute);
        headers.icmpv6(no_route).write_to_vec(&mut packet, &quoted)
    };
    packet
}

fn headers(from: IpAddr, to: IpAddr) -> PacketBuilderStep<IpHeaders> {
    let v6 = |address: IpAddr| match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), TTL),
        (from, to) => PacketBuilder::ipv6(v6(from).octets(), v6(to).octets(), TTL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn octets(address: IpAddr) -> Vec<u8> {
        match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        }
    }

    /// Makes the bytes that a checksum covers before the packet's own (RFC 9293 3.1, RFC 8200 8.1).
    fn pseudo_header(from: IpAddr, to: IpAddr, protocol: u8, len: usize) -> Vec<u8> {
        [octets(from), octets(to), (len as u32).to_be_bytes().to_vec(), vec![0, 0, 0, protocol]].concat()
    }

    /// Returns the checksum of RFC 1071, over pieces of which all but the last have even lengths.
    fn checksum(pieces: &[&[u8]]) -> u16 {
        let words = pieces.iter().flat_map(|piece| piece.chunks(2));
        let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
        let mut sum: u32 = words.map(word).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    fn ends(a: &str, b: &str) -> (SocketAddr, SocketAddr) {
        (a.parse().unwrap(), b.parse().unwrap())
    }

    #[test]
    fn the_message_quotes_the_peers_segment() {
        let (ours, theirs) = ends("10.77.0.2:6379", "10.77.0.1:40000");
        let packet = unreachable(ours, theirs, 0x0102_0304);
        assert_eq!((packet.len(), &packet[2..4]), (20 + 8 + 20 + 8, &[0, 56][..]));
        assert_eq!((packet[9], &packet[12..16], &packet[16..20]), (1, &[10, 77, 0, 2][..], &[10, 77, 0, 1][..]));
        let icmp = &packet[20..];
        assert_eq!((icmp[0], icmp[1], icmp[17]), (3, 1, 6));
        assert_eq!([checksum(&[&packet[..20]]), checksum(&[icmp]), checksum(&[&icmp[8..28]])], [0; 3]);
        assert_eq!(icmp[20..28], [10, 77, 0, 1, 10, 77, 0, 2]);
        assert_eq!(icmp[28..], [0x9c, 0x40, 0x18, 0xeb, 1, 2, 3, 4]);
    }

    #[test]
    fn so_does_that_of_the_sixth_version() {
        let (ours, theirs) = ends("[::1]:6379", "[fe80::1]:40000");
        let packet = unreachable(ours, theirs, 0x0102_0304);
        assert_eq!((packet.len(), packet[0], packet[6], packet[40]), (40 + 8 + 40 + 8, 0x60, 58, 1));
        assert_eq!(checksum(&[&pseudo_header(ours.ip(), theirs.ip(), 58, 56), &packet[40..]]), 0);
        assert_eq!((packet[48 + 6], &packet[48 + 8..48 + 10]), (6, &[0xfe, 0x80][..]));
        assert_eq!(packet[88..], [0x9c, 0x40, 0x18, 0xeb, 1, 2, 3, 4]);
    }

    #[test]
    fn an_acknowledgement_has_no_data() {
        for (a, b, before) in [("10.77.0.2:6379", "10.77.0.1:40000", 20), ("[::1]:6379", "[fe80::1]:40000", 40)] {
            let (ours, theirs) = ends(a, b);
            let packet = acknowledgement(ours, theirs, (1, 0x0203, 512));
            let tcp = &packet[before..];
            assert_eq!(checksum(&[&pseudo_header(ours.ip(), theirs.ip(), 6, 20), tcp]), 0);
            assert_eq!(tcp[..16], [0x18, 0xeb, 0x9c, 0x40, 0, 0, 0, 1, 0, 0, 2, 3, 0x50, 0x10, 2, 0]);
        }
    }
}
