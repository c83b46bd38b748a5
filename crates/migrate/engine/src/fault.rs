//! Points at which a migration can be made to fail: what then becomes of both sides is promised, and tested.

use crate::Error;

/// Behind which step a migration fails. For tests; nothing that a user can say sets one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultPoint {
    /// Publication and slot exist on the source. Promised: clients on the source, both are dropped again.
    Snapshotted,
    /// The definitions are on the target. Promised: as before, and the target's database is dropped.
    Defined,
    /// The rows are on the target, indexes are not. Promised: as before.
    Copied,
    /// The target follows the source. Promised: as before.
    CaughtUp,
    /// The proxy has sessions on the target. Promised: as before, and the sessions go on where they are.
    Prepared,
    /// The tenant is paused, nobody connects to the source any more and strangers are gone. Promised: the fence is lifted,
    /// clients go on on the source.
    Fenced,
    /// The last change is on the target and safe there, the proxy not yet told to switch. Promised: as before, nothing
    /// lost.
    Drained,
    /// Clients are on the target. Promised: they stay there; the next command completes the migration.
    Switched,
    /// Clients are on the source again, and nothing is removed yet. Promised: the next command removes it, whichever it is.
    Returned,
}

/// The failure, when `point` is among those wished for.
pub(crate) fn reach(wished: &[FaultPoint], point: FaultPoint) -> Result<(), Error> {
    if wished.contains(&point) { Err(Error::Fault(point)) } else { Ok(()) }
}
