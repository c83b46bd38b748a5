//! Remote system calls and functions.

use crate::tracee::support::{Target, thread_in};
use std::time::Duration;
use stillpoint_base::PAGE;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Error, Stop, attach};

#[test]
fn system_calls_through_every_kind_of_thread() {
    let mut target = Target::start("waiters");
    let process = target.process();
    let pid = process.pid();
    let carried = attach(&process, |session| {
        let mut carried = 0;
        for _ in 0..200 {
            for tid in session.threads() {
                let Stop::Stopped(mut stopped) = session.stop(tid).unwrap() else { panic!("{tid} is gone") };
                let before = stopped.registers().unwrap();
                let mut remote = match stopped.begin_remote() {
                    Ok(remote) => remote,
                    Err(Error::BadCarrier { .. }) => continue,
                    Err(error) => panic!("{error}"),
                };
                assert_eq!(remote.syscall(libc::SYS_getpid as u64, [0; 6]).unwrap(), pid.0 as u64);
                assert_eq!(remote.syscall(libc::SYS_gettid as u64, [0; 6]).unwrap(), tid.0 as u64);
                remote.finish().unwrap();
                assert_eq!(stopped.registers().unwrap(), before);
                stopped.resume().unwrap();
                carried += 1;
            }
        }
        carried
    })
    .unwrap();
    assert!(carried > 600, "{carried}");
    target.expect_progress();
    target.finish();
}

#[test]
fn maps_memory_in_a_carrier_and_reports_errno() {
    let mut target = Target::start("waiters");
    let process = target.process();
    attach(&process, |session| {
        let mut carrier = session.stop_carrier().unwrap();
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        let prot = (libc::PROT_READ | libc::PROT_EXEC) as u64;
        let at = carrier.remote(libc::SYS_mmap as u64, [0, PAGE, prot, flags, u64::MAX, 0]).unwrap();
        process.memory().write(Avma(at + 7), b"through the back door").unwrap();
        assert_eq!(process.memory().read_vec(Avma(at + 7), 7).unwrap(), b"through");
        let bad = carrier.remote(libc::SYS_close as u64, [9999, 0, 0, 0, 0, 0]).unwrap_err();
        assert!(matches!(&bad, Error::RemoteSyscall { source, .. } if source.raw_os_error() == Some(libc::EBADF)));
        carrier.remote(libc::SYS_munmap as u64, [at, PAGE, 0, 0, 0, 0]).unwrap();
        assert!(process.memory().read_vec(Avma(at), 1).is_err());
    })
    .unwrap();
    assert_eq!(target.report()["faults"], 0);
    target.finish();
}

#[test]
fn functions_return_results_and_faults_and_leave_no_trace() {
    let mut target = Target::start("waiters");
    let process = target.process();
    let (hook, hook_fault) = (Avma(target.ready["hook"]), Avma(target.ready["hook_fault"]));
    let limit = Duration::from_secs(20);
    let called = attach(&process, |session| {
        let mut called = 0;
        for _ in 0..100 {
            for tid in session.threads() {
                let Stop::Stopped(mut stopped) = session.stop(tid).unwrap() else { panic!("{tid} is gone") };
                if stopped.carrier_fault().unwrap().is_some() {
                    continue;
                }
                assert_eq!(stopped.call_function(hook, limit).unwrap(), 4711);
                called += 1;
                let fault = stopped.call_function(hook_fault, limit).unwrap_err();
                assert!(matches!(fault, Error::RemoteFault { signal: libc::SIGSEGV, .. }), "{fault}");
            }
        }
        called
    })
    .unwrap();
    assert_eq!(target.report()["hooks"], called);
    target.expect_progress();
    target.finish();
}

#[test]
fn a_function_that_takes_too_long_finishes_by_itself() {
    let mut target = Target::start("waiters");
    let process = target.process();
    let slow = Avma(target.ready["hook_slow"]);
    let main = thread_in(&process, libc::SYS_read);
    attach(&process, |session| {
        let Stop::Stopped(mut stopped) = session.stop(main).unwrap() else { panic!("gone") };
        let error = stopped.call_function(slow, Duration::from_millis(30)).unwrap_err();
        assert!(matches!(error, Error::RemoteTimeout { .. }), "{error}");
    })
    .unwrap();
    let report = target.await_report("the function ends", |r| r["hooks"] == 1);
    assert_eq!(report["faults"], 0);
    target.finish();
}
