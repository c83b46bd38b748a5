//! Memory that the control groups of a process leave for a patch (cgroup-v2.rst, cgroup-v1/memory.rst).
//!
//! The kernel kills a process of a full group when another page of that group is touched, even if a tool touches it.

use crate::Error;
use std::path::PathBuf;
use stillpoint_host::kernel_files;
use stillpoint_patch_tracee::Pid;

/// Reserve in bytes: for page tables, and for memory that the process itself needs meanwhile.
const RESERVE: u64 = 256 << 10;

/// File names of a hierarchy.
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// Fields of `memory.stat` that count memory which the kernel can reclaim, including groups below.
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

/// Refuses a patch of `len` bytes if a control group of the process has no room for it. Refuses nothing if no limit can be read, or if
/// anonymous memory can be swapped out.
///
/// # Errors
/// [`Error::MemoryLimit`] if a group has too little memory left.
pub(crate) fn check(pid: Pid, len: u64) -> Result<(), Error> {
    let needed = len + RESERVE;
    if len == 0 || free_swap() >= needed {
        return Ok(());
    }
    let Ok(text) = kernel_files::text(format!("/proc/{pid}/cgroup")) else { return Ok(()) };
    for (root, path, files) in groups(&text) {
        let mut group = root.join(path.trim_start_matches('/'));
        while group != root && group.starts_with(&root) {
            if let Some(free) =
                files.free(|name| kernel_files::text(group.join(name)).ok()).filter(|free| *free < needed)
            {
                let group = group.display().to_string();
                return Err(Error::MemoryLimit { pid, group, free, needed });
            }
            group.pop();
        }
    }
    Ok(())
}

/// Returns true if the address space of a process is limited, or if its limits cannot be read.
pub(crate) fn has_address_limit(pid: Pid) -> bool {
    kernel_files::text(format!("/proc/{pid}/limits")).map_or(true, |limits| limits_addresses(&limits))
}

/// Returns true unless `/proc/PID/limits` states that the soft limit, which is the one that the kernel applies, is unlimited.
fn limits_addresses(limits: &str) -> bool {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"));
    line.and_then(|line| line.split_whitespace().next()) != Some("unlimited")
}

/// Returns the hierarchies that may limit memory: directory, path of the group, files.
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
    /// Returns the bytes that a group has left, including reclaimable ones; `None` without a limit.
    fn free(&self, read: impl Fn(&str) -> Option<String>) -> Option<u64> {
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        let (limit, usage) = (number(self.limit)?, number(self.usage)?);
        let stat = read("memory.stat").unwrap_or_default();
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

/// Returns the bytes of swap that the machine has left.
fn free_swap() -> u64 {
    let text = kernel_files::text("/proc/meminfo").unwrap_or_default();
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
    fn a_limit_of_addresses_is_one_with_a_number() {
        let limits = |soft: &str, hard: &str| {
            format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max locked memory         8388608              8388608              bytes     \n\
                 Max address space         {soft:<20} {hard:<20} bytes     \n"
            )
        };
        assert!(!limits_addresses(&limits("unlimited", "unlimited")));
        assert!(limits_addresses(&limits("4294967296", "unlimited")) && limits_addresses(""));
    }

    #[test]
    fn memory_that_the_kernel_takes_back_counts_as_free() {
        let stat = "anon 500\ninactive_file 30\nactive_file 20\nslab_reclaimable 7\nfile 99\n";
        let free = |limit: &str, stat: Option<&str>| {
            V2.free(|name| match name {
                "memory.max" => Some(limit.to_owned()),
                "memory.current" => Some("900\n".to_owned()),
                _ => stat.map(str::to_owned),
            })
        };
        assert_eq!(free("1000\n", None), Some(100));
        assert_eq!(free("1000\n", Some(stat)), Some(157));
        assert_eq!(free("800\n", Some(stat)), Some(57));
        assert_eq!(free("max\n", Some(stat)), None);
    }
}
