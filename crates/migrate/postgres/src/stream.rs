//! A connection: TCP or a socket of this machine, encrypted or not.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;

/// A connection as the kernel has it.
#[derive(Debug)]
pub enum Raw {
    /// Connection over a network.
    Tcp(TcpStream),
    /// Connection over a socket of the file system.
    Unix(UnixStream),
    /// Place of a connection that is not there: nothing can be read from it, and nothing written.
    Vacant,
}

impl Raw {
    /// Returns true if there is no connection.
    #[inline]
    pub fn is_vacant(&self) -> bool {
        matches!(self, Raw::Vacant)
    }
}

/// Receiving half of a connection.
pub type ReadHalf = Box<dyn AsyncRead + Send + Unpin>;
/// Sending half of a connection.
pub type WriteHalf = Box<dyn AsyncWrite + Send + Unpin>;

/// A connection as sessions use it.
#[derive(Debug)]
pub enum Stream {
    /// Connection without encryption.
    Plain(Raw),
    /// Encrypted connection.
    Tls(Box<TlsStream<Raw>>),
}

impl Stream {
    /// Returns true if there is no connection.
    #[inline]
    pub fn is_vacant(&self) -> bool {
        matches!(self, Stream::Plain(raw) if raw.is_vacant())
    }

    /// Returns true if the connection is encrypted.
    pub fn is_tls(&self) -> bool {
        matches!(self, Stream::Tls(_))
    }

    /// Sends all bytes.
    ///
    /// # Errors
    ///
    /// An error if the connection takes no more bytes.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes).await?;
        self.flush().await
    }

    /// Socket of the connection, unless it is one of the file system.
    pub fn tcp(&self) -> Option<&TcpStream> {
        let raw = match self {
            Stream::Plain(raw) => raw,
            Stream::Tls(stream) => stream.get_ref().0,
        };
        match raw {
            Raw::Tcp(stream) => Some(stream),
            Raw::Unix(_) | Raw::Vacant => None,
        }
    }

    /// Splits the connection, so that two tasks can use it.
    pub fn into_halves(self) -> (ReadHalf, WriteHalf) {
        match self {
            Stream::Plain(Raw::Tcp(stream)) => {
                let (read, write) = stream.into_split();
                (Box::new(read), Box::new(write))
            }
            Stream::Plain(Raw::Unix(stream)) => {
                let (read, write) = stream.into_split();
                (Box::new(read), Box::new(write))
            }
            encrypted => {
                let (read, write) = tokio::io::split(encrypted);
                (Box::new(read), Box::new(write))
            }
        }
    }
}

impl AsyncRead for Raw {
    #[inline]
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Raw::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Raw::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
            // No byte will ever come: the task is woken by its other events.
            Raw::Vacant => Poll::Pending,
        }
    }
}

impl AsyncWrite for Raw {
    #[inline]
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Raw::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Raw::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
            Raw::Vacant => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The kernel delays nothing: Nagle's algorithm is off.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Raw::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Raw::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Raw::Vacant => Poll::Ready(Ok(())),
        }
    }
}

impl AsyncRead for Stream {
    #[inline]
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(raw) => Pin::new(raw).poll_read(cx, buf),
            Stream::Tls(stream) => match Pin::new(stream.as_mut()).poll_read(cx, buf) {
                // libpq and others close without TLS's close_notify.
                Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Poll::Ready(Ok(())),
                other => other,
            },
        }
    }
}

impl AsyncWrite for Stream {
    #[inline]
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(raw) => Pin::new(raw).poll_write(cx, buf),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, buf),
        }
    }

    #[inline]
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(_) => Poll::Ready(Ok(())),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(raw) => Pin::new(raw).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}
