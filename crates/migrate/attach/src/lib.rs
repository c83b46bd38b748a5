//! Redirects clients of a server to the proxy without a restart of the clients, and ends the redirection.
//!
//! ```text
//!              attach                                          detach
//!  Direct ----------------> Redirected -------------------------------------> Direct
//!    ^   checked first       |  new connections go to the proxy                 ^
//!    |                       |  direct sessions continue until they end         |
//!    +-- file, rules: undone if one of them fails         redirected sessions continue until they end
//! ```
//!
//! Rules select ports and not databases: all databases of the server are redirected, and the proxy must serve them from that
//! server. The rules belong to the kernel: they outlive the proxy (if it dies, connections are refused until [`detach`], which
//! needs no proxy), and do not outlive a restart of the machine.
//!
//! **The caller must** have the right to change rules of nftables and the proxy's configuration, run the proxy, and call from a tokio
//! runtime. **Guaranteed:** an error leaves everything unchanged; a session that could not connect again through the proxy is a
//! refusal by name. **It does not** move sessions that are connected already, or start the proxy.

#![forbid(unsafe_code)]

mod error;
mod file;
mod rules;

pub use error::Error;
use file::{FILE_MAX, File};
use rules::Redirection;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_host::file::read_regular;
use stillpoint_migrate_control::{Client, Config, Reply, Request, Status};
use stillpoint_migrate_postgres::link::{APPLICATION, Link, Purpose, Row, Server, ServerError, number, text};
use tokio::net::UnixStream;

/// Maximum time for the proxy to read its file again.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two checks of sessions.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Options of [`attach`].
#[derive(Debug, Clone)]
pub struct AttachOptions {
    /// Server that clients connect to, and one of its databases: the one that is to be moved.
    pub source: Server,
    /// The proxy's configuration file.
    pub config: PathBuf,
    /// Maximum time to wait for direct sessions to end.
    pub wait: Duration,
    /// Terminates direct sessions that are between two transactions.
    pub end_idle: bool,
    /// Dry run: only reports.
    pub dry_run: bool,
}

/// Options of [`detach`].
#[derive(Debug, Clone)]
pub struct DetachOptions {
    /// The same server as for [`attach`].
    pub source: Server,
    /// The proxy's configuration file.
    pub config: PathBuf,
    /// True if no client connects any more to the server's address for a database that has moved.
    pub moved: bool,
    /// Dry run: only reports.
    pub dry_run: bool,
}

/// Result of [`attach`]: connections are redirected to the proxy.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct AttachReport {
    /// True if they were redirected before.
    pub already: bool,
    /// Address at which the proxy accepts them.
    pub proxy: String,
    /// Text that was added to the proxy's configuration.
    pub added: String,
    /// Rules that the kernel was given.
    pub rules: String,
    /// Warnings for the operator.
    pub warnings: Vec<String>,
    /// Sessions that are still connected directly.
    pub direct: Vec<String>,
}

/// Result of [`detach`]: connections go to the server itself.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DetachReport {
    /// True if they did before.
    pub already: bool,
    /// Number of connections redirected to the proxy since the last [`attach`].
    pub led: u64,
    /// Number of sessions that the proxy still serves.
    pub sessions: usize,
}

/// The running proxy that is to take the connections.
struct RunningProxy {
    status: Status,
    user: u32,
    process: Option<i32>,
}

/// A direct session at the server, which bypasses the proxy.
struct DirectSession {
    process: u32,
    database: String,
    user: String,
    /// Address of the client; `None` if it connected by the server's socket.
    from: Option<IpAddr>,
    encrypted: bool,
    idle: bool,
}

impl DirectSession {
    fn name(&self) -> String {
        let from = self.from.map_or_else(|| "the server's socket".to_owned(), |from| from.to_string());
        format!("process {} ({} of {} from {from})", self.process, self.database, self.user)
    }
}

/// Redirects new connections of clients to the proxy, then waits until direct ones have ended. An error leaves everything
/// unchanged.
///
/// # Errors
///
/// [`Error::Attach`] if clients cannot be redirected, [`Error::Proxy`] if the proxy cannot be reached or does not reload
/// its file, [`Error::Nft`], and errors of the connection to the server.
pub async fn attach(options: &AttachOptions) -> Result<AttachReport, Error> {
    let file = File::read(&options.config)?;
    let proxy = find_proxy(&file.config).await?;
    let redirection = plan_redirection(options, &file.config, proxy.user).await?;
    let mut link = Link::connect(&options.source.database("postgres"), Purpose::Statements, &[]).await?;
    let databases = list_databases(&mut link).await?;
    let added = file.missing(&options.source, &databases)?;
    let direct = direct_sessions(&mut link, &proxy.status).await?;
    let mut wrong = served_elsewhere(&options.source, &file.config, &proxy.status, &databases);
    wrong.extend(direct.iter().filter_map(|session| rejection_reason(&file.config, &redirection, session)));
    if !wrong.is_empty() {
        return Err(Error::Attach(wrong));
    }
    let mut attached = AttachReport {
        already: rules::count_redirected(redirection.port).await?.is_some(),
        proxy: redirection.to.to_string(),
        rules: redirection.script(),
        warnings: warnings(&file.config, &redirection),
        direct: direct.iter().map(DirectSession::name).collect(),
        added,
    };
    if options.dry_run {
        return Ok(attached);
    }
    if !attached.added.is_empty() {
        extend(&file, &attached.added, &proxy).await?;
    }
    if let Err(error) = rules::load(&redirection).await {
        if !attached.added.is_empty() {
            file.restore()?;
            request_reload(&proxy)?;
        }
        return Err(error);
    }
    // From here on connections are redirected, so a failure while waiting is reported as a warning and not as an error.
    match wait_for_direct(&mut link, &file.config, options).await {
        Ok(left) => attached.direct = left,
        Err(error) => attached.warnings.push(format!("cannot list the remaining direct sessions: {error}")),
    }
    Ok(attached)
}

/// Stops the redirection of new connections. Needs neither the server nor the proxy. `migrations` describes those of the server's
/// databases that are under way.
///
/// # Errors
///
/// [`Error::Detach`] while a migration is under way or a database has moved, [`Error::Attach`] if the configuration file
/// cannot be used, [`Error::Nft`], and the error of `migrations`.
pub async fn detach<E: std::error::Error + Send + Sync + 'static>(
    options: &DetachOptions,
    migrations: impl FnOnce() -> Result<Vec<String>, E>,
) -> Result<DetachReport, Error> {
    let file = File::read(&options.config)?;
    let (_, port) = options.source.host_and_port();
    let sessions = find_proxy(&file.config).await.map_or(0, |proxy| proxy.status.sessions.len());
    let Some(led) = rules::count_redirected(port).await? else {
        if sessions == 0 && !options.dry_run {
            rules::remove(port).await?;
        }
        return Ok(DetachReport { already: true, led: 0, sessions });
    };
    let mut wrong = migrations().map_err(|error| Error::Migrations(error.into()))?;
    if !options.moved {
        wrong.extend(moved_databases(options, &file.config)?);
    }
    if !wrong.is_empty() {
        return Err(Error::Detach(wrong));
    }
    if !options.dry_run {
        rules::unload(port).await?;
        if sessions == 0 {
            rules::remove(port).await?;
        }
    }
    Ok(DetachReport { already: false, led, sessions })
}

async fn find_proxy(config: &Config) -> Result<RunningProxy, Error> {
    let wrong = |error: &dyn std::fmt::Display| Error::Proxy(format!("{}: {error}", config.control.display()));
    let stream = UnixStream::connect(&config.control).await.map_err(|error| wrong(&error))?;
    let owner = stream.peer_cred().map_err(|error| wrong(&error))?;
    drop(stream);
    let mut client = Client::connect(&config.control).await.map_err(|error| wrong(&error))?;
    match client.ask(&Request::Status).await {
        Ok(Reply::Status(status)) => Ok(RunningProxy { status, user: owner.uid(), process: owner.pid() }),
        Ok(reply) => Err(wrong(&format!("unexpected reply {reply:?}"))),
        Err(error) => Err(wrong(&error)),
    }
}

/// Determines which connections are redirected, and to which address; refuses what the kernel could not redirect.
async fn plan_redirection(options: &AttachOptions, config: &Config, proxy_user: u32) -> Result<Redirection, Error> {
    let refused = |why: String| Error::Attach(vec![why]);
    let (host, port) = (&options.source.address.host, options.source.address.port);
    if options.source.address.is_unix_socket() {
        return Err(refused("--source names a Unix socket: give the TCP address that clients connect to".into()));
    }
    let to = rules::reachable_address(&config.listen)
        .ok_or_else(|| refused("the proxy listens only on Unix sockets: add a TCP address to `listen`".into()))?;
    let found = tokio::net::lookup_host((host.as_str(), port)).await;
    let found = found.map_err(|source| ServerError::Connect { server: options.source.to_string(), source })?;
    let mut addresses: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    addresses.sort_unstable();
    addresses.dedup();
    // An address belongs to this machine if a socket can be bound to it.
    let here = addresses.iter().all(|address| UdpSocket::bind((*address, 0)).is_ok());
    if here {
        addresses.clear();
    }
    if here && to.port() == port {
        return Err(refused(format!(
            "proxy and server both use port {port} of this machine: give the proxy another port"
        )));
    }
    let mut exempt = vec![proxy_user, rustix::process::geteuid().as_raw()];
    exempt.sort_unstable();
    exempt.dedup();
    Ok(Redirection { port, addresses, to, exempt })
}

async fn list_databases(link: &mut Link) -> Result<Vec<String>, Error> {
    let sql = "SELECT datname FROM pg_database WHERE datallowconn AND datname <> 'template1' ORDER BY 1";
    Ok(link.query(sql).await?.iter().map(|row| text(row, 0)).collect())
}

/// Databases of the server whose clients the proxy would connect to another server.
fn served_elsewhere(source: &Server, config: &Config, status: &Status, databases: &[String]) -> Vec<String> {
    let here = source.host_and_port();
    let elsewhere = |name: &String| {
        let now = status.tenants.iter().find(|tenant| tenant.name == *name);
        let now = now.map(|tenant| (&tenant.server.host, tenant.server.port));
        let (host, port) = now.or_else(|| config.server_of(name).map(|server| (&server.host, server.port)))?;
        ((host, port) != (&here.0, here.1)).then(|| format!("the proxy serves database {name} from {host}:{port}"))
    };
    databases.iter().filter_map(elsewhere).collect()
}

/// Client sessions of all databases of the server, except ours and the proxy's.
async fn direct_sessions(link: &mut Link, status: &Status) -> Result<Vec<DirectSession>, Error> {
    let proxied: Vec<String> =
        status.sessions.iter().filter_map(|session| session.backend).map(|process| process.to_string()).collect();
    let sql = format!(
        "SELECT a.pid, a.datname, a.usename, host(a.client_addr), coalesce(s.ssl, false) OR coalesce(g.encrypted, \
         false), \
         a.state = 'idle' FROM pg_stat_activity a LEFT JOIN pg_stat_ssl s USING (pid) LEFT JOIN pg_stat_gssapi g \
         USING (pid) WHERE a.backend_type = 'client backend' AND a.datname IS NOT NULL AND a.pid <> ALL ('{{{}}}') \
         AND a.application_name <> '{APPLICATION}' AND a.pid <> pg_backend_pid() ORDER BY a.backend_start",
        proxied.join(",")
    );
    let session = |row: &Row| DirectSession {
        process: number(row, 0),
        database: text(row, 1),
        user: text(row, 2),
        from: text(row, 3).parse().ok(),
        encrypted: text(row, 4) == "t",
        idle: text(row, 5) == "t",
    };
    Ok(link.query(&sql).await?.iter().map(session).collect())
}

/// Reason why a direct session could not connect again through the proxy.
fn rejection_reason(config: &Config, redirection: &Redirection, session: &DirectSession) -> Option<String> {
    let from = session.from?;
    let who = session.name();
    if session.encrypted && config.tls.is_none() {
        return Some(format!("{who} is encrypted, and the proxy has no `[tls]`"));
    }
    // The redirection keeps the client's own address.
    if !config.admits(&session.database, &session.user, from, session.encrypted) {
        return Some(format!("{who} is not allowed by the proxy's `[[allow]]` rules"));
    }
    let here = UdpSocket::bind((from, 0)).is_ok();
    (!here && !redirection.reaches_other_machines())
        .then(|| format!("{who} connects from another machine, and the proxy listens only on {}", redirection.to))
}

fn warnings(config: &Config, redirection: &Redirection) -> Vec<String> {
    let mut warnings = Vec::new();
    if !redirection.reaches_other_machines() {
        warnings.push(format!(
            "clients on other machines are not redirected: the proxy listens only on {}",
            redirection.to
        ));
    } else if config.allow.is_empty() {
        warnings.push("clients on other machines will be rejected: the proxy has no `[[allow]]` rules".into());
    }
    if redirection.exempt.contains(&0) {
        warnings.push("clients that run as root on this machine are not redirected".into());
    }
    warnings
}

/// Makes the proxy serve added tenants; restores the file if that fails.
async fn extend(file: &File, added: &str, proxy: &RunningProxy) -> Result<(), Error> {
    file.extend(added)?;
    let serving = async {
        let begun = Instant::now();
        while begun.elapsed() < RELOAD_TIMEOUT {
            request_reload(proxy)?;
            tokio::time::sleep(POLL_INTERVAL).await;
            if find_proxy(&file.config).await?.status.counters.reloads > proxy.status.counters.reloads {
                return Ok(());
            }
        }
        Err(Error::Proxy("it did not reload the changed configuration file; its log shows the reason".into()))
    };
    let served = serving.await;
    if served.is_err() {
        file.restore()?;
        request_reload(proxy)?;
    }
    served
}

fn request_reload(proxy: &RunningProxy) -> Result<(), Error> {
    let process = proxy.process.and_then(Pid::from_raw);
    let process = process.ok_or_else(|| Error::Proxy("its process id is not known; send it SIGHUP".into()))?;
    kill_process(process, Signal::HUP).map_err(|error| Error::Proxy(format!("cannot send it SIGHUP: {error}")))
}

/// Returns sessions that are still direct when the wait is over; idle ones are terminated first if `end_idle` is set.
async fn wait_for_direct(link: &mut Link, config: &Config, options: &AttachOptions) -> Result<Vec<String>, Error> {
    let begun = Instant::now();
    loop {
        let status = find_proxy(config).await?.status;
        let left = direct_sessions(link, &status).await?;
        if left.iter().all(|session| session.from.is_none()) || begun.elapsed() >= options.wait {
            return Ok(left.iter().map(DirectSession::name).collect());
        }
        for session in left.iter().filter(|session| options.end_idle && session.idle && session.from.is_some()) {
            // Checked again, because the session may have begun a transaction since.
            let sql = format!(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = {} AND state = 'idle'",
                session.process
            );
            link.query(&sql).await?;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns databases that the proxy serves from another server now: a client that connects to this server for them is refused.
fn moved_databases(options: &DetachOptions, config: &Config) -> Result<Vec<String>, Error> {
    let (host, port) = options.source.host_and_port();
    let is_here = |server: &stillpoint_migrate_postgres::Server| (&server.host, server.port) == (&host, port);
    let moved = read_routes(&config.routes)?
        .into_iter()
        .filter(|(name, server)| config.server_of(name).is_some_and(is_here) && !is_here(server));
    Ok(moved
        .map(|(name, server)| {
            format!(
                "database {name} has moved to {}:{}: clients that still connect here for it are refused",
                server.host, server.port
            )
        })
        .collect())
}

/// Servers to which the proxy's tenants have moved; read from its file, because it may not be running.
fn read_routes(path: &Path) -> Result<BTreeMap<String, stillpoint_migrate_postgres::Server>, Error> {
    let wrong = |why: String| Error::Proxy(format!("routes file {}: {why}", path.display()));
    // The proxy's user wrote this file.
    match read_regular(path, FILE_MAX) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string())),
        Err(error) if error.is_not_found() => Ok(BTreeMap::new()),
        Err(error) => Err(wrong(error.to_string())),
    }
}
