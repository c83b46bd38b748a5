//! What programs have in them, or lack, when nothing of ours or of criu's is at work any more.

use crate::Redis;
use crate::support::{criu, restore, scratch};
use nix::libc;
use nix::sys::{ptrace, wait};
use nix::unistd::Pid;
use std::fs;

/// Addresses in the debug registers of all threads. A kernel that has once kept a breakpoint of a thread has it, as an event of
/// perf that is off, until that ends, and looks at it whenever it switches to the thread.
fn breakpoints(pid: i32) -> Vec<i64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let threads = tasks.map(|task| task.file_name().to_str().unwrap().parse().unwrap()).map(Pid::from_raw);
    let first = std::mem::offset_of!(libc::user, u_debugreg);
    threads
        .flat_map(|thread| {
            ptrace::seize(thread, ptrace::Options::empty()).unwrap();
            ptrace::interrupt(thread).unwrap();
            wait::waitpid(thread, Some(wait::WaitPidFlag::__WALL)).unwrap();
            let addresses = [0, 1, 2, 3].map(|at| ptrace::read_user(thread, (first + at * 8) as *mut _).unwrap());
            ptrace::detach(thread, None).unwrap();
            addresses
        })
        .filter(|address| *address != 0)
        .collect()
}

#[test]
fn neither_a_checkpoint_nor_a_restore_leaves_breakpoints_behind() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((mut redis, mut client)) = Redis::with_data(dir.path()) else { return };
    let none: Vec<i64> = Vec::new();
    redis.victim.checkpoint(&criu, &dir.path().join("running"), &["--leave-running"]);
    assert_eq!(breakpoints(redis.victim.pid), none, "behind a checkpoint");
    for how in ["eager", "on-demand"] {
        let image = dir.path().join(how);
        redis.victim.checkpoint(&criu, &image, &[]);
        restore(&criu, &image, &["--restore", how]);
        assert_eq!(breakpoints(redis.victim.pid), none, "behind a restore, {how}");
        assert_eq!(client.ask("PING"), "+PONG");
    }
}
