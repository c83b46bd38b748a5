//! Replays the statements of clients, in one of the paper's schedules, instead of the rows that these wrote.
//!
//! ```text
//!  lines of the capture --reader--> events of the source --conductor--> replay --steps--> players --> target
//!                                                                          |
//!                                                   scheduler: which player may send which step now
//! ```
//!
//! A schedule replays a transaction's statements on the state that the transaction saw. Two kinds of transactions cannot have
//! that. They are repeated by the rows that they wrote, which arrived with their statements and read nothing:
//!
//! - those that began before the snapshot that was copied and committed after it (they straddle it): the state that they saw is
//!   gone;
//! - those that run so long on the source that commits wait for their first read to be repeated (LSIR, 1-b), or that run when
//!   the target is to be brought to one moment of the source: they are *renounced*, and no commit waits for them any more.
//!
//! Rows are equally correct: a row that such a transaction wrote was written by no transaction that did not see it, and a
//! transaction that saw it, or wrote the same row later, waits for its commit.

mod conductor;
mod player;
mod reader;
mod replay;

pub(crate) use conductor::Conductor;
pub(crate) use reader::Translator;
pub use reader::{Reader, SourceEvent, Transaction};
pub use replay::{Replay, ReplaySettings};
