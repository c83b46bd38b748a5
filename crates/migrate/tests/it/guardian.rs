//! The command is killed while connections to the side that serves are disabled. Its guardian enables them, without any
//! further command; a command that is called at once finds the guardian at work, and continues after it.

use rustix::process::{Pid, Signal, kill_process};
use std::io::Write;
use std::process::{Child, Stdio};
use std::time::Duration;
use stillpoint_events::{Event, EventKind};
use stillpoint_measure::postgres::Isolation;
use stillpoint_migrate_tests::{CommandResult, Fault, Moment, Testbed, Trial};
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};

/// A direct session that does not end when it is told to: the switch-over waits for it with connections disabled, up to
/// its limit.
struct OpenTransaction {
    psql: Child,
    backend: Pid,
}

impl OpenTransaction {
    fn on(cluster: &Cluster) -> OpenTransaction {
        let mut psql = cluster.client("psql");
        psql.args(["-X", "-q", "-d", "shop"]).env("PGAPPNAME", "stubborn");
        let mut psql = psql.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        writeln!(psql.stdin.as_mut().unwrap(), "SELECT 1;").unwrap();
        let backend = until("its session", || {
            cluster.sql("postgres", "SELECT pid FROM pg_stat_activity WHERE application_name = 'stubborn'").parse().ok()
        });
        OpenTransaction { psql, backend: Pid::from_raw(backend).unwrap() }
    }

    fn stop(&self) {
        kill_process(self.backend, Signal::STOP).unwrap();
    }

    fn go_on(mut self) {
        kill_process(self.backend, Signal::CONT).unwrap();
        drop(self.psql.stdin.take());
        self.psql.wait().unwrap();
    }
}

fn is_open(cluster: &Cluster) -> bool {
    cluster.sql("postgres", "SELECT datallowconn FROM pg_database WHERE datname = 'shop'") == "t"
}

/// Starts the command and sends it a signal while it has connections to `left` disabled.
#[track_caller]
fn signalled_behind_the_door(testbed: &Testbed, words: &[&str], left: &Cluster, signal: Signal) -> CommandResult {
    let stubborn = OpenTransaction::on(left);
    let mut tool = testbed.tool(words);
    let prepares = |event: &Event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "prepare");
    assert!(tool.await_event(prepares), "{:?}", tool.seen);
    stubborn.stop();
    until("the door to be shut", || (!is_open(left)).then_some(()));
    tool.signal(signal);
    if signal != Signal::KILL {
        // It cleans up after itself; the stubborn session need not end for that.
        assert!(tool.await_event(|event| matches!(event.kind, EventKind::FellBack { .. })), "{:?}", tool.seen);
    }
    stubborn.go_on();
    tool.end()
}

#[track_caller]
fn killed_behind_the_door(testbed: &Testbed, words: &[&str], left: &Cluster) {
    let ended = signalled_behind_the_door(testbed, words, left, Signal::KILL);
    assert_eq!(ended.code, None, "it was killed: {ended:?}");
}

const RUN: [&str; 5] = ["run", "--share", "0", "--pause-timeout", "60s"];
const FALLBACK: [&str; 3] = ["fallback", "--pause-timeout", "60s"];

#[test]
fn the_door_is_opened_when_the_command_is_killed() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    killed_behind_the_door(&testbed, &RUN, &testbed.source);
    until("the guardian to open the source", || is_open(&testbed.source).then_some(()));
    until("the journal to say so", || {
        (testbed.standing() == (Some("following".into()), Some("source".into()))).then_some(())
    });
    assert_eq!(testbed.source.sql("shop", "SHOW default_transaction_read_only"), "off");
    succeeds(&mut testbed, false);

    killed_behind_the_door(&testbed, &FALLBACK, &testbed.target);
    until("the guardian to open the target", || is_open(&testbed.target).then_some(()));
    until("the guardian to shut the source again", || {
        (testbed.standing() == (Some("switched".into()), Some("target".into()))).then_some(())
    });
    assert!(!is_open(&testbed.source), "no session may write there");
    assert_eq!(testbed.target.sql("shop", "SHOW default_transaction_read_only"), "off");
    succeeds(&mut testbed, true);
}

#[test]
fn the_next_command_waits_for_the_guardian() {
    if !available() {
        return;
    }
    let testbed = Testbed::start();
    Trial::prepare(&testbed);
    killed_behind_the_door(&testbed, &RUN, &testbed.source);
    let ended = testbed.run(&RUN);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    killed_behind_the_door(&testbed, &FALLBACK, &testbed.target);
    let ended = testbed.run(&FALLBACK);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    testbed.assert_clean();
    killed_behind_the_door(&testbed, &RUN, &testbed.source);
    let ended = testbed.run(&["abort"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    testbed.assert_clean();
}

#[test]
fn who_is_interrupted_behind_the_door_opens_it() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    for (back, signal) in [(false, Signal::TERM), (true, Signal::INT)] {
        let (words, left) = if back { (&FALLBACK[..], &testbed.target) } else { (&RUN[..], &testbed.source) };
        let ended = signalled_behind_the_door(&testbed, words, left, signal);
        assert!(ended.code == Some(4) && ended.complaints.contains("interrupted"), "{ended:?}");
        assert!(is_open(left), "{ended:?}");
        if back {
            assert_eq!(testbed.standing(), (Some("switched".into()), Some("target".into())));
            assert!(!is_open(&testbed.source), "no session may write there");
        } else {
            testbed.assert_clean();
        }
        succeeds(&mut testbed, back);
    }
}

/// Moves in the same direction again, under load.
#[track_caller]
fn succeeds(testbed: &mut Testbed, back: bool) {
    let moment = Moment { phase: None, after: Duration::ZERO };
    Trial { back, fault: Fault::None, moment, isolation: Isolation::RepeatableRead, seed: 13 }.run(testbed);
}

#[test]
fn the_side_that_was_left_is_shut_again_when_a_command_is_killed() {
    if !available() {
        return;
    }
    let testbed = Testbed::start();
    Trial::prepare(&testbed);
    testbed.source.sql("shop", "CREATE TABLE held (n int PRIMARY KEY)");
    let ended = testbed.run(&RUN);
    assert_eq!(ended.code, Some(0), "{ended:?}");

    // The comparison waits for a lock, while the source accepts connections for the replay.
    let mut holder = OpenTransaction::on(&testbed.target);
    writeln!(holder.psql.stdin.as_mut().unwrap(), "BEGIN; LOCK TABLE held;").unwrap();
    let locked =
        "SELECT 1 FROM pg_locks WHERE relation = 'held'::regclass AND mode = 'AccessExclusiveLock' AND granted";
    until("the lock", || (testbed.target.sql("shop", locked) == "1").then_some(()));
    killed_with_an_open_door(&testbed, &FALLBACK);
    holder.go_on();

    // A connection to the database waits for the process that copies the database, which is stopped.
    testbed.source.sql("postgres", "ALTER DATABASE shop ALLOW_CONNECTIONS true");
    let inside = OpenTransaction::on(&testbed.source);
    testbed.source.sql("postgres", "ALTER DATABASE shop ALLOW_CONNECTIONS false");
    let mut psql = testbed.source.client("psql");
    psql.args(["-X", "-q", "-d", "postgres", "-c", "CREATE DATABASE another TEMPLATE shop"]);
    let mut psql = psql.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let copies = "SELECT l.pid FROM pg_locks l JOIN pg_database d ON d.oid = l.objid WHERE d.datname = 'shop' \
                  AND l.locktype = 'object' AND l.mode = 'ShareLock' AND l.granted";
    let copier: i32 = until("the copy to begin", || testbed.source.sql("postgres", copies).parse().ok());
    let copier = Pid::from_raw(copier).unwrap();
    kill_process(copier, Signal::STOP).unwrap();
    inside.go_on();
    killed_with_an_open_door(&testbed, &["finish"]);
    kill_process(copier, Signal::CONT).unwrap();
    psql.wait().unwrap();
    let ended = testbed.run(&["finish"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!is_open(&testbed.source), "it stays shut");
}

/// Kills a command that has enabled connections to the side that was left; the guardian disables them.
#[track_caller]
fn killed_with_an_open_door(testbed: &Testbed, words: &[&str]) {
    let mut tool = testbed.tool(words);
    until("the source to be opened", || (is_open(&testbed.source) || tool.exit_status().is_some()).then_some(()));
    std::thread::sleep(Duration::from_millis(300));
    assert!(is_open(&testbed.source), "it is still at it: {:?}", tool.end());
    tool.signal(Signal::KILL);
    let ended = tool.end();
    assert_eq!(ended.code, None, "it was killed: {ended:?}");
    until("the guardian to shut it", || (!is_open(&testbed.source)).then_some(()));
    assert_eq!(testbed.standing(), (Some("switched".into()), Some("target".into())));
}
