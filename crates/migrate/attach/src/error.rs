//! Errors of the redirection of clients.

use stillpoint_migrate_postgres::link::ServerError;

/// Reason why clients were not redirected, or the redirection was not ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Clients of a server cannot be redirected to the proxy; nothing has been changed.
    #[error("cannot redirect clients to the proxy: {}", .0.join("; "))]
    Attach(Vec<String>),
    /// Clients cannot be directed to the server itself again; nothing has been changed.
    #[error("cannot end the redirection to the proxy: {}", .0.join("; "))]
    Detach(Vec<String>),
    /// The proxy cannot be reached, or does not do what it is asked for.
    #[error("proxy: {0}")]
    Proxy(String),
    /// `nft` could not be run, or failed.
    #[error("nft: {0}")]
    Nft(String),
    /// The server cannot be asked.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The migrations of the server's databases cannot be listed.
    #[error(transparent)]
    Migrations(Box<dyn std::error::Error + Send + Sync>),
}
