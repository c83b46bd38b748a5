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
        };
        Ok(PolledStream { socket, readable: false, ended: false, writable: true })
    }

    /// Puts the connection into the runtime of the calling task.
    pub(crate) fn register(self) -> io::Result<Raw> {
        Ok(match self.socket {
            Socket::Tcp(stream) => Raw::Tcp(TcpStream::from_std(stream)?),
            Socket::Unix(stream) => Raw::Unix(UnixStream::from_std(stream)?),
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

    /// Returns true if a read may return something.
    #[inline]
    pub(crate) fn is_readable(&self) -> bool {
        self.readable
    }
}

impl AsFd for PolledStream {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Tcp(stream) => stream.as_fd(),
            Socket::Unix(stream) => stream.as_fd(),
        }
    }
}

/// No task is woken: the owner itself waits for the kernel. System calls bypass libc, whose calls are cancellation
/// points and cost more for that.
impl End for PolledStream {
    #[inline]
    fn poll_fill(&mut self, _: &mut Context<'_>, space: &mut [u8]) -> Poll<io::Result<usize>> {
        if !self.readable {
            return Poll::Pending;
        }
        match recv(&*self, &mut *space, RecvFlags::empty()) {
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
