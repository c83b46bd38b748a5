//! Connections that a killed criu left in repair mode: they neither send nor receive.

use crate::process_tree::tree;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use stillpoint_kernel_sys::repair::leave_repair_mode;

/// Takes the connections of a process, and of all below it, out of repair mode; returns the number of those that were
/// in it.
pub(crate) fn leave_repair_mode_below(root: i32) -> usize {
    let mut count = 0;
    for process in tree(root).into_iter().flatten() {
        let Some(pidfd) = Pid::from_raw(process.pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else {
            continue;
        };
        for info in process.fd().into_iter().flatten().flatten() {
            let socket = pidfd_getfd(&pidfd, info.fd, PidfdGetfdFlags::empty());
            count += usize::from(socket.is_ok_and(leave_repair_mode));
        }
    }
    count
}
