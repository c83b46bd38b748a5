//! Where a tenant is going to.

use crate::config::Server;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use zeroize::Zeroizing;

/// A server that a tenant may be switched to, and what its sessions need there.
pub(crate) struct Target {
    pub(crate) server: Arc<Server>,
    /// Stored passwords of roles, as in `pg_authid`.
    pub(crate) verifiers: BTreeMap<String, Zeroizing<String>>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({}, {} verifiers)", self.server, self.verifiers.len())
    }
}
