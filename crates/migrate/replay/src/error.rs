//! What the scheduler refuses.

use crate::{Player, RunningId, Stamp};

/// Why the scheduler refused a call. It is unchanged then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A syncset came after the promise that no more would come up to its stamp.
    #[error("syncset {stamp} comes late: stamps up to {closed} are closed")]
    Late {
        /// Its stamp.
        stamp: Stamp,
        /// What had been promised.
        closed: Stamp,
    },
    /// Two syncsets of one stamp.
    #[error("there is a syncset {stamp} already")]
    Duplicate {
        /// The stamp.
        stamp: Stamp,
    },
    /// The memory limit is reached, and what is pending can go on without this syncset.
    #[error("syncset {stamp} finds no room: {pending} pending syncsets hold {bytes} bytes")]
    Full {
        /// Its stamp.
        stamp: Stamp,
        /// Syncsets that are not done.
        pending: usize,
        /// What they hold.
        bytes: u64,
    },
    /// A mode that replays statements needs to know what each transaction saw.
    #[error("syncset {stamp} does not say what its transaction saw, which mode {mode} needs")]
    NoVisibility {
        /// Its stamp.
        stamp: Stamp,
        /// Name of the mode.
        mode: &'static str,
    },
    /// A syncset of a transaction whose snapshot was never told.
    #[error("transaction {running} has no snapshot")]
    UnknownSnapshot {
        /// The transaction.
        running: RunningId,
    },
    /// There is no such player.
    #[error("there is no player {player}")]
    UnknownPlayer {
        /// What was called one.
        player: Player,
    },
    /// A report about an operation that nobody was given.
    #[error("player {player} has no operation under way")]
    NothingUnderWay {
        /// Who reported.
        player: Player,
    },
    /// A transaction failed after a commit that it must not see: its first read cannot be repeated.
    #[error("syncset {stamp} cannot be retried: a commit that its transaction did not see has been replayed")]
    SnapshotGone {
        /// Its stamp.
        stamp: Stamp,
    },
    /// A transaction failed even with all earlier ones done and nothing beside it.
    #[error("syncset {stamp} failed {attempts} times, at last alone")]
    GivenUp {
        /// Its stamp.
        stamp: Stamp,
        /// How often it was tried.
        attempts: u8,
    },
}

/// A syncset that was not taken, and why.
#[derive(Debug)]
pub struct Refused<P> {
    /// Why.
    pub error: Error,
    /// What was handed in.
    pub syncset: crate::Syncset<P>,
}

impl<P: std::fmt::Debug> std::error::Error for Refused<P> {}

impl<P> std::fmt::Display for Refused<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}
