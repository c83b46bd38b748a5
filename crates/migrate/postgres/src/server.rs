//! Address of a PostgreSQL server, and the rules for connections to it.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// A PostgreSQL server, with its address and the rules for its connections.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// Name; empty for a server that a request described.
    #[serde(default)]
    pub name: String,
    /// Host name, address, or the directory of the server's socket.
    pub host: String,
    /// TCP port, and the number in the name of the socket.
    #[serde(default = "default_port")]
    pub port: u16,
    /// Name of the database on that server; by default the one that the client asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub database: Option<String>,
    /// Encryption of the connection to it.
    #[serde(default)]
    pub tls: ServerTls,
    /// Root certificates in PEM format, for `verify-full`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
}

impl Server {
    /// Returns true if connections to it use a socket of the file system.
    pub fn is_unix_socket(&self) -> bool {
        self.host.starts_with('/')
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.as_str() {
            "" => write!(f, "{}:{}", self.host, self.port),
            name => write!(f, "{name} ({}:{})", self.host, self.port),
        }
    }
}

fn default_port() -> u16 {
    5432
}

/// Encryption, as libpq's `sslmode`: those of its values that give a clear guarantee.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServerTls {
    /// No encryption.
    #[default]
    Disable,
    /// Encryption, with any certificate.
    Require,
    /// Encryption, with a certificate for `host` under one of the roots in `ca`.
    VerifyFull,
}

impl fmt::Display for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ServerTls::Disable => "disable",
            ServerTls::Require => "require",
            ServerTls::VerifyFull => "verify-full",
        })
    }
}
