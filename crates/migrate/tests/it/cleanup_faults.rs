//! Faults at times when nothing is moved any more or not yet: while `run` settles, while `finish` or `abort` removes
//! objects, and between a switch and the way back. Clients' histories are in order, and the next command completes the
//! work.

use rustix::process::Signal;
use std::time::Duration;
use stillpoint_measure::postgres::Isolation;
use stillpoint_migrate_tests::{Fault, Moment, Random, Testbed, Trial};
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};

const RUN: [&str; 5] = ["run", "--share", "0", "--pause-timeout", "3s"];
const FALLBACK: [&str; 3] = ["fallback", "--pause-timeout", "3s"];

/// Most calls of a command that a fault hits.
const ATTEMPTS: usize = 8;

fn quiet(back: bool) -> Trial {
    let moment = Moment { phase: None, after: Duration::ZERO };
    Trial { back, fault: Fault::None, moment, isolation: Isolation::RepeatableRead, seed: 17 }
}

/// Kills a command, each time later, until it ends before that; returns how often it was killed.
#[track_caller]
fn killed_ever_later(testbed: &Testbed, words: &[&str], after_each: impl Fn(&Testbed)) -> usize {
    let mut after = Duration::from_millis(1);
    for killed in 0.. {
        let tool = testbed.tool(words);
        std::thread::sleep(after);
        tool.signal(Signal::KILL);
        let ended = tool.end();
        // The command before may have ended before it was killed.
        if ended.code == Some(0) || ended.complaints.contains("no migration of shop is under way") {
            return killed;
        }
        assert!(ended.code.is_none(), "{words:?}: {ended:?}");
        assert!(after < Duration::from_secs(60), "{words:?} does not come to its end");
        after_each(testbed);
        after = after * 6 / 5;
    }
    unreachable!("it comes to its end, or is not waited for")
}

fn count(cluster: &Cluster, database: &str, what: &str) -> String {
    cluster.sql(database, &format!("SELECT count(*) FROM {what}"))
}

fn is_shut(cluster: &Cluster) -> bool {
    cluster.sql("postgres", "SELECT datallowconn FROM pg_database WHERE datname = 'shop'") == "f"
}

#[test]
fn run_is_killed_while_it_settles() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    let mut cut_off = 0;
    for (round, ms) in [0, 3, 8, 15, 25, 40].into_iter().enumerate() {
        let trial = Trial { fault: Fault::KillTool, ..quiet(false) };
        cut_off += trial.under_load(&mut testbed, |testbed| {
            let mut tool = testbed.tool(&RUN);
            Moment { phase: Some("settle"), after: Duration::from_millis(ms) }.wait(&mut tool);
            tool.signal(Signal::KILL);
            tool.end();
            assert_eq!(testbed.standing(), (Some("switched".into()), Some("target".into())));
            let cut_off = count(&testbed.source, "postgres", "pg_replication_slots") == "1";
            if round % 2 == 0 {
                testbed.succeed(&RUN);
                assert_eq!(count(&testbed.source, "postgres", "pg_replication_slots"), "0", "it settles again");
            }
            until("the source to be shut", || is_shut(&testbed.source).then_some(()));
            // With the commits of clients on the target, also if no `run` has settled.
            testbed.succeed(&FALLBACK);
            testbed.assert_clean();
            usize::from(cut_off)
        });
    }
    assert!(cut_off > 0, "it was always killed too late");
}

#[test]
fn finish_is_killed() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    let killed = quiet(false).under_load(&mut testbed, |testbed| {
        // It also removes what a killed `run` has left.
        let mut tool = testbed.tool(&RUN);
        Moment { phase: Some("settle"), after: Duration::ZERO }.wait(&mut tool);
        tool.signal(Signal::KILL);
        tool.end();
        killed_ever_later(testbed, &["finish"], |testbed| {
            until("the source to be shut", || is_shut(&testbed.source).then_some(()));
            assert!(!is_shut(&testbed.target));
            let (phase, serving) = testbed.standing();
            assert_eq!(serving.as_deref(), Some("target"));
            let Some(phase) = phase else { return };
            assert_eq!(phase, "switched");
            if count(&testbed.target, "postgres", "pg_replication_slots") == "0" {
                let refused = testbed.run(&FALLBACK);
                assert!(refused.code == Some(3) && refused.complaints.contains("cannot be rolled back"), "{refused:?}");
            }
        })
    });
    println!("killed {killed} times");
    assert!(killed > 3, "{killed}");
    assert_eq!(testbed.standing().0, None);
    assert!(is_shut(&testbed.source));
    testbed.source.sql("postgres", "ALTER DATABASE shop ALLOW_CONNECTIONS true");
    for cluster in [&testbed.source, &testbed.target] {
        for what in ["pg_replication_slots", "pg_publication", "pg_namespace WHERE nspname = 'stillpoint'"] {
            assert_eq!(count(cluster, "shop", what), "0", "{what}");
        }
    }
}

#[test]
fn abort_is_killed() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    for phase in ["copy", "indexes", "catch-up"] {
        let killed = Trial { fault: Fault::KillTool, ..quiet(false) }.under_load(&mut testbed, |testbed| {
            let mut tool = testbed.tool(&RUN);
            Moment { phase: Some(phase), after: Duration::ZERO }.wait(&mut tool);
            tool.signal(Signal::KILL);
            tool.end();
            killed_ever_later(testbed, &["abort"], |testbed| {
                assert_eq!(testbed.standing().1.as_deref(), Some("source"), "{phase}");
                until("the source to be open", || (!is_shut(&testbed.source)).then_some(()));
            })
        });
        println!("{phase}: killed {killed} times");
        assert!(killed > 1, "{phase}: {killed}");
        assert_eq!(testbed.standing().0, None);
        testbed.assert_clean();
    }
    quiet(false).run(&mut testbed);
}

#[test]
fn something_fails_between_the_switch_and_the_way_back() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    let mut random = Random::new(23);
    for fault in [
        Fault::KillProxy,
        Fault::CrashSource,
        Fault::CrashTarget,
        Fault::CutSource,
        Fault::CutTarget,
        Fault::StallTarget,
    ] {
        Trial { fault, ..quiet(true) }.under_load(&mut testbed, |testbed| {
            testbed.succeed(&RUN);
            let bystander = testbed.tool(&["status"]);
            fault.strike(testbed, &bystander, &mut random);
            drop(bystander);
            let back = (0..ATTEMPTS).any(|_| {
                let ended = testbed.run(&FALLBACK);
                println!("  {:?} {}", ended.code, ended.complaints.trim());
                ended.code == Some(0)
            });
            assert!(back, "{fault:?}: no way back");
            assert_eq!(testbed.standing(), (None, Some("source".into())));
            testbed.assert_clean();
        });
    }
}
