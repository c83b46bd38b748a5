//! Applies the changes of one server on another while it is in use: the replay of a migration.
//!
//! **The caller must** install the schema and its tables on the target ([`replication_objects::install`]), publish the source's
//! tables or begin a capture at the proxy ([`recording`]), and copy the rows that a snapshot sees; call from a tokio runtime.
//!
//! **Guaranteed:** a committed transaction is applied exactly once, together with its stamp in one transaction on the target,
//! and the source gets a confirmation only when the target has flushed it. Transactions that depend on each other are applied in
//! the source's order. Memory for changes that wait is limited: the source waits instead.
//!
//! **It does not** copy rows, repeat definitions, or move clients.
#![forbid(unsafe_code)]

mod apply_worker;
mod backlog;
mod bulk;
mod conductor;
mod error;
mod follower;
mod intake;
pub mod inventory;
pub mod partial_tables;
mod pgoutput;
pub mod recording;
pub mod replication_objects;
mod rows;
mod statement;
pub mod statement_replay;
mod stream;
pub mod throttle;
mod transaction;

pub use error::Error;
pub use follower::{BARRIER_TIMEOUT, Feed, Follower, Plan};
pub use intake::{ReplayStatus, SourceSnapshot};
pub use pgoutput::Lsn;
pub use transaction::MARKER_PREFIX;
