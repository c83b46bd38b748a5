//! Servers that tenants have moved to, kept in a file: a proxy that starts again must not send clients back to a server
//! that is out of service.
//!
//! One proxy uses the file at a time: the one that holds the lock beside it. The kernel releases the lock when the
//! process ends in any way. A proxy that ends by itself does not change the file after it has released the lock.

use crate::config::Server;
use crate::entry::lock;
use crate::error::StartError;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Servers of tenants that have moved.
#[derive(Debug)]
pub(crate) struct Routes {
    path: PathBuf,
    servers: Mutex<BTreeMap<String, Server>>,
    /// Number of the next staged file: each staged change has a file of its own.
    staged: AtomicU64,
    /// `None` once another proxy may serve.
    lock: Mutex<Option<Lock>>,
}

/// The right to serve; it ends with the process, or when dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    routes: PathBuf,
    _file: File,
}

impl Lock {
    /// Takes the lock at once, or returns the control socket of the proxy that has it.
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
    /// Reads the file, which need not exist.
    pub(crate) fn load(lock: Lock) -> Result<Routes, StartError> {
        let path = lock.routes.clone();
        let wrong = |why: String| StartError::Routes { path: path.clone(), why };
        let servers = match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?,
            Err(error) if error.kind() == ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(wrong(error.to_string())),
        };
        let (staged, lock) = (AtomicU64::new(0), Mutex::new(Some(lock)));
        let routes = Routes { servers: Mutex::new(servers.clone()), staged, path, lock };
        // A file that cannot be written would be noticed only at the switch-over, which is too late.
        routes
            .write(servers.clone(), servers)
            .and_then(|known| known.rename(&routes.path))
            .map_err(|error| routes.wrong(&error))?;
        routes.sync()?;
        Ok(routes)
    }

    /// Ends all changes; another proxy may serve from here on.
    pub(crate) fn close(&self) {
        let held = lock(&self.lock).take();
        if held.is_some()
            && let Err(error) = self.sync()
        {
            tracing::error!(%error, "the routes are in force, but may be lost if the machine crashes");
        }
    }

    /// Returns the lock while it is held: work done under it is done before another proxy serves.
    fn checked_lock(&self) -> Result<std::sync::MutexGuard<'_, Option<Lock>>, StartError> {
        let held = lock(&self.lock);
        if held.is_none() {
            return Err(StartError::Routes { path: self.path.clone(), why: "this proxy is shutting down".into() });
        }
        Ok(held)
    }

    /// Server that a tenant has moved to.
    pub(crate) fn get(&self, tenant: &str) -> Option<Arc<Server>> {
        lock(&self.servers).get(tenant).cloned().map(Arc::new)
    }

    /// Writes the server that a tenant may move to into a new file: the slow part of [`Routes::commit`], before any
    /// client waits. Several tenants may be under way at a time.
    pub(crate) fn stage(&self, tenant: &str, server: &Server) -> Result<Staged, StartError> {
        let _held = self.checked_lock()?;
        let before = lock(&self.servers).clone();
        let mut servers = before.clone();
        servers.insert(tenant.to_owned(), server.clone());
        self.write(before, servers).map_err(|error| self.wrong(&error))
    }

    /// Activates a staged change. The name in the directory may reach the disk later. If the machine (not the process)
    /// fails before that, the fence on the source keeps clients away from it.
    pub(crate) fn commit(&self, mut staged: Staged) -> Result<(), StartError> {
        let _held = self.checked_lock()?;
        let mut in_force = lock(&self.servers);
        if staged.before != *in_force {
            // Another tenant has moved meanwhile.
            let moved = staged.servers.iter().filter(|(tenant, server)| staged.before.get(*tenant) != Some(*server));
            let mut servers = in_force.clone();
            servers.extend(moved.map(|(tenant, server)| (tenant.clone(), server.clone())));
            staged = self.write(in_force.clone(), servers).map_err(|error| self.wrong(&error))?;
        }
        staged.rename(&self.path).map_err(|error| self.wrong(&error))?;
        *in_force = std::mem::take(&mut staged.servers);
        Ok(())
    }

    /// Makes sure that the active routes are on the disk.
    pub(crate) fn sync(&self) -> Result<(), StartError> {
        let dir = self.path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_data());
        dir.map_err(|error| self.wrong(&error))
    }

    fn wrong(&self, error: &std::io::Error) -> StartError {
        StartError::Routes { path: self.path.clone(), why: error.to_string() }
    }

    fn write(&self, before: BTreeMap<String, Server>, servers: BTreeMap<String, Server>) -> std::io::Result<Staged> {
        let (path, mut file) = loop {
            // A file that exists may belong to a proxy that ends, or that has crashed.
            let number = self.staged.fetch_add(1, Ordering::Relaxed);
            let path = self.path.with_extension(format!("new{number}"));
            match File::create_new(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                made => break (path, made?),
            }
        };
        let staged = Staged { path, before, servers };
        file.write_all(&serde_json::to_vec_pretty(&staged.servers)?)?;
        file.sync_data()?;
        Ok(staged)
    }
}

/// Routes that are written and not active; dropping them removes their file.
#[derive(Debug)]
#[must_use]
pub(crate) struct Staged {
    path: PathBuf,
    /// Routes that were active when these were written.
    before: BTreeMap<String, Server>,
    servers: BTreeMap<String, Server>,
}

impl Staged {
    fn rename(&self, to: &Path) -> std::io::Result<()> {
        fs::rename(&self.path, to)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // The file has been renamed, or no process reads it.
        let _ = fs::remove_file(&self.path);
    }
}

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
    fn tenants_on_their_way_at_the_same_time_all_arrive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("routes.json");
        let [one, other, third]: [Server; 3] =
            ["host = 'one'", "host = 'other'", "host = 'third'"].map(|text| toml::from_str(text).unwrap());
        let routes = load(&path).unwrap();
        let (a, b, c) = (routes.stage("a", &one), routes.stage("b", &other), routes.stage("c", &third));
        routes.commit(b.unwrap()).unwrap();
        drop(c.unwrap());
        routes.commit(a.unwrap()).unwrap();
        assert_eq!(
            [routes.get("a"), routes.get("b")].map(|server| (*server.unwrap()).clone()),
            [one.clone(), other.clone()]
        );
        drop(routes);
        let routes = load(&path).unwrap();
        assert_eq!([routes.get("a"), routes.get("b")].map(|server| (*server.unwrap()).clone()), [one, other]);
        assert!(routes.get("c").is_none(), "it was given up");
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "the file and its lock: {left:?}");
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
