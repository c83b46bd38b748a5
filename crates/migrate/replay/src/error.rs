//! Errors of the scheduler.

use crate::{Player, RunningId, Stamp};

/// Reason why the scheduler refused a call. The scheduler is unchanged then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A syncset arrived after the promise that no more would come up to its stamp.
    #[error("syncset {} is late: stamps up to {} are closed", .stamp.0, .closed.0)]
    Late {
        /// Stamp of the syncset.
        stamp: Stamp,
        /// Highest stamp that had been closed.
        closed: Stamp,
    },
    /// Another syncset has the same stamp.
    #[error("syncset {} exists already", .0.0)]
    Duplicate(Stamp),
    /// The memory limit is reached, and the pending syncsets can make progress without this one.
    #[error("no room for syncset {}: {pending} pending syncsets hold {bytes} bytes", .stamp.0)]
    Full {
        /// Stamp of the syncset that was refused.
        stamp: Stamp,
        /// Number of syncsets that are not done.
        pending: usize,
        /// Bytes that they hold.
        bytes: u64,
    },
    /// The syncset does not say what its transaction saw, and modes that replay statements need that.
    #[error("syncset {} has no snapshot of its transaction, which mode {mode} requires", .stamp.0)]
    NoVisibility {
        /// Stamp of the syncset.
        stamp: Stamp,
        /// Name of the mode, as on the command line.
        mode: &'static str,
    },
    /// The snapshot of the syncset's transaction was never reported to the scheduler.
    #[error("transaction {} has no snapshot", .0.0)]
    UnknownSnapshot(RunningId),
    /// No player has this number.
    #[error("there is no player {}", .0.0)]
    UnknownPlayer(Player),
    /// A report arrived about an operation that the player was not given.
    #[error("player {} has no operation under way", .0.0)]
    NothingUnderWay(Player),
    /// A transaction failed after a commit that it must not see, so its first read cannot be repeated.
    #[error("syncset {} cannot be retried: a commit that its transaction did not see has been replayed", .0.0)]
    SnapshotGone(Stamp),
    /// A transaction failed even with all lower stamps done and no other transaction executing.
    #[error("syncset {} failed {attempts} times, the last time alone", .stamp.0)]
    GivenUp {
        /// Stamp of its syncset.
        stamp: Stamp,
        /// Number of tries.
        attempts: u8,
    },
}

/// A syncset that the scheduler did not take, and the reason.
#[derive(Debug)]
pub struct Refused<P> {
    /// Reason of the refusal.
    pub error: Error,
    /// The syncset, unchanged.
    pub syncset: crate::Syncset<P>,
}

impl<P: std::fmt::Debug> std::error::Error for Refused<P> {}

impl<P> std::fmt::Display for Refused<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}
