//! Logging in: the server asks, the client answers, and we listen; or we ask ourselves, where we have the verifiers.

use super::opening::Wish;
use super::pump::Pump;
use super::{Session, notes::Notes};
use crate::config::Server;
use crate::entry::Activity;
use crate::error::{Refusal, SessionError};
use crate::link::{self, Reader, refused};
use crate::proxy::Proxy;
use crate::secret::{Credential, Login, nonce};
use crate::steady::Steady;
use crate::stream::Stream;
use crate::tenant::Place;
use std::collections::BTreeMap;
use std::sync::Arc;
use stillpoint_migrate_wire::backend::{self, Authentication, put_authentication, put_key_data, put_parameter_status};
use stillpoint_migrate_wire::frame::HEADER_LEN;
use stillpoint_migrate_wire::scram::{self, Transcript, Verifier};
use stillpoint_migrate_wire::{WireError, frontend};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use zeroize::Zeroizing;

/// As the server: no answer to a question about passwords is longer.
const ANSWER_MAX: usize = 65_535;

/// A session of which both sides are ready.
pub(super) struct LoggedIn {
    server: Arc<Server>,
    stream: Stream,
    leftover: Vec<u8>,
    parameters: BTreeMap<String, Vec<u8>>,
    credential: Credential,
}

impl Session {
    /// Begins to serve.
    pub(super) fn begin(
        client: Stream,
        wish: Wish,
        logged_in: LoggedIn,
        place: &Place,
        proxy: Arc<Proxy>,
        steady: Arc<Steady>,
    ) -> Session {
        let notes = Notes::new(place.tenant.custom.clone());
        let mut pump = Pump::new(client, logged_in.stream, place.entry.clone(), notes);
        pump.parameters = logged_in.parameters;
        pump.inject(&logged_in.leftover);
        let replicates =
            wish.startup.get("replication").is_some_and(|value| !matches!(value, b"false" | b"off" | b"no" | b"0"));
        if replicates {
            place.entry.set_pinned(Some("it is a replication connection".into()));
        }
        place.entry.set(Activity::Idle);
        place.tenant.keep();
        Session {
            pump,
            entry: place.entry.clone(),
            tenant: place.tenant.clone(),
            proxy,
            steady,
            server: logged_in.server,
            startup: wish.startup,
            credential: logged_in.credential,
            shadow: None,
            preparing: None,
            pausing: None,
            arming: None,
            captured: None,
            ending: false,
            replicates,
        }
    }
}

/// Logs in at the tenant's server, once it is in service, and tells the client.
pub(super) async fn log_in(
    client: &mut Stream,
    wish: &Wish,
    place: &Place,
    proxy: &Proxy,
) -> Result<LoggedIn, SessionError> {
    let server = place.admit().await.map_err(SessionError::Refused)?;
    let (asked, known) = (wish.startup.version.minor, wish.minor);
    if asked != known || wish.startup.protocol_options().next().is_some() {
        let mut bytes = Vec::new();
        backend::put_negotiate(&mut bytes, known, wish.startup.protocol_options());
        write(client, &bytes).await?;
    }
    let packet = link::startup_packet(&wish.startup, &server, &wish.who.database);
    let limit = proxy.settings().config.limits.connect();
    let (mut logged_in, mut greeting, key) = match place.tenant.verifier(&wish.who.user, &proxy.mock_secret) {
        Some(verifier) => {
            let credential = ask(client, verifier, &wish.who.user).await?;
            let ready = link::login(&server, &packet, &wish.who.user, &credential, limit).await?;
            let mut greeting = Vec::new();
            put_authentication(&mut greeting, 0, &[]);
            let link::Ready { stream, leftover, parameters, key } = ready;
            (LoggedIn { server, stream, leftover, parameters, credential }, greeting, key)
        }
        None => {
            let mut stream = link::connect(&server, limit).await?;
            stream.write_all(&packet).await.map_err(SessionError::Server)?;
            stream.flush().await.map_err(SessionError::Server)?;
            listen(client, stream, server).await?
        }
    };
    for (name, value) in &logged_in.parameters {
        put_parameter_status(&mut greeting, name, value);
    }
    put_key_data(&mut greeting, &place.entry.key());
    stillpoint_migrate_wire::frame::put(&mut greeting, b'Z', |body| body.push(b'I'));
    place.entry.cancel_at(logged_in.server.clone(), key);
    greeting.append(&mut logged_in.leftover);
    write(client, &greeting).await?;
    Ok(logged_in)
}

async fn write(client: &mut Stream, bytes: &[u8]) -> Result<(), SessionError> {
    client.write_all(bytes).await.map_err(SessionError::Client)?;
    client.flush().await.map_err(SessionError::Client)
}

/// Reads the client's answer: its body.
async fn answer(client: &mut Stream) -> Result<Zeroizing<Vec<u8>>, SessionError> {
    let mut header = [0; HEADER_LEN];
    client.read_exact(&mut header).await.map_err(SessionError::Client)?;
    let [tag, len @ ..] = header;
    let len = u32::from_be_bytes(len);
    if tag != b'p' {
        return Err(SessionError::ClientProtocol(WireError::Tag(tag)));
    }
    if len < 4 || len as usize > ANSWER_MAX {
        return Err(SessionError::ClientProtocol(WireError::Length { tag, len }));
    }
    let mut body = Zeroizing::new(vec![0; len as usize - 4]);
    client.read_exact(&mut body).await.map_err(SessionError::Client)?;
    Ok(body)
}

/// Asks for the proof that `verifier` is about.
async fn ask(client: &mut Stream, verifier: Verifier, user: &str) -> Result<Credential, SessionError> {
    let protocol = SessionError::ClientProtocol;
    let mut bytes = Vec::new();
    backend::put_sasl(&mut bytes, [scram::MECHANISM]);
    write(client, &bytes).await?;
    let body = answer(client).await?;
    let initial = frontend::sasl_initial(&body).map_err(protocol)?;
    if initial.mechanism != scram::MECHANISM {
        return Err(protocol(WireError::Scram("the mechanism was not offered")));
    }
    let server = scram::Server::begin(verifier, initial.data, &nonce()).map_err(protocol)?;
    bytes.clear();
    put_authentication(&mut bytes, 11, server.first().as_bytes());
    write(client, &bytes).await?;
    let body = answer(client).await?;
    let (last, keys) = server.end(&body).map_err(|error| match error {
        WireError::WrongProof => {
            let message = format!("password authentication failed for user \"{user}\"");
            SessionError::Refused(Refusal::new("28P01", message))
        }
        other => protocol(other),
    })?;
    bytes.clear();
    put_authentication(&mut bytes, 12, last.as_bytes());
    write(client, &bytes).await?;
    Ok(Credential { login: Login::Keys(keys), stored: None })
}

/// Passes the server's questions and the client's answers on, and remembers what they are good for.
async fn listen(
    client: &mut Stream,
    mut stream: Stream,
    server: Arc<Server>,
) -> Result<(LoggedIn, Vec<u8>, frontend::CancelKey), SessionError> {
    let mut reader = Reader::default();
    let mut login = Login::Trusted;
    let mut greeting = Vec::new();
    let protocol = SessionError::ServerProtocol;
    // Until the server lets the client in.
    loop {
        let message = reader.next(&mut stream).await?;
        if message.tag == b'E' {
            write(client, message.bytes).await?;
            return Err(refused(message.body));
        }
        if message.tag != b'R' {
            write(client, message.bytes).await?;
            continue;
        }
        let reply = match backend::authentication(message.body).map_err(protocol)? {
            Authentication::Ok => {
                greeting.extend_from_slice(message.bytes);
                break;
            }
            Authentication::SaslFinal(_) => {
                write(client, message.bytes).await?;
                continue;
            }
            Authentication::Sasl(mechanisms) => {
                write(client, &without_binding(&mechanisms)?).await?;
                let reply = answer(client).await?;
                let initial = frontend::sasl_initial(&reply).map_err(SessionError::ClientProtocol)?;
                if stream.is_tls() && initial.data.starts_with(b"y") {
                    return Err(SessionError::Refused(taken_for_an_attack()));
                }
                let mut transcript = Transcript::default();
                transcript.client_first(initial.data).map_err(SessionError::ClientProtocol)?;
                login = Login::Heard(transcript);
                reply
            }
            Authentication::SaslContinue(data) => {
                let Login::Heard(transcript) = &mut login else {
                    return Err(protocol(WireError::Scram("messages are out of order")));
                };
                transcript.server_first(data);
                write(client, message.bytes).await?;
                let reply = answer(client).await?;
                transcript.client_last(&reply).map_err(SessionError::ClientProtocol)?;
                reply
            }
            question @ (Authentication::Cleartext | Authentication::Md5(_)) => {
                let clear = question == Authentication::Cleartext;
                write(client, message.bytes).await?;
                let reply = answer(client).await?;
                let password = frontend::password(&reply).map_err(SessionError::ClientProtocol)?;
                login = if clear { Login::Password(Zeroizing::new(password.to_vec())) } else { Login::Md5 };
                reply
            }
            Authentication::Other(method) => return Err(SessionError::Refused(cannot_pass(method))),
        };
        let mut passed = Vec::with_capacity(reply.len() + HEADER_LEN);
        stillpoint_migrate_wire::frame::put(&mut passed, b'p', |body| body.extend_from_slice(&reply));
        let passed = Zeroizing::new(passed);
        stream.write_all(&passed).await.map_err(SessionError::Server)?;
        stream.flush().await.map_err(SessionError::Server)?;
    }
    let (mut parameters, mut key) = (BTreeMap::new(), frontend::CancelKey { pid: 0, secret: Vec::new() });
    loop {
        let message = reader.next(&mut stream).await?;
        match message.tag {
            b'S' => {
                let (name, value) = backend::parameter_status(message.body).map_err(protocol)?;
                parameters.insert(name.to_owned(), value.to_vec());
            }
            b'K' => key = backend::key_data(message.body).map_err(protocol)?,
            b'Z' => break,
            b'E' => {
                greeting.extend_from_slice(message.bytes);
                write(client, &greeting).await?;
                return Err(refused(message.body));
            }
            _ => greeting.extend_from_slice(message.bytes),
        }
    }
    let leftover = reader.leftover().to_vec();
    let credential = Credential { login, stored: None };
    Ok((LoggedIn { server, stream, leftover, parameters, credential }, greeting, key))
}

/// The offer of mechanisms without those that bind the login to a TLS connection: there are two of them.
fn without_binding(mechanisms: &[&str]) -> Result<Vec<u8>, SessionError> {
    if !mechanisms.contains(&scram::MECHANISM) {
        return Err(SessionError::Refused(cannot_pass(10)));
    }
    let mut bytes = Vec::new();
    backend::put_sasl(&mut bytes, [scram::MECHANISM]);
    Ok(bytes)
}

/// The client could bind its login to TLS and says so; a server that speaks TLS too concludes that somebody in between hid
/// its offer, which is so.
fn taken_for_an_attack() -> Refusal {
    Refusal::new("28000", "SCRAM between a client and a server that both speak TLS cannot pass the proxy")
        .hint("Set `verifiers` for this database in the proxy's configuration.")
}

fn cannot_pass(method: u32) -> Refusal {
    let name = match method {
        2 => "Kerberos V5",
        6 => "SCM credential",
        7 | 8 => "GSSAPI",
        9 => "SSPI",
        10 => "this SASL",
        _ => "this kind of",
    };
    Refusal::new("28000", format!("{name} authentication cannot pass the proxy"))
        .hint("Use scram-sha-256 in the server's pg_hba.conf for connections of the proxy.")
}
