//! Where tenants have moved, kept in a file: a proxy that starts again must not send clients back to a server that is out of
//! service.
//!
//! The file is one proxy's at a time. Whoever holds the lock beside it serves; the kernel gives the lock up with the process,
//! however that ends, and a proxy that ends by itself changes nothing in the file from the moment when it gives it up.

use crate::config::Server;
use crate::entry::lock;
use crate::error::StartError;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Servers of tenants that have moved.
#[derive(Debug)]
pub(crate) struct Routes {
    path: PathBuf,
    servers: Mutex<BTreeMap<String, Server>>,
    /// None once another proxy may serve.
    lock: Mutex<Option<Lock>>,
}

/// The right to serve; it ends with the process, or when dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    routes: PathBuf,
    _file: File,
}

impl Lock {
    /// Takes it at once, or says at which control socket the one is that has it.
    pub(crate) fn take(routes: &Path, control: &Path) -> Result<Lock, StartError> {
        let wrong = |error: std::io::Error| StartError::Routes { path: routes.into(), why: error.to_string() };
        let path = routes.with_extension("lock");
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(wrong)?;
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let by = fs::read_to_string(&path).unwrap_or_default();
                return Err(StartError::Served { routes: routes.into(), control: by.into() });
            }
            Err(error) => return Err(wrong(error.into())),
        }
        file.set_len(0).and_then(|()| file.write_all(control.as_os_str().as_encoded_bytes())).map_err(wrong)?;
        Ok(Lock { routes: routes.into(), _file: file })
    }
}

impl Routes {
    /// Reads the file; there need not be one.
    pub(crate) fn load(lock: Lock) -> Result<Routes, StartError> {
        let path = lock.routes.clone();
        let wrong = |why: String| StartError::Routes { path: path.clone(), why };
        let servers = match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?,
            Err(error) if error.kind() == ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(wrong(error.to_string())),
        };
        let known = Staged(servers.clone());
        let routes = Routes { servers: Mutex::new(servers), path, lock: Mutex::new(Some(lock)) };
        // A route that cannot be kept would be noticed at the switch-over, which is too late.
        routes.write(&known.0).map_err(|error| routes.wrong(&error))?;
        routes.commit(known)?;
        routes.sync()?;
        Ok(routes)
    }

    /// Nothing changes from here on, and another proxy may serve.
    pub(crate) fn close(&self) {
        let held = lock(&self.lock).take();
        if held.is_some()
            && let Err(error) = self.sync()
        {
            tracing::error!(%error, "the routes are in force, and may not outlive a crash of the machine");
        }
    }

    /// The lock while it is held: what is done under it is done before another proxy serves.
    fn held(&self) -> Result<std::sync::MutexGuard<'_, Option<Lock>>, StartError> {
        let held = lock(&self.lock);
        if held.is_none() {
            return Err(StartError::Routes { path: self.path.clone(), why: "this proxy is ending".into() });
        }
        Ok(held)
    }

    /// Where a tenant has moved.
    pub(crate) fn get(&self, tenant: &str) -> Option<Arc<Server>> {
        lock(&self.servers).get(tenant).cloned().map(Arc::new)
    }

    /// Writes down where a tenant may move: what is slow about [`Routes::commit`], before anybody waits.
    pub(crate) fn stage(&self, tenant: &str, server: &Server) -> Result<Staged, StartError> {
        let _held = self.held()?;
        let mut servers = lock(&self.servers).clone();
        servers.insert(tenant.to_owned(), server.clone());
        self.write(&servers).map_err(|error| self.wrong(&error))?;
        Ok(Staged(servers))
    }

    /// Puts in force what was staged. The name in the directory may reach the disk later: should the machine, not the
    /// process, die before, the fence on the source keeps clients from it.
    pub(crate) fn commit(&self, staged: Staged) -> Result<(), StartError> {
        let _held = self.held()?;
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

    fn load(path: &Path) -> Result<Routes, StartError> {
        Routes::load(Lock::take(path, Path::new("/c"))?)
    }

    #[test]
    fn a_route_outlives_the_proxy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("routes.json");
        let server: Server = toml::from_str("host = 'h'\nport = 7").unwrap();
        let routes = load(&path).unwrap();
        assert!(routes.get("t").is_none());
        let _unused = routes.stage("t", &server).unwrap();
        drop(routes);
        let routes = load(&path).unwrap();
        assert!(routes.get("t").is_none(), "nothing was in force yet");
        let staged = routes.stage("t", &server).unwrap();
        routes.commit(staged).unwrap();
        routes.sync().unwrap();
        drop(routes);
        assert_eq!(*load(&path).unwrap().get("t").unwrap(), server);
    }

    #[test]
    fn the_file_is_one_proxy_s_at_a_time_and_who_has_given_it_up_leaves_it_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("routes.json");
        let [old, new]: [Server; 2] = ["host = 'old'", "host = 'new'"].map(|text| toml::from_str(text).unwrap());
        let first = load(&path).unwrap();
        let refused = load(&path).unwrap_err().to_string();
        assert!(refused.contains("/c"), "{refused}");
        let staged = first.stage("t", &old).unwrap();
        first.close();
        let second = load(&path).unwrap();
        let of_second = second.stage("t", &new).unwrap();
        assert!(first.commit(staged).unwrap_err().to_string().contains("ending"));
        assert!(first.stage("t", &old).unwrap_err().to_string().contains("ending"));
        second.commit(of_second).unwrap();
        drop(second);
        assert_eq!(*load(&path).unwrap().get("t").unwrap(), new);
    }

    #[test]
    fn a_file_that_is_not_ours_or_cannot_be_written_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("routes.json");
        fs::write(&path, "x").unwrap();
        assert!(load(&path).is_err());
        assert!(load(&dir.path().join("missing/routes.json")).is_err());
    }
}
