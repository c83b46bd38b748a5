//! Login: the server asks, the client answers, and the proxy listens; or the proxy asks, if it has the verifiers.

use super::place::Place;
use super::pump::Pump;
use super::startup::StartupRequest;
use super::{Session, state_tracker::StateTracker};
use crate::error::{Refusal, SessionError};
use crate::forwarder::Forwarder;
use crate::link;
use crate::logins;
use crate::pool::Pools;
use crate::process_ids::ProcessIds;
use crate::proxy::Proxy;
use crate::server_process::ServerProcess;
use crate::tenant::TenantAdmission;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use stillpoint_migrate_control::Activity;
use stillpoint_migrate_postgres::{Credential, Greeting, LinkError, Login, Reader, Ready, Server, Stream, nonce};
use stillpoint_migrate_wire::backend::{self, Authentication, put_authentication, put_key_data, put_parameter_status};
use stillpoint_migrate_wire::frame::HEADER_LEN;
use stillpoint_migrate_wire::frontend::{CancelKey, SaslInitial};
use stillpoint_migrate_wire::scram::{self, Transcript, Verifier};
use stillpoint_migrate_wire::startup::Replication;
use stillpoint_migrate_wire::{WireError, frontend};
use tokio::io::AsyncReadExt;
use zeroize::Zeroizing;

/// Longest answer to a question about passwords, in bytes; the limit of the server.
const ANSWER_MAX: usize = 65_535;
/// Most bytes that are added around an answer: with this room no secret is copied to grow a buffer.
const ANSWER_OVERHEAD_MAX: usize = 64;

/// A session whose client and server are both ready.
pub(super) struct ServerSession {
    server: Arc<Server>,
    stream: Stream,
    leftover: Vec<u8>,
    parameters: BTreeMap<String, Vec<u8>>,
    credential: Credential,
    ids: Arc<ProcessIds>,
    pools: Arc<Pools>,
    key: CancelKey,
}

impl ServerSession {
    fn process(&self) -> ServerProcess {
        let (server, key, ids) = (self.server.clone(), self.key.clone(), self.ids.clone());
        ServerProcess { server, key, ids, cancels: Arc::default() }
    }
}

impl Session {
    /// Begins to serve.
    pub(super) fn begin(
        client: Stream,
        request: StartupRequest,
        logged_in: ServerSession,
        place: &Place,
        proxy: Arc<Proxy>,
        forwarder: Arc<Forwarder>,
    ) -> Session {
        let tracker = StateTracker::new(place.tenant.custom.clone());
        let process = logged_in.process();
        let ids = logged_in.ids;
        let mut pump = Pump::new(client, logged_in.stream, place.entry.clone(), ids.clone(), tracker);
        pump.parameters = Arc::new(logged_in.parameters);
        pump.inject(&logged_in.leftover);
        let is_replication = request.startup.replication() != Replication::Off;
        if is_replication {
            place.entry.set_pinned(Some("it is a replication connection".into()));
        }
        place.entry.set(Activity::Idle);
        place.tenant.keep();
        Session {
            pump,
            entry: place.entry.clone(),
            tenant: place.tenant.clone(),
            proxy,
            forwarder,
            server: logged_in.server,
            startup: request.startup,
            credential: logged_in.credential,
            counterpart: None,
            prepare_reporter: None,
            pause_reporter: None,
            pending_capture: None,
            captured: None,
            is_ending: false,
            is_replication,
            process: Some(process),
            ids,
            pools: logged_in.pools,
            light_target: None,
        }
    }
}

/// A client that has not proved its identity.
struct UnauthenticatedClient<'a> {
    stream: &'a mut Stream,
    place: &'a logins::Place,
}

impl UnauthenticatedClient<'_> {
    async fn write(&mut self, bytes: &[u8]) -> Result<(), SessionError> {
        self.stream.send(bytes).await.map_err(SessionError::Client)
    }

    /// Reads the body of its answer. The client has all the time until the startup limit, unless others wait for its
    /// place.
    async fn answer(&mut self) -> Result<Zeroizing<Vec<u8>>, SessionError> {
        self.place.client_owes(true);
        let answer = tokio::select! {
            answer = read_answer(self.stream) => answer,
            () = self.place.evicted() => {
                let message = "no answer arrived in time, and other clients wait to log in";
                Err(SessionError::Refused(Refusal::new("53300", message)))
            }
        };
        self.place.client_owes(false);
        answer
    }
}

async fn read_answer(client: &mut Stream) -> Result<Zeroizing<Vec<u8>>, SessionError> {
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

/// Logs in at the tenant's server, once that is in service, and reports to the client.
pub(super) async fn log_in(
    stream: &mut Stream,
    place_in_line: &logins::Place,
    request: &StartupRequest,
    place: &Place,
    proxy: &Proxy,
) -> Result<ServerSession, SessionError> {
    let mut client = UnauthenticatedClient { stream, place: place_in_line };
    let (asked, known) = (request.startup.version().minor, request.minor);
    if asked != known || request.startup.protocol_options().next().is_some() {
        let mut bytes = Vec::new();
        backend::put_negotiate(&mut bytes, known, request.startup.protocol_options());
        client.write(&bytes).await?;
    }
    let limit = proxy.settings().config.limits.connect();
    let (mut logged_in, mut greeting) = match place.tenant.verifier(&request.who.user, &proxy.mock_secret) {
        Some(verifier) => {
            // The proof comes first: a client without it takes none of the tenant's sessions, and does not hold up a
            // pause.
            let credential = request_proof(&mut client, verifier, &request.who.user).await?;
            request.must_be_served().map_err(SessionError::Refused)?;
            let admitted = place.tenant.admit(&place.entry).await.map_err(SessionError::Refused)?;
            match log_in_again(admitted, request, credential, limit).await {
                Ok(ready) => ready,
                Err(error) => return Err(report_refusal(&mut client, error).await),
            }
        }
        None => {
            let server = place.tenant.server_in_service().await.map_err(SessionError::Refused)?;
            let packet = link::startup_packet(&request.startup, &server);
            let mut stream = link::connect(&server, limit).await?;
            stream.send(&packet).await.map_err(SessionError::Server)?;
            let observed = observe_login(&mut client, stream).await?;
            request.must_be_served().map_err(SessionError::Refused)?;
            // Not earlier: a client that has not proved its identity must not hold up a pause here either.
            let target = place.tenant.target();
            let admitted = place.tenant.admit(&place.entry).await.map_err(SessionError::Refused)?;
            if Arc::ptr_eq(&admitted.server, &server) && !admitted.waited {
                read_greeting(&mut client, observed, admitted).await?
            } else {
                // Meanwhile the tenant has moved, or was paused. Direct sessions were then ended, perhaps this one too.
                let target = target.filter(|target| Arc::ptr_eq(&target.server, &admitted.server));
                let stored = target.and_then(|target| target.verifiers.get(&request.who.user).cloned());
                let credential = Credential { login: observed.login, stored };
                let again = log_in_again(admitted, request, credential, limit).await;
                again.map_err(|error| {
                    tracing::info!(session = place.entry.id, %error, "a login was interrupted, because the database \
                                                                      moved to another server");
                    let message = "the database was moved to another server during the login";
                    SessionError::Refused(Refusal::new("57P03", message).hint("Connect again."))
                })?
            }
        }
    };
    for (name, value) in &logged_in.parameters {
        put_parameter_status(&mut greeting, name, value);
    }
    let process = logged_in.process();
    put_key_data(&mut greeting, &proxy.directory.announce(&place.entry, process, request.secret_len));
    stillpoint_migrate_wire::frame::put(&mut greeting, b'Z', |body| body.push(b'I'));
    greeting.append(&mut logged_in.leftover);
    client.write(&greeting).await?;
    Ok(logged_in)
}

/// Sends a client that has proved its identity the server's refusal, and returns the error.
async fn report_refusal(client: &mut UnauthenticatedClient<'_>, error: SessionError) -> SessionError {
    if let SessionError::ServerRefused { code, message } = &error {
        let mut bytes = Vec::new();
        backend::put_fatal(&mut bytes, code.as_str(), message.as_str(), None);
        let _ = client.write(&bytes).await;
    }
    error
}

/// Asks for the proof that belongs to `verifier`.
async fn request_proof(
    client: &mut UnauthenticatedClient<'_>,
    verifier: Verifier,
    user: &str,
) -> Result<Credential, SessionError> {
    let protocol = SessionError::ClientProtocol;
    let mut bytes = Vec::new();
    backend::put_sasl(&mut bytes, [scram::MECHANISM]);
    client.write(&bytes).await?;
    let body = client.answer().await?;
    let data = offered_data(frontend::sasl_initial(&body))?;
    let server = scram::Server::begin(verifier, data, &nonce()).map_err(protocol)?;
    bytes.clear();
    put_authentication(&mut bytes, 11, server.first().as_bytes());
    client.write(&bytes).await?;
    let body = client.answer().await?;
    let (last, keys) = server.end(&body).map_err(|error| match error {
        WireError::WrongProof => {
            let message = format!("password authentication failed for user \"{user}\"");
            SessionError::Refused(Refusal::new("28P01", message))
        }
        other => protocol(other),
    })?;
    bytes.clear();
    put_authentication(&mut bytes, 12, last.as_bytes());
    client.write(&bytes).await?;
    Ok(Credential { login: Login::Keys(keys), stored: None })
}

/// The client's first message of an exchange by the one mechanism that was offered.
fn offered_data(initial: Result<SaslInitial<'_>, WireError>) -> Result<&[u8], SessionError> {
    match initial.map_err(SessionError::ClientProtocol)? {
        SaslInitial { mechanism: scram::MECHANISM, data } => Ok(data),
        _ => Err(SessionError::ClientProtocol(WireError::Scram("the mechanism was not offered"))),
    }
}

/// A session with its greeting for the client.
type LoginResult = (ServerSession, Vec<u8>);

/// Logs in at a server with what a client has proved before.
async fn log_in_again(
    admitted: TenantAdmission,
    request: &StartupRequest,
    credential: Credential,
    limit: Duration,
) -> Result<LoginResult, SessionError> {
    let TenantAdmission { server, ids, pools, .. } = admitted;
    let packet = link::startup_packet(&request.startup, &server);
    let ready = link::login(&server, &packet, &request.who.user, &credential, limit).await?;
    let mut greeting = Vec::new();
    put_authentication(&mut greeting, 0, &[]);
    let Ready { stream, leftover, parameters, key } = ready;
    Ok((ServerSession { server, stream, leftover, parameters, credential, ids, pools, key }, greeting))
}

/// A server that has let a client in, with what the proxy learned from the login.
struct ObservedLogin {
    stream: Stream,
    reader: Reader,
    login: Login,
    /// Messages that the client has not received.
    greeting: Vec<u8>,
}

/// Passes the server's questions and the client's answers on until the server lets the client in. Keeps secrets or
/// proofs in them for a later login.
async fn observe_login(
    client: &mut UnauthenticatedClient<'_>,
    mut stream: Stream,
) -> Result<ObservedLogin, SessionError> {
    let mut reader = Reader::default();
    let mut login = Login::Trusted;
    let greeting = loop {
        let frame = reader.next(&mut stream).await?;
        let mut bytes = Vec::new();
        frame.put(&mut bytes);
        if frame.tag == b'E' {
            client.write(&bytes).await?;
            return Err(LinkError::refused(&frame.body).into());
        }
        if frame.tag != b'R' {
            client.write(&bytes).await?;
            continue;
        }
        let answer = match backend::authentication(&frame.body).map_err(SessionError::ServerProtocol)? {
            Authentication::Ok => break bytes,
            Authentication::SaslFinal(_) => {
                client.write(&bytes).await?;
                continue;
            }
            question => relay_question(client, &question, &bytes, &mut login, stream.is_tls()).await?,
        };
        stream.send(&answer).await.map_err(SessionError::Server)?;
    };
    Ok(ObservedLogin { stream, reader, login, greeting })
}

/// Reads a server's messages about a session before its first statement.
async fn read_greeting(
    client: &mut UnauthenticatedClient<'_>,
    observed: ObservedLogin,
    admitted: TenantAdmission,
) -> Result<LoginResult, SessionError> {
    let TenantAdmission { server, ids, pools, .. } = admitted;
    let ObservedLogin { mut stream, mut reader, login, mut greeting } = observed;
    let read = stillpoint_migrate_postgres::read_greeting(&mut stream, &mut reader, &mut greeting).await;
    if let Err(LinkError::Refused(_)) = &read {
        client.write(&greeting).await?;
    }
    let Greeting { parameters, key } = read?;
    let leftover = reader.leftover().to_vec();
    let credential = Credential { login, stored: None };
    Ok((ServerSession { server, stream, leftover, parameters, credential, ids, pools, key }, greeting))
}

/// Asks the client the server's question. The answer for the server is built from the parsed message, not copied.
async fn relay_question(
    client: &mut UnauthenticatedClient<'_>,
    question: &Authentication<'_>,
    bytes: &[u8],
    login: &mut Login,
    server_is_tls: bool,
) -> Result<Zeroizing<Vec<u8>>, SessionError> {
    let room = |reply: &[u8]| Zeroizing::new(Vec::<u8>::with_capacity(reply.len() + ANSWER_OVERHEAD_MAX));
    match question {
        Authentication::Sasl(mechanisms) => {
            client.write(&without_binding(mechanisms)?).await?;
            let reply = client.answer().await?;
            let data = offered_data(frontend::sasl_initial(&reply))?;
            if server_is_tls && data.starts_with(b"y") {
                return Err(SessionError::Refused(downgrade_refusal()));
            }
            let mut transcript = Transcript::default();
            transcript.client_first(data).map_err(SessionError::ClientProtocol)?;
            *login = Login::Observed(transcript);
            let mut answer = room(&reply);
            frontend::put_sasl_initial(&mut answer, scram::MECHANISM, data);
            Ok(answer)
        }
        Authentication::SaslContinue(data) => {
            let Login::Observed(transcript) = login else {
                return Err(SessionError::ServerProtocol(WireError::Scram("messages are out of order")));
            };
            transcript.server_first(data);
            client.write(bytes).await?;
            let reply = client.answer().await?;
            transcript.client_last(&reply).map_err(SessionError::ClientProtocol)?;
            let mut answer = room(&reply);
            frontend::put_sasl(&mut answer, &reply);
            Ok(answer)
        }
        Authentication::Cleartext | Authentication::Md5(_) => {
            client.write(bytes).await?;
            let reply = client.answer().await?;
            let password = frontend::password(&reply).map_err(SessionError::ClientProtocol)?;
            *login = match question {
                Authentication::Cleartext => Login::Password(Zeroizing::new(password.to_vec())),
                _ => Login::Md5,
            };
            let mut answer = room(&reply);
            frontend::put_password(&mut answer, password);
            Ok(answer)
        }
        Authentication::Other(method) => Err(SessionError::Refused(unsupported_method(*method))),
        Authentication::Ok | Authentication::SaslFinal(_) => {
            Err(SessionError::ServerProtocol(WireError::Malformed("authentication request")))
        }
    }
}

/// The offer without mechanisms that bind the login to a TLS connection: here there are two TLS connections.
fn without_binding(mechanisms: &[&str]) -> Result<Vec<u8>, SessionError> {
    if !mechanisms.contains(&scram::MECHANISM) {
        return Err(SessionError::Refused(unsupported_method(10)));
    }
    let mut bytes = Vec::new();
    backend::put_sasl(&mut bytes, [scram::MECHANISM]);
    Ok(bytes)
}

/// The client could bind its login to TLS and reports that. A server that speaks TLS too concludes that a third party
/// hid its offer, which is true.
fn downgrade_refusal() -> Refusal {
    Refusal::new("28000", "the proxy cannot relay SCRAM between a client and a server that both use TLS")
        .hint("Set `verifiers` for this database in the proxy's configuration.")
}

fn unsupported_method(method: u32) -> Refusal {
    let name = match method {
        2 => "Kerberos V5",
        6 => "SCM credential",
        7 | 8 => "GSSAPI",
        9 => "SSPI",
        10 => "this SASL",
        _ => "this kind of",
    };
    Refusal::new("28000", format!("the proxy cannot relay {name} authentication"))
        .hint("Use scram-sha-256 in the server's pg_hba.conf for connections of the proxy.")
}
