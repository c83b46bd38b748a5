//! Opening of a connection: the socket, and TLS where it is required.

use crate::error::ConnectError;
use crate::server::{Server, ServerTls};
use crate::stream::{Raw, Stream};
use crate::tls;
use std::io;
use std::path::Path;
use stillpoint_migrate_wire::startup::put_ssl_request;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

/// Opens a connection, encrypted if the server's description says so; sends nothing of the session yet.
///
/// # Errors
///
/// [`ConnectError`] if the server cannot be reached, or not in the way that its description requires.
pub async fn connect(server: &Server) -> Result<Stream, ConnectError> {
    let mut raw = connect_raw(server).await.map_err(ConnectError::Unreachable)?;
    if server.tls == ServerTls::Disable {
        return Ok(Stream::Plain(raw));
    }
    match request_tls(&mut raw).await.map_err(ConnectError::Request)? {
        b'S' => {
            let encrypted = tls::encrypt(raw, server).await.map_err(ConnectError::Handshake)?;
            Ok(Stream::Tls(Box::new(encrypted.into())))
        }
        _ => Err(ConnectError::NoTls),
    }
}

async fn connect_raw(server: &Server) -> io::Result<Raw> {
    if server.is_unix_socket() {
        let path = Path::new(&server.host).join(format!(".s.PGSQL.{}", server.port));
        return Ok(Raw::Unix(UnixStream::connect(path).await?));
    }
    let stream = TcpStream::connect((server.host.as_str(), server.port)).await?;
    stream.set_nodelay(true)?;
    rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
    Ok(Raw::Tcp(stream))
}

/// Requests TLS. Reads exactly one byte: unencrypted bytes after it must not be taken as part of the TLS stream.
async fn request_tls(raw: &mut Raw) -> io::Result<u8> {
    let mut request = Vec::new();
    put_ssl_request(&mut request);
    raw.write_all(&request).await?;
    raw.read_u8().await
}
