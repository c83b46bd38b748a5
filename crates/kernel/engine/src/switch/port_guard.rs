//! The guard in front of the units' ports, from the first phase that needs one until clients are let in.
//!
//! On the old kernel the switch owns it. On a kernel that starts, systemd's generator makes the first table and ends; a
//! service, before which no other service starts, owns the second one (`stillpoint kernel guard-keeper`).

use super::journal::{Decision, Journal};
use super::unit::notify;
use crate::guard::{DropScope, Filter, Gap, GuardOwner, Nftables, lift_guard, owned_name, run_owner};
use crate::{Error, host};
use std::path::Path;

/// Name of the table that stays when the process that made it ends.
const TABLE_NAME: &str = "stillpoint_switch";
/// Socket of the owner on a kernel that starts.
pub(super) const SOCKET_PATH: &str = "/run/stillpoint/switch-guard.sock";

/// The switch's own guard: one of its tables ends with this value.
#[derive(Default)]
pub(super) struct PortGuard(Option<Nftables>);

impl PortGuard {
    /// Raises the guard in front of ports, or changes it; at no moment is there no guard.
    pub(super) fn raise(&mut self, scope: DropScope, ports: &[u16]) -> Result<(), Error> {
        let nftables = self.0.take().map_or_else(Nftables::open, Ok)?;
        let nftables = self.0.insert(nftables);
        let filter = Filter::Ports(scope, ports.to_vec());
        nftables.replace(&owned_name(TABLE_NAME), true, &filter)?;
        nftables.replace(TABLE_NAME, false, &filter)
    }

    /// Removes the guard.
    pub(super) fn lower(&mut self) -> Result<(), Error> {
        // when the socket is closed the kernel removes the owned table
        self.0 = None;
        lower()
    }
}

/// Raises the part that a generator can raise: the table that stays when its maker ends.
pub(super) fn raise_unowned(ports: &[u16]) -> Result<(), Error> {
    Nftables::open()?.replace(TABLE_NAME, false, &outside_filter(ports))
}

/// Removes a guard that another process raised.
pub(super) fn lower() -> Result<(), Error> {
    lift_guard(Path::new(SOCKET_PATH), TABLE_NAME).map(|_| ())
}

/// Removes the guard on a kernel that has started, and records the times in which it was missing. It is `expected` to
/// exist unless a leader that was killed may have removed it.
pub(super) fn lift_and_record(journal: &mut Journal, expected: bool) -> Result<(), Error> {
    let outcome = lift_guard(Path::new(SOCKET_PATH), TABLE_NAME)?;
    journal.guard_gaps.extend(outcome.gaps);
    if expected && !outcome.was_active {
        journal.guard_gaps.push(Gap::until_now());
    }
    Ok(())
}

/// Owns the guard of a switch on a kernel that starts, by the journal, until it gets the order to lift it. `raised` is
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
        Some(journal) => {
            let (filter, socket) = (outside_filter(&journal.ports()), socket.to_owned());
            run_owner(GuardOwner { name: TABLE_NAME.into(), filter, socket, was_raised: true }, notify_ready)
        }
        None => {
            notify_ready();
            Ok(())
        }
    }
}

fn outside_filter(ports: &[u16]) -> Filter {
    Filter::Ports(DropScope::Outside, ports.to_vec())
}
