//! Errors in bytes from outside.

use crate::startup::Version;
use thiserror::Error;

/// Bytes that break the protocol.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WireError {
    /// A length smaller than itself or beyond the limit.
    #[error("invalid length {len} of message {}", shown(*.tag))]
    Length {
        /// Type of the message; 0 for the packets without a type.
        tag: u8,
        /// The length as sent.
        len: u32,
    },
    /// A message type that no peer sends in this direction.
    #[error("invalid message type {}", shown(*.0))]
    Tag(u8),
    /// A message whose contents do not fit its type.
    #[error("malformed {0}")]
    Malformed(&'static str),
    /// A version of the protocol that the proxy does not speak.
    #[error("unsupported frontend protocol {0}: the proxy supports 3.0 to 3.2")]
    Version(Version),
    /// A startup packet without the name of a role.
    #[error("no PostgreSQL user name specified in startup packet")]
    NoUser,
    /// A parameter that the startup packet has more than once, in upper or lower case: the beginning of its name.
    #[error("parameter {0:?} appears more than once in the startup packet")]
    Repeated(String),
    /// A parameter of the startup packet with an invalid name: the beginning of that name.
    #[error("invalid name of a parameter in the startup packet: {0:?}")]
    ParameterName(String),
    /// A value of the parameter `replication` that no server knows: its beginning.
    #[error("invalid value for parameter \"replication\": {0:?}")]
    ReplicationValue(String),
    /// The name of a role or database that is not UTF-8: which of the two.
    #[error("`{0}` in the startup packet is not UTF-8")]
    NotText(&'static str),
    /// The name of a role or database that a server would cut off: which of the two.
    #[error("`{0}` in the startup packet is longer than 63 bytes")]
    NameTooLong(&'static str),
    /// TLS from the first byte on, without this protocol's ALPN name: the client's bytes may be meant for another
    /// server.
    #[error("direct TLS connection without the ALPN protocol \"postgresql\"")]
    NoAlpn,
    /// A stored password that is not a SCRAM-SHA-256 verifier.
    #[error("stored password is not a SCRAM-SHA-256 verifier")]
    NotAVerifier,
    /// The other side of a SCRAM exchange did not follow the RFC.
    #[error("SCRAM exchange: {0}")]
    Scram(&'static str),
    /// The proof or signature was made without the password.
    #[error("SCRAM proof does not match the stored key")]
    WrongProof,
}

impl WireError {
    /// The SQLSTATE that is sent to the client.
    pub fn sqlstate(&self) -> &'static str {
        match self {
            WireError::Version(_) => "0A000",
            WireError::NoUser | WireError::NotText(_) => "28000",
            WireError::ReplicationValue(_) => "22023",
            WireError::NameTooLong(_) => "42622",
            WireError::WrongProof => "28P01",
            WireError::Length { .. }
            | WireError::Tag(_)
            | WireError::Malformed(_)
            | WireError::Repeated(_)
            | WireError::ParameterName(_)
            | WireError::NoAlpn
            | WireError::NotAVerifier
            | WireError::Scram(_) => "08P01",
        }
    }
}

fn shown(tag: u8) -> String {
    match tag {
        0 => "without type".into(),
        tag => format!("{:?}", char::from(tag)),
    }
}
