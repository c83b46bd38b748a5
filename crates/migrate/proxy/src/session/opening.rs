//! The beginning of a connection: encryption, requests to cancel, who wants to go where.

use super::{LAST_WORDS, Session, login};
use crate::config::Origin;
use crate::config::access;
use crate::entry::{Command, Who};
use crate::error::{Refusal, SessionError};
use crate::link;
use crate::logins;
use crate::proxy::{Proxy, Settings};
use crate::steady::Steady;
use crate::stream::{Raw, Stream};
use crate::tenant;
use crate::unnamed;
use crate::workers::Arrival;
use std::sync::Arc;
use stillpoint_migrate_wire::WireError;
use stillpoint_migrate_wire::backend::put_fatal;
use stillpoint_migrate_wire::frontend::CancelKey;
use stillpoint_migrate_wire::startup::{self, Opening, Startup, Version, put_cancel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc::UnboundedReceiver;

/// A TLS record that begins a handshake: the client does not ask whether we speak TLS.
const TLS_HANDSHAKE: u8 = 0x16;
/// Length of the cancel keys of protocol 3.2 that we give.
const LONG_SECRET: usize = 32;

/// Serves a connection from its first byte to its last.
pub(crate) async fn serve(raw: Raw, origin: Origin, arrival: Arrival, proxy: Arc<Proxy>, steady: Arc<Steady>) {
    let settings = proxy.settings();
    let waiting = proxy.unnamed.enter(origin, settings.config.limits.unnamed);
    drop(arrival);
    let opening = tokio::time::timeout(settings.config.limits.startup(), open(raw, origin, &settings));
    let opened = tokio::select! {
        opened = opening => opened,
        () = waiting.makes_way() => return tracing::debug!("a connection that said nothing makes way"),
    };
    let (mut client, opening) = match opened {
        Ok(Ok(opened)) => opened,
        Ok(Err(error)) => return tracing::debug!(%error, "a connection began wrongly"),
        Err(_) => return tracing::debug!("a connection said nothing in time"),
    };
    match opening {
        Opening::Cancel(key) => {
            drop(waiting);
            cancel(&proxy, &key).await;
            // libpq takes the end of an encrypted connection without TLS's good-bye for a failure.
            let _ = tokio::time::timeout(LAST_WORDS, client.shutdown()).await;
        }
        Opening::Startup(startup) => session(client, startup, origin, &proxy, steady, &settings, waiting).await,
        Opening::Ssl | Opening::GssEnc => {}
    }
}

/// Reads the first packet that means something.
async fn open(raw: Raw, origin: Origin, settings: &Settings) -> Result<(Stream, Opening), SessionError> {
    if let (Raw::Tcp(stream), Some(tls)) = (&raw, &settings.tls) {
        let mut first = [0];
        let n = stream.peek(&mut first).await.map_err(SessionError::Client)?;
        if n == 1 && first[0] == TLS_HANDSHAKE {
            let mut stream = Stream::Tls(Box::new(tls.accept(raw).await.map_err(SessionError::Client)?.into()));
            let opening = packet(&mut stream).await?;
            return Ok((stream, opening));
        }
    }
    let mut stream = Stream::Plain(raw);
    // A client asks for each kind of encryption at most once.
    for _ in 0..3 {
        match (packet(&mut stream).await?, stream, &settings.tls) {
            (Opening::Ssl, Stream::Plain(mut raw @ Raw::Tcp(_)), Some(tls)) if origin != Origin::Local => {
                raw.write_all(b"S").await.map_err(SessionError::Client)?;
                stream = Stream::Tls(Box::new(tls.accept(raw).await.map_err(SessionError::Client)?.into()));
            }
            (Opening::Ssl | Opening::GssEnc, mut plain, _) => {
                plain.write_all(b"N").await.map_err(SessionError::Client)?;
                plain.flush().await.map_err(SessionError::Client)?;
                stream = plain;
            }
            (opening, stream, _) => return Ok((stream, opening)),
        }
    }
    Err(SessionError::ClientProtocol(WireError::Malformed("sequence of startup packets")))
}

/// Reads exactly one packet: what follows it may be for another layer.
async fn packet(stream: &mut Stream) -> Result<Opening, SessionError> {
    let mut bytes = vec![0; 4];
    stream.read_exact(&mut bytes).await.map_err(SessionError::Client)?;
    let len = match startup::packet_len(&bytes) {
        Ok(len) => len.unwrap_or(bytes.len()),
        Err(error) => return Err(tell(stream, SessionError::ClientProtocol(error)).await),
    };
    bytes.resize(len, 0);
    stream.read_exact(&mut bytes[4..]).await.map_err(SessionError::Client)?;
    match startup::decode(&bytes) {
        Ok(opening) => Ok(opening),
        Err(error) => Err(tell(stream, SessionError::ClientProtocol(error)).await),
    }
}

/// Tells the client why, and gives the error back.
async fn tell(client: &mut Stream, error: SessionError) -> SessionError {
    if let Some(refusal) = Refusal::of(&error) {
        let mut bytes = Vec::new();
        put_fatal(&mut bytes, refusal.code, refusal.message.as_str(), refusal.hint);
        let say = async {
            let _ = client.write_all(&bytes).await;
            let _ = client.flush().await;
            let _ = client.shutdown().await;
        };
        let _ = tokio::time::timeout(LAST_WORDS, say).await;
    }
    error
}

/// Passes a request to cancel on to where the session is now. Nobody is told whether there was one.
async fn cancel(proxy: &Proxy, key: &CancelKey) {
    let Some((server, theirs)) = proxy.directory.get(key.pid).and_then(|entry| entry.canceller(key)) else {
        return tracing::debug!(session = key.pid, "a request to cancel has no key of ours");
    };
    let limit = proxy.settings().config.limits.connect();
    let pass = async {
        let mut stream = link::connect(&server, limit).await?;
        let mut packet = Vec::new();
        put_cancel(&mut packet, &theirs);
        stream.write_all(&packet).await.map_err(SessionError::Server)?;
        stream.flush().await.map_err(SessionError::Server)?;
        // The server closes once the signal is sent; the client waits for us as it would for the server.
        let mut nothing = [0];
        let _ = stream.read(&mut nothing).await;
        Ok::<(), SessionError>(())
    };
    if let Err(error) = tokio::time::timeout(limit, pass).await.unwrap_or(Err(SessionError::TimedOut("cancelling"))) {
        tracing::info!(session = key.pid, %error, "a request to cancel could not be passed on");
    }
}

/// What the client asked for in its startup packet, checked.
pub(super) struct Wish {
    pub(super) startup: Startup,
    pub(super) who: Who,
    /// The minor version that we speak with it.
    pub(super) minor: u16,
    pub(super) secret_len: usize,
}

fn wish(startup: Startup, origin: Origin, tls: bool, settings: &Settings) -> Result<Wish, Refusal> {
    let Version { major, minor } = startup.version;
    if major != 3 {
        let message = format!("unsupported frontend protocol {major}.{minor}: the proxy supports 3.0 to 3.2");
        return Err(Refusal::new("0A000", message));
    }
    let text = |name: &str| {
        let value = startup.get(name).map(|value| String::from_utf8(value.to_vec()));
        value.transpose().map_err(|_| Refusal::new("28000", format!("`{name}` in the startup packet is not UTF-8")))
    };
    let user = text("user")?.filter(|user| !user.is_empty());
    let user = user.ok_or_else(|| Refusal::new("28000", "no PostgreSQL user name specified in startup packet"))?;
    let database = text("database")?.filter(|name| !name.is_empty()).unwrap_or_else(|| user.clone());
    if !access::allows(&settings.config.allow, &database, &user, origin, tls) {
        let from = match origin {
            Origin::Local => "local socket".into(),
            Origin::Address(address) => address.to_string(),
        };
        let encrypted = if tls { "with" } else { "without" };
        let message = format!(
            "no rule of the proxy allows user \"{user}\", database \"{database}\", from {from}, {encrypted} encryption"
        );
        return Err(Refusal::new("28000", message));
    }
    let minor = if minor >= Version::V3_2.minor { Version::V3_2.minor } else { 0 };
    let secret_len = if minor == Version::V3_2.minor { LONG_SECRET } else { 4 };
    let origin = match origin {
        Origin::Local => "local".into(),
        Origin::Address(address) => address.to_string(),
    };
    let who = Who { tenant: database.clone(), user, database, origin };
    Ok(Wish { startup, who, minor, secret_len })
}

async fn session(
    client: Stream,
    startup: Startup,
    origin: Origin,
    proxy: &Arc<Proxy>,
    steady: Arc<Steady>,
    settings: &Settings,
    waiting: unnamed::Place<'_>,
) {
    let Some((session, guard, mut commands)) = log_in(client, startup, origin, proxy, steady, settings, waiting).await
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
            tracing::info!(session = entry.id, user = entry.user, database = entry.database, %error, cause, "session broken off");
        }
    }
}

/// From the client's wish to its session, or to the reason why there is none, which it is told.
async fn log_in(
    mut client: Stream,
    startup: Startup,
    origin: Origin,
    proxy: &Arc<Proxy>,
    steady: Arc<Steady>,
    settings: &Settings,
    waiting: unnamed::Place<'_>,
) -> Option<(Session, tenant::Place, UnboundedReceiver<Command>)> {
    let limit = tokio::time::Instant::now() + settings.config.limits.startup();
    let entering = async {
        let wish = wish(startup, origin, client.is_tls(), settings)?;
        let login = tokio::select! {
            login = login_place(&wish, origin, proxy, settings, limit) => login?,
            () = waiting.makes_way() => return Err(too_many_logins()),
        };
        let (guard, commands) = enter(&wish, proxy, settings)?;
        Ok((wish, login, guard, commands))
    };
    let (wish, login, guard, commands) = match entering.await {
        Ok(entered) => entered,
        Err(refusal) => {
            tracing::info!(%refusal, "a client was refused");
            tell(&mut client, SessionError::Refused(refusal)).await;
            return None;
        }
    };
    drop(waiting);
    let logging_in = login::log_in(&mut client, &login, &wish, &guard, proxy);
    let logged_in = tokio::time::timeout_at(limit, logging_in).await;
    drop(login);
    match logged_in.unwrap_or(Err(SessionError::TimedOut("logging in"))) {
        Ok(logged_in) => {
            let session = Session::begin(client, wish, logged_in, &guard, proxy.clone(), steady);
            Some((session, guard, commands))
        }
        Err(error) => {
            tracing::info!(session = guard.entry.id, user = wish.who.user, database = wish.who.database, %error, "no session");
            tell(&mut client, error).await;
            None
        }
    }
}

/// Waits in line until the client may log in.
async fn login_place(
    wish: &Wish,
    origin: Origin,
    proxy: &Proxy,
    settings: &Settings,
    limit: tokio::time::Instant,
) -> Result<logins::Place, Refusal> {
    let database = &wish.who.database;
    let (path, places) = logins::places(&settings.config, database, origin).ok_or_else(|| not_served(database))?;
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
fn enter(
    wish: &Wish,
    proxy: &Arc<Proxy>,
    settings: &Settings,
) -> Result<(tenant::Place, UnboundedReceiver<Command>), Refusal> {
    let who = &wish.who;
    let tenant = proxy.tenant(&who.database).ok_or_else(|| not_served(&who.database))?;
    let most = settings.config.limits.connections;
    let full =
        || Refusal::new("53300", "sorry, too many clients already").hint("The proxy serves no more connections.");
    let entered = proxy.directory.enter(who.clone(), wish.secret_len, most, tenant.waits.clone());
    let (entry, commands) = entered.ok_or_else(full)?;
    Ok((tenant::Place::new(proxy.clone(), tenant, entry), commands))
}
