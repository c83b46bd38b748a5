//! A proxy for PostgreSQL that can move sessions to another server between two transactions, with the state that they
//! carry.
//!
//! The caller gives a configuration file ([`Config`]). The proxy must be able to reach the servers, and must be the
//! only way to the databases that are moved. Servers see the proxy's address: the file's `allow` rules replace the
//! addresses in pg_hba.conf, while the servers still check the passwords.
//!
//! The crate guarantees: a client may do through the proxy all that it may do directly, since messages are passed on
//! unchanged. A client or server that is slow, silent or broken harms only its own session. Bytes that break the
//! protocol end their connection with an error. A client's request is read once, and servers get what was read. Clients
//! that do not finish their logins do not block clients of another address or another tenant. The number of connections
//! bounds the memory. A tenant is switched only while no transaction is open ([`Request::Pause`]), and at
//! every time limit the sessions go on at the source. They also do if the process that asked for a pause dies. After
//! [`Request::Switch`] a session is at the target with its settings, role, prepared statements, channels and
//! advisory locks, or it is closed, and named in the reply.
//!
//! One proxy serves at a time, by a lock beside the file of routes; another one may stand by ([`stand_by`]).
//!
//! While a follower reads a capture ([`Request::Capture`]), the writes of that tenant's sessions are rewritten
//! so that every row comes back. The follower gets them transaction by transaction in an order that can be repeated;
//! the crate `stillpoint-migrate-capture` has a table of the statements. Clients see the same as without a proxy,
//! except for `pg_prepared_statements` and time. A statement that cannot be captured ends the capture, with its name,
//! but never the client. [`Reply::CaptureOver`] is then the follower's last message, and its copy is of no
//! use. At each commit an audit compares the server's own counters with the captured rows. The audit misses writes of a
//! transaction without any captured write (a SELECT of a writing function that is declared STABLE), and writes that
//! bypass the proxy; a comparison of both sides finds them.
//!
//! If the configuration has a pool, idle sessions share server connections ([`pool`]): a connection that a session
//! gets is like the one that it gave back. Sessions that keep what cannot be made again keep their connections.
//!
//! It does not parse SQL or rewrite statements without a follower, or keep passwords. State that
//! cannot be moved pins a session, and the status shows it: temporary tables, WITH HOLD cursors, replication. The proxy
//! does not notice, and so loses: values of `currval` and `lastval`, how often a lock was taken, libraries that LOAD
//! loaded.
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
//! The crate follows section 4.2 (the worker) and step 4 of section 4.3 of "Madeus" (SIGMOD 2015), where clients wait
//! and sessions end.
//!
//! [`Config`]: stillpoint_migrate_control::Config
//! [`Reply::CaptureOver`]: stillpoint_migrate_control::Reply::CaptureOver
//! [`Request::Capture`]: stillpoint_migrate_control::Request::Capture
//! [`Request::Pause`]: stillpoint_migrate_control::Request::Pause
//! [`Request::Switch`]: stillpoint_migrate_control::Request::Switch
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod batch;
mod buffer;
mod capture;
mod clock;
mod command;
mod control;
mod counters;
mod daemon;
mod descriptors;
mod drain;
mod entry;
mod error;
mod forwarder;
mod http;
mod latency_histogram;
mod link;
mod listen;
mod logins;
mod metrics;
mod migration_view;
mod mirror;
mod mock_secret;
mod mutex;
mod page;
mod page_token;
mod pending_connections;
mod polled_stream;
mod pool;
mod process_ids;
mod proxy;
mod routes;
mod secret_files;
mod server_process;
mod session;
mod signals;
mod standby;
mod standby_place;
mod target;
mod tenant;
mod tls;
mod untrusted;
mod verifiers;
mod workers;

pub use daemon::{check, run, stand_by};
pub use drain::{Drained, drain};
pub use error::StartError;
