//! The guard in front of the units' ports, from the first phase that needs one to the moment when clients are let in.
//!
//! On the old kernel the switch owns it. On a kernel that comes up systemd's generator makes the first table and ends; a
//! service, before which no other service starts, owns the second one (`stillpoint kernel guard-keeper`).

use super::journal::{Decision, Journal};
use super::unit::notify;
use crate::guard::{Filter, Gap, Keeper, Nftables, Wall, keep, lift_at, owned};
use crate::{Error, host};
use std::path::Path;

/// Name of the table that stays when its maker ends.
const TABLE: &str = "stillpoint_switch";
/// Socket of the keeper of the boot side.
pub(super) const SOCKET: &str = "/run/stillpoint/switch-guard.sock";

/// The switch's own guard: a part of it goes with this value.
#[derive(Default)]
pub(super) struct Front(Option<Nftables>);

impl Front {
    /// Raises the guard in front of ports, or changes it; there is no moment without it.
    pub(super) fn raise(&mut self, wall: Wall, ports: &[u16]) -> Result<(), Error> {
        let nftables = self.0.take().map_or_else(Nftables::open, Ok)?;
        let nftables = self.0.insert(nftables);
        let filter = Filter::Ports(wall, ports.to_vec());
        nftables.replace(&owned(TABLE), true, &filter)?;
        nftables.replace(TABLE, false, &filter)
    }

    /// Takes the guard away.
    pub(super) fn lower(&mut self) -> Result<(), Error> {
        // with its socket the kernel takes the owned table away
        self.0 = None;
        lower()
    }
}

/// Raises what a generator can: the table that stays when its maker ends.
pub(super) fn raise_early(ports: &[u16]) -> Result<(), Error> {
    Nftables::open()?.replace(TABLE, false, &outside(ports))
}

/// Takes away what another process raised.
pub(super) fn lower() -> Result<(), Error> {
    lift_at(Path::new(SOCKET), TABLE).map(|_| ())
}

/// Takes the guard away on a kernel that came up, and notes the times in which it was missing. It is `expected` to be there
/// unless a leader that was killed may have taken it away.
pub(super) fn open(journal: &mut Journal, expected: bool) -> Result<(), Error> {
    let outcome = lift_at(Path::new(SOCKET), TABLE)?;
    journal.unguarded.extend(outcome.gaps);
    if expected && !outcome.stood {
        journal.unguarded.push(Gap::until_now());
    }
    Ok(())
}

/// Owns the guard of a switch on a kernel that comes up, by the journal, until it is told to lift it. `raised` is called when
/// it is up, or when clients may come already.
///
/// # Errors
/// The journal cannot be read, or the kernel does not make the tables.
pub fn keep_ports(state: &Path, socket: &Path, raised: impl FnOnce()) -> Result<(), Error> {
    let journal = Journal::read(state)?;
    let up = || {
        if let Err(error) = notify("READY=1") {
            tracing::warn!("{}", error.with_causes());
        }
        raised();
    };
    match journal.filter(|journal| journal.decide(&host::kernel(), &host::boot()) != Decision::Nothing) {
        Some(journal) => {
            let (filter, socket) = (outside(&journal.ports()), socket.to_owned());
            keep(Keeper { name: TABLE.into(), filter, socket, was_raised: true }, up)
        }
        None => {
            up();
            Ok(())
        }
    }
}

fn outside(ports: &[u16]) -> Filter {
    Filter::Ports(Wall::Outside, ports.to_vec())
}
