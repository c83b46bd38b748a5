//! Errors of a connection. They do not name the server: the caller does.

use std::io;
use stillpoint_migrate_wire::WireError;
use stillpoint_migrate_wire::backend::{Report, report};
use thiserror::Error;

/// A connection could not be opened.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The server cannot be reached.
    #[error(transparent)]
    Unreachable(io::Error),
    /// The connection broke while TLS was requested.
    #[error(transparent)]
    Request(io::Error),
    /// The server refused the request for TLS.
    #[error("it does not offer TLS")]
    NoTls,
    /// The certificates cannot be used, or the handshake failed.
    #[error("{0}")]
    Handshake(String),
}

/// A connection is of no use any more.
#[derive(Debug, Error)]
pub enum LinkError {
    /// The connection broke.
    #[error("connection to the server")]
    Io(#[source] io::Error),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server broke the protocol.
    #[error("the server broke the protocol")]
    Protocol(#[source] WireError),
    /// The server ended the session with this error.
    #[error("the server refused: {}: {}", .0.code, .0.message)]
    Refused(Report),
}

impl LinkError {
    /// Reads the body of an ErrorResponse that ends the session.
    pub fn refused(body: &[u8]) -> LinkError {
        report(body).map_or_else(LinkError::Protocol, LinkError::Refused)
    }
}

/// A login failed.
#[derive(Debug, Error)]
pub enum LoginError {
    /// The connection is of no use.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The server's demand cannot be met.
    #[error(transparent)]
    Authentication(#[from] AuthenticationError),
}

/// A server's demand for a proof of identity cannot be met.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AuthenticationError {
    /// The credential does not hold the secret that the server's method needs.
    #[error("{0}")]
    NoSecret(&'static str),
    /// The secret does not fit the server's method, or the server did not prove that it knows the role's password.
    #[error("{0}")]
    Exchange(String),
    /// A message of a SASL exchange does not follow the one before.
    #[error("its messages are out of order")]
    OutOfOrder,
    /// The server requires a method of this number that is not supported; 10 is SASL without a known mechanism.
    #[error("it requires an authentication method that is not supported")]
    Unsupported(u32),
}

impl From<WireError> for AuthenticationError {
    fn from(error: WireError) -> Self {
        AuthenticationError::Exchange(error.to_string())
    }
}
