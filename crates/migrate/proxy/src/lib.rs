//! A proxy for PostgreSQL whose sessions can be moved to another server between two transactions, with what they carry.
//!
//! The caller gives a configuration file ([`Config`]), must be able to reach the servers, and must be the only way to the
//! databases that are to be moved. Servers see the proxy's address: the file's `allow` rules take the place of pg_hba.conf's
//! addresses, while passwords stay the servers' affair.
//!
//! The crate guarantees: what a client may do directly it may do through the proxy, since messages are passed on as they
//! are; a client or server that is slow, silent or broken harms its own session only; bytes that are not the protocol end
//! their connection with an error that says so; what a client asks for is read once, and servers get what was read; clients that
//! do not finish their logins keep none from another address or of another tenant; memory is bounded by the number of connections. A tenant is switched only
//! while no transaction is open ([`control::Request::Pause`]), and every limit of time leads back to the source. When the
//! one who asked for a pause dies, the sessions go on at the source. After [`control::Request::Switch`] a session is at the
//! target with its settings, role, prepared statements, channels and advisory locks, or it is closed, and named in the reply.
//!
//! One proxy serves at a time, by a lock beside the file of routes; another one may stand by ([`stand_by`]).
//!
//! While somebody follows a capture ([`control::Request::Capture`]), what the sessions of that tenant write is rewritten so
//! that every row comes back, and is handed on transaction by transaction in an order that can be repeated; the crate
//! `stillpoint-migrate-capture` has a table of the statements. Clients see what they see directly, but for
//! `pg_prepared_statements` and for time. What cannot be captured ends the capture, with its name, and never the client:
//! [`control::Reply::CaptureOver`] is then the last that the follower gets, and what it has built is of no use. At each
//! commit an audit compares the server's own counters with what was captured. It does not see what a transaction without
//! any captured write does (a SELECT of a writing function that says it is STABLE), nor what does not come through the
//! proxy; a comparison of both sides does.
//!
//! It does not: pool connections, parse SQL or rewrite statements where nobody follows, keep passwords. What cannot be
//! taken along pins a session and is said: temporary tables, WITH HOLD cursors, replication. Not noticed, and so lost:
//! values of `currval` and `lastval`, how often a lock was taken, libraries that were loaded by LOAD.
//!
//! ```text
//! client ────── thread without a runtime: [ up: read, look at headers, write ] ────── server (source)
//!    ╲                    │               [ down: the same               ]       ╱
//!     ╲         lent and recalled                                               ╱
//!      ╲                  │                                                    ╱
//!       ─TLS?── the session's task: logging in, commands, the same with TLS ─TLS?
//!                 its counterpart, kept alike ──TLS?── server (target)
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
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod batch;
mod buffer;
mod capture;
mod config;
pub mod control;
mod daemon;
mod descriptors;
mod entry;
mod error;
mod link;
mod listen;
mod logins;
mod loose;
mod metrics;
mod proxy;
mod routes;
mod secret;
mod session;
mod standby;
mod steady;
mod stream;
mod target;
mod tenant;
mod tls;
mod unnamed;
mod untrusted;
mod verifiers;
mod waits;
mod workers;

pub use capture::facts::{Capturable, Limit, capturable, capturable_question};
pub use config::{Action, Config, Endpoint, Limits, Rule, Server, ServerTls, TenantConfig, TlsFiles, TlsNeed};
pub use daemon::{check, run, stand_by};
pub use error::{ConfigError, StartError};
pub use session::SESSION_SETTINGS;
pub use tls::encrypt;
