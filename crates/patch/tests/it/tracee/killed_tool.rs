//! Kills of the tool before each of its system calls; the target must continue as if nothing had happened.

use crate::tracee::support::Target;
use crate::tracee::support::step::{self, Outcome};
use std::time::Duration;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Pid, Process, Stop, Tid, attach};

fn variable(name: &str) -> u64 {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is set")).parse().expect("a number")
}

/// Is no test: runs the tracer that is killed.
#[test]
#[ignore = "run by the other tests of this file, as the tracer to be killed"]
fn scenario() {
    let process = Process::open(Pid(variable("TARGET_PID") as i32)).unwrap();
    let tid = Tid(variable("TARGET_TID") as i32);
    let hook = Avma(variable("TARGET_HOOK"));
    step::begin();
    attach(&process, |session| {
        let Stop::Stopped(mut stopped) = session.stop(tid).unwrap() else { panic!("{tid} is gone") };
        let mut remote = stopped.begin_remote().unwrap();
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        let at = remote.syscall(libc::SYS_mmap as u64, [0, 4096, 1, flags, u64::MAX, 0]).unwrap();
        remote.syscall(libc::SYS_munmap as u64, [at, 4096, 0, 0, 0, 0]).unwrap();
        assert_eq!(remote.function(hook, Duration::from_secs(20)).unwrap(), 4711);
        remote.finish().unwrap();
        stopped.resume().unwrap();
        let mut frozen = session.freeze().unwrap();
        let text = process.memory().read_vec(hook, 5).unwrap();
        frozen.write_text(&[(hook, &text)]).unwrap();
        frozen.thaw().unwrap();
    })
    .unwrap();
    step::end();
}

fn expect_untouched(target: &mut Target, process: &Process) {
    target.expect_progress_but_interrupts();
    for info in process.threads().unwrap() {
        let status = process.thread_status(info.tid).unwrap();
        assert!(!matches!(status.state, 't' | 'T'), "thread {} is stopped", info.tid);
        assert_eq!((status.tracer.0, status.blocked, status.pending), (0, 0, 0), "thread {}", info.tid);
    }
}

/// Kills at every system call; `carrier` is the thread's index in the table of `waiters.c`, the first thread being 0.
fn killed_everywhere(carrier: usize) {
    let mut target = Target::start("waiters");
    let process = target.process();
    let environment = [
        ("TARGET_PID", target.pid().to_string()),
        ("TARGET_TID", process.threads().unwrap()[carrier].tid.to_string()),
        ("TARGET_HOOK", target.ready["hook"].to_string()),
    ];
    for n in 1.. {
        let outcome = step::run_killed("tracee::killed_tool::scenario", &environment, n);
        expect_untouched(&mut target, &process);
        if matches!(outcome, Outcome::Completed) {
            // Only between the request to stop and the repair: killed before waitpid (repeated when its timer expires,
            // which the slow supervisor and a busy machine cause), GETREGS or POKEUSER, of a stop and of a freeze.
            let interrupted = target.report()["interrupted"];
            println!("killed before each of {n} system calls; {interrupted} times epoll_wait saw it");
            assert!(n > 100 && interrupted * 10 < n as u64, "{n} {interrupted}");
            break;
        }
    }
    target.finish();
}

#[test]
fn while_a_waiting_thread_carries() {
    killed_everywhere(1);
}

#[test]
fn while_a_sleeping_thread_carries() {
    killed_everywhere(3);
}

#[test]
fn while_a_computing_thread_carries() {
    killed_everywhere(5);
}
