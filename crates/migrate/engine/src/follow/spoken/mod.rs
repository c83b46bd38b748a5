//! Repeating what clients said: their statements, in one of the paper's schedules, instead of the rows that these wrote.
//!
//! ```text
//!  lines of the capture --reader--> what happened --conductor--> replay --steps--> players --> target
//!                                                                  |
//!                                             scheduler: who may send which step now
//! ```
//!
//! A schedule replays a transaction's statements on what that transaction saw. Two kinds of transactions cannot have that,
//! and are repeated by the rows that they wrote, which came with their statements and read nothing:
//!
//! - those that began before the snapshot that was copied and committed behind it (they straddle it): what they saw is gone;
//! - those that run so long on the source that commits wait for their first read to be repeated (LSIR, 1-b), or that run
//!   when the target is to be brought to a moment of the source: they are *renounced*, and nothing waits for them any more.
//!
//! Rows are as good: whatever one of the two wrote, nobody who did not see it wrote as well, and whoever saw it, or wrote the
//! same later, waits for its commit.

mod conductor;
mod player;
mod reader;
mod replay;

pub(super) use conductor::Conductor;
pub(super) use reader::Translator;
pub use reader::{Happened, Reader, Transaction};
pub use replay::{Replay, Way};
