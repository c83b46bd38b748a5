//! Assignment of processes to processors, for servers that must share none, as on two machines.

use std::process::Command;

/// Number of processors.
pub fn processors() -> usize {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines().filter(|line| line.starts_with("processor")).count().max(1)
}

/// Pins a process, its threads, and all that they start from now on to some processors, as `taskset` names them.
#[track_caller]
pub fn pin(process: u32, processors: &str) {
    let pinned = Command::new("taskset").args(["-acp", processors, &process.to_string()]).output();
    assert!(pinned.is_ok_and(|output| output.status.success()), "taskset {processors} {process}");
}
