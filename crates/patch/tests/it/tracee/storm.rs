//! Signals, new threads and processes, exec, exits and job control while the process is traced.

use crate::tracee::is_refusal;
use crate::tracee::support::{Target, await_that};
use std::time::{Duration, Instant};
use stillpoint_patch_tracee::{Error, Event, Process, ProcessOrigin, Session, Stop, StopRequest, attach};

const DURATION: Duration = Duration::from_secs(2);

/// Handles one event as the engine would, and lets every event pass.
fn serve(session: &mut Session<'_>, event: Event) {
    match event {
        Event::NewThread(tid) => session.resume_thread(tid).unwrap(),
        Event::NewProcess { pid, .. } => session.release(pid).unwrap(),
        _ => {}
    }
}

fn probe_all(session: &mut Session<'_>) -> usize {
    let mut stopped = 0;
    for tid in session.threads() {
        match session.stop(tid).unwrap() {
            Stop::Stopped(mut thread) => {
                assert_ne!(thread.registers().unwrap().pc().0, 0);
                thread.resume().unwrap();
                stopped += 1;
            }
            Stop::Gone | Stop::InVfork => {}
        }
    }
    stopped
}

/// Probes all threads repeatedly and handles the events; returns them.
fn probe_for(session: &mut Session<'_>, time: Duration) -> Vec<Event> {
    let end = Instant::now() + time;
    let mut events = Vec::new();
    while Instant::now() < end {
        probe_all(session);
        while Instant::now() < end
            && let Some(event) = session.pump(Instant::now() + Duration::from_millis(1)).unwrap()
        {
            serve(session, event);
            events.push(event);
        }
    }
    events
}

#[test]
fn signals_are_neither_lost_nor_doubled() {
    let mut target = Target::start_with("storm", &[], &["signals"]);
    let process = target.process();
    attach(&process, |session| probe_for(session, DURATION)).unwrap();
    target.say("stop");
    let report = target.await_report("all are handled", |r| r["sent"] == r["restart"] + r["plain"]);
    assert!(report["rounds"] > 100, "{report:?}");
    // Handlers without SA_RESTART interrupt, handlers with it do not, and our stops do not.
    assert!(report["interrupted"] <= report["plain"], "{report:?}");
    assert!(report["interrupted"] * 2 > report["plain"], "{report:?}");
    assert_eq!(report["faults"], 0);
    target.finish();
}

#[test]
fn signals_during_remote_calls_are_held_back() {
    let mut target = Target::start_with("storm", &[], &["signals"]);
    let process = target.process();
    let calls = attach(&process, |session| {
        let end = Instant::now() + DURATION;
        let mut calls = 0;
        while Instant::now() < end {
            for tid in session.threads() {
                let Stop::Stopped(mut thread) = session.stop(tid).unwrap() else { panic!("gone") };
                match thread.remote(libc::SYS_gettid as u64, [0; 6]) {
                    Ok(answer) => assert_eq!(answer, tid.0 as u64),
                    Err(Error::BadCarrier { .. }) => continue,
                    Err(error) => panic!("{error}"),
                }
                calls += 1;
            }
            assert_eq!(session.pump(Instant::now()).unwrap(), None);
        }
        calls
    })
    .unwrap();
    assert!(calls > 100, "{calls}");
    target.say("stop");
    let report = target.await_report("all are handled", |r| r["sent"] == r["restart"] + r["plain"]);
    assert_eq!(report["faults"], 0);
    target.finish();
}

/// Checks that a released or inspected thread never counts as new: no later event may announce it, for the tool would
/// then assume that it has no frames.
#[test]
fn an_announced_thread_has_not_run_yet() {
    let target = Target::start_with("storm", &[], &["threads"]);
    let process = target.process();
    let announced = attach(&process, |session| {
        let end = Instant::now() + DURATION;
        let mut announced = 0;
        while Instant::now() < end {
            session.freeze().unwrap().thaw().unwrap();
            probe_all(session);
            while Instant::now() < end
                && let Some(event) = session.pump(Instant::now()).unwrap()
            {
                if let Event::NewThread(tid) = event {
                    assert_eq!(session.request_stop(tid).unwrap(), StopRequest::AlreadyStopped, "{tid} runs already");
                    announced += 1;
                }
                serve(session, event);
            }
        }
        announced
    })
    .unwrap();
    assert!(announced > 10, "only {announced} were announced");
    target.finish();
}

#[test]
fn threads_come_and_go() {
    let mut target = Target::start_with("storm", &[], &["threads"]);
    let process = target.process();
    let events = attach(&process, |session| {
        let events = probe_for(session, DURATION);
        for _ in 0..20 {
            let frozen = session.freeze().unwrap();
            assert!(frozen.threads().len() >= 3);
            frozen.thaw().unwrap();
            let until = Instant::now() + Duration::from_millis(5);
            while Instant::now() < until
                && let Some(event) = session.pump(until).unwrap()
            {
                serve(session, event);
            }
        }
        events
    })
    .unwrap();
    let born = events.iter().filter(|e| matches!(e, Event::NewThread(_))).count();
    let died = events.iter().filter(|e| matches!(e, Event::ThreadExited(_))).count();
    assert!(born > 50 && died > 50, "{born} {died}");
    let before = target.report();
    let after = target.await_report("threads are made", |r| r["rounds"] > before["rounds"] + 5);
    assert_eq!(after["faults"], 0);
    target.finish();
}

#[test]
fn children_are_told_apart_and_run_on() {
    let mut target = Target::start_with("storm", &[], &["processes"]);
    let process = target.process();
    let events = attach(&process, |session| probe_for(session, DURATION)).unwrap();
    let count = |wanted: ProcessOrigin| {
        events.iter().filter(|e| matches!(e, Event::NewProcess { how, .. } if *how == wanted)).count()
    };
    // To the kernel, posix_spawn is a vfork.
    assert!(count(ProcessOrigin::Fork) > 3 && count(ProcessOrigin::Vfork) > 6, "{events:?}");
    assert!(events.iter().any(|e| matches!(e, Event::VforkDone(_))));
    let before = target.report();
    let after = target.await_report("processes are made", |r| r["rounds"] > before["rounds"] + 3);
    assert_eq!(after["faults"], 0);
    target.finish();
}

#[test]
fn exec_by_another_thread_is_reported_and_the_new_program_runs() {
    let mut target = Target::start_with("storm", &[], &["exec"]);
    let process = target.process();
    attach(&process, |session| {
        probe_all(session);
        target.say("stop");
        let mut events = Vec::new();
        while !events.contains(&Event::Exec) {
            events.extend(session.pump(Instant::now() + Duration::from_secs(30)).unwrap());
            assert!(!events.is_empty(), "an event within 30 s");
        }
        assert_eq!(session.threads(), [process.pid().leader()]);
    })
    .unwrap();
    assert!(target.line().contains_key("pid"), "the new program is ready");
    assert_eq!(target.report()["pid"], target.pid().0 as u64);
    target.finish();
}

#[test]
fn a_process_whose_leader_has_ended_can_be_held() {
    let mut target = Target::start_with("storm", &[], &["leader"]);
    let process = target.process();
    attach(&process, |session| {
        let threads = session.threads();
        assert_eq!(threads.len(), 1);
        assert_ne!(threads[0], process.pid().leader());
        assert_eq!(probe_all(session), 1);
        assert!(matches!(session.stop(process.pid().leader()).unwrap(), Stop::Gone));
        session.freeze().unwrap().thaw().unwrap();
    })
    .unwrap();
    assert_eq!(target.report()["faults"], 0);
    target.finish();
}

#[test]
fn job_control_is_kept() {
    let mut target = Target::start("waiters");
    let process = target.process();
    let pid = process.pid();
    // SAFETY: plain integers.
    let signal = |signal: i32| assert_eq!(unsafe { libc::kill(pid.0, signal) }, 0);
    let state = |letter: &str| {
        let threads = process.threads().unwrap();
        threads.iter().all(|t| letter.contains(t.state))
    };
    signal(libc::SIGSTOP);
    await_that("it stops", || state("T"));
    attach(&process, |session| {
        // Stopped before we attached.
        let Stop::Stopped(mut thread) = session.stop(pid.leader()).unwrap() else { panic!("gone") };
        assert!(thread.group_stopped());
        assert_eq!(thread.remote(libc::SYS_getpid as u64, [0; 6]).unwrap(), pid.0 as u64);
        thread.resume().unwrap();
        while session.pump(Instant::now() + Duration::from_millis(50)).unwrap().is_some() {}
        assert!(state("tT"), "it stays stopped");
        // Continued and stopped again while we trace it.
        signal(libc::SIGCONT);
        let pump = |session: &mut Session<'_>| {
            assert_eq!(session.pump(Instant::now() + Duration::from_millis(100)).unwrap(), None);
        };
        pump(session);
        target.expect_progress_while(|| pump(session));
        signal(libc::SIGSTOP);
        await_that("it stops again", || {
            pump(session);
            state("tT")
        });
        session.freeze().unwrap().thaw().unwrap();
    })
    .unwrap();
    await_that("it is stopped when we have gone", || state("T"));
    signal(libc::SIGCONT);
    // Natively, epoll_wait is interrupted by SIGSTOP and SIGCONT.
    target.expect_progress_but_interrupts();
    target.finish();
}

#[test]
fn a_process_that_is_killed_while_held_is_reported() {
    let mut target = Target::start("waiters");
    let process = target.process();
    attach(&process, |session| {
        let mut frozen = session.freeze().unwrap();
        target.child.kill().unwrap();
        let tid = frozen.threads()[0];
        await_that("requests fail", || frozen.carrier().is_err() || frozen.thread(tid).is_err());
        drop(frozen);
        let mut last = None;
        while !matches!(last, Some(Event::Exited(137))) {
            last = session.pump(Instant::now() + Duration::from_secs(30)).unwrap();
            assert!(last.is_some(), "an event within 30 s");
        }
    })
    .unwrap();
    let gone = Process::open(process.pid()).unwrap_err();
    assert!(is_refusal(&gone) && gone.gone(), "{gone}");
}
