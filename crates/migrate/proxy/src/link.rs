//! A connection to a server that *the proxy* speaks on: opening it, logging in, asking the proxy's own questions.

use crate::config::{Server, ServerTls};
use crate::error::SessionError;
use crate::secret::Credential;
use crate::stream::{Raw, Stream};
use crate::tls;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use stillpoint_migrate_wire::backend::{self, Authentication};
use stillpoint_migrate_wire::frame::{Scanner, Step};
use stillpoint_migrate_wire::frontend::{self, CancelKey};
use stillpoint_migrate_wire::startup::{Startup, put_ssl_request};
use stillpoint_migrate_wire::{md5, scram};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

/// Longest message of a server that the proxy waits for, in bytes; all rows of an answer together may be longer.
const ANSWER_MAX: usize = 16 << 20;

/// A whole message with its header.
#[derive(Debug)]
pub(crate) struct Whole<'a> {
    pub(crate) tag: u8,
    pub(crate) body: &'a [u8],
    /// Header and body, to be passed on.
    pub(crate) bytes: &'a [u8],
}

/// Reads whole messages; bytes that it read ahead are in [`Reader::leftover`].
#[derive(Debug, Default)]
pub(crate) struct Reader {
    buffer: Vec<u8>,
    start: usize,
}

impl Reader {
    /// Reads the next message.
    pub(crate) async fn next<'a>(&'a mut self, stream: &mut Stream) -> Result<Whole<'a>, SessionError> {
        let (tag, total) = loop {
            let mut scanner = Scanner::new(ANSWER_MAX as u32);
            match scanner.peek(&self.buffer[self.start..]).map_err(SessionError::ServerProtocol)? {
                Step::Message(message) if message.is_whole() => break (message.tag, message.total()),
                _ => {}
            }
            if self.start > 0 {
                self.buffer.drain(..self.start);
                self.start = 0;
            }
            self.buffer.reserve(4096);
            if stream.read_buf(&mut self.buffer).await.map_err(SessionError::Server)? == 0 {
                return Err(SessionError::ServerClosed);
            }
        };
        let bytes = &self.buffer[self.start..self.start + total];
        self.start += total;
        Ok(Whole { tag, body: &bytes[stillpoint_migrate_wire::frame::HEADER_LEN..], bytes })
    }

    /// Bytes that were read and not taken.
    pub(crate) fn leftover(&self) -> &[u8] {
        &self.buffer[self.start..]
    }
}

async fn connect_raw(server: &Server) -> std::io::Result<Raw> {
    if server.host.starts_with('/') {
        let path = Path::new(&server.host).join(format!(".s.PGSQL.{}", server.port));
        return Ok(Raw::Unix(UnixStream::connect(path).await?));
    }
    let stream = TcpStream::connect((server.host.as_str(), server.port)).await?;
    stream.set_nodelay(true)?;
    rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
    Ok(Raw::Tcp(stream))
}

/// Opens a connection, encrypted if the configuration says so; sends nothing of the session yet.
pub(crate) async fn connect(server: &Server, limit: Duration) -> Result<Stream, SessionError> {
    let unreachable = |why: String| SessionError::Unreachable { server: server.to_string(), why: why.into() };
    let connect = async {
        let mut raw = connect_raw(server).await.map_err(|error| unreachable(error.to_string()))?;
        if server.tls == ServerTls::Disable {
            return Ok(Stream::Plain(raw));
        }
        let mut question = Vec::new();
        put_ssl_request(&mut question);
        raw.write_all(&question).await.map_err(SessionError::Server)?;
        let mut answer = [0];
        raw.read_exact(&mut answer).await.map_err(SessionError::Server)?;
        match answer {
            [b'S'] => tls::connect(raw, server).await,
            _ => Err(unreachable("it does not support TLS".into())),
        }
    };
    tokio::time::timeout(limit, connect).await.map_err(|_| unreachable("no answer in time".into()))?
}

/// Packet that begins a session at a server. The version is always 3.0: 3.2 differs only in the cancel keys.
pub(crate) fn startup_packet(client: &Startup, server: &Server) -> Vec<u8> {
    let mut packet = Vec::new();
    client.for_server(server.database.as_deref()).encode(&mut packet);
    packet
}

/// A session at a server that waits for its first statement.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) stream: Stream,
    /// Bytes after the first ReadyForQuery.
    pub(crate) leftover: Vec<u8>,
    /// Parameters that the server reported.
    pub(crate) parameters: BTreeMap<String, Vec<u8>>,
    pub(crate) key: CancelKey,
}

/// Opens a connection and logs in with the credential.
pub(crate) async fn login(
    server: &Server,
    packet: &[u8],
    user: &str,
    credential: &Credential,
    limit: Duration,
) -> Result<Ready, SessionError> {
    let mut stream = connect(server, limit).await?;
    let login = async {
        stream.write_all(packet).await.map_err(SessionError::Server)?;
        stream.flush().await.map_err(SessionError::Server)?;
        let mut reader = Reader::default();
        authenticate(&mut stream, &mut reader, server, user, credential).await?;
        let (mut parameters, mut key) = (BTreeMap::new(), CancelKey { pid: 0, secret: Vec::new() });
        loop {
            let message = reader.next(&mut stream).await?;
            match message.tag {
                b'S' => {
                    let (name, value) =
                        backend::parameter_status(message.body).map_err(SessionError::ServerProtocol)?;
                    parameters.insert(name.to_owned(), value.to_vec());
                }
                b'K' => key = backend::key_data(message.body).map_err(SessionError::ServerProtocol)?,
                b'Z' => break,
                b'E' => return Err(refused(message.body)),
                _ => {}
            }
        }
        Ok((reader.leftover().to_vec(), parameters, key))
    };
    let timed = tokio::time::timeout(limit, login).await.map_err(|_| SessionError::TimedOut("logging in"))?;
    let (leftover, parameters, key) = timed?;
    Ok(Ready { stream, leftover, parameters, key })
}

/// Reads a server's error.
pub(crate) fn refused(body: &[u8]) -> SessionError {
    match backend::report(body) {
        Ok(report) => SessionError::ServerRefused { code: report.code.into(), message: report.message.into() },
        Err(error) => SessionError::ServerProtocol(error),
    }
}

async fn authenticate(
    stream: &mut Stream,
    reader: &mut Reader,
    server: &Server,
    user: &str,
    credential: &Credential,
) -> Result<(), SessionError> {
    let lacking = |why: &str| SessionError::Login { server: server.to_string(), user: user.into(), why: why.into() };
    let mut exchange: Option<scram::Client> = None;
    loop {
        let message = reader.next(stream).await?;
        match message.tag {
            b'R' => {}
            b'E' => return Err(refused(message.body)),
            _ => continue,
        }
        let mut answer = Vec::new();
        match backend::authentication(message.body).map_err(SessionError::ServerProtocol)? {
            Authentication::Ok => return Ok(()),
            Authentication::Cleartext => {
                let password = credential.password().ok_or_else(|| lacking("it requires a password in clear text"))?;
                frontend::put_password(&mut answer, password);
            }
            Authentication::Md5(salt) => {
                let stored = credential.md5(user).ok_or_else(|| lacking("it requires md5 authentication"))?;
                let proof =
                    md5::answer(&stored, salt).ok_or_else(|| lacking("the stored password is not an md5 hash"))?;
                frontend::put_password(&mut answer, proof.as_bytes());
            }
            Authentication::Sasl(mechanisms) if mechanisms.contains(&scram::MECHANISM) => {
                let client = scram::Client::new(&crate::secret::nonce());
                frontend::put_sasl_initial(&mut answer, scram::MECHANISM, client.first().as_bytes());
                exchange = Some(client);
            }
            Authentication::SaslContinue(data) => {
                let client = exchange.as_mut().ok_or_else(|| lacking("its messages are out of order"))?;
                let secret = credential.scram().map_err(|why| lacking(&why))?;
                let last = client.last(data, &secret).map_err(|error| lacking(&error.to_string()))?;
                frontend::put_sasl(&mut answer, last.as_bytes());
            }
            Authentication::SaslFinal(data) => {
                let client = exchange.as_ref().ok_or_else(|| lacking("its messages are out of order"))?;
                client.check(data).map_err(|error| lacking(&error.to_string()))?;
            }
            Authentication::Sasl(_) | Authentication::Other(_) => {
                return Err(lacking("it requires an authentication method that a proxy cannot relay"));
            }
        }
        stream.write_all(&answer).await.map_err(SessionError::Server)?;
        stream.flush().await.map_err(SessionError::Server)?;
    }
}

/// A server's answers to the proxy's own questions.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    /// Rows in the session's encoding.
    pub(crate) rows: Vec<Vec<Option<Vec<u8>>>>,
    /// Code and message of the first error.
    pub(crate) error: Option<(String, String)>,
    /// Messages that are not answers: for the session's client.
    pub(crate) aside: Vec<u8>,
}

/// Sends `question`, which ends in `syncs` ReadyForQuery messages, and waits for all of them. The caller must have
/// nothing else under way.
pub(crate) async fn exchange(stream: &mut Stream, question: &[u8], syncs: usize) -> Result<Answers, SessionError> {
    stream.write_all(question).await.map_err(SessionError::Server)?;
    stream.flush().await.map_err(SessionError::Server)?;
    let (mut reader, mut answers, mut left) = (Reader::default(), Answers::default(), syncs);
    while left > 0 {
        let message = reader.next(stream).await?;
        match message.tag {
            b'D' => {
                let row = backend::row(message.body).map_err(SessionError::ServerProtocol)?;
                answers.rows.push(row.into_iter().map(|value| value.map(<[u8]>::to_vec)).collect());
            }
            b'E' => {
                let report = backend::report(message.body).map_err(SessionError::ServerProtocol)?;
                if report.severity == "FATAL" {
                    return Err(refused(message.body));
                }
                answers.error.get_or_insert((report.code, report.message));
            }
            b'N' | b'A' | b'S' => answers.aside.extend_from_slice(message.bytes),
            b'Z' => left -= 1,
            _ => {}
        }
    }
    answers.aside.extend_from_slice(reader.leftover());
    Ok(answers)
}
