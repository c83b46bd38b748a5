//! PostgreSQL's protocol, versions 3.0 and 3.2: bytes in, messages out, and what a session stands at.
//!
//! The caller brings the bytes of a connection in order, both ways, and randomness where a nonce is needed.
//!
//! The crate guarantees that no input makes it panic or allocate more than a small multiple of what it was given: lengths
//! are checked against limits before anything is taken ([`frame::Scanner`]), and a message that is malformed is an error
//! that names it, after which the connection can only be closed. What opens a session is one value that holds each parameter
//! once ([`startup::Startup`]): a packet that two readers could take for two things is malformed. [`Conversation`] answers
//! one question, which a proxy needs to know: *does the server owe anything, and is a transaction open?* Only where the
//! answer is "neither" may a session be moved.
//!
//! ```text
//!            Query, Sync: one ReadyForQuery owed each          ReadyForQuery(I), nothing owed
//! boundary ─────────────────────────────────────────▶ busy ─────────────────────────────────▶ boundary
//! ```
//!
//! It performs no I/O, holds no sockets and keeps no text of clients beyond what is passed in. Secrets are wiped when
//! dropped, and `Debug` does not show them. postgres-protocol was looked at for what is not hot: it knows the client's side
//! of SCRAM by password alone, and we need the server's side and the client's by recovered key.
//!
//! ```
//! use stillpoint_migrate_wire::frame::{Scanner, Step};
//! let mut scanner = Scanner::new(1 << 30);
//! let Ok(Step::Message(message)) = scanner.peek(b"Q\0\0\0\x06;\0") else { panic!("a whole message") };
//! assert_eq!((message.tag, message.body, message.is_whole()), (b'Q', &b";\0"[..], true));
//! ```
//!
//! Follows the chapter "Frontend/Backend Protocol" of PostgreSQL's manual, RFC 5802 and RFC 7677 (SCRAM).
#![forbid(unsafe_code)]

pub mod backend;
mod conversation;
mod error;
pub mod frame;
pub mod frontend;
pub mod hidden;
pub mod md5;
mod read;
pub mod scram;
pub mod startup;
mod statement;

pub use conversation::{Conversation, Status};
pub use error::WireError;
pub use statement::{Touch, custom_settings, touch};
