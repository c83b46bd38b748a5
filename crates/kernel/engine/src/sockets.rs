//! Connections that a killed criu left under repair: they neither send nor hear.

use crate::tree::tree;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use stillpoint_kernel_sys::repair::leave;

/// Lets the connections of a process, and of all below it, go on; tells how many did not.
pub(crate) fn leave_repair(root: i32) -> usize {
    let mut left = 0;
    for process in tree(root).into_iter().flatten() {
        let Some(pidfd) = Pid::from_raw(process.pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else {
            continue;
        };
        for info in process.fd().into_iter().flatten().flatten() {
            let socket = pidfd_getfd(&pidfd, info.fd, PidfdGetfdFlags::empty());
            left += usize::from(socket.is_ok_and(leave));
        }
    }
    left
}
