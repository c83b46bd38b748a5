//! A proxy stands by: it serves as soon as the one that served is gone, two never serve together, and a migration goes
//! on. No acknowledged commit is lost or doubled.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdout, Command, Stdio};
use std::time::Duration;
use stillpoint_events::{Event, EventKind};
use stillpoint_measure::postgres::Isolation;
use stillpoint_migrate_tests::{Fault, Moment, Testbed, Trial};
use stillpoint_testing::{
    child::{ChildGuard, bound_command},
    postgresql::available,
    wait::until,
};

const fn trial(back: bool, phase: &'static str, ms: u64) -> Trial {
    let moment = Moment { phase: Some(phase), after: Duration::from_millis(ms) };
    Trial { back, fault: Fault::ReplaceProxy, moment, isolation: Isolation::RepeatableRead, seed: 11 }
}

/// A psql at the proxy.
struct Psql {
    process: ChildGuard,
    answers: BufReader<ChildStdout>,
}

impl Psql {
    fn at(testbed: &Testbed) -> Psql {
        let mut psql = bound_command("psql".as_ref());
        psql.args(["-XAtq", &testbed.conninfo()]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = ChildGuard::from_child(psql.spawn().unwrap());
        let answers = BufReader::new(process.child().stdout.take().unwrap());
        Psql { process, answers }
    }

    /// Output for a statement; empty if its session has ended.
    fn asks(&mut self, sql: &str) -> String {
        let mut answer = String::new();
        let input = self.process.child().stdin.as_mut().unwrap();
        if writeln!(input, "{sql}").is_ok() {
            self.answers.read_line(&mut answer).unwrap();
        }
        answer.trim().to_owned()
    }
}

/// Runs a command that is refused; returns its output.
#[track_caller]
fn refused(mut command: Command) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{text}");
    text
}

fn commits(testbed: &Testbed) -> u64 {
    let sql = "SELECT pg_snapshot_xmax(pg_current_snapshot())";
    testbed.source.sql("shop", sql).parse().unwrap()
}

#[test]
fn a_proxy_that_is_drained_lets_transactions_finish_and_the_standby_serves() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    testbed.start_standby();
    let mut busy = Psql::at(&testbed);
    assert_eq!(busy.asks("BEGIN; SELECT 1;"), "1");
    let mut drain = testbed.proxy_command(&["--drain"]);
    let drain = std::thread::spawn(move || drain.output().unwrap());
    let retired = testbed.replaced_by_standby();
    assert_eq!(Psql::at(&testbed).asks("SELECT 2;"), "2", "the standby serves");
    assert!(!drain.is_finished(), "a transaction is open");
    assert_eq!(busy.asks("SELECT 3;"), "3");
    assert_eq!(busy.asks("COMMIT \\; SELECT 4;"), "4");
    let output = drain.join().unwrap();
    assert!(output.status.success(), "{output:?}");
    drop(retired);
    // A configuration without a proxy.
    testbed.kill_proxy();
    assert!(refused(testbed.proxy_command(&["--drain"])).contains("no proxy answers"));
}

#[test]
fn one_serves_and_one_stands_by() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    testbed.start_standby();

    assert!(refused(testbed.proxy_command(&["--standby"])).contains("is already on standby"));
    assert!(refused(testbed.proxy_command(&[])).contains("another proxy uses the routes file"));
    let own = std::fs::read_to_string(testbed.config()).unwrap();
    std::fs::write(testbed.config(), format!("{own}connections = 7\n")).unwrap();
    assert!(refused(testbed.proxy_command(&["--standby"])).contains("differs in `tenants`"));
    std::fs::write(testbed.config(), own.replace("proxy.sock", "another.sock")).unwrap();
    assert!(refused(testbed.proxy_command(&["--standby"])).contains("proxy.sock"));
    std::fs::write(testbed.config(), own).unwrap();

    testbed.kill_standby();
    testbed.start_standby();
    trial(false, "", 0).under_load(&mut testbed, |testbed| {
        for _ in 0..2 {
            let before = commits(testbed);
            until("clients to work", || (commits(testbed) > before + 50).then_some(()));
            let took = testbed.kill_proxy_before_standby();
            println!("another proxy serves after {took:?}");
            testbed.start_standby();
        }
        let before = commits(testbed);
        until("clients to work", || (commits(testbed) > before + 50).then_some(()));
    });

    let (mut old, mut held) = (Psql::at(&testbed), Psql::at(&testbed));
    assert_eq!(old.asks("CREATE TABLE held (who text); SELECT 1;"), "1");
    assert_eq!(held.asks("BEGIN; INSERT INTO held VALUES ('in a transaction') RETURNING 2;"), "2");
    let mut retired = testbed.retire_proxy_before_standby();
    assert_eq!(Psql::at(&testbed).asks("INSERT INTO held VALUES ('the next proxy') RETURNING 3;"), "3");
    until("an idle session to end", || old.asks("SELECT 4;").is_empty().then_some(()));
    assert!(retired.exit_status().is_none(), "a transaction is open");
    assert_eq!(held.asks("INSERT INTO held VALUES ('the same one') RETURNING 5;"), "5");
    // The session ends with its transaction; psql then prints 6 by itself.
    assert_eq!(held.asks("COMMIT;\n\\echo 6"), "6");
    assert!(until("the old proxy to end", || retired.exit_status()).success());
    assert_eq!(testbed.source.sql("shop", "SELECT count(*) FROM held"), "3");
}

#[test]
fn a_migration_goes_on() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    testbed.start_standby();
    for trial in [trial(false, "switch-over", 10), trial(true, "switch-over", 15), trial(false, "prepare", 5)] {
        let first = trial.run(&mut testbed);
        assert_eq!(first.code, Some(0), "{first:?}");
    }
    let finished = testbed.run(&["finish"]);
    assert_eq!(finished.code, Some(0), "{finished:?}");
}

/// While rows are copied, the proxy counts clients' statements: the next proxy counts them again from zero.
#[test]
fn a_copy_goes_on() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    testbed.start_standby();
    let copying = |event: &Event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "copy");
    let ended = trial(false, "copy", 0).under_load(&mut testbed, |testbed| {
        let mut tool = testbed.tool(&["run", "--pause-timeout", "3s"]);
        assert!(tool.await_event(copying), "{:?}", tool.seen);
        testbed.kill_proxy_before_standby();
        tool.end()
    });
    assert_eq!(ended.code, Some(0), "{ended:?}");
}
