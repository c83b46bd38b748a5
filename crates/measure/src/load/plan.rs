//! Parameters of a load, and the checks before any connection.

use std::fmt;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

use super::connection::Address;
use super::schedule::Arrivals;
use super::values::VALUE_BYTES_MIN;
use super::{memcached, redis};
use crate::error::{Error, Result};
use crate::record::{Header, KINDS_MAX};

/// Address of the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    /// `HOST:PORT`.
    Tcp(String),
    /// Path of a Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Tcp(address) => f.write_str(address),
            Target::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

impl Target {
    /// Host in the form of an HTTP request.
    pub(super) fn host(&self) -> String {
        match self {
            Target::Tcp(address) => address.clone(),
            Target::Unix(_) => "localhost".into(),
        }
    }

    pub(super) fn resolve(&self) -> Result<Address> {
        match self {
            Target::Unix(path) => Ok(Address::Unix(path.clone())),
            Target::Tcp(name) => {
                let fail = |source| Error::Connect { target: name.clone(), source };
                let address = name.to_socket_addrs().map_err(fail)?.next();
                address.map(Address::Tcp).ok_or_else(|| fail(std::io::ErrorKind::NotFound.into()))
            }
        }
    }
}

/// Kinds of requests with weights: `get=70,set=25,lua=3,blpop=2`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mix(pub Vec<(String, u32)>);

impl FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut pairs: Vec<(String, u32)> = Vec::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (name, weight) = part.split_once('=').unwrap_or((part, "1"));
            let weight = weight.parse().map_err(|_| format!("`{weight}` is not a weight"))?;
            if pairs.iter().any(|(other, _)| other == name) {
                return Err(format!("`{name}` is named twice"));
            }
            pairs.push((name.to_owned(), weight));
        }
        if pairs.iter().all(|(_, weight)| *weight == 0) {
            return Err("no kind of request has a weight".into());
        }
        Ok(Mix(pairs))
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, weight)) in self.0.iter().enumerate() {
            write!(f, "{}{name}={weight}", if index > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

impl Mix {
    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(other, weight)| other == name && *weight > 0)
    }
}

/// Protocol and requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Protocol {
    /// RESP: `get`, `set`, `lua`, `blpop`, `incr`, `ping`.
    Redis {
        /// Kinds of requests, with weights.
        mix: Mix,
        /// Number of keys.
        keys: u64,
        /// Size of a value, in bytes.
        value_bytes: u32,
    },
    /// The text protocol: `get`, `set`, `version`.
    Memcached {
        /// Kinds of requests, with weights.
        mix: Mix,
        /// Number of keys.
        keys: u64,
        /// Size of a value, in bytes.
        value_bytes: u32,
    },
    /// An echo server.
    Tcp {
        /// Size of a message, in bytes.
        value_bytes: u32,
    },
    /// `GET path` over HTTP/1.1.
    Http {
        /// Path of the request.
        path: String,
    },
    /// Searches for `uid=userN`, each with one entry as its answer.
    Ldap {
        /// Name of the entry below which they search.
        base: String,
        /// Number of records: N is less.
        records: u64,
    },
}

impl Protocol {
    /// Returns the name that a record uses.
    pub fn name(&self) -> &'static str {
        match self {
            Protocol::Redis { .. } => "redis",
            Protocol::Memcached { .. } => "memcached",
            Protocol::Tcp { .. } => "tcp",
            Protocol::Http { .. } => "http",
            Protocol::Ldap { .. } => "ldap",
        }
    }

    /// Returns the number of keys and the bytes of a value; 0 for a protocol without keys.
    pub(super) fn size(&self) -> (u64, u32) {
        match self {
            Protocol::Redis { keys, value_bytes, .. } | Protocol::Memcached { keys, value_bytes, .. } => {
                (*keys, *value_bytes)
            }
            Protocol::Tcp { value_bytes } => (0, *value_bytes),
            Protocol::Http { .. } => (0, 0),
            Protocol::Ldap { records, .. } => (*records, 0),
        }
    }
}

/// Plan of a load.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Address of the server.
    pub target: Target,
    /// Protocol, with its parameters.
    pub protocol: Protocol,
    /// Number of connections that carry requests.
    pub connections: u32,
    /// Number of connections that are only kept open, and checked at the end.
    pub idle: u32,
    /// Number of connections blocked in a pop (Redis only).
    pub blocking: u32,
    /// Maximum number of requests in progress on one connection.
    pub pipeline: u32,
    /// Requests per second.
    pub rate: f64,
    /// Distribution of the times between requests.
    pub arrivals: Arrivals,
    /// Time for which requests are sent.
    pub duration: Duration,
    /// Time after the due time at which a request without an answer has failed.
    pub timeout: Duration,
    /// Time limit for opening all connections.
    pub connect_timeout: Duration,
    /// Time before a due time at which sleeping ends and polling begins.
    pub spin: Duration,
    /// Seed of all random choices: the same seed gives the same requests at the same times.
    pub seed: u64,
    /// File into which every request is recorded.
    pub record: Option<PathBuf>,
}

impl Plan {
    /// Makes a plan with the defaults of the command line: 50 connections, 10,000 requests per second for 10 seconds.
    pub fn new(target: Target, protocol: Protocol) -> Plan {
        Plan {
            target,
            protocol,
            connections: 50,
            idle: 0,
            blocking: 0,
            pipeline: 16,
            rate: 10_000.0,
            arrivals: Arrivals::default(),
            duration: Duration::from_secs(10),
            timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(30),
            spin: Duration::from_micros(20),
            seed: 1,
            record: None,
        }
    }

    /// Makes a plan for Redis with the mix of the demo.
    pub fn redis(target: Target) -> Plan {
        let mix = Mix([("get", 70), ("set", 30)].map(|(name, weight)| (name.to_owned(), weight)).to_vec());
        Plan::new(target, Protocol::Redis { mix, keys: 100_000, value_bytes: 64 })
    }

    /// Refuses a plan that contradicts itself.
    ///
    /// # Errors
    /// The plan contradicts itself.
    pub fn check(&self) -> Result<()> {
        let refuse = |option, problem: String| Err(Error::Plan { option, problem });
        if !(self.rate > 0.0 && self.rate <= 10_000_000.0) {
            return refuse("--rate", format!("{} requests a second cannot be scheduled", self.rate));
        }
        for (option, value) in [("--connections", self.connections), ("--pipeline", self.pipeline)] {
            if value == 0 {
                return refuse(option, "must be at least 1".into());
            }
        }
        let (keys, value_bytes) = self.protocol.size();
        match &self.protocol {
            Protocol::Redis { mix, .. } => {
                check_kinds(mix, &redis::KINDS)?;
                if mix.has("blpop") && self.blocking == 0 {
                    return refuse("--blocking", "a mix with blpop needs connections that block".into());
                }
                check_keys(keys)?;
            }
            Protocol::Memcached { mix, .. } => {
                check_kinds(mix, &memcached::KINDS)?;
                check_keys(keys)?;
            }
            Protocol::Http { path } if !path.starts_with('/') || path.contains(char::is_whitespace) => {
                return refuse("--path", format!("`{path}` is not a path"));
            }
            Protocol::Ldap { .. } if self.pipeline > 1 => {
                return refuse("--pipeline", "an LDAP server answers in any order".into());
            }
            Protocol::Ldap { .. } => check_keys(keys)?,
            Protocol::Tcp { .. } | Protocol::Http { .. } => {}
        }
        if !matches!(self.protocol, Protocol::Http { .. } | Protocol::Ldap { .. }) {
            check_value_bytes(value_bytes)?;
        }
        if self.blocking > 0 && self.protocol.name() != "redis" {
            return refuse("--blocking", "only Redis has a pop that blocks".into());
        }
        Ok(())
    }

    /// Raises the limit on open files to the number that the plan needs; refuses the plan if that is not allowed.
    pub(super) fn allow_files(&self) -> Result<()> {
        let wanted = u64::from(self.connections) + u64::from(self.idle) + u64::from(self.blocking) + 64;
        let limit = getrlimit(Resource::Nofile);
        if limit.current.is_none_or(|current| current >= wanted) {
            return Ok(());
        }
        if limit.maximum.is_some_and(|maximum| maximum < wanted) {
            let problem = format!("{wanted} open files are more than the {} allowed", limit.maximum.unwrap_or(0));
            return Err(Error::Plan { option: "--connections", problem });
        }
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum })
            .map_err(|errno| Error::System { call: "setrlimit", source: errno.into() })
    }

    pub(super) fn header(&self, kinds: Vec<String>, started_ns: u64, started_unix_s: u64) -> Header {
        let (keys, value_bytes) = self.protocol.size();
        Header {
            protocol: self.protocol.name().into(),
            target: self.target.to_string(),
            started_ns,
            started_unix_s,
            kinds,
            rate: self.rate,
            arrivals: self.arrivals.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default(),
            connections: self.connections,
            idle: self.idle,
            blocking: self.blocking,
            pipeline: self.pipeline,
            keys,
            value_bytes,
        }
    }
}

fn check_kinds(mix: &Mix, known: &[&str]) -> Result<()> {
    let refuse = |problem| Err(Error::Plan { option: "--mix", problem });
    if mix.0.len() > KINDS_MAX || mix.0.iter().all(|(_, weight)| *weight == 0) {
        return refuse("no kind of request has a weight".into());
    }
    match mix.0.iter().find(|(name, _)| !known.contains(&name.as_str())) {
        Some((name, _)) => refuse(format!("`{name}` is not one of {}", known.join(", "))),
        None => Ok(()),
    }
}

pub(super) fn check_keys(keys: u64) -> Result<()> {
    if (1..=u64::from(u32::MAX)).contains(&keys) {
        return Ok(());
    }
    Err(Error::Plan { option: "--keys", problem: format!("{keys} is not between 1 and {}", u32::MAX) })
}

pub(super) fn check_value_bytes(value_bytes: u32) -> Result<()> {
    if (VALUE_BYTES_MIN..=16 << 20).contains(&value_bytes) {
        return Ok(());
    }
    let problem = format!("{value_bytes} is not between {VALUE_BYTES_MIN} (a stamp has to fit) and 16 MiB");
    Err(Error::Plan { option: "--value-bytes", problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan::redis(Target::Tcp("127.0.0.1:1".into()))
    }

    fn refused(plan: &Plan) -> &'static str {
        match plan.check() {
            Err(Error::Plan { option, .. }) => option,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_mix_is_read_and_written() {
        let text = "get=70,set=25,lua=3,blpop=2";
        assert_eq!(text.parse::<Mix>().unwrap().to_string(), text);
        assert_eq!("ping".parse::<Mix>().unwrap().0, [("ping".to_owned(), 1)]);
        for bad in ["", "get=0", "get=x", "get=1,get=2", "get=-1"] {
            assert!(bad.parse::<Mix>().is_err(), "{bad}");
        }
    }

    #[test]
    fn contradictions_are_refused_by_option() {
        assert!(plan().check().is_ok());
        assert_eq!(refused(&Plan { rate: 0.0, ..plan() }), "--rate");
        assert_eq!(refused(&Plan { rate: f64::NAN, ..plan() }), "--rate");
        assert_eq!(refused(&Plan { connections: 0, ..plan() }), "--connections");
        let redis = |mix: &str, keys, value_bytes| Protocol::Redis { mix: mix.parse().unwrap(), keys, value_bytes };
        assert_eq!(refused(&Plan { protocol: redis("get,fly", 1, 64), ..plan() }), "--mix");
        assert_eq!(refused(&Plan { protocol: redis("blpop", 1, 64), ..plan() }), "--blocking");
        assert_eq!(refused(&Plan { protocol: redis("get", 0, 64), ..plan() }), "--keys");
        assert_eq!(refused(&Plan { protocol: redis("get", 1, 26), ..plan() }), "--value-bytes");
        let http = Protocol::Http { path: "x".into() };
        assert_eq!(refused(&Plan { protocol: http, ..plan() }), "--path");
        let ldap = Protocol::Ldap { base: "dc=example".into(), records: 1 };
        assert_eq!(refused(&Plan { protocol: ldap.clone(), ..plan() }), "--pipeline");
        assert!(Plan { protocol: ldap, pipeline: 1, ..plan() }.check().is_ok());
        let echo = Protocol::Tcp { value_bytes: 64 };
        assert_eq!(refused(&Plan { protocol: echo, blocking: 1, ..plan() }), "--blocking");
    }
}
