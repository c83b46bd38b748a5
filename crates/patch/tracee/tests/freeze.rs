//! All threads at once.

mod support;

use std::time::{Duration, Instant};
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Error, Event, Session, ThreadInfo, Tid, attach};
use support::Target;

#[test]
fn freezes_and_thaws_again_and_again() {
    let mut target = Target::start("waiters");
    let process = target.process();
    attach(&process, |session| {
        for _ in 0..200 {
            let mut frozen = session.freeze().unwrap();
            let threads = frozen.threads();
            assert_eq!(threads.len(), 7);
            for tid in threads {
                let registers = frozen.thread(tid).unwrap().registers().unwrap();
                assert_ne!(registers.pc().0, 0);
                assert_eq!(process.thread_status(tid).unwrap().state, 't');
            }
            let pid = frozen.carrier().unwrap().remote(libc::SYS_getpid as u64, [0; 6]).unwrap();
            assert_eq!(pid, process.pid().0 as u64);
            assert_eq!(frozen.thaw().unwrap().len(), 7);
            assert_eq!(session.pump(Instant::now()).unwrap(), None::<Event>);
        }
    })
    .unwrap();
    target.expect_progress();
    target.finish();
}

#[test]
fn sleepers_are_looked_at_while_the_busy_thread_still_runs() {
    let mut target = Target::start("waiters");
    let process = target.process();
    let busiest = || process.threads().unwrap().into_iter().max_by_key(|thread| thread.cpu_ticks).unwrap();
    // all others sleep: who has used the processor for so long is the one that spins
    while busiest().cpu_ticks < 32 {
        std::thread::sleep(Duration::from_millis(10));
    }
    let busy = busiest().tid;
    let freeze = |session: &mut Session<'_>| {
        let mut order = Vec::new();
        let frozen = session.freeze_looking(|held| {
            order.push((held.tid(), process.thread_status(busy)?.state));
            Ok::<_, Error>(())
        });
        let mut all = frozen.unwrap().threads();
        let (last, before) = order.split_last().unwrap();
        let as_wished = *last == (busy, 't') && before.iter().all(|(_, state)| *state != 't');
        let mut looked_at: Vec<Tid> = order.iter().map(|(tid, _)| *tid).collect();
        looked_at.sort_unstable();
        all.sort_unstable();
        assert_eq!(looked_at, all, "each once");
        as_wished
    };
    // a sleeper may happen to run in that moment, and is stopped with the busy one then
    attach(&process, |session| assert!((0..100).any(|_| freeze(session)))).unwrap();
    target.expect_progress();
    target.finish();
}

#[test]
fn a_look_that_fails_lets_everybody_go() {
    let mut target = Target::start("waiters");
    let process = target.process();
    attach(&process, |session| {
        let mut looks = 0;
        let result = session.freeze_looking(|held| {
            looks += 1;
            if looks == 3 { Err(Error::ThreadGone(held.tid())) } else { Ok(()) }
        });
        assert!(matches!(result, Err(Error::ThreadGone(_))));
        let stands = |thread: &ThreadInfo| process.thread_status(thread.tid).is_ok_and(|status| status.state == 't');
        assert!(!process.threads().unwrap().iter().any(stands));
    })
    .unwrap();
    target.expect_progress();
    target.finish();
}

#[test]
fn writes_text_whole_or_not_at_all() {
    let mut target = Target::start("waiters");
    let process = target.process();
    let hook = Avma(target.ready["hook"]);
    attach(&process, |session| {
        let mut frozen = session.freeze().unwrap();
        let text = process.memory().read_vec(hook, 5).unwrap();
        frozen.write_text(&[(hook, &[0xb8, 42, 0, 0, 0]), (Avma(hook.0 + 5), &[0xc3])]).unwrap();
        let result = frozen.carrier().unwrap().call_function(hook, Duration::from_secs(20)).unwrap();
        assert_eq!(result, 42);
        let page_end = Avma((hook.0 | 4095) - 2);
        let error = frozen.write_text(&[(hook, &text), (page_end, &[0; 5])]).unwrap_err();
        assert!(matches!(error, Error::CrossesPage { len: 5, .. }), "{error}");
        assert_eq!(process.memory().read_vec(hook, 1).unwrap(), [0xb8]);
    })
    .unwrap();
    assert_eq!(target.report()["faults"], 0);
    target.finish();
}
