//! Stop and release of threads.

use crate::tracee::support::Target;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Libc, Stop, Tid, attach};

#[test]
fn describes_a_process() {
    let target = Target::start("waiters");
    let process = target.process();
    assert_eq!(process.threads().unwrap().len(), 7);
    let modules = process.modules().unwrap();
    assert!(modules[0].executable && modules[0].build_id.is_some(), "{:?}", modules[0]);
    assert!(modules.iter().any(|m| m.path == "[vdso]"));
    let libc = modules.iter().find(|m| m.path.ends_with("libc.so.6")).expect("libc is mapped");
    assert!(libc.build_id.is_some() && libc.dynamic.is_some());
    let Libc::Glibc { version, .. } = process.libc().unwrap() else { panic!("glibc") };
    assert!(version >= (2, 17));
    assert!(!process.shadow_stack().unwrap());
    process.open_exe().unwrap();
    process.open_mapping(&libc.mappings[0]).unwrap();
    assert!(process.memory_sharers().unwrap().is_empty());
    target.finish();
    assert!(!process.is_alive());
}

#[test]
fn ten_thousand_stops_do_no_harm() {
    let mut target = Target::start("waiters");
    let process = target.process();
    let mut stood: Vec<u64> = attach(&process, |session| {
        let threads = session.threads();
        let mut stack = [0; 4096];
        let mut stood = Vec::new();
        for round in 0..10_000 {
            let tid = threads[round % threads.len()];
            let Stop::Stopped(mut stopped) = session.stop(tid).unwrap() else { panic!("{tid} is gone") };
            let registers = stopped.registers().unwrap();
            process.memory().read_some(Avma(registers.rsp), &mut stack);
            stood.push(stopped.resume().unwrap());
        }
        stood
    })
    .unwrap();
    stood.sort_unstable();
    println!("stopped ns: median {} p99 {} max {}", stood[5000], stood[9900], stood[9999]);
    target.expect_progress();
    assert_eq!(process.status().unwrap().tracer.0, 0);
    target.finish();
}

#[test]
fn a_thread_that_has_not_run_is_known_to_be_idle() {
    let mut target = Target::start("waiters");
    let process = target.process();
    let main = process.pid().leader();
    let reads = |tid| process.activity(tid).is_ok_and(|a| a.waits_in.is_some_and(|w| w.0 == libc::SYS_read as u64));
    crate::tracee::support::await_that("main waits for a question", || reads(main));
    attach(&process, |session| {
        assert!(!session.idle_since_stop(main).unwrap());
        let Stop::Stopped(stopped) = session.stop(main).unwrap() else { panic!("gone") };
        stopped.resume().unwrap();
        crate::tracee::support::await_that("it sleeps again", || session.idle_since_stop(main).unwrap());
        target.report();
        crate::tracee::support::await_that("it has run", || !session.idle_since_stop(main).unwrap());
        let gone = Tid(main.0 + 4_000_000);
        assert!(matches!(session.stop(gone).unwrap(), Stop::Gone));
    })
    .unwrap();
    assert_eq!(target.report()["faults"], 0);
    target.finish();
}
