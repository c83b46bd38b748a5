//! Sockets for clients and commands.

use crate::error::StartError;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use stillpoint_host::file::{listen_in_place, remove_socket};
use stillpoint_migrate_control::{Endpoint, Origin};
use stillpoint_migrate_postgres::Raw;
use tokio::net::{TcpListener, TcpSocket, UnixListener};

/// Most connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// A place where clients connect; dropping it removes its socket from the file system.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, #[allow(dead_code, reason = "its end removes the socket")] SocketFile),
}

/// Path of a socket, removed when dropped.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        remove_socket(&self.0);
    }
}

impl Listener {
    /// Listens; the caller must be inside a runtime.
    pub(crate) fn bind(at: &Endpoint, mode: u32) -> Result<Listener, StartError> {
        let bound = match at {
            Endpoint::Tcp(address) => tcp(*address).map(Listener::Tcp),
            Endpoint::Unix(path) => unix(path, mode).map(|(listener, file)| Listener::Unix(listener, file)),
        };
        bound.map_err(|source| StartError::Listen { at: at.to_string(), source })
    }

    /// Accepts the next client.
    pub(crate) async fn accept(&self) -> io::Result<(Raw, Origin)> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                stream.set_nodelay(true)?;
                // Keepalive ends a transaction whose client's machine is gone.
                rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
                Ok((Raw::Tcp(stream), Origin::Address(peer.ip())))
            }
            Listener::Unix(listener, _) => Ok((Raw::Unix(listener.accept().await?.0), Origin::Local)),
        }
    }
}

/// Listens with SO_REUSEADDR: a successor may listen at the same address while this process serves its last sessions,
/// but only after this process has stopped listening.
fn tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Creates a socket that only `mode` may use from its first moment on.
pub(crate) fn unix(path: &Path, mode: u32) -> io::Result<(UnixListener, SocketFile)> {
    let listener = listen_in_place(path, mode)?;
    let file = SocketFile(path.to_owned());
    listener.set_nonblocking(true)?;
    Ok((UnixListener::from_std(listener)?, file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[tokio::test(flavor = "current_thread")]
    async fn a_socket_in_use_or_another_file_is_left_alone_and_a_dead_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let (listener, file) = unix(&path, 0o600).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(unix(&path, 0o600).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        let second = unix(&path, 0o666).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        drop((second, file));
        assert!(!path.exists());
        fs::write(&path, "x").unwrap();
        assert_eq!(unix(&path, 0o600).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }
}
