//! The beginning of a connection: encryption, requests to cancel, the client's user and database.

use super::place::Place;
use super::{CLOSE_TIMEOUT, Session, login};
use crate::command::Command;
use crate::entry::SessionIdentity;
use crate::error::{Refusal, SessionError};
use crate::forwarder::Forwarder;
use crate::link;
use crate::logins;
use crate::pending_connections::{self, Arrival};
use crate::proxy::{Proxy, Settings};
use crate::tls;
use std::sync::Arc;
use stillpoint_migrate_control::{Origin, allows};
use stillpoint_migrate_postgres::{Raw, Stream};
use stillpoint_migrate_wire::WireError;
use stillpoint_migrate_wire::backend::put_fatal;
use stillpoint_migrate_wire::frontend::CancelKey;
use stillpoint_migrate_wire::startup::{self, Opening, Startup, Version, put_cancel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc::UnboundedReceiver;

/// Type of the TLS record that begins a handshake: the client did not ask for TLS first.
const TLS_HANDSHAKE: u8 = 0x16;
/// Length of the secrets in the proxy's cancel keys, in bytes: by protocol 3.2 and by 3.0.
const SECRET_LEN_3_2: usize = 32;
const SECRET_LEN_3_0: usize = 4;

/// Serves a connection from its first byte to its last.
pub(crate) async fn serve(raw: Raw, origin: Origin, arrival: Arrival, proxy: Arc<Proxy>, forwarder: Arc<Forwarder>) {
    let settings = proxy.settings();
    let waiting = proxy.unnamed.enter(origin, settings.config.limits.unnamed);
    drop(arrival);
    let opening = tokio::time::timeout(settings.config.limits.startup(), open(raw, origin, &settings));
    let opened = tokio::select! {
        opened = opening => opened,
        () = waiting.evicted() => return tracing::debug!("a connection before login was closed to admit another \
                                                          client"),
    };
    let (mut client, opening) = match opened {
        Ok(Ok(opened)) => opened,
        Ok(Err(error)) => return tracing::debug!(%error, "a connection broke the protocol before login"),
        Err(_) => return tracing::debug!("a connection reached the startup time limit"),
    };
    match opening {
        Opening::Cancel(key) => {
            drop(waiting);
            pass_cancel(&proxy, &key).await;
            // libpq reports a failure if an encrypted connection ends without TLS's close_notify.
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, client.shutdown()).await;
        }
        Opening::Startup(startup) => {
            serve_session(client, startup, origin, &proxy, forwarder, &settings, waiting).await
        }
        Opening::Ssl | Opening::GssEnc => {}
    }
}

/// Reads the first packet that is not a request for encryption. A client may ask for each kind of encryption at most
/// once, and for none inside TLS.
async fn open(raw: Raw, origin: Origin, settings: &Settings) -> Result<(Stream, Opening), SessionError> {
    if let (Raw::Tcp(stream), Some(tls)) = (&raw, &settings.tls) {
        let mut first = [0];
        let n = stream.peek(&mut first).await.map_err(SessionError::Client)?;
        if n == 1 && first[0] == TLS_HANDSHAKE {
            let tls::Encrypted { mut stream, names_protocol } =
                tls::accept(raw, tls).await.map_err(SessionError::Client)?;
            if !names_protocol {
                return Err(send_refusal(&mut stream, SessionError::ClientProtocol(WireError::NoAlpn)).await);
            }
            return first_message(stream, RequestedEncryption { tls: true, gssenc: true }, origin, settings).await;
        }
    }
    first_message(Stream::Plain(raw), RequestedEncryption::default(), origin, settings).await
}

/// Encryption that a client has asked for before its session.
#[derive(Debug, Default)]
struct RequestedEncryption {
    tls: bool,
    gssenc: bool,
}

async fn first_message(
    mut stream: Stream,
    mut requested: RequestedEncryption,
    origin: Origin,
    settings: &Settings,
) -> Result<(Stream, Opening), SessionError> {
    loop {
        match read_packet(&mut stream).await? {
            Opening::Ssl if !requested.tls => {
                stream = encrypt(stream, origin, settings).await?;
                requested = RequestedEncryption { tls: true, gssenc: requested.gssenc || stream.is_tls() };
            }
            Opening::GssEnc if !requested.gssenc => {
                requested.gssenc = true;
                stream.send(b"N").await.map_err(SessionError::Client)?;
            }
            Opening::Ssl | Opening::GssEnc => {
                let error = SessionError::ClientProtocol(WireError::Malformed("sequence of startup packets"));
                return Err(send_refusal(&mut stream, error).await);
            }
            opening => return Ok((stream, opening)),
        }
    }
}

/// Answers the request for TLS, and begins TLS if the proxy has it.
async fn encrypt(stream: Stream, origin: Origin, settings: &Settings) -> Result<Stream, SessionError> {
    match (stream, &settings.tls) {
        (Stream::Plain(mut raw @ Raw::Tcp(_)), Some(tls)) if origin != Origin::Local => {
            raw.write_all(b"S").await.map_err(SessionError::Client)?;
            tls::accept(raw, tls).await.map(|encrypted| encrypted.stream).map_err(SessionError::Client)
        }
        (mut plain, _) => plain.send(b"N").await.map(|()| plain).map_err(SessionError::Client),
    }
}

/// Reads exactly one packet: the bytes after it may belong to another layer.
async fn read_packet(stream: &mut Stream) -> Result<Opening, SessionError> {
    let mut bytes = vec![0; 4];
    stream.read_exact(&mut bytes).await.map_err(SessionError::Client)?;
    let len = match startup::packet_len(&bytes) {
        Ok(len) => len.unwrap_or(bytes.len()),
        Err(error) => return Err(send_refusal(stream, SessionError::ClientProtocol(error)).await),
    };
    bytes.resize(len, 0);
    stream.read_exact(&mut bytes[4..]).await.map_err(SessionError::Client)?;
    match startup::decode(&bytes) {
        Ok(opening) => Ok(opening),
        Err(error) => Err(send_refusal(stream, SessionError::ClientProtocol(error)).await),
    }
}

/// Sends the client the reason, and returns the error.
async fn send_refusal(client: &mut Stream, error: SessionError) -> SessionError {
    if let Some(refusal) = Refusal::of(&error) {
        let mut bytes = Vec::new();
        put_fatal(&mut bytes, refusal.code, refusal.message.as_str(), refusal.hint);
        let say = async {
            let _ = client.send(&bytes).await;
            let _ = client.shutdown().await;
        };
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, say).await;
    }
    error
}

/// Passes a request to cancel on to the session's present server. The client does not learn if there was such a
/// session.
async fn pass_cancel(proxy: &Proxy, key: &CancelKey) {
    let Some(cancelling) = proxy.directory.canceller(key) else {
        return tracing::debug!(process = key.pid, "a cancel request has an unknown key");
    };
    let limit = proxy.settings().config.limits.connect();
    let pass = async {
        let mut stream = link::connect(&cancelling.server, limit).await?;
        let mut packet = Vec::new();
        put_cancel(&mut packet, &cancelling.key);
        stream.send(&packet).await.map_err(SessionError::Server)?;
        // The server closes once the signal is sent; the client waits for the proxy as it would for the server.
        let mut nothing = [0];
        let _ = stream.read(&mut nothing).await;
        Ok::<(), SessionError>(())
    };
    if let Err(error) = tokio::time::timeout(limit, pass).await.unwrap_or(Err(SessionError::TimedOut("cancelling"))) {
        cancelling.never_ends();
        tracing::info!(process = key.pid, %error, "cannot forward a cancel request");
    }
}

/// Contents of the client's startup packet, checked.
pub(super) struct StartupRequest {
    pub(super) startup: Startup,
    pub(super) who: SessionIdentity,
    /// Minor version that the proxy speaks with the client.
    pub(super) minor: u16,
    pub(super) secret_len: usize,
    served: bool,
}

impl StartupRequest {
    /// Returns a refusal if the database is not served; only for a client that has proved its identity.
    ///
    /// Any other client of such a database is asked by the rules of the first tenant by name, and gets the same answers
    /// as for a served database: without a login no client can find out which databases exist.
    pub(super) fn must_be_served(&self) -> Result<(), Refusal> {
        if self.served { Ok(()) } else { Err(not_served(&self.who.database)) }
    }
}

fn check_startup(startup: Startup, origin: Origin, tls: bool, settings: &Settings) -> Result<StartupRequest, Refusal> {
    let (user, database) = (startup.user().to_owned(), startup.database().to_owned());
    if !allows(&settings.config.allow, &database, &user, origin, tls) {
        let from = match origin {
            Origin::Local => "local socket".into(),
            Origin::Address(address) => address.to_string(),
        };
        let encrypted = if tls { "with" } else { "without" };
        let message = format!(
            "no rule of the proxy allows user \"{user}\", database \"{database}\", from {from}, {encrypted} \
             encryption"
        );
        return Err(Refusal::new("28000", message));
    }
    let served = settings.config.tenant(&database).is_some();
    let stand_in = if served { Some(&database) } else { settings.config.tenants.keys().next() };
    let tenant = stand_in.ok_or_else(|| not_served(&database))?.clone();
    let is_new = startup.version().minor >= Version::V3_2.minor;
    let (minor, secret_len) = if is_new { (Version::V3_2.minor, SECRET_LEN_3_2) } else { (0, SECRET_LEN_3_0) };
    let who = SessionIdentity { tenant, user, database, origin: origin.to_string() };
    Ok(StartupRequest { startup, who, minor, secret_len, served })
}

async fn serve_session(
    client: Stream,
    startup: Startup,
    origin: Origin,
    proxy: &Arc<Proxy>,
    forwarder: Arc<Forwarder>,
    settings: &Settings,
    waiting: pending_connections::Place<'_>,
) {
    let Some((session, guard, mut commands)) =
        log_in(client, startup, origin, proxy, forwarder, settings, waiting).await
    else {
        return;
    };
    let entry = guard.entry.clone();
    tracing::debug!(
        session = entry.id,
        user = entry.user,
        database = entry.database,
        from = entry.origin,
        "session begins"
    );
    match session.run(&mut commands).await {
        Ok(()) => tracing::debug!(session = entry.id, "session ends"),
        Err(error) => {
            let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            tracing::info!(session = entry.id, user = entry.user, database = entry.database, %error, cause, "session \
                                                                                                             failed");
        }
    }
}

/// Takes a client from its startup packet to its session. If there is none, the client gets the reason.
async fn log_in(
    mut client: Stream,
    startup: Startup,
    origin: Origin,
    proxy: &Arc<Proxy>,
    forwarder: Arc<Forwarder>,
    settings: &Settings,
    waiting: pending_connections::Place<'_>,
) -> Option<(Session, Place, UnboundedReceiver<Command>)> {
    let limit = tokio::time::Instant::now() + settings.config.limits.startup();
    let entering = async {
        let request = check_startup(startup, origin, client.is_tls(), settings)?;
        let login = tokio::select! {
            login = login_place(&request, origin, proxy, settings, limit) => login?,
            () = waiting.evicted() => return Err(too_many_logins()),
        };
        let (guard, commands) = register_session(&request, proxy, settings)?;
        Ok((request, login, guard, commands))
    };
    let (request, login, guard, commands) = match entering.await {
        Ok(entered) => entered,
        Err(refusal) => {
            tracing::info!(%refusal, "a client was refused");
            send_refusal(&mut client, SessionError::Refused(refusal)).await;
            return None;
        }
    };
    drop(waiting);
    let logging_in = login::log_in(&mut client, &login, &request, &guard, proxy);
    let logged_in = tokio::time::timeout_at(limit, logging_in).await;
    drop(login);
    match logged_in.unwrap_or(Err(SessionError::TimedOut("logging in"))) {
        Ok(logged_in) => {
            let session = Session::begin(client, request, logged_in, &guard, proxy.clone(), forwarder);
            Some((session, guard, commands))
        }
        Err(error) => {
            let who = &request.who;
            tracing::info!(session = guard.entry.id, user = who.user, database = who.database, %error, "login failed");
            send_refusal(&mut client, error).await;
            None
        }
    }
}

/// Waits in line until the client may log in.
async fn login_place(
    request: &StartupRequest,
    origin: Origin,
    proxy: &Proxy,
    settings: &Settings,
    limit: tokio::time::Instant,
) -> Result<logins::Place, Refusal> {
    let SessionIdentity { tenant, database, .. } = &request.who;
    let (path, places) = logins::places(&settings.config, tenant, origin).ok_or_else(|| not_served(database))?;
    let entering = proxy.logins.enter(path, places);
    tokio::time::timeout_at(limit, entering).await.map_err(|_| too_many_logins())
}

fn too_many_logins() -> Refusal {
    Refusal::new("53300", "too many clients are logging in from this address or to this database")
}

fn not_served(database: &str) -> Refusal {
    Refusal::new("3D000", format!("database \"{database}\" is not served here"))
}

/// Gives the session its number and its place in its tenant.
fn register_session(
    request: &StartupRequest,
    proxy: &Arc<Proxy>,
    settings: &Settings,
) -> Result<(Place, UnboundedReceiver<Command>), Refusal> {
    let who = &request.who;
    let tenant = proxy.tenant(&who.tenant).ok_or_else(|| not_served(&who.database))?;
    let most = settings.config.limits.connections;
    let full =
        || Refusal::new("53300", "sorry, too many clients already").hint("The proxy serves no more connections.");
    let entered = proxy.directory.enter(who.clone(), most, tenant.waits.clone());
    let (entry, commands) = entered.ok_or_else(full)?;
    Ok((Place::new(proxy.clone(), tenant, entry), commands))
}
