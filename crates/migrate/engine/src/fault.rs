//! Points at which a migration can be made to fail: the resulting state of both sides is promised, and tested.

use crate::Error;

/// Step after which a migration fails. For tests; no option of the user sets one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultPoint {
    /// Publication and slot exist on the source. Promised: clients are on the source, both are dropped again.
    Snapshotted,
    /// The definitions are on the target. Promised: as before, and the target's database is dropped.
    Defined,
    /// The rows are on the target, indexes are not. Promised: as before.
    Copied,
    /// The target follows the source. Promised: as before.
    CaughtUp,
    /// The proxy has sessions on the target. Promised: as before, and the sessions continue where they are.
    Prepared,
    /// The tenant is paused, connections to the source are disabled and direct sessions are gone. Promised: the fence is
    /// lifted, clients continue on the source.
    Fenced,
    /// The last change is on the target and on disk there, and the proxy has not been told to switch. Promised: as before,
    /// nothing is lost.
    Drained,
    /// Clients are on the target. Promised: they stay there; the next command completes the migration.
    Switched,
    /// Clients are on the source again, and nothing is removed yet. Promised: the next command, of any kind, removes it.
    Returned,
    /// The source has no owner any more, and the journal is left. Promised: the next command of any kind removes the
    /// journal, and reports the side on which clients are.
    Released,
}

/// Returns the fault if `point` is among the `wished` ones.
pub(crate) fn reach(wished: &[FaultPoint], point: FaultPoint) -> Result<(), Error> {
    if wished.contains(&point) { Err(Error::Fault(point)) } else { Ok(()) }
}
