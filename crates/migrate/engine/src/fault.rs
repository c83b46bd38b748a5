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
    /// The tenant is paused and the last change is on the target. Promised: clients go on on the source, nothing lost.
    Drained,
    /// The source is fenced, the proxy not yet told to switch. Promised: the fence is lifted, clients go on on the
    /// source.
    Fenced,
    /// Clients are on the target. Promised: they stay there; the next command completes the migration.
    Switched,
}

/// The failure, when `point` is among those wished for.
pub(crate) fn reach(wished: &[FaultPoint], point: FaultPoint) -> Result<(), Error> {
    if wished.contains(&point) { Err(Error::Fault(point)) } else { Ok(()) }
}
