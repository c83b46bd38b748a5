//! Containers: processes that see other processes or another file system than this command.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use stillpoint_host::kernel_files;
use stillpoint_patch_tracee::Pid;

/// Container of a process, as the machine names it: its control group, or else its namespace.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Container(String);

impl fmt::Display for Container {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Namespaces and root directory of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    pids: Option<PathBuf>,
    mounts: Option<PathBuf>,
    root: Option<(u64, u64)>,
}

impl Place {
    fn of(process: &str) -> Place {
        let link = |name: &str| kernel_files::link(format!("/proc/{process}/ns/{name}")).ok();
        let root = kernel_files::metadata(format!("/proc/{process}/root")).ok();
        Place { pids: link("pid"), mounts: link("mnt"), root: root.map(|root| (root.dev(), root.ino())) }
    }

    /// Returns the namespace by which `other` is a container as seen from here.
    ///
    /// Another mount namespace alone is none: systemd gives one to each service with `PrivateTmp=`, `ProtectSystem=` and the like, over the
    /// same root directory. A namespace that may not be read counts as the same.
    fn namespace_of_container<'a>(&self, other: &'a Place) -> Option<&'a PathBuf> {
        let differs = |own: &Option<PathBuf>, its: &Option<PathBuf>| its.is_some() && own != its;
        if differs(&self.pids, &other.pids) {
            return other.pids.as_ref();
        }
        let other_root = other.root.is_some() && self.root != other.root;
        other.mounts.as_ref().filter(|_| differs(&self.mounts, &other.mounts) && other_root)
    }
}

/// Place of this command, with which others are compared.
#[derive(Debug)]
pub(super) struct Surroundings {
    own: Place,
    own_group: Option<String>,
}

impl Surroundings {
    pub(super) fn here() -> Surroundings {
        Surroundings { own: Place::of("self"), own_group: group_of("self") }
    }

    /// Returns the container of a process; `None` if it belongs to the system that this command runs on.
    pub(super) fn container_of(&self, pid: Pid) -> Option<Container> {
        let process = pid.to_string();
        let other = Place::of(&process);
        let namespace = self.own.namespace_of_container(&other)?;
        let group = group_of(&process).filter(|group| group != "/" && Some(group) != self.own_group.as_ref());
        Some(Container(group.unwrap_or_else(|| format!("namespace {}", namespace.display()))))
    }
}

/// Returns the control group of a process: that of version 2, or else systemd's.
fn group_of(process: &str) -> Option<String> {
    let text = kernel_files::text(format!("/proc/{process}/cgroup")).ok()?;
    let of = |prefix: &str| text.lines().find_map(|line| line.split_once(prefix).map(|(_, path)| path.to_owned()));
    of(":name=systemd:").or_else(|| of("::"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(pids: &str, mounts: &str, root: u64) -> Place {
        Place { pids: Some(pids.into()), mounts: Some(mounts.into()), root: Some((1, root)) }
    }

    #[test]
    fn a_sandboxed_service_is_no_container() {
        let own = place("pid:[1]", "mnt:[1]", 2);
        let container = |other: Place| own.namespace_of_container(&other).map(|path| path.display().to_string());
        assert_eq!(container(place("pid:[1]", "mnt:[1]", 2)), None);
        assert_eq!(container(place("pid:[1]", "mnt:[1]", 9)), None, "a changed root alone");
        assert_eq!(container(place("pid:[1]", "mnt:[7]", 2)), None, "PrivateTmp=");
        assert_eq!(container(place("pid:[1]", "mnt:[7]", 9)).as_deref(), Some("mnt:[7]"));
        assert_eq!(container(place("pid:[7]", "mnt:[1]", 2)).as_deref(), Some("pid:[7]"));
        assert_eq!(container(Place { pids: None, mounts: None, root: None }), None, "not readable");
    }

    #[test]
    fn this_process_is_in_no_container() {
        assert_eq!(Surroundings::here().container_of(Pid(std::process::id() as i32)), None);
    }
}
