//! Control groups of services. A path comes from systemd or the kernel and is trusted only as far as it is checked here.

use super::{ServiceName, ask, is_booted};
use crate::Error;
use crate::error::At;
use crate::kernel_files;
use rustix::fs::{Dir, FileType, FsWord, fstatfs};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

const CGROUP_MAGIC: FsWord = 0x27_e0eb;
const CGROUP2_MAGIC: FsWord = 0x6367_7270;

/// Mount points of systemd's hierarchies: version 2 alone, beside version 1, or in a hierarchy of version 1.
const HIERARCHIES: [(&str, FsWord); 3] = [
    ("/sys/fs/cgroup", CGROUP2_MAGIC),
    ("/sys/fs/cgroup/unified", CGROUP2_MAGIC),
    ("/sys/fs/cgroup/systemd", CGROUP_MAGIC),
];

/// Maximum depth of nested groups; a deeper one is an error.
const DEPTH_MAX: usize = 64;

/// Control group of a service of the system's manager. Processes in its sub-groups belong to the service as well.
#[derive(Debug)]
pub struct ControlGroup {
    service: ServiceName,
    root: OwnedFd,
    path: String,
}

impl ControlGroup {
    /// Finds the control group of an active service by asking systemd. Where systemd does not run, only `system.slice/NAME.service` or
    /// `system.slice/system-PREFIX.slice/PREFIX@INSTANCE.service` is accepted.
    ///
    /// # Errors
    /// [`Error::Service`] for a template, a service that is not active, and one that has no such group.
    pub fn of_active(service: &ServiceName) -> Result<ControlGroup, Error> {
        ControlGroup::find(service, true)
    }

    fn find(service: &ServiceName, must_be_active: bool) -> Result<ControlGroup, Error> {
        let refused = |why: String| Error::Service { service: service.to_string(), why };
        if service.is_template() {
            return Err(refused("it is a template; instances of it have processes".to_owned()));
        }
        let booted = is_booted();
        let path = if booted { ask(service)?.group(service, must_be_active)? } else { service.default_group() };
        for root in hierarchies() {
            match open_below(&root, &path) {
                Ok(_) => return Ok(ControlGroup { service: service.clone(), root, path }),
                Err(Errno::NOENT) => {}
                Err(error) => return Err(refused(format!("opening control group {path}: {error}"))),
            }
        }
        let systemd = if booted { "" } else { "systemd does not run here, and " };
        Err(refused(format!("{systemd}there is no control group {path}")))
    }

    /// Ids of the processes in the group and all groups below it at this moment, ascending. Empty for a removed group; a service that is
    /// started again has its group at the same path.
    ///
    /// # Errors
    /// [`Error::Service`] when a group cannot be read, or groups are nested more than 64 deep.
    pub fn processes(&self) -> Result<BTreeSet<i32>, Error> {
        let mut pids = BTreeSet::new();
        let collected = match open_below(&self.root, &self.path) {
            Ok(folder) => collect(&folder, DEPTH_MAX, &mut pids),
            Err(error) if is_gone(error) => Ok(()),
            Err(error) => Err(error),
        };
        collected.map_err(|error| Error::Service {
            service: self.service.to_string(),
            why: match error {
                Errno::LOOP => format!("control groups of {} are nested more than {DEPTH_MAX} deep", self.path),
                _ => format!("reading control group {}: {error}", self.path),
            },
        })?;
        Ok(pids)
    }
}

/// Hierarchies that are mounted.
fn hierarchies() -> impl Iterator<Item = OwnedFd> {
    HIERARCHIES.into_iter().filter_map(|(path, magic)| {
        let root = kernel_files::open_directory(path).ok()?;
        fstatfs(&root).is_ok_and(|found| found.f_type == magic).then_some(root)
    })
}

/// Opens a group by its path from the root, folder by folder, and follows no link.
fn open_below(root: &OwnedFd, path: &str) -> Result<OwnedFd, Errno> {
    let mut folder = kernel_files::directory_in(root, ".")?;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        if name == ".." {
            return Err(Errno::INVAL);
        }
        folder = kernel_files::directory_in(&folder, name)?;
    }
    Ok(folder)
}

fn collect(group: &OwnedFd, depth: usize, pids: &mut BTreeSet<i32>) -> Result<(), Errno> {
    match members(group) {
        Ok(found) => pids.extend(found),
        // the group above lists its processes
        Err(Errno::OPNOTSUPP) => {}
        Err(error) if is_gone(error) => return Ok(()),
        Err(error) => return Err(error),
    }
    for entry in Dir::read_from(group)? {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) if is_gone(error) => return Ok(()),
            Err(error) => return Err(error),
        };
        let name = entry.file_name();
        if entry.file_type() != FileType::Directory || [c".", c".."].contains(&name) {
            continue;
        }
        let depth = depth.checked_sub(1).ok_or(Errno::LOOP)?;
        match kernel_files::directory_in(group, name) {
            Ok(below) => collect(&below, depth, pids)?,
            Err(error) if is_gone(error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns true for an error by which a group was removed while it was read; such a group has no processes.
fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NODEV)
}

/// Processes in a group itself, without those of another pid namespace (0).
fn members(group: impl AsFd) -> Result<Vec<i32>, Errno> {
    let mut text = String::new();
    kernel_files::file_in(group, "cgroup.procs")?
        .read_to_string(&mut text)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0).collect())
}

/// Returns the service of the system's manager that a control group belongs to, and the path of the service's own group, from the group's
/// path. `None` for groups in no service, and for all below `user.slice`: there, users' managers choose names.
pub fn service_of_group(path: &str) -> Option<(ServiceName, &str)> {
    let mut end = 0;
    let mut folders = path.strip_prefix('/')?.split('/');
    let leads_elsewhere = folders.clone().any(|folder| ["", ".", ".."].contains(&folder));
    if leads_elsewhere || folders.clone().next() == Some("user.slice") {
        return None;
    }
    let folder = folders.find(|folder| {
        end += 1 + folder.len();
        !folder.ends_with(".slice")
    })?;
    Some((ServiceName::of_folder(folder)?, &path[..end]))
}

/// Returns the service of the system's manager that a process belongs to, also while the service starts.
///
/// # Errors
/// [`Error::Io`] for a process that has ended, [`Error::NotInService`] for one in no service's control group.
pub fn service_of_process(pid: i32) -> Result<ServiceName, Error> {
    let path = format!("/proc/{pid}/cgroup");
    let text = kernel_files::text(&path).at("reading", Path::new(&path))?;
    let is_service = |(service, group): &(ServiceName, &str)| {
        ControlGroup::find(service, false).is_ok_and(|found| found.path == *group)
    };
    let mut found = groups_of_systemd(&text).filter_map(service_of_group);
    found.find(is_service).map(|(service, _)| service).ok_or(Error::NotInService(pid))
}

/// Paths in systemd's own hierarchies, from the text of `/proc/PID/cgroup`.
pub fn groups_of_systemd(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers) = (fields.next()?, fields.next()?);
        let is_systemd = (number, controllers) == ("0", "") || controllers == "name=systemd";
        fields.next().filter(|_| is_systemd)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_path_tells_the_service_and_users_choose_no_names() {
        let of = |path| service_of_group(path).map(|(service, group)| (service.to_string(), group.to_owned()));
        let found = |service: &str, group: &str| Some((service.to_owned(), group.to_owned()));
        let own = "/system.slice/redis-server.service";
        assert_eq!(of(own), found("redis-server.service", own));
        assert_eq!(of("/system.slice/redis-server.service/payload"), found("redis-server.service", own));
        assert_eq!(of("/system.slice/a.service/b.service"), found("a.service", "/system.slice/a.service"));
        let instance = "/system.slice/system-x\\x2dy.slice/x-y@1.service";
        assert_eq!(of(instance), found("x-y@1.service", instance));
        for none in [
            "",
            "/",
            "redis.service",
            "/system.slice",
            "/init.scope/redis.service",
            "/user.slice/user-1000.slice/user@1000.service/app.slice/redis.service",
            "/user.slice/redis.service",
            "/user.slice/user-1000.slice/session-1.scope",
            "/../system.slice/redis.service",
            "/system.slice/../../redis.service",
            "/system.slice//redis.service",
            "/docker/0123/system.slice/redis.service",
        ] {
            assert_eq!(of(none), None, "{none}");
        }
    }

    #[test]
    fn only_systemds_hierarchies_are_read() {
        let text = "4:memory:/a\n2:name=systemd:/b\n1:name=other:/c\n0::/d:e\n5:cpu,cpuacct:/f\nnonsense\n";
        assert_eq!(groups_of_systemd(text).collect::<Vec<_>>(), ["/b", "/d:e"]);
    }

    fn folder(path: &Path) -> OwnedFd {
        fs::File::open(path).unwrap().into()
    }

    #[test]
    fn processes_of_sub_groups_count_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().join("system.slice/a.service");
        for (at, text) in [("", "41\n0\n"), ("inner", "42\n43\n"), ("inner/most", "42\n"), ("threaded", "")] {
            fs::create_dir_all(group.join(at)).unwrap();
            fs::write(group.join(at).join("cgroup.procs"), text).unwrap();
        }
        fs::create_dir_all(dir.path().join("elsewhere")).unwrap();
        fs::write(dir.path().join("elsewhere/cgroup.procs"), "44\n").unwrap();
        symlink("../../elsewhere", group.join("link")).unwrap();
        symlink("../elsewhere", dir.path().join("system.slice/b.service")).unwrap();
        let root = folder(dir.path());
        let mut pids = BTreeSet::new();
        collect(&open_below(&root, "/system.slice/a.service").unwrap(), DEPTH_MAX, &mut pids).unwrap();
        assert_eq!(pids.into_iter().collect::<Vec<_>>(), [41, 42, 43]);
        let open = |path| open_below(&root, path).err();
        assert_eq!(open("/system.slice/c.service"), Some(Errno::NOENT));
        assert!([Some(Errno::NOTDIR), Some(Errno::LOOP)].contains(&open("/system.slice/b.service")));
        assert_eq!(open("/system.slice/../elsewhere"), Some(Errno::INVAL));
        let mut pids = BTreeSet::new();
        let group = folder(&group);
        assert_eq!(collect(&group, 1, &mut pids), Err(Errno::LOOP));
    }
}
