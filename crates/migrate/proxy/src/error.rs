//! What can go wrong, for the log and for the one who started the proxy. What clients are told is another matter: see
//! [`Refusal`]. What is from outside is held as [`Untrusted`]: an error shows as one line.

use crate::untrusted::Untrusted;
use std::path::PathBuf;
use stillpoint_migrate_wire::WireError;
use thiserror::Error;

/// The configuration cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not TOML, or not of our shape.
    #[error("{0}")]
    Syntax(String),
    /// Its parts do not fit together.
    #[error("{0}")]
    Invalid(String),
    /// A certificate or key cannot be used.
    #[error("{}: {why}", path.display())]
    Tls {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

/// The proxy cannot start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An address or socket is not to be had.
    #[error("cannot listen at {at}")]
    Listen {
        /// The address or path.
        at: String,
        /// Why.
        source: std::io::Error,
    },
    /// Another proxy answers there.
    #[error("another proxy serves the control socket {}", .0.display())]
    Taken(PathBuf),
    /// Another proxy has the file of routes.
    #[error("another proxy uses the routes file {}: the one with the control socket {}", routes.display(), control.display())]
    Served {
        /// The file.
        routes: PathBuf,
        /// Where that proxy is reached.
        control: PathBuf,
    },
    /// The proxy that serves does not want this one to stand by.
    #[error("cannot stand by for the proxy at {}: {why}", control.display())]
    StandBy {
        /// Where that proxy is reached.
        control: PathBuf,
        /// Why.
        why: String,
    },
    /// The file of routes cannot be read or written.
    #[error("cannot use the routes file {}: {why}", path.display())]
    Routes {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A thread, a signal handler or the runtime is not to be had.
    #[error("cannot start {what}")]
    System {
        /// What.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

impl StartError {
    /// Whether somebody listens there still.
    pub(crate) fn is_in_use(&self) -> bool {
        match self {
            StartError::Taken(_) => true,
            StartError::Listen { source, .. } => source.kind() == std::io::ErrorKind::AddrInUse,
            _ => false,
        }
    }
}

/// Why a session ended other than by its client's wish.
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
    /// The client does not keep to the protocol.
    #[error("the client broke the protocol")]
    ClientProtocol(#[source] WireError),
    /// The server does not keep to the protocol.
    #[error("the server broke the protocol")]
    ServerProtocol(#[source] WireError),
    /// The server said no.
    #[error("the server refused: {code}: {message}")]
    ServerRefused {
        /// SQLSTATE.
        code: Untrusted,
        /// Its message.
        message: Untrusted,
    },
    /// The client was told why it is not served.
    #[error("{0}")]
    Refused(Refusal),
    /// A server asks for what we do not have.
    #[error("cannot log in at {server} as {user}: {why}")]
    Login {
        /// The server.
        server: String,
        /// The role.
        user: Untrusted,
        /// What is missing.
        why: Untrusted,
    },
    /// The server cannot be reached.
    #[error("cannot reach {server}: {why}")]
    Unreachable {
        /// The server.
        server: String,
        /// Why.
        why: Untrusted,
    },
    /// The session could not be handed to the thread that passes bytes on, or back.
    #[error("the session is lost between two threads")]
    Lent(#[source] std::io::Error),
    /// A limit of time was reached.
    #[error("{0} took too long")]
    TimedOut(&'static str),
}

/// What a client is told before its connection is closed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{code}: {message}")]
pub(crate) struct Refusal {
    /// SQLSTATE.
    pub(crate) code: &'static str,
    /// The message, which may hold names that the client has sent.
    pub(crate) message: Untrusted,
    /// What to do, where something can be done.
    pub(crate) hint: Option<&'static str>,
}

impl Refusal {
    pub(crate) fn new(code: &'static str, message: impl Into<String>) -> Self {
        Refusal { code, message: Untrusted::new(message), hint: None }
    }

    pub(crate) fn hint(self, hint: &'static str) -> Self {
        Refusal { hint: Some(hint), ..self }
    }

    /// What a client may know of an error: nothing about servers but that they are not there.
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
            SessionError::Lent(_) => Some(Refusal::new("58000", "the proxy cannot serve the session any longer")),
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
        // The client gets its names as it has sent them.
        assert_eq!(refusal.message.as_str(), text());
    }
}
