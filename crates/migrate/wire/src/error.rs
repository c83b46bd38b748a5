//! What can be wrong with bytes from outside.

use thiserror::Error;

/// Bytes that are not the protocol.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WireError {
    /// A length smaller than itself or beyond the limit.
    #[error("invalid length {len} of message {}", shown(*.tag))]
    Length {
        /// Type of the message; 0 for the packets that have none.
        tag: u8,
        /// The length as sent.
        len: u32,
    },
    /// A type that nobody sends in this direction.
    #[error("invalid message type {}", shown(*.0))]
    Tag(u8),
    /// A message whose contents do not fit its type.
    #[error("malformed {0}")]
    Malformed(&'static str),
    /// A stored password that is none of the kinds that PostgreSQL keeps.
    #[error("stored password is not a SCRAM-SHA-256 verifier")]
    NotAVerifier,
    /// The other side of a SCRAM exchange did not do as the RFC says.
    #[error("SCRAM exchange: {0}")]
    Scram(&'static str),
    /// The proof or signature is not that of the one who knows the password.
    #[error("SCRAM proof does not match the stored key")]
    WrongProof,
}

fn shown(tag: u8) -> String {
    match tag {
        0 => "without type".into(),
        tag => format!("{:?}", char::from(tag)),
    }
}
