//! A blocking Redis client: one command, one reply. For load, use `stillpoint measure`.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Answer of a server (RESP2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// A `+...` line or a bulk string.
    Text(String),
    /// An error, without the dash of `-...`.
    Error(String),
    /// An integer, `:...`.
    Integer(i64),
    /// The null bulk string or array.
    Nil,
    /// An array.
    Array(Vec<Reply>),
}

impl Reply {
    /// Returns the text of a string or error; panics on any other reply.
    #[track_caller]
    pub fn text(&self) -> &str {
        match self {
            Reply::Text(text) | Reply::Error(text) => text,
            other => panic!("expected a string, got {other:?}"),
        }
    }

    /// Returns the number of an integer reply; panics on any other reply.
    #[track_caller]
    pub fn integer(&self) -> i64 {
        match self {
            Reply::Integer(number) => *number,
            other => panic!("expected an integer, got {other:?}"),
        }
    }
}

/// One connection.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<TcpStream>,
}

/// Limit of nesting of a reply; with the limit of a bulk's length, an invalid stream ends in an error, not in exhausted
/// memory.
const DEPTH_MAX: u32 = 16;
const LENGTH_MAX: i64 = 512 << 20;

impl Client {
    /// Connects to 127.0.0.1; the time-out of replies is 30 s.
    ///
    /// # Errors
    /// The server does not accept the connection.
    pub fn connect(port: u16) -> io::Result<Client> {
        let stream = TcpStream::connect_timeout(&SocketAddr::from(([127, 0, 0, 1], port)), Duration::from_secs(10))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        Ok(Client { stream: BufReader::new(stream) })
    }

    /// Changes the time-out of replies.
    ///
    /// # Errors
    /// The system refuses the time limit.
    pub fn set_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        self.stream.get_ref().set_read_timeout(Some(timeout))
    }

    /// Sends one command and waits for its reply. An error *reply* is `Ok(Reply::Error)`.
    ///
    /// # Errors
    /// The connection fails, or the answer is not of the protocol.
    pub fn command<A: AsRef<[u8]>>(&mut self, words: &[A]) -> io::Result<Reply> {
        self.send(words)?;
        self.receive()
    }

    /// Sends one command without waiting.
    ///
    /// # Errors
    /// The connection fails.
    pub fn send<A: AsRef<[u8]>>(&mut self, words: &[A]) -> io::Result<()> {
        let mut request = format!("*{}\r\n", words.len()).into_bytes();
        for word in words.iter().map(AsRef::as_ref) {
            write!(request, "${}\r\n", word.len())?;
            request.extend_from_slice(word);
            request.extend_from_slice(b"\r\n");
        }
        self.stream.get_mut().write_all(&request)
    }

    /// Waits for one reply.
    ///
    /// # Errors
    /// The connection fails, or the answer is not of the protocol.
    pub fn receive(&mut self) -> io::Result<Reply> {
        read_reply(&mut self.stream, DEPTH_MAX)
    }
}

fn invalid(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not a RESP reply: {what}"))
}

fn read_reply(stream: &mut impl BufRead, depth: u32) -> io::Result<Reply> {
    let mut line = String::new();
    if stream.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let line = line.strip_suffix("\r\n").ok_or_else(|| invalid(format_args!("line without end: {line:?}")))?;
    let Some((kind, rest)) = line.split_at_checked(1) else {
        return Err(invalid("empty line"));
    };
    let number = || rest.parse::<i64>().map_err(|e| invalid(format_args!("{line:?}: {e}")));
    match kind {
        "+" => Ok(Reply::Text(rest.to_owned())),
        "-" => Ok(Reply::Error(rest.to_owned())),
        ":" => number().map(Reply::Integer),
        "$" | "*" if number()? < 0 => Ok(Reply::Nil),
        "$" | "*" if number()? > LENGTH_MAX => Err(invalid(format_args!("length {rest}"))),
        "$" => {
            let mut bytes = vec![0; number()? as usize + 2];
            stream.read_exact(&mut bytes)?;
            bytes.truncate(bytes.len() - 2);
            Ok(Reply::Text(String::from_utf8_lossy(&bytes).into_owned()))
        }
        "*" if depth == 0 => Err(invalid("nested too deeply")),
        "*" => (0..number()?).map(|_| read_reply(stream, depth - 1)).collect::<io::Result<_>>().map(Reply::Array),
        _ => Err(invalid(format_args!("{line:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(mut bytes: &[u8]) -> io::Result<Reply> {
        read_reply(&mut bytes, DEPTH_MAX)
    }

    #[test]
    fn reads_every_kind_of_reply() {
        assert_eq!(parse(b"+OK\r\n").unwrap(), Reply::Text("OK".into()));
        assert_eq!(parse(b"-ERR no\r\n").unwrap(), Reply::Error("ERR no".into()));
        assert_eq!(parse(b":-5\r\n").unwrap(), Reply::Integer(-5));
        assert_eq!(parse(b"$-1\r\n").unwrap(), Reply::Nil);
        assert_eq!(parse(b"$4\r\na\r\nb\r\n").unwrap(), Reply::Text("a\r\nb".into()));
        assert_eq!(parse(b"*2\r\n:1\r\n*0\r\n").unwrap(), Reply::Array(vec![Reply::Integer(1), Reply::Array(vec![])]));
    }

    #[test]
    fn refuses_what_is_no_reply() {
        for bytes in [&b"?\r\n"[..], b"\r\n", b"$x\r\n", b"+OK", b"$99999999999\r\n", "é\r\n".as_bytes()] {
            assert!(parse(bytes).is_err(), "{bytes:?}");
        }
        assert_eq!(parse(b"$5\r\nab").unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(parse(&b"*1\r\n".repeat(40)).is_err());
    }
}
