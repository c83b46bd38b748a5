//! Which processors run what, where servers are to share none as servers of two machines do.

use std::process::Command;

/// How many there are.
pub fn processors() -> usize {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines().filter(|line| line.starts_with("processor")).count().max(1)
}

/// Keeps a process, its threads, and whoever they start from now on to some processors, as `taskset` names them.
#[track_caller]
pub fn pin(process: u32, processors: &str) {
    let pinned = Command::new("taskset").args(["-acp", processors, &process.to_string()]).output();
    assert!(pinned.is_ok_and(|output| output.status.success()), "taskset {processors} {process}");
}
