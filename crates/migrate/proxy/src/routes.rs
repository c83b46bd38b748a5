//! Servers that tenants have moved to, kept in a file: a proxy that starts again must not send clients back to a server
//! that is out of service.
//!
//! One proxy uses the file at a time: the one that holds the lock beside it. The kernel releases the lock when the
//! process ends in any way. A proxy that ends by itself does not change the file after it has released the lock.

use crate::error::StartError;
use crate::mutex::lock;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use stillpoint_host::trusted::Directory;
use stillpoint_migrate_postgres::Server;

/// Size limit of the file, in bytes.
const FILE_MAX: u64 = 64 << 20;
/// Size limit of the path of a control socket, in bytes.
const SOCKET_PATH_MAX: u64 = 4096;

/// Servers of tenants that have moved.
#[derive(Debug)]
pub(crate) struct Routes {
    file: Arc<RoutesFile>,
    servers: Mutex<BTreeMap<String, Server>>,
    /// Number of the next staged file: each staged change has a file of its own.
    staged: AtomicU64,
    /// `None` once another proxy may serve.
    lock: Mutex<Option<Lock>>,
}

/// Place of the file. A user that could change it could send clients, and their passwords, elsewhere.
#[derive(Debug)]
struct RoutesFile {
    directory: Directory,
    name: String,
}

impl RoutesFile {
    fn beside(&self, extension: &str) -> String {
        Path::new(&self.name).with_extension(extension).to_string_lossy().into_owned()
    }

    fn wrong(&self, why: impl ToString) -> StartError {
        StartError::Routes { path: self.directory.path().join(&self.name), why: why.to_string() }
    }
}

/// The right to serve; it ends with the process, or when dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    file: Arc<RoutesFile>,
    _locked: File,
}

impl Lock {
    /// Takes the lock at once, or returns the control socket of the proxy that has it.
    pub(crate) fn take(routes: &Path, control: &Path) -> Result<Lock, StartError> {
        let (directory, name) = Directory::of_file(routes)
            .map_err(|error| StartError::Routes { path: routes.into(), why: error.to_string() })?;
        let file = Arc::new(RoutesFile { directory, name: name.to_owned() });
        let (directory, name) = (&file.directory, file.beside("lock"));
        let opened = directory.lock_file(&name).and_then(|_| directory.file_to_change(&name));
        let mut locked = opened.map_err(|error| file.wrong(error))?;
        match rustix::fs::flock(&locked, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let by = OsString::from_vec(directory.read(&name, SOCKET_PATH_MAX).unwrap_or_default());
                return Err(StartError::Served { routes: routes.into(), control: by.into() });
            }
            Err(error) => return Err(file.wrong(error)),
        }
        let written = locked.set_len(0).and_then(|()| locked.write_all(control.as_os_str().as_encoded_bytes()));
        written.map_err(|error| file.wrong(error))?;
        Ok(Lock { file, _locked: locked })
    }
}

impl Routes {
    /// Reads the file, which need not exist.
    pub(crate) fn load(lock: Lock) -> Result<Routes, StartError> {
        let file = Arc::clone(&lock.file);
        let servers: BTreeMap<String, Server> = match file.directory.read(&file.name, FILE_MAX) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| file.wrong(error))?,
            Err(error) if error.is_not_found() => BTreeMap::new(),
            Err(error) => return Err(file.wrong(error)),
        };
        let (staged, lock) = (AtomicU64::new(0), Mutex::new(Some(lock)));
        let routes = Routes { servers: Mutex::new(servers.clone()), staged, file, lock };
        // A file that cannot be written would be noticed only at the switch-over, which is too late.
        routes.write(servers.clone(), servers)?.activate()?;
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
            return Err(self.file.wrong("this proxy is shutting down"));
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
        self.write(before, servers)
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
            staged = self.write(in_force.clone(), servers)?;
        }
        staged.activate()?;
        *in_force = std::mem::take(&mut staged.servers);
        Ok(())
    }

    /// Makes sure that the active routes are on the disk.
    pub(crate) fn sync(&self) -> Result<(), StartError> {
        self.file.directory.sync().map_err(|error| self.file.wrong(error))
    }

    fn write(&self, before: BTreeMap<String, Server>, servers: BTreeMap<String, Server>) -> Result<Staged, StartError> {
        let bytes = serde_json::to_vec_pretty(&servers).map_err(|error| self.file.wrong(error))?;
        loop {
            // A file that exists may belong to a proxy that ends, or that has crashed.
            let name = self.file.beside(&format!("new{}", self.staged.fetch_add(1, Ordering::Relaxed)));
            if self.file.directory.write_new(&name, &bytes).map_err(|error| self.file.wrong(error))? {
                return Ok(Staged { file: Arc::clone(&self.file), name, before, servers });
            }
        }
    }
}

/// Routes that are written and not active; dropping them removes their file.
#[derive(Debug)]
#[must_use]
pub(crate) struct Staged {
    file: Arc<RoutesFile>,
    name: String,
    /// Routes that were active when these were written.
    before: BTreeMap<String, Server>,
    servers: BTreeMap<String, Server>,
}

impl Staged {
    fn activate(&self) -> Result<(), StartError> {
        self.file.directory.rename(&self.name, &self.file.name).map_err(|error| self.file.wrong(error))
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // The file has been renamed, or no process reads it.
        let _ = self.file.directory.remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

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
        assert!(first.commit(staged).unwrap_err().to_string().contains("shutting down"));
        assert!(first.stage("t", &old).unwrap_err().to_string().contains("shutting down"));
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

    #[test]
    fn routes_that_another_user_can_change_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("routes.json");
        let why = || load(&path).unwrap_err().to_string();
        fs::write(&path, "{}").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(why().contains("others can write"), "{}", why());
        fs::rename(&path, dir.path().join("other")).unwrap();
        symlink("other", &path).unwrap();
        assert!(why().contains("symbolic link"), "{}", why());
        fs::remove_file(&path).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(why().contains("others can write"), "{}", why());
    }
}
