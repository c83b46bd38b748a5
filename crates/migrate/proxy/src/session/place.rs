//! A session's place in the proxy and in its tenant.

use crate::entry::Entry;
use crate::proxy::Proxy;
use crate::tenant::Tenant;
use std::sync::Arc;

/// A session's place in the proxy and its tenant; dropping it frees the place.
pub(super) struct Place {
    pub(super) tenant: Arc<Tenant>,
    pub(super) entry: Arc<Entry>,
    proxy: Arc<Proxy>,
}

impl Place {
    pub(super) fn new(proxy: Arc<Proxy>, tenant: Arc<Tenant>, entry: Arc<Entry>) -> Place {
        Place { tenant, entry, proxy }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.tenant.leave(self.entry.id);
        self.proxy.directory.leave(self.entry.id);
        self.proxy.totals.absorb(&self.entry.counters);
    }
}
