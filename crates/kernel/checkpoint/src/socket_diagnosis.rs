//! The kernel's socket diagnosis (`SOCK_DIAG`, `include/uapi/linux/sock_diag.h`): requests by netlink, and their answers.

use crate::Error;
use crate::error::ErrorContext;
use crate::netlink::{messages, put};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with};

/// `SOCK_DIAG_BY_FAMILY`: the type of requests, and of answers about a socket.
pub(crate) const BY_FAMILY: u16 = 20;
/// `SOCK_DESTROY`.
pub(crate) const DESTROY: u16 = 21;

/// Maximum length in bytes of one part of an answer.
const ANSWER_BYTES_MAX: usize = 1 << 16;

/// A netlink socket for the diagnosis of sockets.
pub(crate) struct SocketDiagnosis(OwnedFd);

impl SocketDiagnosis {
    /// Opens a netlink socket.
    pub(crate) fn open() -> Result<Self, Error> {
        let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
        let socket = socket_with(family, SocketType::RAW, flags, Some(netlink::SOCK_DIAG));
        Ok(SocketDiagnosis(socket.with_action("open the socket diagnosis")?))
    }

    /// Sends a request.
    pub(crate) fn send(&self, kind: u16, flags: u16, payload: &[u8]) -> Result<(), Error> {
        let mut message = Vec::new();
        put(&mut message, kind, flags, payload);
        send(&self.0, &message, SendFlags::empty()).with_action("query the socket diagnosis").map(|_| ())
    }

    /// Receives one part of an answer: type and payload of each message.
    pub(crate) fn receive(&self) -> Result<Vec<(u16, Vec<u8>)>, Error> {
        let mut buffer = vec![0; ANSWER_BYTES_MAX];
        let received = recv(&self.0, buffer.as_mut_slice(), RecvFlags::empty());
        let length = received.with_action("receive from the socket diagnosis")?.0;
        Ok(messages(&buffer[..length]).map(|(kind, payload)| (kind, payload.to_vec())).collect())
    }
}
