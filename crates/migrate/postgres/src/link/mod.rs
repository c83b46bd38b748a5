//! One connection to a server, at the level of protocol messages.
//!
//! tokio-postgres is not suitable: it has no CopyBoth, sends a Sync after every statement, and copies COPY data through its own
//! buffers. Here a replayed transaction is one batch with one Sync, COPY data passes through unchanged, and the replication
//! stream is one more mode of the same connection. Message encoding comes from `postgres-protocol`.

mod conninfo;
mod error;
mod password;
mod pooler;
mod server;
pub mod session_settings;

use crate::credential::Credential;
use crate::error::LinkError;
use crate::login::log_in;
use crate::reader::{Frame, Reader};
use crate::stream::{ReadHalf, Stream, WriteHalf};
use bytes::{Bytes, BytesMut};
use postgres_protocol::message::frontend;
use rustix::net::sockopt;
use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use stillpoint_migrate_wire::WireError;
use stillpoint_migrate_wire::backend::{self, report};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

pub use conninfo::of_database;
pub use error::ServerError;
pub use pooler::Pooler;
pub use server::{APPLICATION, Server};
pub use session_settings::SessionRights;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without traffic after which the system checks that the other machine is reachable.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// Receive buffer in bytes: limits how much of the stream of changes a server on this machine may send ahead.
const RECEIVE_BUFFER_BYTES: usize = 32 << 10;

/// Purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The connection executes statements.
    Statements,
    /// The connection executes statements, manages slots and receives the stream of changes.
    Replication,
}

/// The receiving half of a connection.
pub struct Receiver {
    stream: ReadHalf,
    reader: Reader,
    server: String,
}

/// The sending half of a connection.
pub struct Sender {
    stream: WriteHalf,
    /// Bytes to be sent next; frontend messages are appended.
    pub buffer: BytesMut,
    /// True if encryption may still hold back the end of the bytes it was given.
    held_back: bool,
    server: String,
}

/// A connection that has logged in.
pub struct Link {
    /// Half that receives messages.
    pub receiver: Receiver,
    /// Half that sends messages.
    pub sender: Sender,
    /// Process id of the server process.
    pub pid: i32,
    /// Rights of our role on the server.
    pub rights: SessionRights,
    /// True if an answer is expected; a caller that does not wait for it leaves the connection unusable.
    is_busy: bool,
}

/// One row in text form; `None` is NULL.
pub type Row = Vec<Option<String>>;

impl Receiver {
    /// Receives the next message, without notices and parameter changes.
    ///
    /// # Errors
    ///
    /// [`ServerError`] if the connection breaks, or the server answers with an error.
    pub async fn frame(&mut self) -> Result<Frame, ServerError> {
        loop {
            let frame = self.any_frame().await?;
            if !matches!(frame.tag, b'N' | b'S' | b'A') {
                return Ok(frame);
            }
        }
    }

    /// Returns the next message if it has been received already.
    ///
    /// # Errors
    ///
    /// [`ServerError`] if the connection breaks, or the server answers with an error.
    pub fn waiting(&mut self) -> Result<Option<Frame>, ServerError> {
        loop {
            match self.reader.buffered().map_err(|error| self.broken(error))? {
                Some(frame) if matches!(frame.tag, b'N' | b'S' | b'A') => {}
                other => return Ok(other),
            }
        }
    }

    /// Returns true if the next message has not been received completely.
    pub fn needs_read(&self) -> bool {
        self.reader.needs_read()
    }

    async fn any_frame(&mut self) -> Result<Frame, ServerError> {
        self.reader.next(&mut self.stream).await.map_err(|error| self.broken(error))
    }

    fn broken(&self, error: LinkError) -> ServerError {
        ServerError::link(&self.server, error)
    }

    /// Makes an error for a message that is not expected.
    pub fn protocol(&self, what: String) -> ServerError {
        ServerError::protocol(&self.server, what)
    }

    /// Makes an error from an ErrorResponse.
    pub fn sql_error(&self, body: &Bytes, doing: &str) -> ServerError {
        ServerError::sql(&self.server, report(body).unwrap_or_default(), doing)
    }
}

impl Sender {
    /// Returns true if bytes are left to send.
    pub fn has_unsent(&self) -> bool {
        self.held_back || !self.buffer.is_empty()
    }

    /// Sends the buffered bytes. If the future is dropped early, the next call sends the rest.
    ///
    /// # Errors
    ///
    /// [`ServerError`] if the connection breaks, or the server answers with an error.
    pub async fn flush(&mut self) -> Result<(), ServerError> {
        let all = async {
            self.held_back = true;
            self.stream.write_all_buf(&mut self.buffer).await?;
            self.stream.flush().await?;
            self.held_back = false;
            Ok(())
        };
        let result: io::Result<()> = all.await;
        result.map_err(|source| ServerError::Lost { server: self.server.clone(), doing: "writing", source })
    }

    /// Buffers a message; it fails only if a string contains a NUL byte.
    ///
    /// # Errors
    ///
    /// [`ServerError`] if the connection breaks, or the server answers with an error.
    pub fn put(&mut self, write: impl FnOnce(&mut BytesMut) -> io::Result<()>) -> Result<(), ServerError> {
        write(&mut self.buffer).map_err(|error| ServerError::protocol(&self.server, error))
    }
}

impl Link {
    /// Connects and logs in. The session's output has the form that both sides read in the same way.
    ///
    /// # Errors
    ///
    /// [`ServerError`] if the connection breaks, or the server answers with an error.
    pub async fn connect(server: &Server, purpose: Purpose, settings: &[(&str, &str)]) -> Result<Link, ServerError> {
        let connecting = async { Link::log_in(open(server, purpose).await?, server, purpose, settings).await };
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
        connected.map_err(|_| ServerError::TimedOut { server: server.to_string(), limit: CONNECT_TIMEOUT })?
    }

    async fn log_in(
        stream: Stream,
        server: &Server,
        purpose: Purpose,
        own: &[(&str, &str)],
    ) -> Result<Link, ServerError> {
        let name = server.to_string();
        let mut parameters = vec![
            ("user", server.user.as_str()),
            ("database", server.database.as_str()),
            ("application_name", APPLICATION),
        ];
        if purpose == Purpose::Replication {
            parameters.push(("replication", "database"));
        }
        parameters.extend(session_settings::at_login(own));
        let mut packet = BytesMut::new();
        frontend::startup_message(parameters, &mut packet).map_err(|error| ServerError::protocol(&name, error))?;
        let credential = Credential { login: server.login().await?, stored: None };
        let ready = log_in(stream, &packet, &server.user, &credential).await;
        let ready = ready.map_err(|error| ServerError::login(&name, error))?;
        let (read, write) = ready.stream.into_halves();
        let mut link = Link {
            receiver: Receiver { stream: read, reader: Reader::for_bulk(&ready.leftover), server: name.clone() },
            sender: Sender { stream: write, buffer: BytesMut::with_capacity(64 << 10), held_back: false, server: name },
            pid: ready.key.pid.cast_signed(),
            rights: SessionRights { major: 0, is_superuser: false, may_replicate: false },
            is_busy: false,
        };
        let value = |name: &str| ready.parameters.get(name).and_then(|value| std::str::from_utf8(value).ok());
        let major = value("server_version").map_or(0, leading_number);
        let is_superuser = value("is_superuser") == Some("on");
        let is_bytes = value("server_encoding") == Some("SQL_ASCII");
        let may_replicate = is_superuser || link.tries_replication_role(server).await?;
        link.rights = SessionRights { major, is_superuser, may_replicate };
        match session_settings::after_login(link.rights, is_bytes, own) {
            Some(rest) => link.query(&rest).await.map(|_| link),
            None => Ok(link),
        }
    }

    /// Returns true if our role, which is no superuser, may keep triggers from acting on its sessions. A server that refused it once
    /// is not asked again.
    async fn tries_replication_role(&mut self, server: &Server) -> Result<bool, ServerError> {
        static REFUSED: Mutex<BTreeSet<(String, String)>> = Mutex::new(BTreeSet::new());
        let key = (server.to_string(), server.user.clone());
        if REFUSED.lock().unwrap_or_else(PoisonError::into_inner).contains(&key) {
            return Ok(false);
        }
        match self.query(&session_settings::trial_of_replication_role()).await {
            Ok(_) => Ok(true),
            Err(ServerError::Sql { .. }) => {
                REFUSED.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Executes statements by the simple protocol; returns the rows of the last one that has rows. Several statements in one
    /// text are one transaction.
    ///
    /// # Errors
    ///
    /// [`ServerError`] if the connection breaks, or the server answers with an error.
    pub async fn query(&mut self, sql: &str) -> Result<Vec<Row>, ServerError> {
        self.query_secret(sql, sql).await
    }

    /// Executes statements that hold a secret: errors show `doing` instead of the statements.
    ///
    /// # Errors
    ///
    /// An error if the server answers with one, or cannot be asked.
    pub async fn query_secret(&mut self, sql: &str, doing: &str) -> Result<Vec<Row>, ServerError> {
        if std::mem::replace(&mut self.is_busy, true) {
            return Err(self.receiver.broken(LinkError::Io(io::ErrorKind::Interrupted.into())));
        }
        self.sender.put(|buffer| frontend::query(sql, buffer))?;
        self.sender.flush().await?;
        let mut rows = Vec::new();
        let mut failure = None;
        loop {
            let frame = self.receiver.frame().await?;
            match frame.tag {
                b'T' => rows.clear(),
                b'D' => rows.push(row(&frame.body).map_err(|_| self.receiver.protocol("a broken row".into()))?),
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
    ///
    /// # Errors
    ///
    /// [`ServerError`] if the connection breaks, or the server answers with an error.
    pub async fn value(&mut self, sql: &str) -> Result<Option<String>, ServerError> {
        Ok(self.query(sql).await?.into_iter().next().and_then(|row| row.into_iter().next().flatten()))
    }

    /// Returns the first column of the first row; it is an error if there is none.
    ///
    /// # Errors
    ///
    /// [`ServerError`] if the connection breaks, or the server answers with an error.
    pub async fn text(&mut self, sql: &str) -> Result<String, ServerError> {
        let value = self.value(sql).await?;
        value.ok_or_else(|| self.receiver.protocol(format!("no row in answer to {sql}")))
    }

    /// Begins a COPY (in either direction), or the stream of changes.
    ///
    /// # Errors
    ///
    /// [`ServerError`] if the connection breaks, or the server answers with an error.
    pub async fn begin_copy(&mut self, sql: &str) -> Result<(), ServerError> {
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
    ///
    /// # Errors
    ///
    /// [`ServerError`] if the connection breaks, or the server answers with an error.
    pub async fn copied(&mut self) -> Result<Option<Bytes>, ServerError> {
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
    ///
    /// # Errors
    ///
    /// [`ServerError`] if the connection breaks, or the server answers with an error.
    pub async fn copy(&mut self, piece: &Bytes) -> Result<(), ServerError> {
        self.sender.put(|buffer| {
            frontend::CopyData::new(piece.as_ref())?.write(buffer);
            Ok(())
        })?;
        if self.sender.buffer.len() >= 128 << 10 { self.sender.flush().await } else { Ok(()) }
    }

    /// Ends a COPY to the server.
    ///
    /// # Errors
    ///
    /// [`ServerError`] if the connection breaks, or the server answers with an error.
    pub async fn end_copy(&mut self) -> Result<(), ServerError> {
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

    async fn read_until_ready(&mut self) -> Result<(), ServerError> {
        while self.receiver.frame().await?.tag != b'Z' {}
        Ok(())
    }
}

/// Opens a connection.
async fn open(server: &Server, purpose: Purpose) -> Result<Stream, ServerError> {
    let name = server.to_string();
    let stream = crate::connect(&server.address).await.map_err(|error| ServerError::connect(&name, error))?;
    if let Some(socket) = stream.tcp() {
        set_up(socket, purpose).map_err(|source| ServerError::Connect { server: name, source })?;
    }
    Ok(stream)
}

fn set_up(socket: &TcpStream, purpose: Purpose) -> io::Result<()> {
    set_keepalive(socket)?;
    if purpose == Purpose::Replication && is_local_connection(socket.local_addr()?, socket.peer_addr()?) {
        shrink_receive_buffer(socket)?;
    }
    Ok(())
}

/// Sets the times of keepalive: a peer whose machine or network is gone sends nothing, so the system probes it, and closes the
/// connection if it does not answer.
fn set_keepalive(stream: &TcpStream) -> io::Result<()> {
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

/// The major version of `17.2 (Debian 17.2-1)` or `18beta1`; 0 if the text is not a version.
fn leading_number(version: &str) -> u32 {
    let end = version.find(|c: char| !c.is_ascii_digit()).unwrap_or(version.len());
    version[..end].parse().unwrap_or(0)
}

/// The columns of a DataRow.
fn row(body: &[u8]) -> Result<Row, WireError> {
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    Ok(backend::row(body)?.into_iter().map(|value| value.map(text)).collect())
}

/// Text of a column, empty for NULL.
pub fn text(row: &Row, at: usize) -> String {
    row.get(at).cloned().flatten().unwrap_or_default()
}

/// Number in a column, 0 for NULL.
pub fn number<T: FromStr + Default>(row: &Row, at: usize) -> T {
    text(row, at).parse().unwrap_or_default()
}

/// Formats a string constant of SQL.
pub fn literal(text: &str) -> String {
    postgres_protocol::escape::escape_literal(text).trim_start().to_owned()
}

/// Formats a quoted identifier of SQL.
pub fn identifier(name: &str) -> String {
    postgres_protocol::escape::escape_identifier(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    #[test]
    fn rows_are_read_and_broken_ones_refused() {
        let good = b"\0\x02\0\0\0\x01x\xff\xff\xff\xff";
        assert_eq!(row(good).unwrap(), [Some("x".into()), None]);
        for end in 0..good.len() {
            assert!(row(&good[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn a_server_says_who_it_is() {
        for (version, major) in [("17.2 (Debian 17.2-1)", 17), ("18beta1", 18), ("15", 15), ("", 0), ("x", 0)] {
            assert_eq!(leading_number(version), major, "{version}");
        }
    }

    /// Counts the bytes that a server can send in small pieces, as it sends changes, to a link that is not read.
    async fn unread(purpose: Purpose) -> usize {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Server::parse("source", &format!("host=127.0.0.1 port={port} user=u dbname=d"), None).unwrap();
        let (stream, accepted) = tokio::join!(open(&server, purpose), listener.accept());
        let (mut stream, (theirs, _)) = (stream.unwrap(), accepted.unwrap());
        theirs.set_nodelay(true).unwrap();
        while theirs.writable().await.is_ok() {
            if theirs.try_write(&[7; 100]).is_err() {
                break;
            }
        }
        // One read takes exactly what has arrived: nothing else runs on this thread before it.
        stream.read_buf(&mut BytesMut::with_capacity(64 << 20)).await.unwrap()
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
