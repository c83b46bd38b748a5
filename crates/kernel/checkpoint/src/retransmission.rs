//! Wakes both ends of restored connections: peers have doubled their time-outs while no process held the connection,
//! and our own ends have done so while a guard dropped their packets.
//!
//! An end waits in one of two ways. An end that has sent data and got no acknowledgement waits for its retransmission
//! time-out, whose doublings messages of ICMP take back (RFC 6069). An end that could not send at all, because a guard
//! on its own machine dropped the packets, waits to probe a window that it takes for closed (RFC 9293 3.8.6.1): an
//! acknowledgement lets it send.

use crate::Error;
use crate::criu_files::{CRIU_FILE_BYTES_MAX, connections_of};
use crate::packet::{acknowledgement, unreachable};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::tcp::{Connection, Progress, progress};

/// Number of rounds. Each message takes one doubling back, and Linux counts up to fifteen of them
/// (`net.ipv4.tcp_retries2`); one may be lost.
const ROUNDS: u32 = 16;
const ROUND_INTERVAL: Duration = Duration::from_millis(10);
/// Rounds in which acknowledgements are sent: three equal ones would mean that a segment was lost.
const ACKNOWLEDGEMENT_ROUNDS: [u32; 2] = [0, ROUNDS / 2];

/// Messages for one end.
struct Message {
    to: SocketAddr,
    unreachable: Vec<u8>,
    acknowledgement: Vec<u8>,
}

/// Informs both ends of every connection in the images that packets pass again; returns the number of connections. Best
/// effort: an end that gets no message retries by itself later.
///
/// # Errors
/// No end could be informed.
pub fn prompt_both_ends<'a>(images: impl Iterator<Item = &'a Path>) -> Result<usize, Error> {
    let (mut messages, mut failed) = (Vec::new(), None);
    for image in images {
        if let Err(error) = collect_messages(image, &mut messages) {
            tracing::warn!("ends of the connections of {} are not informed: {}", image.display(), error.with_causes());
            failed.get_or_insert(error);
        }
    }
    if messages.is_empty() {
        return failed.map_or(Ok(0), Err);
    }
    let [v4, v6] = [AddressFamily::INET, AddressFamily::INET6].map(open_raw_socket);
    for round in 0..ROUNDS {
        for Message { to, unreachable, acknowledgement } in &messages {
            let socket = if to.is_ipv4() { &v4 } else { &v6 };
            let address = SocketAddr::new(to.ip(), 0);
            let send = |packet: &[u8]| {
                socket
                    .as_ref()
                    .map_err(|error| *error)
                    .and_then(|raw| sendto(raw, packet, SendFlags::empty(), &address))
            };
            let mut sent = send(unreachable);
            if ACKNOWLEDGEMENT_ROUNDS.contains(&round) {
                sent = sent.and(send(acknowledgement));
            }
            // one that cannot be reached now retries by itself
            if let (0, Err(error)) = (round, sent) {
                tracing::warn!("{to} is not informed: {error}");
            }
        }
        std::thread::sleep(ROUND_INTERVAL);
    }
    Ok(messages.len() / 2)
}

/// Opens a socket that accepts packets with their headers.
fn open_raw_socket(family: AddressFamily) -> rustix::io::Result<OwnedFd> {
    socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, Some(ipproto::RAW))
}

/// Collects messages for both ends of each connection of an image.
fn collect_messages(image: &Path, into: &mut Vec<Message>) -> Result<(), Error> {
    let directory = Directory::open(image)?;
    for connection in connections_of(&directory)? {
        // a connection that no process has accepted has no stream
        let name = format!("tcp-stream-{:x}.img", connection.ino);
        let Ok(stream) = directory.read(&name, CRIU_FILE_BYTES_MAX) else { continue };
        match progress(&stream) {
            Ok(at) => into.extend(messages(&connection, &at)),
            Err(error) => tracing::warn!("{} is not informed: {error}", connection.peer),
        }
    }
    Ok(())
}

fn messages(connection: &Connection, at: &Progress) -> [Message; 2] {
    let (ours, theirs) = (connection.local, connection.peer);
    [
        Message {
            to: theirs,
            unreachable: unreachable(ours, theirs, at.expects),
            acknowledgement: acknowledgement(ours, theirs, (at.next, at.expects, at.window)),
        },
        Message {
            to: ours,
            unreachable: unreachable(theirs, ours, at.unacknowledged),
            acknowledgement: acknowledgement(theirs, ours, (at.expects, at.unacknowledged, at.peer_window)),
        },
    ]
}
