//! Errors, for the log and for the operator. Clients get a [`Refusal`] instead. Text from outside is kept as
//! [`UntrustedText`]: every error is one line.

use crate::untrusted::UntrustedText;
use std::path::PathBuf;
use stillpoint_migrate_control::ConfigError;
use stillpoint_migrate_postgres::LinkError;
use stillpoint_migrate_wire::WireError;
use thiserror::Error;

/// The proxy cannot start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An address or socket is not available.
    #[error("cannot listen at {at}")]
    Listen {
        /// The address or path.
        at: String,
        /// Cause of the failure.
        source: std::io::Error,
    },
    /// Another proxy answers at the control socket.
    #[error("another proxy serves the control socket {}", .0.display())]
    Taken(PathBuf),
    /// Another proxy uses the file of routes.
    #[error("another proxy uses the routes file {}: the one with the control socket {}", routes.display(), control.display())]
    Served {
        /// Path of the file.
        routes: PathBuf,
        /// Control socket of that proxy.
        control: PathBuf,
    },
    /// The proxy that serves refuses this one as its standby.
    #[error("cannot stand by for the proxy at {}: {why}", control.display())]
    StandBy {
        /// Control socket of that proxy.
        control: PathBuf,
        /// Reason for the refusal.
        why: String,
    },
    /// The file of routes cannot be read or written.
    #[error("cannot use the routes file {}: {why}", path.display())]
    Routes {
        /// Path of the file.
        path: PathBuf,
        /// Cause of the failure.
        why: String,
    },
    /// A thread, a signal handler or the runtime cannot be created.
    #[error("cannot start {what}")]
    System {
        /// Name of the missing part.
        what: &'static str,
        /// Cause of the failure.
        source: std::io::Error,
    },
}

impl StartError {
    /// Returns true if a process still listens at the address or socket.
    pub(crate) fn is_in_use(&self) -> bool {
        match self {
            StartError::Taken(_) => true,
            StartError::Listen { source, .. } => source.kind() == std::io::ErrorKind::AddrInUse,
            _ => false,
        }
    }
}

/// Reason for the end of a session, other than its client's request.
#[derive(Debug, Error)]
pub(crate) enum SessionError {
    /// The client's connection broke.
    #[error("connection to the client")]
    Client(#[source] std::io::Error),
    /// The server's connection broke.
    #[error("connection to the server")]
    Server(#[source] std::io::Error),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    ServerClosed,
    /// The client broke the protocol.
    #[error("the client broke the protocol")]
    ClientProtocol(#[source] WireError),
    /// The server broke the protocol.
    #[error("the server broke the protocol")]
    ServerProtocol(#[source] WireError),
    /// The server refused the login.
    #[error("the server refused: {code}: {message}")]
    ServerRefused {
        /// SQLSTATE.
        code: UntrustedText,
        /// Message of the server.
        message: UntrustedText,
    },
    /// The client was refused, and has received the reason.
    #[error("{0}")]
    Refused(Refusal),
    /// The server asks for a secret that the proxy does not have.
    #[error("cannot log in at {server} as {user}: {why}")]
    Login {
        /// Name and address of the server.
        server: String,
        /// Name of the role.
        user: UntrustedText,
        /// Secret that is missing.
        why: UntrustedText,
    },
    /// The server cannot be reached.
    #[error("cannot reach {server}: {why}")]
    Unreachable {
        /// Name and address of the server.
        server: String,
        /// Cause of the failure.
        why: UntrustedText,
    },
    /// The session could not be handed to the thread that passes bytes on, or back.
    #[error("the session could not be handed to another thread")]
    Handover(#[source] std::io::Error),
    /// A time limit was reached.
    #[error("{0} took too long")]
    TimedOut(&'static str),
}

impl From<LinkError> for SessionError {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Io(error) => SessionError::Server(error),
            LinkError::Closed => SessionError::ServerClosed,
            LinkError::Protocol(error) => SessionError::ServerProtocol(error),
            LinkError::Refused(report) => {
                SessionError::ServerRefused { code: report.code.into(), message: report.message.into() }
            }
        }
    }
}

/// Error that a client gets before its connection is closed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{code}: {message}")]
pub(crate) struct Refusal {
    /// SQLSTATE.
    pub(crate) code: &'static str,
    /// Message, which may hold names that the client has sent.
    pub(crate) message: UntrustedText,
    /// Action for the client or operator, if there is one.
    pub(crate) hint: Option<&'static str>,
}

impl Refusal {
    pub(crate) fn new(code: &'static str, message: impl Into<String>) -> Self {
        Refusal { code, message: UntrustedText::new(message), hint: None }
    }

    pub(crate) fn hint(self, hint: &'static str) -> Self {
        Refusal { hint: Some(hint), ..self }
    }

    /// The part of an error that a client may know: nothing about servers except that they cannot be reached.
    pub(crate) fn of(error: &SessionError) -> Option<Refusal> {
        match error {
            SessionError::Client(_) | SessionError::ServerRefused { .. } => None,
            SessionError::Refused(refusal) => Some(refusal.clone()),
            SessionError::ClientProtocol(error) => Some(Refusal::new(error.sqlstate(), error.to_string())),
            SessionError::Server(_) | SessionError::ServerClosed | SessionError::ServerProtocol(_) => {
                Some(Refusal::new("08006", "the server closed the connection unexpectedly"))
            }
            SessionError::Login { .. } => {
                Some(Refusal::new("28000", "the proxy cannot log in at the server as this role"))
            }
            SessionError::Unreachable { .. } => Some(Refusal::new("08001", "the server cannot be reached")),
            SessionError::Handover(_) => Some(Refusal::new("58000", "the proxy can no longer serve this session")),
            SessionError::TimedOut(what) => Some(Refusal::new("57014", format!("{what} took too long"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_error_of_a_session_shows_as_two_lines() {
        let text = || "a\n2026-01-01T00:00:00Z  INFO forged\u{1b}[2K".to_owned();
        let refusal = Refusal::new("28000", text());
        for error in [
            SessionError::Refused(refusal.clone()),
            SessionError::ServerRefused { code: text().into(), message: text().into() },
            SessionError::Login { server: "s".into(), user: text().into(), why: text().into() },
            SessionError::Unreachable { server: "s".into(), why: text().into() },
        ] {
            for shown in [error.to_string(), format!("{error:?}")] {
                assert!(!shown.contains(char::is_control), "{shown}");
            }
        }
        for error in [
            WireError::Repeated(text()),
            WireError::ParameterName(text()),
            WireError::ReplicationValue(text()),
            WireError::Tag(b'\n'),
        ] {
            assert!(!error.to_string().contains(char::is_control), "{error}");
        }
        // The client gets its names back unchanged.
        assert_eq!(refusal.message.as_str(), text());
    }
}
