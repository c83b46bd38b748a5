//! A client of MariaDB with only the functions that tests need: one connection, text queries, every answer checked.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Time limit of an answer.
const LIMIT: Duration = crate::wait::WAIT_TIMEOUT.saturating_mul(5);

const CLIENT_PROTOCOL_41: u32 = 0x200;
const CLIENT_TRANSACTIONS: u32 = 0x2000;
const CLIENT_SECURE_CONNECTION: u32 = 0x8000;
const CLIENT_PLUGIN_AUTH: u32 = 0x8_0000;
const UTF8: u8 = 33;

/// Answer of the server to a statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Rows of texts; `None` is NULL.
    Rows(Vec<Vec<Option<String>>>),
    /// Done, with the number of rows changed.
    Done(u64),
    /// Refused, with the error's number and text.
    Error(u16, String),
}

impl Answer {
    /// Returns true if the statement was refused.
    pub fn is_error(&self) -> bool {
        matches!(self, Answer::Error(..))
    }
}

/// Prints the form in the files of changes: columns by tabs, rows by line ends, `ok N`, `error N`.
impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Answer::Done(rows) => write!(f, "ok {rows}"),
            Answer::Error(number, _) => write!(f, "error {number}"),
            Answer::Rows(rows) => {
                let line = |row: &Vec<Option<String>>| {
                    row.iter().map(|v| v.as_deref().unwrap_or("NULL")).collect::<Vec<_>>().join("\t")
                };
                f.write_str(&rows.iter().map(line).collect::<Vec<_>>().join("\n"))
            }
        }
    }
}

/// A connection as the user `root`, without a password.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<File>,
    sequence: u8,
}

impl Client {
    /// Connects by the server's socket.
    pub fn connect(socket: &Path, database: &str) -> io::Result<Client> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(LIMIT))?;
        Client::log_in(OwnedFd::from(stream), database)
    }

    /// Connects by TCP.
    pub fn connect_tcp(port: u16, database: &str) -> io::Result<Client> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(LIMIT))?;
        Client::log_in(OwnedFd::from(stream), database)
    }

    fn log_in(stream: OwnedFd, database: &str) -> io::Result<Client> {
        let mut client = Client { stream: BufReader::new(File::from(stream)), sequence: 0 };
        let greeting = client.receive()?;
        if greeting.first() == Some(&0xff) {
            return Err(refused(&greeting));
        }
        let mut login = Vec::new();
        let flags = CLIENT_PROTOCOL_41 | CLIENT_TRANSACTIONS | CLIENT_SECURE_CONNECTION | CLIENT_PLUGIN_AUTH;
        login.extend(flags.to_le_bytes());
        login.extend((1u32 << 24).to_le_bytes());
        login.push(UTF8);
        login.extend([0; 23]);
        // the user, an empty password, the authentication method
        login.extend(b"root\0\0mysql_native_password\0");
        client.send(&login)?;
        let mut answer = client.receive()?;
        if answer.first() == Some(&0xfe) {
            client.send(&[])?;
            answer = client.receive()?;
        }
        if answer.first() != Some(&0) {
            return Err(refused(&answer));
        }
        if !database.is_empty() {
            client.done(&format!("USE {database}"))?;
        }
        Ok(client)
    }

    /// Sends a statement and reads the whole answer. An error means that the connection is lost.
    pub fn query(&mut self, statement: &str) -> io::Result<Answer> {
        self.begin(statement)?;
        self.answer()
    }

    /// Sends a statement whose answer [`Client::answer`] reads later.
    pub fn begin(&mut self, statement: &str) -> io::Result<()> {
        self.sequence = 0;
        let mut packet = vec![3];
        packet.extend(statement.as_bytes());
        self.send(&packet)
    }

    /// Reads the answer to a statement.
    pub fn answer(&mut self) -> io::Result<Answer> {
        let first = self.receive()?;
        match first.first() {
            Some(0) => Ok(Answer::Done(integer(&mut &first[1..]).unwrap_or(0))),
            Some(0xff) => Ok(error(&first)),
            Some(_) => self.rows(),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "an empty packet")),
        }
    }

    /// Runs [`Client::query`]; an error answer is an error.
    pub fn done(&mut self, statement: &str) -> io::Result<Answer> {
        match self.query(statement)? {
            Answer::Error(number, text) => Err(io::Error::other(format!("{statement}: {number}: {text}"))),
            answer => Ok(answer),
        }
    }

    fn rows(&mut self) -> io::Result<Answer> {
        while !is_end(&self.receive()?) {}
        let mut rows = Vec::new();
        loop {
            let packet = self.receive()?;
            if packet.first() == Some(&0xff) {
                return Ok(error(&packet));
            }
            if is_end(&packet) {
                return Ok(Answer::Rows(rows));
            }
            rows.push(row(&packet));
        }
    }

    fn send(&mut self, packet: &[u8]) -> io::Result<()> {
        let length = (packet.len() as u32).to_le_bytes();
        let mut bytes = vec![length[0], length[1], length[2], self.sequence];
        bytes.extend(packet);
        self.sequence = self.sequence.wrapping_add(1);
        self.stream.get_mut().write_all(&bytes)
    }

    fn receive(&mut self) -> io::Result<Vec<u8>> {
        let mut header = [0; 4];
        self.stream.read_exact(&mut header)?;
        self.sequence = header[3].wrapping_add(1);
        let mut packet = vec![0; u32::from_le_bytes([header[0], header[1], header[2], 0]) as usize];
        self.stream.read_exact(&mut packet)?;
        Ok(packet)
    }
}

/// Sends a quit message, so that the server does not count the connection as lost.
impl Drop for Client {
    fn drop(&mut self) {
        const QUIT: u8 = 1;
        self.sequence = 0;
        // The connection ends here in any case.
        let _ = self.send(&[QUIT]);
    }
}

fn is_end(packet: &[u8]) -> bool {
    packet.first() == Some(&0xfe) && packet.len() < 9
}

fn error(packet: &[u8]) -> Answer {
    let number = u16::from_le_bytes([*packet.get(1).unwrap_or(&0), *packet.get(2).unwrap_or(&0)]);
    // a marker and the SQL state precede the text
    Answer::Error(number, String::from_utf8_lossy(packet.get(9..).unwrap_or_default()).into_owned())
}

fn refused(packet: &[u8]) -> io::Error {
    io::Error::other(format!("the server refuses the connection: {}", error(packet)))
}

fn row(packet: &[u8]) -> Vec<Option<String>> {
    let mut rest = packet;
    let mut values = Vec::new();
    while let Some(&first) = rest.first() {
        if first == 0xfb {
            rest = &rest[1..];
            values.push(None);
            continue;
        }
        let length = integer(&mut rest).unwrap_or(0) as usize;
        let (value, behind) = rest.split_at(length.min(rest.len()));
        values.push(Some(String::from_utf8_lossy(value).into_owned()));
        rest = behind;
    }
    values
}

/// Reads a number of the protocol; its first byte gives its length.
fn integer(bytes: &mut &[u8]) -> Option<u64> {
    let (&first, rest) = bytes.split_first()?;
    let length = match first {
        0xfc => 2,
        0xfd => 3,
        0xfe => 8,
        small => {
            *bytes = rest;
            return Some(u64::from(small));
        }
    };
    let (value, rest) = rest.split_at_checked(length)?;
    *bytes = rest;
    Some(value.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_with_null_and_long_values() {
        let long = "x".repeat(300);
        let mut packet = vec![1, b'a', 0xfb, 0xfc, 44, 1];
        packet.extend(long.as_bytes());
        assert_eq!(row(&packet), [Some("a".to_owned()), None, Some(long)]);
        assert_eq!(Answer::Rows(vec![vec![Some("a".into()), None], vec![Some("b".into())]]).to_string(), "a\tNULL\nb");
    }

    #[test]
    fn errors_carry_their_number() {
        let answer = error(b"\xff\x7a\x04#42S02Table is not there");
        assert_eq!(answer, Answer::Error(1146, "Table is not there".into()));
        assert_eq!(answer.to_string(), "error 1146");
    }
}
