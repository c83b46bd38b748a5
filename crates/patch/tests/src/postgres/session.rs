//! A connection to PostgreSQL: simple queries, and no layer between the test and the answer that could repair it.

use crate::wait;
use std::io::{BufReader, Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;

/// Version 3.0 of the protocol.
const PROTOCOL: i32 = 196_608;

/// Answer to a statement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// Names of the columns.
    pub columns: Vec<String>,
    /// The rows, NULL as `None`.
    pub rows: Vec<Vec<Option<String>>>,
}

impl Answer {
    /// Returns the first column of the first row; empty if there is none.
    pub fn text(&self) -> &str {
        self.rows.first().and_then(|row| row.first()).and_then(Option::as_deref).unwrap_or_default()
    }

    /// Returns the complete answer, for effects anywhere in it.
    pub fn all(&self) -> String {
        let cell = |cell: &Option<String>| cell.clone().unwrap_or_default();
        let rows = self.rows.iter().map(|row| row.iter().map(cell).collect::<Vec<_>>().join("|"));
        [self.columns.join("|")].into_iter().chain(rows).collect::<Vec<_>>().join("\n")
    }
}

/// One connection, one server process.
#[derive(Debug)]
pub struct Session {
    stream: BufReader<TcpStream>,
    pid: i32,
    /// Names of channels with a notification.
    notified: Vec<String>,
}

impl Session {
    /// Connects to the database `postgres` as its superuser.
    pub fn connect(port: u16) -> Result<Session> {
        Session::connect_as(port, "postgres")
    }

    /// Connects as another user; a refusal of the server is the error.
    pub fn connect_as(port: u16, user: &str) -> Result<Session> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(wait::WAIT_TIMEOUT))?;
        stream.set_nodelay(true)?;
        let mut session = Session { stream: BufReader::new(stream), pid: 0, notified: Vec::new() };
        let words = ["user", user, "database", "postgres", "application_name", "stillpoint"];
        let body: Vec<u8> = words.iter().flat_map(|w| w.bytes().chain([0])).chain([0]).collect();
        let mut message = (body.len() as i32 + 8).to_be_bytes().to_vec();
        message.extend(PROTOCOL.to_be_bytes());
        message.extend(body);
        session.stream.get_mut().write_all(&message)?;
        session.answer().map_err(Error::other)?;
        Ok(session)
    }

    /// Returns the id of the server process of this connection.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Runs a statement; an error of the server, or of the connection, as text.
    pub fn ask(&mut self, sql: &str) -> std::result::Result<Answer, String> {
        let mut message = vec![b'Q'];
        message.extend((sql.len() as i32 + 5).to_be_bytes());
        message.extend(sql.bytes().chain([0]));
        self.stream.get_mut().write_all(&message).map_err(|e| format!("connection lost: {e}"))?;
        self.answer()
    }

    /// Waits for a notification on a channel that this session listens to.
    pub fn notification(&mut self) -> Result<String> {
        while self.notified.is_empty() {
            let (kind, body) = self.message()?;
            self.note(kind, &body);
        }
        Ok(self.notified.remove(0))
    }

    fn answer(&mut self) -> std::result::Result<Answer, String> {
        let mut answer = Answer::default();
        let mut failed: Option<String> = None;
        loop {
            let (kind, body) = self.message().map_err(|e| match &failed {
                Some(said) => said.clone(),
                None => format!("connection lost: {e}"),
            })?;
            match kind {
                b'T' => answer.columns = columns(&body),
                b'D' => answer.rows.push(row(&body)),
                b'E' => failed = Some(field(&body, b'M')),
                b'Z' => return failed.map_or(Ok(answer), Err),
                _ => self.note(kind, &body),
            }
        }
    }

    fn note(&mut self, kind: u8, body: &[u8]) {
        match kind {
            b'K' => self.pid = number(body),
            b'A' => self.notified.push(text(&body[4..])),
            _ => {}
        }
    }

    fn message(&mut self) -> Result<(u8, Vec<u8>)> {
        let mut head = [0; 5];
        self.stream.read_exact(&mut head)?;
        let len = number(&head[1..]);
        let len = usize::try_from(len - 4).map_err(|_| Error::new(ErrorKind::InvalidData, "a length below 4"))?;
        let mut body = vec![0; len];
        self.stream.read_exact(&mut body)?;
        Ok((head[0], body))
    }
}

fn number(bytes: &[u8]) -> i32 {
    bytes.first_chunk().map_or(0, |b| i32::from_be_bytes(*b))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.split(|b| *b == 0).next().unwrap_or_default()).into_owned()
}

fn columns(body: &[u8]) -> Vec<String> {
    let count = body.first_chunk().map_or(0, |b| i16::from_be_bytes(*b));
    let mut rest = &body[2..];
    let mut names = Vec::new();
    for _ in 0..count {
        let name = text(rest);
        rest = rest.get(name.len() + 19..).unwrap_or_default();
        names.push(name);
    }
    names
}

fn row(body: &[u8]) -> Vec<Option<String>> {
    let count = body.first_chunk().map_or(0, |b| i16::from_be_bytes(*b));
    let mut rest = &body[2..];
    let mut cells = Vec::new();
    for _ in 0..count {
        let len = usize::try_from(number(rest)).ok();
        rest = rest.get(4..).unwrap_or_default();
        cells.push(len.map(|len| String::from_utf8_lossy(&rest[..len]).into_owned()));
        rest = &rest[len.unwrap_or(0)..];
    }
    cells
}

fn field(body: &[u8], wanted: u8) -> String {
    let fields = body.split(|b| *b == 0).filter(|f| f.first() == Some(&wanted));
    fields.map(|f| String::from_utf8_lossy(&f[1..]).into_owned()).next().unwrap_or_default()
}
