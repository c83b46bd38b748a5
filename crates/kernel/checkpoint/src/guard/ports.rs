//! The guard of TCP ports.

use super::nftables::{DropScope, Filter, Nftables};
use super::owner::{GuardOwner, LiftedGuard, lift_guard, owned_name, run_owner};
use crate::Error;
use std::path::Path;

/// A guard in front of ports. If this process owns it, one of its tables ends with this value.
pub struct PortGuard {
    /// Name of the table that stays when the process that made it ends.
    name: &'static str,
    owned: Option<Nftables>,
}

impl PortGuard {
    /// Names a guard, raised or not, that this process does not own.
    pub fn new(name: &'static str) -> Self {
        PortGuard { name, owned: None }
    }

    /// Raises both tables in front of ports, or changes them; at no moment is there no guard.
    ///
    /// # Errors
    /// The kernel does not make the tables.
    pub fn raise(&mut self, scope: DropScope, ports: &[u16]) -> Result<(), Error> {
        let nftables = self.owned.take().map_or_else(Nftables::open, Ok)?;
        let nftables = self.owned.insert(nftables);
        let filter = Filter::Ports(scope, ports.to_vec());
        nftables.replace(&owned_name(self.name), true, &filter)?;
        nftables.replace(self.name, false, &filter)
    }

    /// Raises the table alone that stays when this process ends.
    ///
    /// # Errors
    /// The kernel does not make the table.
    pub fn raise_unowned(&self, scope: DropScope, ports: &[u16]) -> Result<(), Error> {
        Nftables::open()?.replace(self.name, false, &Filter::Ports(scope, ports.to_vec()))
    }

    /// Owns the guard, whose unowned table was raised before, until it gets the order at `socket` to lift it. `on_ready` is
    /// called when the guard is up.
    ///
    /// # Errors
    /// The kernel does not make the tables, or another owner exists.
    pub fn own(self, scope: DropScope, ports: &[u16], socket: &Path, on_ready: impl FnOnce()) -> Result<(), Error> {
        let (name, filter) = (self.name.into(), Filter::Ports(scope, ports.to_vec()));
        run_owner(GuardOwner { name, filter, socket: socket.to_owned(), was_raised: true }, on_ready)
    }

    /// Removes the guard, also one that the process at `socket` owns.
    ///
    /// # Errors
    /// A table cannot be removed.
    pub fn lift(&mut self, socket: &Path) -> Result<LiftedGuard, Error> {
        // when the socket is closed the kernel removes the owned table
        self.owned = None;
        lift_guard(socket, self.name)
    }
}
