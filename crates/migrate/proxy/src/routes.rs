//! Where tenants have moved, kept in a file: a proxy that starts again must not send clients back to a server that is out of
//! service.

use crate::config::Server;
use crate::entry::lock;
use crate::error::StartError;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Servers of tenants that have moved.
#[derive(Debug)]
pub(crate) struct Routes {
    path: PathBuf,
    servers: Mutex<BTreeMap<String, Server>>,
}

impl Routes {
    /// Reads the file; there need not be one.
    pub(crate) fn load(path: PathBuf) -> Result<Routes, StartError> {
        let wrong = |why: String| StartError::Routes { path: path.clone(), why };
        let servers = match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?,
            Err(error) if error.kind() == ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(wrong(error.to_string())),
        };
        let routes = Routes { servers: Mutex::new(servers), path };
        // A route that cannot be kept would be noticed at the switch-over, which is too late.
        routes.write(&lock(&routes.servers))?;
        Ok(routes)
    }

    /// Where a tenant has moved.
    pub(crate) fn get(&self, tenant: &str) -> Option<Arc<Server>> {
        lock(&self.servers).get(tenant).cloned().map(Arc::new)
    }

    /// Keeps where a tenant moves, durably.
    pub(crate) fn set(&self, tenant: &str, server: &Server) -> Result<(), StartError> {
        let mut servers = lock(&self.servers);
        let mut changed = servers.clone();
        changed.insert(tenant.to_owned(), server.clone());
        self.write(&changed)?;
        *servers = changed;
        Ok(())
    }

    fn write(&self, servers: &BTreeMap<String, Server>) -> Result<(), StartError> {
        let write = || {
            let fresh = self.path.with_extension("new");
            let mut file = File::create(&fresh)?;
            file.write_all(&serde_json::to_vec_pretty(servers)?)?;
            file.sync_data()?;
            fs::rename(&fresh, &self.path)?;
            match self.path.parent() {
                Some(dir) => File::open(dir)?.sync_data(),
                None => Ok(()),
            }
        };
        write().map_err(|error: std::io::Error| StartError::Routes { path: self.path.clone(), why: error.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_outlives_the_proxy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("routes.json");
        let server: Server = toml::from_str("host = 'h'\nport = 7").unwrap();
        let routes = Routes::load(path.clone()).unwrap();
        assert!(routes.get("t").is_none());
        routes.set("t", &server).unwrap();
        assert_eq!(*Routes::load(path).unwrap().get("t").unwrap(), server);
    }

    #[test]
    fn a_file_that_is_not_ours_or_cannot_be_written_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("routes.json");
        fs::write(&path, "x").unwrap();
        assert!(Routes::load(path).is_err());
        assert!(Routes::load(dir.path().join("missing/routes.json")).is_err());
    }
}
