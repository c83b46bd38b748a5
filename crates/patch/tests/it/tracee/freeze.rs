//! Freeze of all threads at once.

use crate::tracee::support::Target;
use std::time::{Duration, Instant};
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Error, Event, attach};

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

/// Limit of freezes that may fail on a busy machine, beside the hundred that must succeed.
const REFUSED_MAX: usize = 20;

/// Waits for a thread in state D: in vain while the other threads, which would end its sleep, are stopped.
#[test]
fn no_thread_is_stopped_for_one_that_sleeps_in_the_kernel() {
    for lasts in ["1", "20"] {
        let mut target = Target::start_with("unwilling", &[], &[lasts]);
        let process = target.process();
        attach(&process, |session| {
            let (mut frozen, mut refused) = (0, 0);
            while frozen < 100 {
                match session.freeze() {
                    Ok(all) => {
                        assert_eq!(all.threads().len(), 4);
                        all.thaw().unwrap();
                        frozen += 1;
                    }
                    // On a busy machine the program may take longer to end a sleep than a freeze may last.
                    Err(Error::Unstoppable { .. }) => refused += 1,
                    Err(error) => panic!("{error}"),
                }
                assert!(refused <= REFUSED_MAX, "refused {refused} times, frozen {frozen} times");
                assert_eq!(session.pump(Instant::now() + Duration::from_millis(1)).unwrap(), None::<Event>);
            }
        })
        .unwrap();
        let slept = target.report()["sleeps"];
        let report = target.await_report("it goes on sleeping", |r| r["sleeps"] > slept + 1);
        assert_eq!(report["faults"], 0);
        target.finish();
    }
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
