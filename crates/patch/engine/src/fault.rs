//! Points at which an operation can be made to fail: what then becomes of the target is promised, and tested.

use crate::Error;

/// Behind which step an operation fails, as if the next one had been refused by the kernel. For tests; nothing that a
/// user can say sets one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultPoint {
    /// The patch's memory is mapped and filled; nothing leads there. Promised: the old side, the target as it was.
    Placed,
    /// The intent is in the ledger. Promised: the old side.
    Begun,
    /// Entries lead to dispatchers, all of which choose the old side. Promised: the old side, entries as they were.
    Armed,
    /// Threads have gone over, nothing is decided. Promised: all threads are brought back, entries as they were.
    Migrated,
    /// The byte that decides is written. Promised: the new side for every thread; the next operation turns the entries
    /// into direct jumps.
    Decided,
    /// On the way back every thread is on the old side again, entries still lead to dispatchers. Promised: the old side
    /// for every thread; the next operation puts the entries back.
    Returned,
}

/// The failure, when `point` is among those wished for.
pub(crate) fn reach(wished: &[FaultPoint], point: FaultPoint) -> Result<(), Error> {
    if wished.contains(&point) { Err(Error::Fault(point)) } else { Ok(()) }
}
