//! A client of servers that take and answer lines, as redis and memcached do.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::TcpStream;
use std::time::Duration;

/// A client that sends lines and reads answers.
pub struct LineClient {
    /// Its connection; what was received and is not read yet is in the buffer.
    pub stream: BufReader<TcpStream>,
}

impl LineClient {
    /// Takes over a connection; an answer must come within `limit`.
    #[track_caller]
    pub fn new(stream: TcpStream, limit: Duration) -> LineClient {
        stream.set_read_timeout(Some(limit)).expect("set a limit");
        LineClient { stream: BufReader::new(stream) }
    }

    /// Sends one request and returns one line of the answer.
    #[track_caller]
    pub fn ask(&mut self, request: &str) -> String {
        self.send(request);
        self.line()
    }

    /// Sends one request and returns one line of the answer, or an error if the server has ended.
    ///
    /// # Errors
    /// The connection has ended, or the time limit has passed.
    pub fn try_ask(&mut self, request: &str) -> std::io::Result<String> {
        self.stream.get_mut().write_all(format!("{request}\r\n").as_bytes())?;
        let mut line = String::new();
        match self.stream.read_line(&mut line)? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }

    /// Sends a request whose answer is read later.
    pub fn send(&mut self, request: &str) {
        self.stream.get_mut().write_all(format!("{request}\r\n").as_bytes()).expect("send a request");
    }

    /// Reads one line of an answer.
    #[track_caller]
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("an answer");
        assert!(!line.is_empty(), "the connection was closed");
        line.trim_end().to_owned()
    }
}
