//! The calls of `stillpoint patch` that tests, the demo and the benchmark make most.

use crate::cli::Stillpoint;
use std::path::Path;

/// Makes the call `stillpoint patch apply FILE --pid PID`.
pub fn apply(patch: &Path, pid: i32) -> Stillpoint {
    Stillpoint::new().args(["patch", "apply"]).arg(patch).arg("--pid").arg(pid)
}

/// Makes the call `stillpoint patch revert --pid PID`, which reverts the newest patch.
pub fn revert(pid: i32) -> Stillpoint {
    Stillpoint::new().args(["patch", "revert", "--pid"]).arg(pid)
}

/// Makes the call `stillpoint patch status --pid PID`.
pub fn status(pid: i32) -> Stillpoint {
    Stillpoint::new().args(["patch", "status", "--pid"]).arg(pid)
}
