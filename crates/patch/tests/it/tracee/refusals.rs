//! Processes that are refused by name, and left unchanged.

use crate::tracee::is_refusal;
use crate::tracee::support::{Target, await_that, thread_in};
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Error, Pid, Process, Stop, attach};

fn refusal(pid: Pid) -> Error {
    let error = Process::open(pid).expect_err("it is refused");
    assert!(is_refusal(&error), "{error}");
    error
}

#[test]
fn what_is_no_program_to_patch() {
    assert!(matches!(refusal(Pid(-1)), Error::Gone(_)));
    assert!(matches!(refusal(Pid(i32::MAX)), Error::Gone(_)));
    assert!(matches!(refusal(Pid(std::process::id() as i32)), Error::Own(_)));
    let target = Target::start("waiters");
    let thread = target.process().threads().unwrap()[1].tid;
    assert!(matches!(refusal(Pid(thread.0)), Error::NotAProcess { pid, .. } if pid == target.pid()));
    let kernel = std::fs::read_to_string("/proc/2/comm").unwrap_or_default();
    match kernel.trim() {
        "kthreadd" => assert!(matches!(refusal(Pid(2)), Error::KernelThread(_))),
        _ => stillpoint_testing::skipped("no kernel thread is visible here"),
    }
}

#[test]
fn zombies() {
    let mut target = Target::start("waiters");
    let process = target.process();
    target.child.kill().unwrap();
    await_that("it has ended", || matches!(Process::open(target.pid()), Err(Error::Zombie(_))));
    assert!(!process.is_alive());
    // Exiting threads still exist, and may be attached to.
    await_that("nothing is left to attach to", || matches!(attach(&process, |_| ()), Err(error) if error.gone()));
}

#[test]
fn programs_of_other_kinds() {
    let alone = Target::start_with("foreign", &["-static", "-nostdlib", "-fno-stack-protector"], &[]);
    assert!(matches!(refusal(alone.pid()), Error::Static(_)));
    let narrow = Target::start_with("foreign", &["-m32", "-static", "-nostdlib", "-fno-stack-protector"], &[]);
    let error = refusal(narrow.pid());
    assert!(matches!(&error, Error::NotX86_64 { what, .. } if what == "a 32-bit x86 program"), "{error}");
}

#[test]
fn another_process_traces_it() {
    let target = Target::start("waiters");
    let process = target.process();
    attach(&process, |session| {
        let error = refusal(target.pid());
        assert!(matches!(&error, Error::AlreadyTraced { .. }), "{error}");
        let error = attach(&process, |_| ()).expect_err("the second is refused");
        assert!(matches!(&error, Error::AlreadyTraced { .. }), "{error}");
        assert_eq!(session.threads().len(), 7);
    })
    .unwrap();
    target.process();
}

#[test]
fn calls_that_seccomp_would_not_let_through() {
    let mut target = Target::start("filtered");
    let process = target.process();
    assert_eq!(process.status().unwrap().seccomp_filters, 2);
    thread_in(&process, libc::SYS_read);
    attach(&process, |session| {
        let tid = process.pid().leader();
        let Stop::Stopped(mut thread) = session.stop(tid).unwrap() else { panic!("gone") };
        let before = thread.registers().unwrap();
        let stack = process.memory().read_vec(Avma(before.rsp), 512).unwrap();
        let mmap = libc::SYS_mmap as u64;
        for error in [
            thread.check_syscalls(&[(libc::SYS_getpid as u64, [0; 6]), (mmap, [0; 6])]).unwrap_err(),
            thread.remote(mmap, [0, 4096, 1, 0x22, u64::MAX, 0]).unwrap_err(),
        ] {
            assert!(is_refusal(&error), "{error}");
            let text = error.to_string();
            assert_eq!(
                text,
                format!("seccomp filter of thread {tid} does not allow system call {mmap}: it would return errno 1")
            );
        }
        let error = thread.remote(libc::SYS_socket as u64, [1, 1, 0, 0, 0, 0]).unwrap_err();
        assert!(matches!(&error, Error::Seccomp { verdict, .. } if verdict.contains("kill")), "{error}");
        assert_eq!(thread.registers().unwrap(), before);
        assert_eq!(process.memory().read_vec(Avma(before.rsp), 512).unwrap(), stack);
        assert_eq!(thread.remote(libc::SYS_getpid as u64, [0; 6]).unwrap(), process.pid().0 as u64);
    })
    .unwrap();
    assert_eq!(target.report()["faults"], 0);
    target.finish();
}

#[test]
fn workers_of_the_kernel_are_not_traced() {
    let mut target = Target::start("uring");
    if target.ready["unavailable"] == 1 {
        return stillpoint_testing::skipped("io_uring cannot be used here");
    }
    let process = target.process();
    let workers = || process.threads().unwrap().iter().filter(|t| t.kernel_worker).count();
    await_that("a worker", || workers() > 0);
    attach(&process, |session| {
        assert_eq!(session.threads(), [process.pid().leader()]);
        let frozen = session.freeze().unwrap();
        assert_eq!(frozen.threads(), [process.pid().leader()]);
    })
    .unwrap();
    assert!(workers() > 0);
    assert_eq!(target.report()["faults"], 0);
    target.finish();
}
