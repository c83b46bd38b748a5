//! The kernel's socket diagnosis (`SOCK_DIAG`, `include/uapi/linux/sock_diag.h`): requests by netlink, and their answers.

use crate::Error;
use crate::error::ErrorContext;
use crate::netlink::{messages, put};
use netlink_packet_core::{DecodeError, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload, NetlinkSerializable};
use netlink_packet_sock_diag::SockDiagMessage;
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with};
use std::io;

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
    pub(crate) fn send<M: NetlinkSerializable + Into<NetlinkPayload<M>>>(
        &self,
        flags: u16,
        request: M,
    ) -> Result<(), Error> {
        let mut message = Vec::new();
        put(&mut message, NLM_F_REQUEST | flags, request);
        send(&self.0, &message, SendFlags::empty()).with_action("query the socket diagnosis").map(|_| ())
    }

    /// Receives one part of an answer.
    pub(crate) fn receive(&self) -> Result<Vec<NetlinkPayload<SockDiagMessage>>, Error> {
        const ACTION: &str = "receive from the socket diagnosis";
        let mut buffer = vec![0; ANSWER_BYTES_MAX];
        let length = recv(&self.0, buffer.as_mut_slice(), RecvFlags::empty()).with_action(ACTION)?.0;
        let decode = |message: &[u8]| NetlinkMessage::deserialize(message).map(|message| message.payload);
        let answers: Result<_, DecodeError> =
            messages(&buffer[..length]).map(|message| decode(message.into_inner())).collect();
        answers.map_err(io::Error::other).with_action(ACTION)
    }
}
