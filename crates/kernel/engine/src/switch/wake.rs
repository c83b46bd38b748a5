//! Wakes peers that wait out their retransmission time-outs (RFC 6069).

use super::journal::Journal;
use crate::Error;
use crate::error::At;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with};
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use stillpoint_kernel_criu::tcp::{connections, next_expected, unreachable};

/// A message may be lost, and a peer may send between two of them.
const TIMES: u32 = 10;

/// Tells the peer of every restored connection that the way is free; how many there are. Best effort: those that do not
/// hear it, and those of IPv6, try again by themselves later.
pub(super) fn peers(journal: &Journal) -> Result<usize, Error> {
    let mut messages = Vec::new();
    for unit in &journal.units {
        let dir = journal.image(&unit.name);
        let path = dir.join("files.img");
        for connection in connections(&fs::read(&path).at("read", path)?)? {
            let path = dir.join(format!("tcp-stream-{:x}.img", connection.ino));
            let Ok(stream) = fs::read(path) else { continue };
            let IpAddr::V4(peer) = connection.peer else { continue };
            if let Some(message) = unreachable(&connection, next_expected(&stream)?).filter(|_| !peer.is_loopback()) {
                messages.push((SocketAddr::from((peer, 0)), message));
            }
        }
    }
    if messages.is_empty() {
        return Ok(0);
    }
    let socket = socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, Some(ipproto::ICMP))
        .doing("make a socket for ICMP")?;
    for _ in 0..TIMES {
        for (peer, message) in &messages {
            // one that cannot be reached now tries again by itself
            let _ = sendto(&socket, message, SendFlags::empty(), peer);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(messages.len())
}
