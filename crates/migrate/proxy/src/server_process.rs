//! A server process, as the proxy knows it.

use crate::process_ids::ProcessIds;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use stillpoint_migrate_postgres::Server;
use stillpoint_migrate_wire::frontend::CancelKey;

/// Server process of a session.
#[derive(Debug, Clone)]
pub(crate) struct ServerProcess {
    pub(crate) server: Arc<Server>,
    /// Key for requests to cancel, with the process id at the server.
    pub(crate) key: CancelKey,
    /// Ids of the tenant's sessions at that server.
    pub(crate) ids: Arc<ProcessIds>,
    /// Number of requests to cancel that are on their way to the process.
    pub(crate) cancels: Arc<AtomicUsize>,
}
