//! A control group beside that of a unit. systemd ends all processes in the group of a unit together: a daemon in that
//! group would end with the program that waits for its pages, and pages that are not resident would be zeros when the
//! program saves its data.
//!
//! The group belongs to no unit of systemd: it stays as it is while units stop. A process in it ends by itself after
//! its program, or with the machine, after all units.

use crate::Error;
use crate::error::ErrorContext;
use std::path::{Path, PathBuf};
use stillpoint_host::kernel_files::{self, Files};
use stillpoint_host::systemd::service_of_group;

const ROOT: &str = "/sys/fs/cgroup";

/// Moves a process out of the group of a unit, in which this process is.
pub(crate) fn move_beside_unit(unit: &str, pid: u32) -> Result<(), Error> {
    let groups = groups(unit)?;
    if groups.is_empty() {
        return Err(Error::Unit {
            unit: unit.to_owned(),
            why: "this process is not in a control group of the unit".into(),
        });
    }
    groups.iter().try_for_each(|group| add_process(&Files::of_kernel(), group, pid))
}

/// Removes the groups when no process is in them any more.
pub(crate) fn remove_groups(unit: &str) {
    for group in groups(unit).unwrap_or_default() {
        let _ = kernel_files::remove_directory(group);
    }
}

fn groups(unit: &str) -> Result<Vec<PathBuf>, Error> {
    let own = kernel_files::text("/proc/self/cgroup").at("read", "/proc/self/cgroup")?;
    Ok(groups_in(&Files::of_kernel(), &own, unit))
}

/// Returns the groups in each hierarchy by which systemd ends units, from this process's `/proc/self/cgroup`.
fn groups_in(files: &Files, own: &str, unit: &str) -> Vec<PathBuf> {
    let root = Path::new(ROOT);
    let group = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let mounted = match parts.next()? {
            "" if files.exists(root.join("cgroup.controllers")) => root.to_owned(),
            "" => root.join("unified"),
            "name=systemd" => root.join("systemd"),
            _ => return None,
        };
        let (_, group) = service_of_group(parts.next()?).filter(|(service, _)| service.as_str() == unit)?;
        let slice = Path::new(group).parent()?.strip_prefix("/").ok()?;
        // no unit has such a name
        Some(mounted.join(slice).join(format!("stillpoint-memory-{}", unit.trim_end_matches(".service"))))
    };
    own.lines().filter_map(group).collect()
}

fn add_process(files: &Files, group: &Path, pid: u32) -> Result<(), Error> {
    files.make_directory(group).at("make", group)?;
    let members = group.join("cgroup.procs");
    files.write(&members, pid.to_string()).at("write", members)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_in_the_slice_of_its_unit_and_not_in_the_unit() {
        let dir = tempfile::tempdir().unwrap();
        let (root, files) = (Path::new(ROOT), Files::below(dir.path()));
        let unit = "redis-server.service";
        let own = "0::/system.slice/redis-server.service\n";
        assert_eq!(groups_in(&files, own, unit), [root.join("unified/system.slice/stillpoint-memory-redis-server")]);
        std::fs::create_dir_all(dir.path().join("sys/fs/cgroup/system.slice")).unwrap();
        files.write(root.join("cgroup.controllers"), "cpu").unwrap();
        let expected = root.join("system.slice/stillpoint-memory-redis-server");
        assert_eq!(groups_in(&files, own, unit), std::slice::from_ref(&expected));
        let within = "0::/system.slice/redis-server.service/payload\n";
        assert_eq!(groups_in(&files, within, unit), std::slice::from_ref(&expected));
        let old = "4:memory:/system.slice/redis-server.service\n1:name=systemd:/system.slice/redis-server.service\n";
        assert_eq!(groups_in(&files, old, unit), [root.join("systemd/system.slice/stillpoint-memory-redis-server")]);
        assert!(groups_in(&files, "0::/user.slice/session-1.scope\n", unit).is_empty());
        assert!(groups_in(&files, "0::/user.slice/user@0.service/redis-server.service\n", unit).is_empty());
        add_process(&files, &expected, 4121).unwrap();
        add_process(&files, &expected, 4122).unwrap();
        assert_eq!(files.text(expected.join("cgroup.procs")).unwrap(), "4122");
    }
}
