//! Login at a server: authentication, and the server's report about the new session.

use crate::credential::{Credential, nonce};
use crate::error::{AuthenticationError, LinkError, LoginError};
use crate::reader::Reader;
use crate::stream::Stream;
use postgres_protocol::authentication::sasl::{ChannelBinding, ScramSha256};
use std::collections::BTreeMap;
use stillpoint_migrate_wire::backend::{self, Authentication};
use stillpoint_migrate_wire::frontend::{self, CancelKey};
use stillpoint_migrate_wire::md5;
use stillpoint_migrate_wire::scram::{self, Secret};
use zeroize::Zeroizing;

/// A session at a server that waits for its first statement.
#[derive(Debug)]
pub struct Ready {
    /// Connection of the session.
    pub stream: Stream,
    /// Bytes after the first ReadyForQuery.
    pub leftover: Vec<u8>,
    /// Parameters that the server reported.
    pub parameters: BTreeMap<String, Vec<u8>>,
    /// Key with which statements of the session are cancelled.
    pub key: CancelKey,
}

/// A server's report about a session that it has let in.
#[derive(Debug)]
pub struct Greeting {
    /// Parameters that the server reported.
    pub parameters: BTreeMap<String, Vec<u8>>,
    /// Key with which statements of the session are cancelled.
    pub key: CancelKey,
}

/// Logs in with the credential; `packet` is the startup packet, which names the same user.
///
/// # Errors
///
/// [`LoginError`] if the server refuses, requires a secret that the credential does not hold, or the connection ends.
pub async fn log_in(
    mut stream: Stream,
    packet: &[u8],
    user: &str,
    credential: &Credential,
) -> Result<Ready, LoginError> {
    stream.send(packet).await.map_err(LinkError::Io)?;
    let mut reader = Reader::default();
    authenticate(&mut stream, &mut reader, user, credential).await?;
    let Greeting { parameters, key } = read_greeting(&mut stream, &mut reader, &mut Vec::new()).await?;
    Ok(Ready { stream, leftover: reader.leftover().to_vec(), parameters, key })
}

/// Reads the messages about a session up to its first ReadyForQuery. Appends to `others` those that the greeting does
/// not hold, and an error.
///
/// # Errors
///
/// [`LinkError::Refused`] if the server ends the session, and the others if the connection is of no use.
pub async fn read_greeting(
    stream: &mut Stream,
    reader: &mut Reader,
    others: &mut Vec<u8>,
) -> Result<Greeting, LinkError> {
    let (mut parameters, mut key) = (BTreeMap::new(), CancelKey { pid: 0, secret: Vec::new() });
    loop {
        let frame = reader.next(stream).await?;
        match frame.tag {
            b'S' => {
                let (name, value) = backend::parameter_status(&frame.body).map_err(LinkError::Protocol)?;
                parameters.insert(name.to_owned(), value.to_vec());
            }
            b'K' => key = backend::key_data(&frame.body).map_err(LinkError::Protocol)?,
            b'Z' => return Ok(Greeting { parameters, key }),
            b'E' => {
                frame.put(others);
                return Err(LinkError::refused(&frame.body));
            }
            _ => frame.put(others),
        }
    }
}

async fn authenticate(
    stream: &mut Stream,
    reader: &mut Reader,
    user: &str,
    credential: &Credential,
) -> Result<(), LoginError> {
    let lacking = AuthenticationError::NoSecret;
    let mut exchange: Option<ScramExchange> = None;
    loop {
        let frame = reader.next(stream).await?;
        match frame.tag {
            b'R' => {}
            b'E' => return Err(LinkError::refused(&frame.body).into()),
            _ => continue,
        }
        let mut answer = Zeroizing::new(Vec::new());
        match backend::authentication(&frame.body).map_err(LinkError::Protocol)? {
            Authentication::Ok => return Ok(()),
            Authentication::Cleartext => {
                let password = credential.password().ok_or(lacking("it requires a password in clear text"))?;
                frontend::put_password(&mut answer, password);
            }
            Authentication::Md5(salt) => {
                let stored = credential.md5(user).ok_or(lacking("it requires md5 authentication"))?;
                let proof = md5::answer(&stored, salt);
                let proof = proof.ok_or_else(|| failed("the stored password is not an md5 hash"))?;
                frontend::put_password(&mut answer, proof.as_bytes());
            }
            Authentication::Sasl(mechanisms) if mechanisms.contains(&scram::MECHANISM) => {
                let begun = ScramExchange::begin(credential)?;
                frontend::put_sasl_initial(&mut answer, scram::MECHANISM, &begun.first());
                exchange = Some(begun);
            }
            Authentication::SaslContinue(data) => {
                let exchange = exchange.as_mut().ok_or(AuthenticationError::OutOfOrder)?;
                frontend::put_sasl(&mut answer, &exchange.last(data)?);
            }
            Authentication::SaslFinal(data) => {
                exchange.as_mut().ok_or(AuthenticationError::OutOfOrder)?.check(data)?;
                continue;
            }
            Authentication::Sasl(_) => return Err(AuthenticationError::Unsupported(10).into()),
            Authentication::Other(method) => return Err(AuthenticationError::Unsupported(method).into()),
        }
        stream.send(&answer).await.map_err(LinkError::Io)?;
    }
}

/// The client's side of a SCRAM exchange.
enum ScramExchange {
    /// By keys, or by a password of ASCII characters, which is used unchanged.
    Plain(scram::Client, Secret),
    /// By another password, which the library normalizes as servers do (SASLprep).
    Normalized(Box<ScramSha256>),
}

impl ScramExchange {
    fn begin(credential: &Credential) -> Result<ScramExchange, AuthenticationError> {
        Ok(match credential.scram()? {
            Secret::Password(password) if !password.is_ascii() => {
                ScramExchange::Normalized(Box::new(ScramSha256::new(&password, ChannelBinding::unsupported())))
            }
            secret => ScramExchange::Plain(scram::Client::new(&nonce()), secret),
        })
    }

    /// First message of the client.
    fn first(&self) -> Vec<u8> {
        match self {
            ScramExchange::Plain(client, _) => client.first().into_bytes(),
            ScramExchange::Normalized(exchange) => exchange.message().to_vec(),
        }
    }

    /// Last message of the client, in answer to the server's first.
    fn last(&mut self, server_first: &[u8]) -> Result<Vec<u8>, AuthenticationError> {
        match self {
            ScramExchange::Plain(client, secret) => Ok(client.last(server_first, secret)?.into_bytes()),
            ScramExchange::Normalized(exchange) => {
                exchange.update(server_first).map_err(failed)?;
                Ok(exchange.message().to_vec())
            }
        }
    }

    /// Checks the server's last message, which proves that the server knows the password's verifier.
    fn check(&mut self, server_last: &[u8]) -> Result<(), AuthenticationError> {
        match self {
            ScramExchange::Plain(client, _) => Ok(client.check(server_last)?),
            ScramExchange::Normalized(exchange) => exchange.finish(server_last).map_err(failed),
        }
    }
}

fn failed(why: impl ToString) -> AuthenticationError {
    AuthenticationError::Exchange(why.to_string())
}
