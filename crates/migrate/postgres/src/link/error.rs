//! Errors of a connection to a server that is named in messages.

use crate::error::{AuthenticationError, ConnectError, LinkError, LoginError};
use std::io;
use std::time::Duration;
use stillpoint_migrate_wire::backend::{Report, without_values};

/// Reason why a server could not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A connection string does not parse, or uses something that is not supported.
    #[error("connection string of the {side}: {why}")]
    Conninfo {
        /// `source` or `target`.
        side: String,
        /// Description of the problem.
        why: String,
    },
    /// A server could not be reached.
    #[error("connect to {server}")]
    Connect {
        /// The server.
        server: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The command that prints our password failed.
    #[error("the password command for {server} failed: {why}")]
    PasswordCommand {
        /// The server.
        server: String,
        /// Reason, without the command's output.
        why: String,
    },
    /// A server did not accept the connection in time.
    #[error("connecting to {server} took longer than {:.1} s", .limit.as_secs_f64())]
    TimedOut {
        /// The server.
        server: String,
        /// The limit.
        limit: Duration,
    },
    /// A connection could not be encrypted, but must be.
    #[error("encrypt the connection to {server}: {why}")]
    Tls {
        /// The server.
        server: String,
        /// Reason of the failure.
        why: String,
    },
    /// A connection broke.
    #[error("connection to {server} lost while {doing}")]
    Lost {
        /// The server.
        server: String,
        /// Work during which it broke.
        doing: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A server answered with an error.
    #[error("{server}: {message} ({code}) while {doing}")]
    Sql {
        /// The server.
        server: String,
        /// Work during which it answered.
        doing: String,
        /// SQLSTATE of the error.
        code: String,
        /// Message of the server with its detail, without values of rows.
        message: String,
    },
    /// A server sent something that the protocol does not allow at this point.
    #[error("{server} sent {what}")]
    Protocol {
        /// The server.
        server: String,
        /// Description of the message.
        what: String,
    },
    /// The server requires an authentication method that is not supported.
    #[error("{server} requires {method} authentication, which is not supported")]
    Authentication {
        /// The server.
        server: String,
        /// Name of the method.
        method: String,
    },
}

impl ServerError {
    pub(super) fn sql(server: &str, report: Report, doing: &str) -> ServerError {
        let Report { code, message, detail, .. } = report;
        let message = without_values(&code, &message, &detail);
        ServerError::Sql { server: server.into(), doing: doing.chars().take(200).collect(), code, message }
    }

    pub(super) fn protocol(server: &str, what: impl ToString) -> ServerError {
        ServerError::Protocol { server: server.into(), what: what.to_string() }
    }

    pub(super) fn connect(server: &str, error: ConnectError) -> ServerError {
        match error {
            ConnectError::Unreachable(source) => ServerError::Connect { server: server.into(), source },
            error => ServerError::Tls { server: server.into(), why: error.to_string() },
        }
    }

    pub(super) fn link(server: &str, error: LinkError) -> ServerError {
        let lost = |source: io::Error| ServerError::Lost { server: server.into(), doing: "reading", source };
        match error {
            LinkError::Io(error) => lost(error),
            LinkError::Closed => lost(io::ErrorKind::UnexpectedEof.into()),
            LinkError::Protocol(error) => ServerError::protocol(server, error),
            LinkError::Refused(report) => ServerError::sql(server, report, "connecting"),
        }
    }

    pub(super) fn login(server: &str, error: LoginError) -> ServerError {
        let method = match error {
            LoginError::Link(error) => return ServerError::link(server, error),
            LoginError::Authentication(error) => match error {
                AuthenticationError::NoSecret(_) => "password (and no password was given)".into(),
                AuthenticationError::OutOfOrder => "SASL out of order".into(),
                AuthenticationError::Unsupported(7 | 8) => "GSSAPI".into(),
                AuthenticationError::Unsupported(10) => "an unknown SASL".into(),
                AuthenticationError::Unsupported(method) => format!("method {method}"),
                AuthenticationError::Exchange(what) => return ServerError::protocol(server, what),
            },
        };
        ServerError::Authentication { server: server.into(), method }
    }

    /// Server that failed; `None` for a connection string that names none.
    pub fn server(&self) -> Option<&str> {
        match self {
            ServerError::Conninfo { .. } => None,
            ServerError::Connect { server, .. }
            | ServerError::PasswordCommand { server, .. }
            | ServerError::TimedOut { server, .. }
            | ServerError::Tls { server, .. }
            | ServerError::Lost { server, .. }
            | ServerError::Sql { server, .. }
            | ServerError::Protocol { server, .. }
            | ServerError::Authentication { server, .. } => Some(server),
        }
    }

    /// Returns true if a retry cannot succeed: the caller has to change something first.
    pub fn is_refusal(&self) -> bool {
        match self {
            ServerError::Conninfo { .. }
            | ServerError::PasswordCommand { .. }
            | ServerError::Tls { .. }
            | ServerError::Authentication { .. } => true,
            // Errors of authentication, of an unknown database, and of missing rights.
            ServerError::Sql { code, .. } => code.starts_with("28") || code == "3D000" || code == "42501",
            _ => false,
        }
    }

    /// Returns true if a server could not make a text or message because it would be longer than a gigabyte.
    pub fn is_of_length(&self) -> bool {
        let ServerError::Sql { code, message, .. } = self else { return false };
        // These errors have no code of their own.
        code == "54000" && (message.starts_with("out of memory") || message.starts_with("string buffer exceeds"))
            || code == "XX000" && message.starts_with("invalid memory alloc request size")
    }

    /// SQLSTATE of a server's error.
    pub fn sqlstate(&self) -> Option<&str> {
        if let ServerError::Sql { code, .. } = self { Some(code) } else { None }
    }
}
