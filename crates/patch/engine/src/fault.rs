//! Points at which an operation can be made to fail: the state of the target after each is guaranteed and tested.

use crate::Error;

/// Step after which an operation fails, as if the kernel had refused the next one. For tests only; no option of a command sets one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultPoint {
    /// The patch's memory is mapped and filled; no jump leads there. Guaranteed: the old side, the target unchanged.
    Placed,
    /// The intent is in the ledger. Guaranteed: the old side.
    Begun,
    /// Entries jump to dispatchers, all of which choose the old side. Guaranteed: the old side, entries as before.
    Armed,
    /// Threads have migrated, the transition is undecided. Guaranteed: all threads are moved back, entries as before.
    Migrated,
    /// The deciding byte is written. Guaranteed: the new side for every thread; the next operation turns the entries into direct jumps.
    Decided,
    /// During a rollback every thread is on the old side again, and entries still jump to dispatchers. Guaranteed: the old side for every
    /// thread; the next operation restores the entries.
    Returned,
}

/// Returns the failure if `point` is among the requested ones.
pub(crate) fn reach(requested: &[FaultPoint], point: FaultPoint) -> Result<(), Error> {
    if requested.contains(&point) { Err(Error::Fault(point)) } else { Ok(()) }
}
