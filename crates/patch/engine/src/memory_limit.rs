//! Memory that the control groups of a process leave for a patch (cgroup-v2.rst, cgroup-v1/memory.rst).
//!
//! The kernel kills a process of a group that is full when something touches another page of it, also when that is a tool.

use crate::Error;
use std::fs;
use std::path::{Path, PathBuf};
use stillpoint_patch_tracee::Pid;

/// Tables of pages, and what the process itself may want meanwhile.
const RESERVE: u64 = 256 << 10;

/// Names of a hierarchy's files.
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// Fields of `memory.stat` that count memory which the kernel takes back, groups below included.
    reclaimable: [&'static str; 3],
}

const V2: Files = Files {
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: ["inactive_file", "active_file", "slab_reclaimable"],
};
const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: ["total_inactive_file", "total_active_file", ""],
};

/// Refuses a patch of `len` bytes that a control group of the process has no room for. Nothing is refused where no limit can be
/// read, or where anonymous memory can be swapped out.
///
/// # Errors
/// [`Error::MemoryLimit`].
pub(crate) fn check(pid: Pid, len: u64) -> Result<(), Error> {
    let needed = len + RESERVE;
    if len == 0 || free_swap() >= needed {
        return Ok(());
    }
    let Ok(text) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else { return Ok(()) };
    for (root, path, files) in groups(&text) {
        let mut group = root.join(path.trim_start_matches('/'));
        while group != root && group.starts_with(&root) {
            if let Some(free) = files.free(&group).filter(|free| *free < needed) {
                let group = group.display().to_string();
                return Err(Error::MemoryLimit { pid, group, free, needed });
            }
            group.pop();
        }
    }
    Ok(())
}

/// Hierarchies that may limit memory: directory, path of the group, files.
fn groups(text: &str) -> Vec<(PathBuf, &str, Files)> {
    let mut found = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        // a path that leads upwards is outside of our cgroup namespace
        if path.split('/').any(|folder| folder == "..") {
            continue;
        }
        if controllers.is_empty() {
            found.extend(["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(|root| (root.into(), path, V2)));
        } else if controllers.split(',').any(|controller| controller == "memory") {
            found.push(("/sys/fs/cgroup/memory".into(), path, V1));
        }
    }
    found
}

impl Files {
    /// Bytes that a group has left, reclaimable ones included; `None` without a limit.
    fn free(&self, group: &Path) -> Option<u64> {
        let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        let (limit, usage) = (number(self.limit)?, number(self.usage)?);
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        Some(limit.saturating_sub(usage).saturating_add(self.reclaimable(&stat)))
    }

    fn reclaimable(&self, stat: &str) -> u64 {
        let fields = stat.lines().filter_map(|line| line.split_once(' '));
        fields
            .filter(|(name, _)| self.reclaimable.contains(name))
            .filter_map(|(_, value)| value.parse::<u64>().ok())
            .sum()
    }
}

/// Bytes of swap that the machine has left.
fn free_swap() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = text.lines().find_map(|line| line.strip_prefix("SwapFree:"));
    field.and_then(|value| value.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_in_both_versions() {
        let text = "4:memory:/a/b\n3:cpuset:/x\n5:cpu,memory:/c\n0::/d\n0::/../e\nbroken\n";
        let found: Vec<_> = groups(text).iter().map(|(root, path, _)| format!("{}{path}", root.display())).collect();
        let expected =
            ["/sys/fs/cgroup/memory/a/b", "/sys/fs/cgroup/memory/c", "/sys/fs/cgroup/d", "/sys/fs/cgroup/unified/d"];
        assert_eq!(found, expected);
    }

    #[test]
    fn memory_that_the_kernel_takes_back_counts_as_free() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        write("memory.max", "1000\n");
        write("memory.current", "900\n");
        assert_eq!(V2.free(directory.path()), Some(100));
        write("memory.stat", "anon 500\ninactive_file 30\nactive_file 20\nslab_reclaimable 7\nfile 99\n");
        assert_eq!(V2.free(directory.path()), Some(157));
        write("memory.max", "800\n");
        assert_eq!(V2.free(directory.path()), Some(57));
        write("memory.max", "max\n");
        assert_eq!(V2.free(directory.path()), None);
    }
}
