//! The configuration file: what there may be in it, and what is refused.

pub(crate) mod access;
mod secrets;
#[cfg(test)]
mod tests;

pub(crate) use access::Origin;
pub use access::{Action, Rule, TlsNeed};
pub(crate) use secrets::warnings as secrets_warnings;

use crate::error::ConfigError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The configuration of a proxy.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Addresses (`127.0.0.1:6432`) and paths of sockets (`/run/stillpoint/.s.PGSQL.6432`) where clients connect.
    pub listen: Vec<Endpoint>,
    /// Path of the socket by which `stillpoint migrate` commands reach the proxy.
    pub control: PathBuf,
    /// File in which the proxy keeps where tenants have moved; it outranks `server` of a tenant.
    pub routes: PathBuf,
    /// Address that serves Prometheus metrics at `/metrics`.
    #[serde(default)]
    pub metrics: Option<SocketAddr>,
    /// Pairs of threads that serve sessions; by default one for every two processors.
    #[serde(default)]
    pub workers: Option<usize>,
    /// Permissions of the sockets in `listen`, as octal digits.
    #[serde(default = "default_socket_mode")]
    pub socket_mode: String,
    /// What clients' TLS is served with.
    #[serde(default)]
    pub tls: Option<TlsFiles>,
    /// What bounds memory and patience.
    #[serde(default)]
    pub limits: Limits,
    /// PostgreSQL servers by name.
    #[serde(default)]
    pub servers: BTreeMap<String, Server>,
    /// Databases by the name that clients ask for; `*` stands for every other name.
    #[serde(default)]
    pub tenants: BTreeMap<String, TenantConfig>,
    /// Who may connect from where; the first rule that fits decides. Without rules: this machine only.
    #[serde(default)]
    pub allow: Vec<Rule>,
    /// What it was read from.
    #[serde(skip)]
    pub(crate) text: String,
}

/// A place to listen at.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Endpoint {
    /// TCP.
    Tcp(SocketAddr),
    /// A socket in the file system.
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
    /// The certificate and those between it and its root.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// What bounds memory and patience.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Sessions at a time, all tenants together.
    pub connections: usize,
    /// Memory for what is under way between clients and servers.
    pub memory_mib: usize,
    /// Connections at a time that have not said who they are, or wait in line for their login; at the limit the longest waiting of
    /// the address that has the most is closed.
    pub unnamed: usize,
    /// Logins at a time of one tenant, and no more than half of the sessions that it may have.
    pub logins_per_tenant: usize,
    /// Logins at a time of one tenant from one address, and no more than a quarter of the sessions that it may have. All IPv6
    /// addresses of a /64 network are one.
    pub logins_per_address: usize,
    /// From a client's first byte to its session.
    pub startup_ms: u64,
    /// Until a server accepts a connection.
    pub connect_ms: u64,
    /// After SIGTERM sessions may go on so long with what they are doing.
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
    /// As a duration.
    pub fn startup(&self) -> Duration {
        Duration::from_millis(self.startup_ms)
    }

    /// As a duration.
    pub fn connect(&self) -> Duration {
        Duration::from_millis(self.connect_ms)
    }

    /// As a duration.
    pub fn drain(&self) -> Duration {
        Duration::from_millis(self.drain_ms)
    }
}

/// A PostgreSQL server, and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// Name; empty for one that a request described.
    #[serde(default)]
    pub name: String,
    /// Host name, address, or the directory of its socket.
    pub host: String,
    /// Port.
    #[serde(default = "default_port")]
    pub port: u16,
    /// Name of the database there; by default the one that the client asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub database: Option<String>,
    /// Whether the connection to it is encrypted.
    #[serde(default)]
    pub tls: ServerTls,
    /// Root certificates in PEM format, for `verify-full`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.as_str() {
            "" => write!(f, "{}:{}", self.host, self.port),
            name => write!(f, "{name} ({}:{})", self.host, self.port),
        }
    }
}

/// As libpq's `sslmode`, those of its values that mean something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServerTls {
    /// Never.
    #[default]
    Disable,
    /// Always, with any certificate.
    Require,
    /// Always, with a certificate for `host` under one of the roots in `ca`.
    VerifyFull,
}

/// A database behind the proxy.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// Name of its server, unless it has moved since.
    pub server: String,
    /// Its name there, if it differs.
    #[serde(default)]
    pub database: Option<String>,
    /// Sessions at a time.
    #[serde(default)]
    pub connections: Option<usize>,
    /// File with lines `USER VERIFIER` (`rolname` and `rolpassword` of `pg_authid`). With it the proxy checks passwords by
    /// itself; without, it passes the server's questions on.
    #[serde(default)]
    pub verifiers: Option<PathBuf>,
}

fn default_port() -> u16 {
    5432
}

fn default_socket_mode() -> String {
    "0600".into()
}

/// Every name of a database that has no tenant of its own.
pub(crate) const ANY: &str = "*";

impl Config {
    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
        Config::parse(&text)
    }

    /// Reads and checks a text.
    pub fn parse(text: &str) -> Result<Config, ConfigError> {
        let mut config: Config = toml::from_str(text).map_err(|error| ConfigError::Syntax(error.to_string()))?;
        for (name, server) in &mut config.servers {
            server.name.clone_from(name);
        }
        config.check()?;
        text.clone_into(&mut config.text);
        Ok(config)
    }

    /// The same with what takes effect at the start only as it was then.
    pub(crate) fn started_as(self, start: &Config) -> Config {
        let Config { listen, control, routes, workers, .. } = start.clone();
        Config { listen, control, routes, workers, ..self }
    }

    /// Names of what differs.
    pub(crate) fn differences(&self, other: &Config) -> Vec<&'static str> {
        let (a, b) = (self, other);
        let parts = [
            ("listen", a.listen == b.listen),
            ("control", a.control == b.control),
            ("routes", a.routes == b.routes),
            ("metrics", a.metrics == b.metrics),
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
            return invalid("`listen` names no address".into());
        }
        if self.tenants.is_empty() {
            return invalid("there is no tenant: add `[tenants.NAME]`, or `[tenants.\"*\"]` for every database".into());
        }
        for (name, tenant) in &self.tenants {
            if !self.servers.contains_key(&tenant.server) {
                return invalid(format!(
                    "tenant `{name}` is on server `{}`, which is not in `[servers]`",
                    tenant.server
                ));
            }
            if name == ANY && tenant.database.is_some() {
                return invalid("tenant `*` stands for many databases and cannot have one `database`".into());
            }
        }
        for (name, server) in &self.servers {
            if server.tls == ServerTls::VerifyFull && server.ca.is_none() {
                return invalid(format!("server `{name}` has tls = \"verify-full\" and no `ca`"));
            }
            if server.tls != ServerTls::Disable && server.host.starts_with('/') {
                return invalid(format!("server `{name}` is reached by a socket, where there is no TLS"));
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
        let most = self.limits.memory_mib * (1 << 20) / crate::session::MEMORY_MAX;
        if self.limits.connections > most {
            let (memory, connections) = (self.limits.memory_mib, self.limits.connections);
            return invalid(format!("memory_mib = {memory} is enough for {most} connections, not for {connections}"));
        }
        self.socket_mode().map(|_| ())
    }

    /// The tenant for a database: its own, or the one for every other name.
    pub(crate) fn tenant(&self, database: &str) -> Option<&TenantConfig> {
        self.tenants.get(database).or_else(|| self.tenants.get(ANY))
    }

    /// The server that a database is on unless it has moved.
    pub fn server_of(&self, database: &str) -> Option<&Server> {
        self.servers.get(&self.tenant(database)?.server)
    }

    /// Whether a client at an address is let in.
    pub fn admits(&self, database: &str, user: &str, from: IpAddr, tls: bool) -> bool {
        access::allows(&self.allow, database, user, Origin::Address(from), tls)
    }

    /// Permissions of sockets for clients.
    pub(crate) fn socket_mode(&self) -> Result<u32, ConfigError> {
        let mode = u32::from_str_radix(&self.socket_mode, 8).ok().filter(|mode| *mode <= 0o777);
        mode.ok_or_else(|| ConfigError::Invalid(format!("`socket_mode` is {:?}, not octal digits", self.socket_mode)))
    }

    /// What is set up in a way that surprises, one line each.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for (name, server) in &self.servers {
            if server.host.starts_with('/') {
                warnings.push(format!(
                    "server `{name}` is reached by its socket: a `peer` line of its pg_hba.conf would judge the user of the \
                     proxy, not that of the client"
                ));
            }
        }
        if self.tls.is_none() && self.listen.iter().any(|at| matches!(at, Endpoint::Tcp(a) if !a.ip().is_loopback())) {
            warnings.push("clients of other machines connect without TLS: there is no `[tls]`".into());
        }
        warnings.extend(access::warnings(&self.allow));
        warnings
    }
}
