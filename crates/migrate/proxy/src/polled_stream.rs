//! A connection that belongs to no runtime: its owner polls it after the kernel has reported an event.

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use stillpoint_migrate_postgres::{Raw, Stream};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// One end of a session, for reads.
pub(crate) trait End {
    /// Reads available bytes into `space`; 0 means the end.
    fn poll_fill(&mut self, cx: &mut Context<'_>, space: &mut [u8]) -> Poll<io::Result<usize>>;
}

impl End for Stream {
    #[inline]
    fn poll_fill(&mut self, cx: &mut Context<'_>, space: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut buffer = ReadBuf::new(space);
        ready!(Pin::new(self).poll_read(cx, &mut buffer))?;
        Poll::Ready(Ok(buffer.filled().len()))
    }
}

#[derive(Debug)]
enum Socket {
    Tcp(std::net::TcpStream),
    Unix(StdUnixStream),
    Vacant,
}

/// A connection between two runtimes, or without any.
#[derive(Debug)]
pub(crate) struct PolledStream {
    socket: Socket,
    /// A read may return something.
    readable: bool,
    /// The peer has ended, or the connection is broken: reads report it after the bytes that came before.
    ended: bool,
    /// A write may be taken.
    writable: bool,
}

impl PolledStream {
    /// Takes a connection out of the runtime.
    pub(crate) fn from(raw: Raw) -> io::Result<PolledStream> {
        let socket = match raw {
            Raw::Tcp(stream) => Socket::Tcp(stream.into_std()?),
            Raw::Unix(stream) => Socket::Unix(stream.into_std()?),
            Raw::Vacant => return Ok(PolledStream::vacant()),
        };
        Ok(PolledStream { socket, readable: false, ended: false, writable: true })
    }

    /// Place of a connection that is not there.
    pub(crate) fn vacant() -> PolledStream {
        PolledStream { socket: Socket::Vacant, readable: false, ended: false, writable: false }
    }

    /// Returns true if the peer has sent nothing that was not read, and has not closed the connection.
    pub(crate) fn is_quiet(&self) -> bool {
        let mut byte = [0; 1];
        let peeked = self.fd().map(|fd| recv(fd, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT));
        matches!(peeked, Some(Err(Errno::AGAIN)))
    }

    /// Puts the connection into the runtime of the calling task.
    pub(crate) fn register(self) -> io::Result<Raw> {
        Ok(match self.socket {
            Socket::Tcp(stream) => Raw::Tcp(TcpStream::from_std(stream)?),
            Socket::Unix(stream) => Raw::Unix(UnixStream::from_std(stream)?),
            Socket::Vacant => Raw::Vacant,
        })
    }

    /// Records an event that the kernel reported.
    #[inline]
    pub(crate) fn record_event(&mut self, flags: EventFlags) {
        self.ended |= flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
        self.readable |= self.ended || flags.contains(EventFlags::IN);
        self.writable |= flags.intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR);
    }

    /// Returns true if a write may be taken.
    #[inline]
    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// Records that a write had no room.
    #[inline]
    pub(crate) fn mark_full(&mut self) {
        self.writable = false;
    }

    /// Descriptor of the connection, if there is one.
    #[inline]
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.socket {
            Socket::Tcp(stream) => Some(stream.as_fd()),
            Socket::Unix(stream) => Some(stream.as_fd()),
            Socket::Vacant => None,
        }
    }

    /// Returns true if a read may return something.
    #[inline]
    pub(crate) fn is_readable(&self) -> bool {
        self.readable
    }
}

/// No task is woken: the owner itself waits for the kernel. System calls bypass libc, whose calls are cancellation
/// points and cost more for that.
impl End for PolledStream {
    #[inline]
    fn poll_fill(&mut self, _: &mut Context<'_>, space: &mut [u8]) -> Poll<io::Result<usize>> {
        let Some(fd) = self.fd().filter(|_| self.readable) else { return Poll::Pending };
        match recv(fd, &mut *space, RecvFlags::empty()) {
            Ok((n, _)) => {
                // The kernel reports bytes that arrive after a short read as a new event.
                self.readable = n == space.len() || self.ended;
                Poll::Ready(Ok(n))
            }
            Err(Errno::AGAIN) => {
                self.readable = false;
                Poll::Pending
            }
            Err(error) => Poll::Ready(Err(error.into())),
        }
    }
}
