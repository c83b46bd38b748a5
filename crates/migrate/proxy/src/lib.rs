//! A proxy for PostgreSQL whose sessions can be moved to another server between two transactions, with what they carry.
//!
//! The caller gives a configuration file ([`Config`]), must be able to reach the servers, and must be the only way to the
//! databases that are to be moved. Servers see the proxy's address: the file's `allow` rules take the place of pg_hba.conf's
//! addresses, while passwords stay the servers' affair.
//!
//! The crate guarantees: what a client may do directly it may do through the proxy, since messages are passed on as they
//! are; a client or server that is slow, silent or broken harms its own session only; bytes that are not the protocol end
//! their connection with an error that says so; memory is bounded by the number of connections. A tenant is switched only
//! while no transaction is open ([`control::Request::Pause`]), and every limit of time leads back to the source. When the
//! one who asked for a pause dies, the sessions go on at the source. After [`control::Request::Switch`] a session is at the
//! target with its settings, role, prepared statements, channels and advisory locks, or it is closed, and named in the reply.
//!
//! It does not: pool connections, parse SQL, rewrite statements, keep passwords. What cannot be taken along pins a session
//! and is said: temporary tables, WITH HOLD cursors, replication. Not noticed, and so lost: values of `currval` and
//! `lastval`, how often a lock was taken, libraries that were loaded by LOAD.
//!
//! ```text
//! client ──TLS?── worker thread: [ up: read, look at headers, write ] ──TLS?── server (source)
//!                                [ down: the same               ]
//!                                  counterpart, kept alike       ──TLS?── server (target)
//! ```
//!
//! ```
//! use stillpoint_migrate_proxy::Config;
//! let config = Config::parse(
//!     r#"
//!     listen = ["127.0.0.1:6432"]
//!     control = "/run/stillpoint/proxy.sock"
//!     routes = "/var/lib/stillpoint/routes.json"
//!     servers.old.host = "10.0.0.7"
//!     tenants.shop.server = "old"
//!     "#,
//! )?;
//! assert_eq!(config.tenants["shop"].server, "old");
//! # Ok::<(), stillpoint_migrate_proxy::ConfigError>(())
//! ```
//!
//! Follows section 4.2 (the worker) and step 4 of section 4.3 of "Madeus" (SIGMOD 2015), where clients wait and sessions end.
#![forbid(unsafe_code)]

mod buffer;
mod config;
pub mod control;
mod daemon;
mod entry;
mod error;
mod link;
mod listen;
mod metrics;
mod proxy;
mod routes;
mod secret;
mod session;
mod stream;
mod target;
mod tenant;
mod tls;
mod workers;

pub use config::{Action, Config, Endpoint, Limits, Rule, Server, ServerTls, TenantConfig, TlsFiles, TlsNeed};
pub use daemon::{check, run};
pub use error::{ConfigError, StartError};
