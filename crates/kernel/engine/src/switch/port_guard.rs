//! The guard in front of the units' ports, from the first phase that needs one until clients are let in.
//!
//! On the old kernel the switch owns it. On a kernel that starts, systemd's generator makes the first table and ends; a
//! service, before which no other service starts, owns the second one (`stillpoint kernel guard-keeper`).

use super::journal::{Decision, Journal};
use super::unit::notify;
use crate::guard::{Filter, Gap, GuardOwner, Nftables, DropScope, run_owner, lift_guard, owned_name};
use crate::{Error, host};
use std::path::Path;

/// Name of the table that stays when the process that made it ends.
const TABLE: &str = "stillpoint_switch";
/// Socket of the keeper on a kernel that starts.
pub(super) const SOCKET: &str = "/run/stillpoint/switch-guard.sock";

/// The switch's own guard: one of its tables ends with this value.
#[derive(Default)]
pub(super) struct Front(Option<Nftables>);

impl Front {
    /// Raises the guard in front of ports, or changes it; at no moment is there no guard.
    pub(super) fn raise(&mut self, scope: DropScope, ports: &[u16]) -> Result<(), Error> {
        let nftables = self.0.take().map_or_else(Nftables::open, Ok)?;
        let nftables = self.0.insert(nftables);
        let filter = Filter::Ports(scope, ports.to_vec());
        nftables.replace(&owned_name(TABLE), true, &filter)?;
        nftables.replace(TABLE, false, &filter)
    }

    /// Removes the guard.
    pub(super) fn lower(&mut self) -> Result<(), Error> {
        // when the socket is closed the kernel removes the owned table
        self.0 = None;
        lower()
    }
}

/// Raises the part that a generator can raise: the table that stays when its maker ends.
pub(super) fn raise_early(ports: &[u16]) -> Result<(), Error> {
    Nftables::open()?.replace(TABLE, false, &outside(ports))
}

/// Removes a guard that another process raised.
pub(super) fn lower() -> Result<(), Error> {
    lift_guard(Path::new(SOCKET), TABLE).map(|_| ())
}

/// Removes the guard on a kernel that has started, and records the times in which it was missing. It is `expected` to
/// exist unless a leader that was killed may have removed it.
pub(super) fn open(journal: &mut Journal, expected: bool) -> Result<(), Error> {
    let outcome = lift_guard(Path::new(SOCKET), TABLE)?;
    journal.unguarded.extend(outcome.gaps);
    if expected && !outcome.was_active {
        journal.unguarded.push(Gap::until_now());
    }
    Ok(())
}

/// Owns the guard of a switch on a kernel that starts, by the journal, until it gets the order to lift it. `raised` is
/// called when the guard is up, or when clients may connect already.
///
/// # Errors
/// The journal cannot be read, or the kernel does not make the tables.
pub fn keep_ports(state: &Path, socket: &Path, on_ready: impl FnOnce()) -> Result<(), Error> {
    let journal = Journal::read(state)?;
    let up = || {
        if let Err(error) = notify("READY=1") {
            tracing::warn!("{}", error.with_causes());
        }
        on_ready();
    };
    match journal.filter(|journal| journal.decide(&host::kernel(), &host::boot()) != Decision::Nothing) {
        Some(journal) => {
            let (filter, socket) = (outside(&journal.ports()), socket.to_owned());
            run_owner(GuardOwner { name: TABLE.into(), filter, socket, was_raised: true }, up)
        }
        None => {
            up();
            Ok(())
        }
    }
}

fn outside(ports: &[u16]) -> Filter {
    Filter::Ports(DropScope::Outside, ports.to_vec())
}
