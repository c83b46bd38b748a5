//! The guard in front of the units' ports, from the first phase that needs one until clients are let in.
//!
//! On the old kernel the switch owns it. On a kernel that starts, systemd's generator makes the first table and ends; a
//! service, before which no other service starts, owns the second one (`stillpoint kernel guard-keeper`).

use crate::journal::{Decision, Journal};
use crate::unit::notify;
use std::path::Path;
use stillpoint_kernel_checkpoint::{DropScope, Error, Gap, PortGuard, host};

/// Name of the table that stays when the process that made it ends.
const TABLE_NAME: &str = "stillpoint_switch";
/// Socket of the owner on a kernel that starts.
pub(crate) const SOCKET_PATH: &str = "/run/stillpoint/switch-guard.sock";

/// Returns the guard of a switch, which this process does not own.
pub(crate) fn port_guard() -> PortGuard {
    PortGuard::new(TABLE_NAME)
}

/// Removes the guard.
pub(crate) fn lower(guard: &mut PortGuard) -> Result<(), Error> {
    guard.lift(Path::new(SOCKET_PATH)).map(|_| ())
}

/// Raises the part that a generator can raise.
pub(crate) fn raise_unowned(ports: &[u16]) -> Result<(), Error> {
    port_guard().raise_unowned(DropScope::Outside, ports)
}

/// Removes the guard on a kernel that has started, and records the times in which it was missing. It is `expected` to
/// exist unless a leader that was killed may have removed it.
pub(crate) fn lift_and_record(journal: &mut Journal, expected: bool) -> Result<(), Error> {
    let lifted = port_guard().lift(Path::new(SOCKET_PATH))?;
    journal.guard_gaps.extend(lifted.gaps);
    if expected && !lifted.was_active {
        journal.guard_gaps.push(Gap::until_now());
    }
    Ok(())
}

/// Owns the guard of a switch on a kernel that starts, by the journal, until it gets the order to lift it. `on_ready` is
/// called when the guard is up, or when clients may connect already.
///
/// # Errors
/// The journal cannot be read, or the kernel does not make the tables.
pub fn guard_ports(state: &Path, socket: &Path, on_ready: impl FnOnce()) -> Result<(), Error> {
    let journal = Journal::read(state)?;
    let notify_ready = || {
        if let Err(error) = notify("READY=1") {
            tracing::warn!("{}", error.with_causes());
        }
        on_ready();
    };
    match journal.filter(|journal| journal.decide(&host::kernel(), &host::boot()) != Decision::Nothing) {
        Some(journal) => port_guard().own(DropScope::Outside, &journal.ports(), socket, notify_ready),
        None => {
            notify_ready();
            Ok(())
        }
    }
}
