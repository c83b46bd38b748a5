//! Connections to PostgreSQL servers, for sessions of clients and for sessions of a migration itself.
//!
//! The caller names a [`Server`], limits the time of each call, and builds the startup packet.
//!
//! The crate guarantees: a connection is encrypted if the server's description says so, or is not used. A server can
//! make it allocate no more than one message of the reader's limit. Secrets are wiped when dropped and not shown.
//!
//! It does not pool connections or retry; only [`link::Link`], a connection of a migration itself, interprets rows. Messages are encoded and decoded by `stillpoint-migrate-wire`.
//!
//! ```text
//! connect ──▶ Stream ──▶ log_in ──▶ Ready ──▶ exchange: a question, its answers
//!                                        └──▶ Reader:   messages one by one, without copies
//! ```
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use stillpoint_migrate_postgres::{Credential, Server, ServerTls, connect, log_in};
//! use stillpoint_migrate_wire::startup::{Startup, Version};
//!
//! let (host, tls) = ("/run/postgresql".into(), ServerTls::Disable);
//! let server = Server { name: String::new(), host, port: 5432, database: None, tls, ca: None };
//! let mut packet = Vec::new();
//! Startup::of(Version::V3_0, [("user", &b"postgres"[..])])?.encode(&mut packet);
//! let session = log_in(connect(&server).await?, &packet, "postgres", &Credential::default()).await?;
//! println!("{:?}", session.parameters.get("server_version"));
//! # Ok(())
//! # }
//! ```
//!
//! The crate follows the chapter "Frontend/Backend Protocol" of PostgreSQL's manual.
#![forbid(unsafe_code)]

mod connect;
mod credential;
mod error;
mod exchange;
pub mod link;
mod login;
mod reader;
mod server;
mod stream;
pub mod tls;

pub use connect::connect;
pub use credential::{Credential, Login, fill_random, nonce};
pub use error::{AuthenticationError, ConnectError, LinkError, LoginError};
pub use exchange::{Answers, exchange};
pub use login::{Greeting, Ready, log_in, read_greeting};
pub use reader::{Frame, Reader};
pub use server::{Server, ServerTls};
pub use stream::{Raw, ReadHalf, Stream, WriteHalf};
