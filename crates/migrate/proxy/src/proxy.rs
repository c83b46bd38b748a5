//! State that all threads of the proxy share.

use crate::capture::Memory;
use crate::command::Command;
use crate::counters::Counters;
use crate::entry::Directory;
use crate::error::StartError;
use crate::logins::Logins;
use crate::mock_secret::MockSecret;
use crate::mutex::lock;
use crate::page_token::PageToken;
use crate::pending_connections::PendingConnections;
use crate::routes::{Lock, Routes};
use crate::standby_place::Place;
use crate::tenant::Tenant;
use crate::tls;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use stillpoint_migrate_control::{ANY, Config, ConfigError};
use stillpoint_migrate_postgres::Server;
use tokio::sync::{Notify, watch};
use tokio_rustls::TlsAcceptor;

/// A configuration, with the TLS acceptor built from it.
pub(crate) struct Settings {
    pub(crate) config: Config,
    pub(crate) tls: Option<TlsAcceptor>,
    /// Token of the live page's button.
    pub(crate) page_token: Option<PageToken>,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.config.fmt(f)
    }
}

impl Settings {
    pub(crate) fn new(config: Config) -> Result<Settings, ConfigError> {
        let tls = config.tls.as_ref().map(tls::acceptor).transpose()?;
        let page_token =
            config.page.as_ref().and_then(|page| page.token.as_deref()).map(PageToken::load).transpose()?;
        Ok(Settings { config, tls, page_token })
    }

    fn server(&self, name: &str) -> Option<Arc<Server>> {
        self.config.servers.get(name).cloned().map(Arc::new)
    }
}

/// State that all threads of the proxy share.
#[derive(Debug)]
pub(crate) struct Proxy {
    settings: Mutex<Arc<Settings>>,
    tenants: Mutex<BTreeMap<String, Arc<Tenant>>>,
    pub(crate) directory: Directory,
    pub(crate) routes: Routes,
    /// Sums over sessions that have ended.
    pub(crate) totals: Counters,
    /// Bytes of messages that captured sessions hold.
    held: Arc<AtomicUsize>,
    /// Number of times that the configuration was reloaded.
    pub(crate) reloads: watch::Sender<u64>,
    /// Connections that have not named their user.
    pub(crate) unnamed: PendingConnections,
    /// Clients that have not proved their identity.
    pub(crate) logins: Arc<Logins>,
    /// Secret from which mock exchanges are built.
    pub(crate) mock_secret: MockSecret,
    /// Place of the process that waits to serve in this one's place.
    pub(crate) standby: Place,
    /// An operator has ordered the end of this proxy.
    pub(crate) drain: Notify,
}

impl Proxy {
    pub(crate) fn new(settings: Settings, lock: Lock) -> Result<Proxy, StartError> {
        let routes = Routes::load(lock)?;
        let path = settings.config.routes.clone();
        let mock_secret = MockSecret::load(&path).map_err(|error| {
            let why = format!("cannot store the secret in its directory: {error}");
            StartError::Routes { path, why }
        })?;
        let proxy = Proxy {
            settings: Mutex::new(Arc::new(settings)),
            tenants: Mutex::default(),
            directory: Directory::default(),
            routes,
            totals: Counters::default(),
            held: Arc::default(),
            reloads: watch::Sender::new(0),
            unnamed: PendingConnections::default(),
            logins: Arc::default(),
            mock_secret,
            standby: Place::default(),
            drain: Notify::new(),
        };
        proxy.register_configured_tenants();
        Ok(proxy)
    }

    /// Registers the tenants that the configuration names, before any client asks for them.
    fn register_configured_tenants(&self) {
        let named: Vec<String> = self.settings().config.tenants.keys().filter(|name| *name != ANY).cloned().collect();
        named.iter().for_each(|name| drop(self.tenant(name)));
    }

    /// Present configuration.
    pub(crate) fn settings(&self) -> Arc<Settings> {
        lock(&self.settings).clone()
    }

    /// Tenant for a database; `None` if the configuration has none.
    pub(crate) fn tenant(&self, name: &str) -> Option<Arc<Tenant>> {
        let settings = self.settings();
        let config = settings.config.tenant(name)?;
        let mut tenants = lock(&self.tenants);
        if let Some(known) = tenants.get(name) {
            return Some(known.clone());
        }
        let server = self.place(&settings, name, &config.server, config.database.as_deref())?;
        // Clients may use any number of names for `*`: names without sessions are removed.
        let is_named = |name: &str| settings.config.tenants.contains_key(name) || self.routes.get(name).is_some();
        tenants.retain(|name, tenant| tenant.is_kept() || Arc::strong_count(tenant) > 1 || is_named(name));
        let tenant = Arc::new(Tenant::new(name.to_owned(), config.clone(), server));
        tenants.insert(name.to_owned(), tenant.clone());
        Some(tenant)
    }

    /// Server of a tenant: the one that it has moved to, or the one in the configuration.
    fn place(&self, settings: &Settings, name: &str, server: &str, database: Option<&str>) -> Option<Arc<Server>> {
        if let Some(moved) = self.routes.get(name) {
            return Some(moved);
        }
        let server = settings.server(server)?;
        Some(match database {
            Some(database) => Arc::new(Server { database: Some(database.to_owned()), ..(*server).clone() }),
            None => server,
        })
    }

    /// All known tenants.
    pub(crate) fn tenants(&self) -> Vec<Arc<Tenant>> {
        lock(&self.tenants).values().cloned().collect()
    }

    /// Applies a changed configuration. Sessions go on; the listening sockets stay.
    pub(crate) fn reload(&self, settings: Settings) {
        let settings = Arc::new(settings);
        *lock(&self.settings) = settings.clone();
        for tenant in self.tenants() {
            if let Some(config) = settings.config.tenant(&tenant.name) {
                let server = self.place(&settings, &tenant.name, &config.server, config.database.as_deref());
                tenant.reload(config.clone(), server);
            }
        }
        self.register_configured_tenants();
        self.reloads.send_modify(|reloads| *reloads += 1);
    }

    /// Memory that captured sessions may hold for messages.
    pub(crate) fn memory(&self) -> Memory {
        Memory { held: self.held.clone(), max_bytes: self.settings().config.limits.memory_mib << 20 }
    }

    /// Sums over all sessions so far.
    pub(crate) fn sum(&self) -> Counters {
        let sum = Counters::default();
        sum.absorb(&self.totals);
        self.directory.all().iter().for_each(|entry| sum.absorb(&entry.counters));
        sum
    }

    /// Lets another proxy serve from here on: no tenant moves in this one any more.
    pub(crate) fn retire(&self) {
        self.routes.close();
    }

    /// Asks every session to end when no transaction is open.
    pub(crate) fn end_sessions(&self) {
        self.directory.all().iter().for_each(|entry| entry.send(Command::End));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn names_that_come_to_nothing_are_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let routes = dir.path().join("routes.json");
        let text = format!(
            "listen = ['/x/s']\ncontrol = '/x/c'\nroutes = {routes:?}\n[servers.a]\nhost = 'h'\n\
             [tenants.shop]\nserver = 'a'\n[tenants.'*']\nserver = 'a'\n"
        );
        let settings = Settings::new(Config::parse(&text).unwrap()).unwrap();
        let proxy = Proxy::new(settings, Lock::take(&routes, Path::new("/x/c")).unwrap()).unwrap();
        let held = proxy.tenant("held").unwrap();
        proxy.tenant("kept").unwrap().keep();
        for number in 0..100 {
            proxy.tenant(&format!("thought of {number}")).unwrap();
        }
        let known: Vec<String> = proxy.tenants().iter().map(|tenant| tenant.name.clone()).collect();
        assert_eq!(known, ["held", "kept", "shop", "thought of 99"]);
        assert!(Arc::ptr_eq(&held, &proxy.tenant("held").unwrap()));
    }
}
