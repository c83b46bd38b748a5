//! PostgreSQL's protocol, versions 3.0 and 3.2: bytes in, messages out, and the state of a session.
//!
//! The caller passes the bytes of a connection in order, both ways, and random bytes where a nonce is needed.
//!
//! The crate guarantees that no input makes it panic or allocate more than a small multiple of the input. It checks
//! lengths against limits before it takes anything ([`frame::Scanner`]). A malformed message is an error that names it;
//! after that the connection can only be closed. One value opens a session and holds each parameter once
//! ([`startup::Startup`]): a packet that two readers could understand differently is malformed. [`Conversation`]
//! answers the one question of a proxy: *does the server owe anything, and is a transaction open?* A session may be
//! moved only if the answer is "neither".
//!
//! ```text
//!            Query, Sync: one ReadyForQuery owed each          ReadyForQuery(I), nothing owed
//! boundary ─────────────────────────────────────────▶ busy ─────────────────────────────────▶ boundary
//! ```
//!
//! It performs no I/O, holds no sockets and keeps no text of clients beyond what is passed in. Secrets are wiped when
//! dropped, and `Debug` does not show them. The crate postgres-protocol does not fit even the parts that are not hot:
//! it has only the client's side of SCRAM, by password. The proxy needs the server's side, and the client's side by
//! recovered key.
//!
//! ```
//! use stillpoint_migrate_wire::frame::{Scanner, Step};
//! let mut scanner = Scanner::new(1 << 30);
//! let Ok(Step::Message(message)) = scanner.peek(b"Q\0\0\0\x06;\0") else { panic!("a whole message") };
//! assert_eq!((message.tag, message.body, message.is_whole()), (b'Q', &b";\0"[..], true));
//! ```
//!
//! The crate follows the chapter "Frontend/Backend Protocol" of PostgreSQL's manual, RFC 5802 and RFC 7677 (SCRAM).
#![forbid(unsafe_code)]

pub mod backend;
mod body_reader;
mod conversation;
mod error;
pub mod frame;
pub mod frontend;
pub mod hidden_column;
pub mod md5;
pub mod scram;
pub mod startup;
mod statement;

pub use conversation::{Conversation, Status};
pub use error::WireError;
pub use statement::{Touch, custom_settings, first_word, touch};
