//! The configuration file: its contents, and what is refused.

pub(crate) mod access;
#[cfg(test)]
mod tests;

use access::{Origin, Rule};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use stillpoint_migrate_postgres::{Server, ServerTls};
use thiserror::Error;

/// Size limit of the file, in bytes.
const FILE_MAX: u64 = 64 << 20;
/// Memory in bytes of a session for bytes under way and for its state.
pub const SESSION_BYTES: usize = 64 << 10;

/// The configuration cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause of the failure.
        source: std::io::Error,
    },
    /// The text is not TOML, or has other keys or types than a configuration.
    #[error("{0}")]
    Syntax(String),
    /// The parts of the configuration do not fit together.
    #[error("{0}")]
    Invalid(String),
    /// A certificate or key cannot be used.
    #[error("{}: {why}", path.display())]
    Tls {
        /// Path of the file.
        path: PathBuf,
        /// Cause of the failure.
        why: String,
    },
}

/// The configuration of a proxy.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Addresses (`127.0.0.1:6432`) and paths of sockets (`/run/stillpoint/.s.PGSQL.6432`) where clients connect.
    pub listen: Vec<Endpoint>,
    /// Path of the socket through which `stillpoint migrate` commands reach the proxy.
    pub control: PathBuf,
    /// File in which the proxy keeps the servers that tenants have moved to; it outranks `server` of a tenant.
    pub routes: PathBuf,
    /// Address that serves Prometheus metrics at `/metrics`.
    pub metrics: Option<SocketAddr>,
    /// The live page, served at `/` of that address. Without it there is none.
    pub page: Option<PageConfig>,
    /// Number of pairs of threads that serve sessions; by default one for every two processors.
    pub workers: Option<usize>,
    /// Permissions of the sockets in `listen`, as octal digits.
    #[serde(default = "default_socket_mode")]
    pub socket_mode: String,
    /// Certificate and key for clients' TLS.
    pub tls: Option<TlsFiles>,
    /// Limits of memory, connections and time.
    #[serde(default)]
    pub limits: Limits,
    /// PostgreSQL servers by name.
    #[serde(default)]
    pub servers: BTreeMap<String, Server>,
    /// Databases by the name that clients ask for; `*` stands for every other name.
    #[serde(default)]
    pub tenants: BTreeMap<String, TenantConfig>,
    /// Rules for clients' connections; the first rule that matches decides. Without rules: this machine only.
    #[serde(default)]
    pub allow: Vec<Rule>,
    /// Text that it was read from.
    #[serde(skip)]
    pub text: String,
}

/// An address or path to listen at.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Endpoint {
    /// TCP address.
    Tcp(SocketAddr),
    /// Path of a socket in the file system.
    Unix(PathBuf),
}

impl TryFrom<String> for Endpoint {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text.starts_with('/') {
            return Ok(Endpoint::Unix(text.into()));
        }
        let address = text.parse().map_err(|_| format!("{text:?} is neither ADDRESS:PORT nor the path of a socket"))?;
        Ok(Endpoint::Tcp(address))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Tcp(address) => address.fmt(f),
            Endpoint::Unix(path) => path.display().fmt(f),
        }
    }
}

/// Files in PEM format.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// Certificate, and those between it and its root.
    pub certificate: PathBuf,
    /// Private key of the certificate.
    pub key: PathBuf,
}

/// The live page.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PageConfig {
    /// File with the token that the button for the switch requires. Without it there is no button.
    pub token: Option<PathBuf>,
    /// Names, without ports, by which browsers on other machines reach the page. Without names only browsers on this
    /// machine may, and `metrics` must be a loopback address.
    pub hosts: Vec<String>,
}

impl PageConfig {
    /// Returns true if the page may be shown under this name or address, without a port: the name in a browser is this
    /// machine's own, or one that the operator has chosen. A site on the internet cannot lead its name here.
    pub fn is_host(&self, host: &str) -> bool {
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        let is_local = host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback());
        is_local || self.hosts.iter().any(|name| name.eq_ignore_ascii_case(host))
    }
}

/// Limits of memory, connections and time.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Maximum number of sessions at a time, all tenants together.
    pub connections: usize,
    /// Memory for bytes under way between clients and servers, in MiB.
    pub memory_mib: usize,
    /// Maximum number of connections that have not named their user, or wait in line for their login. At the limit the proxy
    /// looks for the address that has the most and closes its connection that waits longest.
    pub unnamed: usize,
    /// Maximum number of logins at a time of one tenant, and no more than half of the sessions that it may have.
    pub logins_per_tenant: usize,
    /// Maximum number of logins at a time of one tenant from one address, and no more than a quarter of the sessions that it may have.
    /// All IPv6 addresses of a /64 network count as one.
    pub logins_per_address: usize,
    /// Time from a client's first byte to its session, in milliseconds.
    pub startup_ms: u64,
    /// Time until a server accepts a connection, in milliseconds.
    pub connect_ms: u64,
    /// Time after SIGTERM in which sessions may finish their transactions, in milliseconds.
    pub drain_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 1000,
            memory_mib: 256,
            unnamed: 512,
            logins_per_tenant: 64,
            logins_per_address: 16,
            startup_ms: 10_000,
            connect_ms: 5_000,
            drain_ms: 30_000,
        }
    }
}

impl Limits {
    /// `startup_ms` as a duration.
    pub fn startup(&self) -> Duration {
        Duration::from_millis(self.startup_ms)
    }

    /// `connect_ms` as a duration.
    pub fn connect(&self) -> Duration {
        Duration::from_millis(self.connect_ms)
    }

    /// `drain_ms` as a duration.
    pub fn drain(&self) -> Duration {
        Duration::from_millis(self.drain_ms)
    }
}

/// A database behind the proxy.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// Name of its server, unless it has moved since.
    pub server: String,
    /// Name of the database on that server, if it differs.
    pub database: Option<String>,
    /// Maximum number of sessions at a time.
    pub connections: Option<usize>,
    /// File with lines `USER VERIFIER` (`rolname` and `rolpassword` of `pg_authid`). With it the proxy checks passwords
    /// itself; without it, the proxy passes the server's questions on.
    pub verifiers: Option<PathBuf>,
    /// Idle sessions share connections to the server. Without it each session has its own.
    pub pool: Option<PoolConfig>,
}

/// Server connections that idle sessions of a tenant share.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// Maximum number of shared connections of each user. Sessions that keep their connection are not counted.
    pub servers: usize,
    /// Maximum number of sessions of each user that wait for a connection.
    #[serde(default = "default_waiting")]
    pub waiting: usize,
    /// Longest wait for a connection, in milliseconds.
    #[serde(default = "default_wait_ms")]
    pub wait_ms: u64,
    /// Time after which an unused connection is closed, in milliseconds.
    #[serde(default = "default_idle_ms")]
    pub idle_ms: u64,
    /// Words of statements after which a session keeps its connection to its end, for example names of functions that
    /// keep something in their server process.
    #[serde(default)]
    pub keep: Vec<String>,
}

fn default_waiting() -> usize {
    1000
}

fn default_wait_ms() -> u64 {
    10_000
}

fn default_idle_ms() -> u64 {
    600_000
}

fn default_socket_mode() -> String {
    "0600".into()
}

/// Name that stands for every database without a tenant of its own.
pub const ANY: &str = "*";

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Read`] if the file cannot be read, and the errors of [`Config::parse`].
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let text = stillpoint_host::file::read_named_text(path, FILE_MAX)
            .map_err(|error| ConfigError::Read { path: path.into(), source: error.into() })?;
        Config::parse(&text)
    }

    /// Reads and checks a text.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Syntax`] if the text is not a configuration, [`ConfigError::Invalid`] if its parts do not fit
    /// together.
    pub fn parse(text: &str) -> Result<Config, ConfigError> {
        let mut config: Config = toml::from_str(text).map_err(|error| ConfigError::Syntax(error.to_string()))?;
        for (name, server) in &mut config.servers {
            server.name.clone_from(name);
        }
        config.check()?;
        text.clone_into(&mut config.text);
        Ok(config)
    }

    /// This configuration, except for the values that take effect only at the start: those come from `start`.
    pub fn started_as(self, start: &Config) -> Config {
        let Config { listen, control, routes, workers, .. } = start.clone();
        Config { listen, control, routes, workers, ..self }
    }

    /// Names of the values that differ.
    pub fn differences(&self, other: &Config) -> Vec<&'static str> {
        let (a, b) = (self, other);
        let parts = [
            ("listen", a.listen == b.listen),
            ("control", a.control == b.control),
            ("routes", a.routes == b.routes),
            ("metrics", a.metrics == b.metrics),
            ("page", a.page == b.page),
            ("workers", a.workers == b.workers),
            ("socket_mode", a.socket_mode == b.socket_mode),
            ("tls", a.tls == b.tls),
            ("limits", a.limits == b.limits),
            ("servers", a.servers == b.servers),
            ("tenants", a.tenants == b.tenants),
            ("allow", a.allow == b.allow),
        ];
        parts.into_iter().filter(|(_, same)| !same).map(|(name, _)| name).collect()
    }

    fn check(&self) -> Result<(), ConfigError> {
        let invalid = |text: String| Err(ConfigError::Invalid(text));
        if self.listen.is_empty() {
            return invalid("`listen` is empty".into());
        }
        if self.tenants.is_empty() {
            return invalid("there is no tenant: add `[tenants.NAME]`, or `[tenants.\"*\"]` for every database".into());
        }
        for (name, tenant) in &self.tenants {
            if !self.servers.contains_key(&tenant.server) {
                return invalid(format!(
                    "tenant `{name}` names server `{}`, which is not in `[servers]`",
                    tenant.server
                ));
            }
            if let Some(pool) = &tenant.pool {
                for (key, value) in
                    [("servers", pool.servers as u64), ("wait_ms", pool.wait_ms), ("idle_ms", pool.idle_ms)]
                {
                    if value == 0 {
                        return invalid(format!("`pool.{key}` of tenant `{name}` is 0"));
                    }
                }
                if pool.keep.iter().any(|word| word.len() < 3 || !word.is_ascii()) {
                    return invalid(format!(
                        "a word in `pool.keep` of tenant `{name}` is shorter than 3 ASCII letters"
                    ));
                }
            }
            if name == ANY && tenant.database.is_some() {
                return invalid("tenant `*` stands for many databases and cannot have `database`".into());
            }
        }
        for (name, server) in &self.servers {
            if server.tls == ServerTls::VerifyFull && server.ca.is_none() {
                return invalid(format!("server `{name}` has tls = \"verify-full\" but no `ca`"));
            }
            if server.tls != ServerTls::Disable && server.is_unix_socket() {
                return invalid(format!("server `{name}` is a Unix socket, which does not support TLS"));
            }
        }
        if let Some(page) = &self.page {
            let Some(address) = self.metrics else {
                return invalid("`page` needs `metrics`, the address that serves it".into());
            };
            if page.hosts.is_empty() && !address.ip().is_loopback() {
                return invalid(format!(
                    "`metrics` is {address}, and the page is for this machine only: use 127.0.0.1, or set `page.hosts`"
                ));
            }
        }
        if self.workers == Some(0) {
            return invalid("`workers` is 0".into());
        }
        for (name, limit) in [
            ("unnamed", self.limits.unnamed),
            ("logins_per_tenant", self.limits.logins_per_tenant),
            ("logins_per_address", self.limits.logins_per_address),
        ] {
            if limit == 0 {
                return invalid(format!("`limits.{name}` is 0"));
            }
        }
        let most = self.limits.memory_mib * (1 << 20) / SESSION_BYTES;
        if self.limits.connections > most {
            let (memory, connections) = (self.limits.memory_mib, self.limits.connections);
            return invalid(format!("memory_mib = {memory} is enough for {most} connections, not for {connections}"));
        }
        self.socket_mode().map(|_| ())
    }

    /// Tenant for a database: its own, or the one for every other name.
    pub fn tenant(&self, database: &str) -> Option<&TenantConfig> {
        self.tenants.get(database).or_else(|| self.tenants.get(ANY))
    }

    /// Server of a database, unless the database has moved.
    pub fn server_of(&self, database: &str) -> Option<&Server> {
        self.servers.get(&self.tenant(database)?.server)
    }

    /// Returns true if a client at an address may connect.
    pub fn admits(&self, database: &str, user: &str, from: IpAddr, tls: bool) -> bool {
        access::allows(&self.allow, database, user, Origin::Address(from), tls)
    }

    /// Permissions of the clients' sockets.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] if `socket_mode` is not a mode.
    pub fn socket_mode(&self) -> Result<u32, ConfigError> {
        let mode = u32::from_str_radix(&self.socket_mode, 8).ok().filter(|mode| *mode <= 0o777);
        mode.ok_or_else(|| ConfigError::Invalid(format!("`socket_mode` is {:?}, not octal digits", self.socket_mode)))
    }

    /// Settings that may surprise the operator, one line each.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for (name, server) in &self.servers {
            if server.is_unix_socket() {
                warnings.push(format!(
                    "server `{name}` is a Unix socket: a `peer` line of its pg_hba.conf would check the \
                     operating-system user of the proxy, not of the client"
                ));
            }
        }
        if self.tls.is_none() && self.listen.iter().any(|at| matches!(at, Endpoint::Tcp(a) if !a.ip().is_loopback())) {
            warnings.push("clients on other machines connect without TLS: there is no `[tls]`".into());
        }
        if self.page.is_some() && self.metrics.is_some_and(|address| !address.ip().is_loopback()) {
            warnings.push("the live page, and the token of its button, pass the network without encryption".into());
        }
        warnings.extend(access::warnings(&self.allow));
        warnings
    }
}
