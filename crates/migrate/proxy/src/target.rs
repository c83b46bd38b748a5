//! Target of a tenant's move.

use crate::pool::Pools;
use crate::process_ids::ProcessIds;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use stillpoint_migrate_postgres::Server;
use tokio::sync::{Semaphore, SemaphorePermit};
use zeroize::Zeroizing;

/// A server that a tenant may be switched to, with the data that its sessions need there.
pub(crate) struct Target {
    pub(crate) server: Arc<Server>,
    /// Stored passwords of roles, as in `pg_authid`.
    pub(crate) verifiers: BTreeMap<String, Zeroizing<String>>,
    /// Ids of the tenant's sessions there.
    pub(crate) ids: Arc<ProcessIds>,
    /// Server connections there that its sessions share.
    pub(crate) pools: Arc<Pools>,
    places: Semaphore,
}

/// Sessions that are prepared at the same time: all at once would take the processors from the clients.
const CONCURRENT_LOGINS: usize = 2;

impl Target {
    pub(crate) fn new(server: Server, verifiers: BTreeMap<String, Zeroizing<String>>) -> Target {
        let places = Semaphore::new(CONCURRENT_LOGINS);
        Target { server: Arc::new(server), verifiers, ids: Arc::default(), pools: Arc::default(), places }
    }

    /// Waits until one more session may be prepared; dropping the result frees its place.
    pub(crate) async fn place(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.places.acquire().await.ok()
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({}, {} verifiers)", self.server, self.verifiers.len())
    }
}
