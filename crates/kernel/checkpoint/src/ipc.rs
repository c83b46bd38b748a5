//! SysV shared memory, which criu takes along only with its IPC namespace.

use crate::process_tree::tree;
use procfs::process::{MMapPath, Process};
use std::path::PathBuf;
use stillpoint_host::kernel_files;

/// Returns the IPC namespace of a process.
pub(crate) fn namespace(pid: i32) -> Option<PathBuf> {
    kernel_files::link(format!("/proc/{pid}/ns/ipc")).ok()
}

/// Returns true if a process shares the namespace of this program.
pub(crate) fn shares_namespace(pid: i32) -> bool {
    namespace(pid) == namespace(std::process::id().cast_signed())
}

/// Returns true if a process maps such memory.
fn maps_sysv_memory(process: &Process) -> bool {
    process.maps().is_ok_and(|maps| maps.into_iter().any(|map| matches!(map.pathname, MMapPath::Vsys(_))))
}

/// Returns true if a process or one below it maps such memory that cannot be taken along.
pub fn has_unmovable_memory(pid: i32) -> bool {
    shares_namespace(pid) && tree(pid).is_ok_and(|processes| processes.iter().any(maps_sysv_memory))
}
