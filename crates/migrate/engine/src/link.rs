//! One connection to a server, at the level of protocol messages.
//!
//! tokio-postgres is not suitable: it has no CopyBoth, sends a Sync after every statement, and copies COPY data through its own
//! buffers. Here a replayed transaction is one batch with one Sync, COPY data passes through unchanged, and the replication
//! stream is one more mode of the same connection. Login and message encoding come from `postgres-protocol`.

use crate::server::{Address, Server};
use crate::{Error, session_settings};
use bytes::{Buf, Bytes, BytesMut};
use postgres_protocol::authentication::{md5_hash, sasl};
use postgres_protocol::message::frontend;
use rustix::net::sockopt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use stillpoint_migrate_wire::backend::{Report, report, without_values};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

/// Maximum size in bytes of a row or message of the protocol.
const MESSAGE_MAX: usize = 1 << 30;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without traffic after which the system checks that the other machine is reachable.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// Receive buffer in bytes: limits how much of the stream of changes a server on this machine may send ahead.
const RECEIVE_BUFFER_BYTES: usize = 32 << 10;

/// Purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The connection executes statements.
    Statements,
    /// The connection executes statements, manages slots and receives the stream of changes.
    Replication,
}

/// A message from the server: its tag, and its contents after the length.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) tag: u8,
    pub(crate) body: Bytes,
}

/// The receiving half of a connection.
pub(crate) struct Receiver {
    stream: Box<dyn AsyncRead + Send + Unpin>,
    buffer: BytesMut,
    server: String,
}

/// The sending half of a connection.
pub(crate) struct Sender {
    stream: Box<dyn AsyncWrite + Send + Unpin>,
    /// Bytes to be sent next; frontend messages are appended.
    pub(crate) buffer: BytesMut,
    /// True if encryption may still hold back the end of the bytes it was given.
    held_back: bool,
    server: String,
}

/// A connection that has logged in.
pub(crate) struct Link {
    pub(crate) receiver: Receiver,
    pub(crate) sender: Sender,
    /// Process id of the server process.
    pub(crate) pid: i32,
    /// True if an answer is expected; a caller that does not wait for it leaves the connection unusable.
    is_busy: bool,
}

/// One row in text form; `None` is NULL.
pub(crate) type Row = Vec<Option<String>>;

impl Receiver {
    /// Receives the next message, without notices and parameter changes.
    pub(crate) async fn frame(&mut self) -> Result<Frame, Error> {
        loop {
            let frame = self.any_frame().await?;
            if !matches!(frame.tag, b'N' | b'S' | b'A') {
                return Ok(frame);
            }
        }
    }

    /// Returns the next message if it has been received already.
    pub(crate) fn waiting(&mut self) -> Result<Option<Frame>, Error> {
        loop {
            match self.buffered()? {
                Some(frame) if matches!(frame.tag, b'N' | b'S' | b'A') => {}
                other => return Ok(other),
            }
        }
    }

    /// Returns true if the next message has not been received completely.
    pub(crate) fn needs_read(&self) -> bool {
        let length = |head: &[u8]| u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        self.buffer.get(..5).is_none_or(|head| self.buffer.len() <= length(head))
    }

    async fn any_frame(&mut self) -> Result<Frame, Error> {
        loop {
            if let Some(frame) = self.buffered()? {
                return Ok(frame);
            }
            self.buffer.reserve(64 << 10);
            match self.stream.read_buf(&mut self.buffer).await {
                Ok(0) => return Err(self.connection_lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(error) => return Err(self.connection_lost(error)),
            }
        }
    }

    fn buffered(&mut self) -> Result<Option<Frame>, Error> {
        if self.buffer.len() < 5 {
            return Ok(None);
        }
        let length = u32::from_be_bytes([self.buffer[1], self.buffer[2], self.buffer[3], self.buffer[4]]) as usize;
        if !(4..MESSAGE_MAX).contains(&length) {
            return Err(self.protocol(format!("a message of {length} bytes")));
        }
        if self.buffer.len() <= length {
            self.buffer.reserve(length + 1 - self.buffer.len());
            return Ok(None);
        }
        let mut whole = self.buffer.split_to(length + 1).freeze();
        let tag = whole.get_u8();
        whole.advance(4);
        Ok(Some(Frame { tag, body: whole }))
    }

    pub(crate) fn protocol(&self, what: String) -> Error {
        Error::Protocol { server: self.server.clone(), what }
    }

    fn connection_lost(&self, source: io::Error) -> Error {
        Error::Lost { server: self.server.clone(), doing: "reading".into(), source }
    }

    /// Makes an error from an ErrorResponse.
    pub(crate) fn sql_error(&self, body: &Bytes, doing: &str) -> Error {
        let Report { code, message, detail, .. } = report(body).unwrap_or_default();
        let message = without_values(&code, &message, &detail);
        let mut doing: String = doing.chars().take(200).collect();
        if doing.is_empty() {
            doing = "connecting".into();
        }
        Error::Sql { server: self.server.clone(), doing, code, message }
    }
}

impl Sender {
    /// Returns true if bytes are left to send.
    pub(crate) fn has_unsent(&self) -> bool {
        self.held_back || !self.buffer.is_empty()
    }

    /// Sends the buffered bytes. If the future is dropped early, the next call sends the rest.
    pub(crate) async fn flush(&mut self) -> Result<(), Error> {
        let all = async {
            self.held_back = true;
            self.stream.write_all_buf(&mut self.buffer).await?;
            self.stream.flush().await?;
            self.held_back = false;
            Ok(())
        };
        let result: io::Result<()> = all.await;
        result.map_err(|source| Error::Lost { server: self.server.clone(), doing: "writing".into(), source })
    }

    /// Buffers a message; it fails only if a string contains a NUL byte.
    pub(crate) fn put(&mut self, write: impl FnOnce(&mut BytesMut) -> io::Result<()>) -> Result<(), Error> {
        write(&mut self.buffer)
            .map_err(|error| Error::Protocol { server: self.server.clone(), what: error.to_string() })
    }
}

impl Link {
    /// Connects and logs in. The session's output has the form that both sides read in the same way.
    pub(crate) async fn connect(server: &Server, purpose: Purpose, settings: &[(&str, &str)]) -> Result<Link, Error> {
        let connecting = async {
            let mut link = Link::open(server, purpose).await?;
            link.log_in(server, purpose, settings).await?;
            Ok(link)
        };
        tokio::time::timeout(CONNECT_TIMEOUT, connecting).await.unwrap_or_else(|_| {
            Err(Error::TimedOut { what: format!("connecting to {server}"), limit: CONNECT_TIMEOUT, who: Vec::new() })
        })
    }

    async fn open(server: &Server, purpose: Purpose) -> Result<Link, Error> {
        type Halves = (Box<dyn AsyncRead + Send + Unpin>, Box<dyn AsyncWrite + Send + Unpin>);
        let opened: io::Result<Halves> = match &server.address {
            Address::Tcp(host, port) => {
                let stream = TcpStream::connect((host.as_str(), *port)).await.and_then(|stream| {
                    stream.set_nodelay(true)?;
                    enable_keepalive(&stream)?;
                    if purpose == Purpose::Replication && is_local_connection(stream.local_addr()?, stream.peer_addr()?)
                    {
                        shrink_receive_buffer(&stream)?;
                    }
                    Ok(stream)
                });
                match stream {
                    Ok(stream) if server.is_encrypted() => {
                        let (read, write) = tokio::io::split(start_tls(stream, server).await?);
                        Ok((Box::new(read) as _, Box::new(write) as _))
                    }
                    Ok(stream) => {
                        let (read, write) = stream.into_split();
                        Ok((Box::new(read) as _, Box::new(write) as _))
                    }
                    Err(error) => Err(error),
                }
            }
            Address::Unix(path) => UnixStream::connect(path).await.map(|stream| {
                let (read, write) = stream.into_split();
                (Box::new(read) as _, Box::new(write) as _)
            }),
        };
        let (read, write) = opened.map_err(|source| Error::Connect { server: server.to_string(), source })?;
        let name = server.to_string();
        Ok(Link {
            receiver: Receiver { stream: read, buffer: BytesMut::with_capacity(64 << 10), server: name.clone() },
            sender: Sender { stream: write, buffer: BytesMut::with_capacity(64 << 10), held_back: false, server: name },
            pid: 0,
            is_busy: false,
        })
    }

    async fn log_in(&mut self, server: &Server, purpose: Purpose, own: &[(&str, &str)]) -> Result<(), Error> {
        let mut parameters = vec![
            ("user", server.user.as_str()),
            ("database", server.database.as_str()),
            ("application_name", crate::APPLICATION),
        ];
        if purpose == Purpose::Replication {
            parameters.push(("replication", "database"));
        }
        parameters.extend(session_settings::at_login(own));
        self.sender.put(|buffer| frontend::startup_message(parameters, buffer))?;
        self.sender.flush().await?;
        let (mut scram, mut major, mut superuser, mut is_bytes) = (None, 0, false, false);
        loop {
            let frame = self.receiver.any_frame().await?;
            match frame.tag {
                b'R' => self.authenticate(server, &frame.body, &mut scram).await?,
                b'S' => match parameter(&frame.body) {
                    Some(("server_version", version)) => major = leading_number(version),
                    Some(("is_superuser", value)) => superuser = value == "on",
                    Some(("server_encoding", value)) => is_bytes = value == "SQL_ASCII",
                    _ => {}
                },
                b'N' => {}
                b'K' if frame.body.len() >= 4 => self.pid = (&frame.body[..4]).get_i32(),
                b'Z' => break,
                b'E' => return Err(self.receiver.sql_error(&frame.body, "")),
                tag => return Err(self.receiver.protocol(format!("`{}` during login", char::from(tag)))),
            }
        }
        match session_settings::after_login(major, superuser, is_bytes, own) {
            Some(rest) => self.query(&rest).await.map(drop),
            None => Ok(()),
        }
    }

    async fn authenticate(
        &mut self,
        server: &Server,
        body: &Bytes,
        scram: &mut Option<sasl::ScramSha256>,
    ) -> Result<(), Error> {
        let broken = |error: io::Error| Error::Protocol { server: server.to_string(), what: error.to_string() };
        let unsupported = |method: &str| Error::Authentication { server: server.to_string(), method: method.into() };
        let password = || server.password.clone().ok_or_else(|| unsupported("password (and no password was given)"));
        let mut rest = body.clone();
        if rest.len() < 4 {
            return Err(self.receiver.protocol("a short authentication request".into()));
        }
        match rest.get_i32() {
            0 => return Ok(()),
            3 => {
                let password = password()?;
                self.sender.put(|buffer| frontend::password_message(&password, buffer))?;
            }
            5 if rest.len() == 4 => {
                let salt = [rest[0], rest[1], rest[2], rest[3]];
                let hash = md5_hash(server.user.as_bytes(), &password()?, salt);
                self.sender.put(|buffer| frontend::password_message(hash.as_bytes(), buffer))?;
            }
            10 => {
                if !rest.split(|byte| *byte == 0).any(|mechanism| mechanism == sasl::SCRAM_SHA_256.as_bytes()) {
                    return Err(unsupported("an unknown SASL"));
                }
                let exchange = sasl::ScramSha256::new(&password()?, sasl::ChannelBinding::unsupported());
                let first = exchange.message().to_vec();
                *scram = Some(exchange);
                self.sender.put(|buffer| frontend::sasl_initial_response(sasl::SCRAM_SHA_256, &first, buffer))?;
            }
            11 => {
                let exchange = scram.as_mut().ok_or_else(|| unsupported("SASL out of order"))?;
                exchange.update(&rest).map_err(broken)?;
                let response = exchange.message().to_vec();
                self.sender.put(|buffer| frontend::sasl_response(&response, buffer))?;
            }
            12 => {
                let exchange = scram.as_mut().ok_or_else(|| unsupported("SASL out of order"))?;
                return exchange.finish(&rest).map_err(broken);
            }
            7 | 8 => return Err(unsupported("GSSAPI")),
            other => return Err(unsupported(&format!("method {other}"))),
        }
        self.sender.flush().await
    }

    /// Executes statements by the simple protocol; returns the rows of the last one that has rows. Several statements in one
    /// text are one transaction.
    pub(crate) async fn query(&mut self, sql: &str) -> Result<Vec<Row>, Error> {
        self.query_secret(sql, sql).await
    }

    /// Executes statements that hold a secret: errors show `doing` instead of the statements.
    ///
    /// # Errors
    ///
    /// An error if the server answers with one, or cannot be asked.
    pub(crate) async fn query_secret(&mut self, sql: &str, doing: &str) -> Result<Vec<Row>, Error> {
        if std::mem::replace(&mut self.is_busy, true) {
            return Err(self.receiver.connection_lost(io::ErrorKind::Interrupted.into()));
        }
        self.sender.put(|buffer| frontend::query(sql, buffer))?;
        self.sender.flush().await?;
        let mut rows = Vec::new();
        let mut failure = None;
        loop {
            let frame = self.receiver.frame().await?;
            match frame.tag {
                b'T' => rows.clear(),
                b'D' => rows.push(row(&frame.body).ok_or_else(|| self.receiver.protocol("a broken row".into()))?),
                b'E' => failure = failure.or(Some(self.receiver.sql_error(&frame.body, doing))),
                b'Z' => {
                    self.is_busy = false;
                    return failure.map_or(Ok(rows), Err);
                }
                b'C' | b'I' | b'n' => {}
                tag => return Err(self.receiver.protocol(format!("`{}` after {doing}", char::from(tag)))),
            }
        }
    }

    /// Returns the first column of the first row.
    pub(crate) async fn value(&mut self, sql: &str) -> Result<Option<String>, Error> {
        Ok(self.query(sql).await?.into_iter().next().and_then(|row| row.into_iter().next().flatten()))
    }

    /// Returns the first column of the first row; it is an error if there is none.
    pub(crate) async fn text(&mut self, sql: &str) -> Result<String, Error> {
        let value = self.value(sql).await?;
        value.ok_or_else(|| self.receiver.protocol(format!("no row in answer to {sql}")))
    }

    /// Begins a COPY (in either direction), or the stream of changes.
    pub(crate) async fn begin_copy(&mut self, sql: &str) -> Result<(), Error> {
        self.sender.put(|buffer| frontend::query(sql, buffer))?;
        self.sender.flush().await?;
        let frame = self.receiver.frame().await?;
        match frame.tag {
            b'G' | b'H' | b'W' => Ok(()),
            b'E' => {
                let error = self.receiver.sql_error(&frame.body, sql);
                self.read_until_ready().await?;
                Err(error)
            }
            tag => Err(self.receiver.protocol(format!("`{}` after {sql}", char::from(tag)))),
        }
    }

    /// Receives the next piece of a COPY; `None` at its end.
    pub(crate) async fn copied(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            let frame = self.receiver.frame().await?;
            match frame.tag {
                b'd' => return Ok(Some(frame.body)),
                b'c' | b'C' => {}
                b'Z' => return Ok(None),
                b'E' => {
                    let error = self.receiver.sql_error(&frame.body, "COPY");
                    self.read_until_ready().await?;
                    return Err(error);
                }
                tag => return Err(self.receiver.protocol(format!("`{}` in a COPY", char::from(tag)))),
            }
        }
    }

    /// Buffers a piece of a COPY to the server, and sends when there is enough data.
    pub(crate) async fn copy(&mut self, piece: &Bytes) -> Result<(), Error> {
        self.sender.put(|buffer| {
            frontend::CopyData::new(piece.as_ref())?.write(buffer);
            Ok(())
        })?;
        if self.sender.buffer.len() >= 128 << 10 { self.sender.flush().await } else { Ok(()) }
    }

    /// Ends a COPY to the server.
    pub(crate) async fn end_copy(&mut self) -> Result<(), Error> {
        frontend::copy_done(&mut self.sender.buffer);
        self.sender.flush().await?;
        let mut failure = None;
        loop {
            let frame = self.receiver.frame().await?;
            match frame.tag {
                b'E' => failure = failure.or(Some(self.receiver.sql_error(&frame.body, "COPY"))),
                b'Z' => return failure.map_or(Ok(()), Err),
                b'C' => {}
                tag => return Err(self.receiver.protocol(format!("`{}` after a COPY", char::from(tag)))),
            }
        }
    }

    async fn read_until_ready(&mut self) -> Result<(), Error> {
        while self.receiver.frame().await?.tag != b'Z' {}
        Ok(())
    }
}

/// Asks the server for TLS. If the server refuses, the connection is not used.
async fn start_tls(
    mut stream: TcpStream,
    server: &Server,
) -> Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static, Error> {
    let failed = |why: String| Error::Tls { server: server.to_string(), why };
    let mut request = BytesMut::new();
    frontend::ssl_request(&mut request);
    let mut answer = [0];
    stream.write_all(&request).await.map_err(|error| failed(error.to_string()))?;
    // Read exactly one byte: unencrypted bytes after it must not be taken as part of the TLS stream.
    stream.read_exact(&mut answer).await.map_err(|error| failed(error.to_string()))?;
    match answer[0] {
        b'S' => stillpoint_migrate_proxy::encrypt(stream, &server.to_proxy_server()).await.map_err(failed),
        _ => Err(failed("it does not offer TLS".into())),
    }
}

/// Enables keepalive: a peer whose machine or network is gone sends nothing, so the system probes it, and closes the connection
/// if it does not answer.
fn enable_keepalive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_IDLE / 5)?;
    sockopt::set_tcp_keepcnt(stream, 5)?;
    Ok(sockopt::set_tcp_user_timeout(stream, 2 * KEEPALIVE_IDLE.as_millis() as u32)?)
}

/// Returns true if both ends are on this machine, where a small window costs nothing.
fn is_local_connection(ours: SocketAddr, theirs: SocketAddr) -> bool {
    ours.ip() == theirs.ip() || theirs.ip().is_loopback()
}

/// Makes the receive window small. A server sends each change separately, and with a large window each passes the whole network
/// stack in the server's time: two thirds of its time for a stream. If the window is full, changes are joined, and pass
/// together when we read.
fn shrink_receive_buffer(stream: &TcpStream) -> io::Result<()> {
    Ok(sockopt::set_socket_recv_buffer_size(stream, RECEIVE_BUFFER_BYTES)?)
}

/// Name and value of a ParameterStatus.
fn parameter(body: &[u8]) -> Option<(&str, &str)> {
    let (name, value) = std::str::from_utf8(body).ok()?.split_once('\0')?;
    Some((name, value.trim_end_matches('\0')))
}

/// The major version of `17.2 (Debian 17.2-1)` or `18beta1`; 0 if the text is not a version.
fn leading_number(version: &str) -> u32 {
    let end = version.find(|c: char| !c.is_ascii_digit()).unwrap_or(version.len());
    version[..end].parse().unwrap_or(0)
}

/// The columns of a DataRow.
fn row(body: &Bytes) -> Option<Row> {
    let mut rest = body.clone();
    let columns = rest.try_get_u16().ok()?;
    let mut row = Vec::with_capacity(usize::from(columns));
    for _ in 0..columns {
        let length = rest.try_get_i32().ok()?;
        let Ok(length) = usize::try_from(length) else {
            row.push(None);
            continue;
        };
        if rest.len() < length {
            return None;
        }
        row.push(Some(String::from_utf8_lossy(&rest.split_to(length)).into_owned()));
    }
    rest.is_empty().then_some(row)
}

/// Formats a string constant of SQL.
pub(crate) fn literal(text: &str) -> String {
    postgres_protocol::escape::escape_literal(text).trim_start().to_owned()
}

/// Formats a quoted identifier of SQL.
pub(crate) fn identifier(name: &str) -> String {
    postgres_protocol::escape::escape_identifier(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_and_broken_ones_refused() {
        let good = Bytes::from_static(b"\0\x02\0\0\0\x01x\xff\xff\xff\xff");
        assert_eq!(row(&good), Some(vec![Some("x".into()), None]));
        for end in 0..good.len() {
            assert_eq!(row(&good.slice(..end)), None, "cut at {end}");
        }
    }

    #[test]
    fn a_server_says_who_it_is() {
        assert_eq!(
            parameter(b"server_version\x0017.2 (Debian 17.2-1)\0"),
            Some(("server_version", "17.2 (Debian 17.2-1)"))
        );
        assert_eq!((parameter(b"is_superuser"), parameter(b"\xff\0\0")), (None, None));
        for (version, major) in [("17.2 (Debian 17.2-1)", 17), ("18beta1", 18), ("15", 15), ("", 0), ("x", 0)] {
            assert_eq!(leading_number(version), major, "{version}");
        }
    }

    #[test]
    fn only_a_whole_message_need_not_be_waited_for() {
        let message = b"Z\0\0\0\x05I";
        for end in 0..=message.len() {
            let (stream, buffer) = (Box::new(tokio::io::empty()), BytesMut::from(&message[..end]));
            let mut receiver = Receiver { stream, buffer, server: String::new() };
            assert_eq!(receiver.needs_read(), end < message.len(), "{end} bytes");
            assert_eq!(receiver.waiting().unwrap().is_none(), end < message.len(), "{end} bytes");
        }
    }

    /// Counts the bytes that a server can send in small pieces, as it sends changes, to a link that is not read.
    async fn unread(purpose: Purpose) -> usize {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Server::parse("source", &format!("host=127.0.0.1 port={port} user=u dbname=d"), None).unwrap();
        let (link, accepted) = tokio::join!(Link::open(&server, purpose), listener.accept());
        let (mut link, (theirs, _)) = (link.unwrap(), accepted.unwrap());
        theirs.set_nodelay(true).unwrap();
        while theirs.writable().await.is_ok() {
            if theirs.try_write(&[7; 100]).is_err() {
                break;
            }
        }
        // One read takes exactly what has arrived: nothing else runs on this thread before it.
        link.receiver.buffer.reserve(64 << 20);
        link.receiver.stream.read_buf(&mut link.receiver.buffer).await.unwrap()
    }

    #[tokio::test]
    async fn changes_wait_at_the_server_for_one_another() {
        let (changes, answers) = (unread(Purpose::Replication).await, unread(Purpose::Statements).await);
        assert!(
            changes <= 3 * RECEIVE_BUFFER_BYTES && changes < answers,
            "{changes} bytes of changes, {answers} of answers"
        );
    }

    #[test]
    fn only_a_server_on_this_machine_gets_a_narrow_window() {
        let near = |ours: &str, theirs: &str| is_local_connection(ours.parse().unwrap(), theirs.parse().unwrap());
        assert!(near("127.0.0.1:9", "127.0.0.1:5432") && near("[::1]:9", "[::1]:5432"));
        assert!(near("10.0.0.5:9", "10.0.0.5:5432"));
        assert!(!near("10.0.0.5:9", "10.0.0.6:5432"));
    }

    #[tokio::test]
    async fn what_encryption_holds_back_is_sent_too() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        let mut sender = Sender {
            // Like encryption, this holds back bytes until it is flushed.
            stream: Box::new(tokio::io::BufWriter::with_capacity(4096, ours)),
            buffer: BytesMut::from(&[7; 1000][..]),
            held_back: false,
            server: String::new(),
        };
        // The future is dropped early, because the other end does not read yet.
        tokio::time::timeout(Duration::from_millis(20), sender.flush()).await.unwrap_err();
        assert!(sender.buffer.is_empty() && sender.has_unsent());
        let mut got = vec![0; 1000];
        let (sent, read) = tokio::join!(sender.flush(), theirs.read_exact(&mut got));
        sent.unwrap();
        assert_eq!(read.unwrap(), 1000);
        assert!(!sender.has_unsent() && got == [7; 1000]);
    }

    #[test]
    fn names_and_texts_are_quoted() {
        assert_eq!(identifier("a\"b"), "\"a\"\"b\"");
        assert_eq!(literal("it's"), "'it''s'");
        assert_eq!(literal("a\\b"), "E'a\\\\b'");
    }
}
