//! Connections to servers that the proxy itself opens, with the proxy's time limits and errors.

use crate::error::SessionError;
use std::time::Duration;
use stillpoint_migrate_postgres::{
    AuthenticationError, ConnectError, Credential, LoginError, Ready, Server, Stream, log_in,
};
use stillpoint_migrate_wire::startup::Startup;

/// Opens a connection, encrypted if the configuration says so; sends nothing of the session yet.
pub(crate) async fn connect(server: &Server, limit: Duration) -> Result<Stream, SessionError> {
    let unreachable = |why: String| SessionError::Unreachable { server: server.to_string(), why: why.into() };
    let connected = tokio::time::timeout(limit, stillpoint_migrate_postgres::connect(server)).await;
    connected.map_err(|_| unreachable("no answer in time".into()))?.map_err(|error| match error {
        ConnectError::Request(error) => SessionError::Server(error),
        error => unreachable(error.to_string()),
    })
}

/// Packet that begins a session at a server. The version is always 3.0: 3.2 differs only in the cancel keys.
pub(crate) fn startup_packet(client: &Startup, server: &Server) -> Vec<u8> {
    let mut packet = Vec::new();
    client.for_server(server.database.as_deref()).encode(&mut packet);
    packet
}

/// Opens a connection and logs in with the credential.
pub(crate) async fn login(
    server: &Server,
    packet: &[u8],
    user: &str,
    credential: &Credential,
    limit: Duration,
) -> Result<Ready, SessionError> {
    let stream = connect(server, limit).await?;
    let login = tokio::time::timeout(limit, log_in(stream, packet, user, credential)).await;
    login.map_err(|_| SessionError::TimedOut("logging in"))?.map_err(|error| match error {
        LoginError::Link(error) => error.into(),
        LoginError::Authentication(error) => {
            let why = match error {
                AuthenticationError::Unsupported(_) => {
                    "it requires an authentication method that a proxy cannot relay".into()
                }
                error => error.to_string(),
            };
            SessionError::Login { server: server.to_string(), user: user.into(), why: why.into() }
        }
    })
}
