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
        let known = lock(&routes.servers).clone();
        routes.write(&known).map_err(|error| routes.wrong(&error))?;
        routes.commit(Staged(known))?;
        routes.sync()?;
        Ok(routes)
    }

    /// Where a tenant has moved.
    pub(crate) fn get(&self, tenant: &str) -> Option<Arc<Server>> {
        lock(&self.servers).get(tenant).cloned().map(Arc::new)
    }

    /// Writes down where a tenant may move: what is slow about [`Routes::commit`], before anybody waits.
    pub(crate) fn stage(&self, tenant: &str, server: &Server) -> Result<Staged, StartError> {
        let mut servers = lock(&self.servers).clone();
        servers.insert(tenant.to_owned(), server.clone());
        self.write(&servers).map_err(|error| self.wrong(&error))?;
        Ok(Staged(servers))
    }

    /// Puts in force what was staged. The name in the directory may reach the disk later: should the machine, not the
    /// process, die before, the fence on the source keeps clients from it.
    pub(crate) fn commit(&self, staged: Staged) -> Result<(), StartError> {
        fs::rename(self.fresh(), &self.path).map_err(|error| self.wrong(&error))?;
        *lock(&self.servers) = staged.0;
        Ok(())
    }

    /// Makes sure that what is in force is on the disk.
    pub(crate) fn sync(&self) -> Result<(), StartError> {
        let dir = self.path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_data());
        dir.map_err(|error| self.wrong(&error))
    }

    fn fresh(&self) -> PathBuf {
        self.path.with_extension("new")
    }

    fn wrong(&self, error: &std::io::Error) -> StartError {
        StartError::Routes { path: self.path.clone(), why: error.to_string() }
    }

    fn write(&self, servers: &BTreeMap<String, Server>) -> std::io::Result<()> {
        let mut file = File::create(self.fresh())?;
        file.write_all(&serde_json::to_vec_pretty(servers)?)?;
        file.sync_data()
    }
}

/// Routes that are written down and not in force.
#[derive(Debug)]
#[must_use]
pub(crate) struct Staged(BTreeMap<String, Server>);

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
        let staged = routes.stage("t", &server).unwrap();
        assert!(Routes::load(path.clone()).unwrap().get("t").is_none(), "nothing is in force yet");
        let staged_again = routes.stage("t", &server).unwrap();
        drop(staged);
        routes.commit(staged_again).unwrap();
        routes.sync().unwrap();
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
