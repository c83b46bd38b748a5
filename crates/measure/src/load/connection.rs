//! Connection of the load: its socket, its buffers, and the requests that wait for an answer.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::path::PathBuf;

use mio::event::Source;
use mio::net::{TcpStream, UnixStream};
use mio::{Interest, Registry, Token};

use crate::record::{Outcome, Sample};

/// Address of the server.
#[derive(Debug, Clone)]
pub(crate) enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// Purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Carries requests.
    Worker,
    /// Pushes the elements that blocked connections wait for.
    Feeder,
    /// Blocks in a pop.
    Blocked,
    /// Is only kept open.
    Idle,
}

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Not open; to be opened at that time.
    Down { retry_ns: u64 },
    /// The handshake is under way.
    Connecting,
    /// Open.
    Open,
}

/// Request that waits for its answer.
#[derive(Debug)]
pub(crate) struct Pending<E> {
    pub(crate) scheduled_ns: u64,
    pub(crate) late_us: u32,
    pub(crate) kind: u8,
    /// True for a measured request.
    pub(crate) measured: bool,
    /// True if it was reported as timed out; its answer is only awaited to keep the order.
    pub(crate) timed_out: bool,
    pub(crate) expect: E,
}

impl<E> Pending<E> {
    /// Makes the sample of the request when it has ended.
    pub(crate) fn sample(&self, connection: usize, t_ns: u64, outcome: Outcome) -> Sample {
        Sample {
            scheduled_ns: self.scheduled_ns,
            latency_ns: t_ns.saturating_sub(self.scheduled_ns),
            late_us: self.late_us,
            connection: connection as u32,
            kind: self.kind,
            outcome,
        }
    }
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Connection and its state.
#[derive(Debug)]
pub(crate) struct Connection<E> {
    pub(crate) role: Role,
    pub(crate) state: State,
    /// Number of times that it was opened again.
    pub(crate) epoch: u32,
    pub(crate) failures: u32,
    pub(crate) output: Vec<u8>,
    written: usize,
    pub(crate) input: Vec<u8>,
    pub(crate) pending: VecDeque<Pending<E>>,
    /// True if it gave a right answer to the check at the end.
    pub(crate) alive: bool,
    /// True while it is in the driver's list of connections with data to write.
    pub(crate) dirty: bool,
    stream: Option<Stream>,
}

impl<E> Connection<E> {
    pub(crate) fn new(role: Role) -> Self {
        Connection {
            role,
            state: State::Down { retry_ns: 0 },
            epoch: 0,
            failures: 0,
            output: Vec::new(),
            written: 0,
            input: Vec::new(),
            pending: VecDeque::new(),
            alive: false,
            dirty: false,
            stream: None,
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// Starts to connect.
    pub(crate) fn open(&mut self, address: &Address, registry: &Registry, token: Token) -> io::Result<()> {
        let mut stream = match address {
            Address::Tcp(address) => Stream::Tcp(TcpStream::connect(*address)?),
            Address::Unix(path) => Stream::Unix(UnixStream::connect(path)?),
        };
        let interest = Interest::READABLE | Interest::WRITABLE;
        match &mut stream {
            Stream::Tcp(tcp) => tcp.register(registry, token, interest)?,
            Stream::Unix(unix) => unix.register(registry, token, interest)?,
        }
        self.stream = Some(stream);
        self.state = State::Connecting;
        Ok(())
    }

    /// Returns true if the connection is established; called when the socket has become writable.
    pub(crate) fn connected(&mut self) -> io::Result<bool> {
        let open = match &self.stream {
            Some(Stream::Tcp(tcp)) => {
                tcp.take_error()?.map_or(Ok(()), Err)?;
                match tcp.peer_addr() {
                    Ok(_) => tcp.set_nodelay(true).map(|()| true)?,
                    Err(error) if error.kind() == io::ErrorKind::NotConnected => false,
                    Err(error) => return Err(error),
                }
            }
            Some(Stream::Unix(unix)) => unix.take_error()?.map_or(Ok(true), Err)?,
            None => false,
        };
        if open {
            self.state = State::Open;
            self.failures = 0;
        }
        Ok(open)
    }

    /// Closes the socket and discards partly read or written data.
    pub(crate) fn close(&mut self, retry_ns: u64) {
        self.stream = None;
        self.state = State::Down { retry_ns };
        self.output.clear();
        self.written = 0;
        self.input.clear();
        self.epoch += 1;
    }

    /// Writes as much as the kernel accepts.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        while self.is_open() && self.written < self.output.len() {
            let Some(stream) = &mut self.stream else { break };
            match stream.write(&self.output[self.written..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.written += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.written == self.output.len() {
            self.output.clear();
            self.written = 0;
        }
        Ok(())
    }

    /// Reads once; `Ok(None)` when there is nothing to read.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let Some(stream) = &mut self.stream else { return Ok(None) };
        loop {
            return match stream.read(buffer) {
                Ok(count) => Ok(Some(count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
        }
    }
}

impl Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(tcp) => tcp.read(buffer),
            Stream::Unix(unix) => unix.read(buffer),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(tcp) => tcp.write(bytes),
            Stream::Unix(unix) => unix.write(bytes),
        }
    }
}
