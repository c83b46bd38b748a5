//! Troubles that last until an operator removes them: the migration is aborted with an error that names them, clients
//! go on, and after the repair it succeeds.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_measure::postgres::{Isolation, PostgresLoad, PostgresPlan};
use stillpoint_migrate_tests::{Fault, Moment, Testbed, Trial, stillpoint};
use stillpoint_testing::{
    postgresql::{Cluster, available},
    skipped,
    wait::until,
};

const QUICK: [&str; 3] = ["run", "--share", "0"];

/// Asserts that the migration succeeds now, under load.
#[track_caller]
fn succeeds(testbed: &mut Testbed) {
    let moment = Moment { phase: None, after: Duration::ZERO };
    Trial { back: false, fault: Fault::None, moment, isolation: Isolation::RepeatableRead, seed: 11 }.run(testbed);
}

fn begins(wanted: &'static str) -> impl Fn(&Event) -> bool {
    move |event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == wanted)
}

/// A psql at the proxy that has received these statements and waits for more.
fn psql(testbed: &Testbed, told: &str) -> Child {
    let mut command = testbed.source.client("psql");
    command.env("PGPORT", testbed.port().to_string()).args(["-X", "-q", "-d", "shop"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("start psql");
    writeln!(child.stdin.as_mut().expect("piped"), "{told}").expect("psql listens");
    child
}

#[test]
fn the_target_s_disk_is_full() {
    if !available() {
        return;
    }
    let settings = ["wal_level=logical", "max_wal_size=64MB", "min_wal_size=32MB"];
    let target = match Cluster::on_small_disk(120, &settings) {
        Ok(target) => target,
        Err(why) => return skipped(&why),
    };
    let mut testbed = Testbed::of(Cluster::start(&settings), target);
    Trial::prepare(&testbed);
    testbed.source.sql(
        "shop",
        "CREATE TABLE wide (id int PRIMARY KEY, v text); ALTER TABLE wide ALTER COLUMN v SET STORAGE EXTERNAL; \
         INSERT INTO wide SELECT i, repeat('x', 100000) FROM generate_series(1, 1200) i",
    );
    let ended = testbed.run(&QUICK);
    println!("{}", ended.complaints);
    assert_eq!(ended.code, Some(4), "{ended:?}");
    assert_eq!(testbed.standing().1.as_deref(), Some("source"));
    testbed.target.disk().expect("it has one").resize(2000).unwrap();
    // A server that cannot write its log ends.
    testbed.target.crash();
    testbed.target.restart(None);
    succeeds(&mut testbed);
}

#[test]
fn the_target_is_slower_than_the_load() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    // At 800 transactions a second: some 100 kB of changes, while 2 kB get through.
    let think = Duration::from_millis(20);
    let plan = PostgresPlan { duration: Duration::from_secs(600), think, ..PostgresPlan::checked(testbed.conninfo()) };
    let load = PostgresLoad::start(plan).unwrap();
    let mut tool = testbed.tool(&QUICK);
    assert!(tool.await_event(begins("catch-up")), "{:?}", tool.seen);
    testbed.to_target.slow_down(2_000);
    let behind =
        |event: &Event| matches!(event.kind, EventKind::Migrate(migrate::Event::Following { lag_bytes: 50_000.., .. }));
    assert!(tool.await_event(behind), "it tells how far behind it is, and waits: {:?}", tool.seen);
    tool.signal(rustix::process::Signal::INT);
    assert!(tool.await_event(|event| matches!(event.kind, EventKind::FellBack { .. })), "{:?}", tool.seen);
    testbed.to_target.slow_down(0);
    let ended = tool.end();
    assert!(ended.code == Some(4) && ended.complaints.contains("interrupted"), "{ended:?}");
    load.stop();
    let finished = load.wait().unwrap();
    assert!(finished.is_clean(), "clients noticed: {finished:?}");
    testbed.assert_clean();
    succeeds(&mut testbed);
}

#[test]
fn a_client_never_ends_its_transaction() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    let mut client = psql(&testbed, "BEGIN; SELECT 1;");
    until("the client's transaction", || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = 'shop'";
        (testbed.source.sql("postgres", sql) == "1").then_some(())
    });
    let ended = testbed.run(&["run", "--share", "0", "--pause-attempts", "2", "--pause-timeout", "300ms"]);
    assert_eq!(ended.code, Some(4), "{ended:?}");
    assert!(ended.complaints.contains("its client holds a transaction open"), "{}", ended.complaints);
    assert!(ended.complaints.contains("of postgres"), "{}", ended.complaints);
    testbed.assert_clean();
    drop(client.stdin.take());
    assert!(client.wait().unwrap().success(), "the client goes on");
    succeeds(&mut testbed);
}

#[test]
fn a_transaction_is_prepared_and_not_decided() {
    if !available() {
        return;
    }
    let settings = ["wal_level=logical", "max_prepared_transactions=5"];
    let mut testbed = Testbed::of(Cluster::start(&settings), Cluster::start(&settings));
    Trial::prepare(&testbed);
    let mut tool = testbed.tool(&["run", "--share", "0", "--pause-attempts", "2"]);
    // The snapshot, which would have waited for the transaction, is taken. The run cannot reach the switch-over before
    // the transaction exists.
    assert!(tool.await_event(begins("copy")), "{:?}", tool.seen);
    testbed.to_target.stall();
    let mut client = psql(&testbed, "BEGIN; INSERT INTO ballast VALUES (-1, 'late'); PREPARE TRANSACTION 'undecided';");
    drop(client.stdin.take());
    assert!(client.wait().unwrap().success());
    assert_eq!(testbed.source.sql("shop", "SELECT gid FROM pg_prepared_xacts"), "undecided");
    testbed.to_target.restore();
    let ended = tool.end();
    assert_eq!(ended.code, Some(4), "{ended:?}");
    assert!(ended.complaints.contains("undecided"), "{}", ended.complaints);
    testbed.assert_clean();
    let mut client = psql(&testbed, "COMMIT PREPARED 'undecided';");
    drop(client.stdin.take());
    assert!(client.wait().unwrap().success());
    succeeds(&mut testbed);
    assert_eq!(testbed.target.sql("shop", "SELECT v FROM ballast WHERE id = -1"), "late");
}

#[test]
fn wrong_credentials_are_told_before_anything_is_touched() {
    if !available() {
        return;
    }
    let testbed = Testbed::start();
    testbed.source.sql("postgres", "CREATE ROLE mover SUPERUSER LOGIN PASSWORD 'right'");
    testbed.source.sql("postgres", "CREATE ROLE weak LOGIN");
    let hba = "host all mover 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n";
    std::fs::write(testbed.source.data_dir().join("pg_hba.conf"), hba).unwrap();
    testbed.source.sql("postgres", "SELECT pg_reload_conf()");
    for (who, needle) in [
        ("user=mover password=wrong", "password authentication failed"),
        ("user=mover", "no password was given"),
        ("user=absent", "role \"absent\" does not exist"),
        ("user=weak", "try: GRANT pg_read_all_stats TO \"weak\""),
    ] {
        let mut command = Command::new(stillpoint());
        let place = |port: u16, who: &str| format!("host=127.0.0.1 port={port} dbname=shop {who}");
        command.args(["migrate", "check", "--source"]).arg(place(testbed.source.port(), who));
        command.arg("--target").arg(place(testbed.target.port(), "user=postgres")).env_remove("PGPASSWORD");
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(needle), "{who}: {said}");
        assert_eq!(output.status.code(), Some(3), "{who}: {said}");
        assert!(!said.contains("wrong"), "no password in messages: {said}");
    }
}

#[test]
fn a_source_that_the_proxy_does_not_serve_is_refused() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::direct(Cluster::start(&["wal_level=logical"]), Cluster::start(&["wal_level=logical"]));
    Trial::prepare(&testbed);
    // As after a restore of a backup beside the server: the same contents at another address.
    let clone = Cluster::start(&["wal_level=logical"]);
    clone.sql("postgres", "CREATE DATABASE shop");
    let mut client = psql(&testbed, "SELECT 1;");
    until("the client's session", || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'shop' AND application_name = 'psql'";
        (testbed.source.sql("postgres", sql) == "1").then_some(())
    });
    let place = |cluster: &Cluster| format!("host=127.0.0.1 port={} user=postgres dbname=shop", cluster.port());
    let mut command = Command::new(stillpoint());
    command.args(["migrate", "run", "--source"]).arg(place(&clone)).arg("--target").arg(place(&testbed.target));
    command.arg("--proxy").arg(testbed.path("proxy.sock")).arg("--state").arg(testbed.path("other state"));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(3) && said.contains("the proxy serves another server"), "{output:?}");
    assert_eq!(clone.sql("shop", "SELECT count(*) FROM pg_replication_slots"), "0");
    drop(client.stdin.take());
    assert!(client.wait().unwrap().success());
    testbed.assert_clean();
    succeeds(&mut testbed);
}

#[test]
fn abort_ends_a_command_that_is_at_work() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    let mut tool = testbed.tool(&QUICK);
    assert!(tool.await_event(begins("copy")), "{:?}", tool.seen);
    // It cannot end by itself.
    testbed.to_target.slow_down(2_000);
    let abort = testbed.tool(&["abort"]);
    assert!(tool.await_event(|event| matches!(event.kind, EventKind::FellBack { .. })), "{:?}", tool.seen);
    testbed.to_target.slow_down(0);
    let ended = tool.end();
    assert!(ended.code == Some(4) && ended.complaints.contains("interrupted"), "{ended:?}");
    let aborted = abort.end();
    assert_eq!(aborted.code, Some(0), "{aborted:?}");
    testbed.assert_clean();
    succeeds(&mut testbed);
}

/// Leaves a server's disk this much room beyond its present contents, in MiB.
#[track_caller]
fn leave_room(cluster: &Cluster, mib: u32) {
    let mut du = Command::new("du");
    let output = du.args(["-sm"]).arg(cluster.socket_dir()).output().expect("run du");
    let used: u32 = String::from_utf8_lossy(&output.stdout).split_whitespace().next().unwrap().parse().unwrap();
    cluster.disk().expect("it has one").resize(used + mib).unwrap();
}

/// Writes rows for which a server has no room, from a client at the proxy.
#[track_caller]
fn flood(testbed: &Testbed) {
    let rows = "INSERT INTO ballast SELECT -i, (SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 300) \
                WHERE i > 0) FROM generate_series(1, 6000) i;";
    let mut client = psql(testbed, rows);
    drop(client.stdin.take());
    assert!(client.wait().unwrap().success(), "clients go on");
}

/// The replay finds no room: on the target after the copy, and on the source on the way back.
#[test]
fn a_disk_gets_full_behind_the_copy() {
    if !available() {
        return;
    }
    let settings = ["wal_level=logical", "max_wal_size=64MB", "min_wal_size=32MB"];
    let (source, target) = match [(), ()].map(|()| Cluster::on_small_disk(2000, &settings)) {
        [Ok(source), Ok(target)] => (source, target),
        [Err(why), _] | [_, Err(why)] => return skipped(&why),
    };
    let mut testbed = Testbed::of(source, target);
    Trial::prepare(&testbed);
    for back in [false, true] {
        let (words, serving): (&[&str], _) = if back { (&["fallback"], "target") } else { (&QUICK, "source") };
        let tool = if back {
            flood(&testbed);
            leave_room(&testbed.source, 4);
            testbed.tool(words)
        } else {
            let mut tool = testbed.tool(words);
            assert!(tool.await_event(begins("copy")), "{:?}", tool.seen);
            testbed.to_target.slow_down(1_000_000);
            flood(&testbed);
            testbed.to_target.slow_down(0);
            assert!(tool.await_event(begins("catch-up")), "{:?}", tool.seen);
            leave_room(&testbed.target, 4);
            tool
        };
        let ended = tool.end();
        println!("{}", ended.complaints);
        assert_eq!(ended.code, Some(4), "{ended:?}");
        assert_eq!(testbed.standing().1.as_deref(), Some(serving));
        let full = if back { &mut testbed.source } else { &mut testbed.target };
        full.disk().expect("it has one").resize(2000).unwrap();
        // A server that cannot write its log ends.
        full.crash();
        full.restart(None);
        let moment = Moment { phase: None, after: Duration::ZERO };
        Trial { back, fault: Fault::None, moment, isolation: Isolation::RepeatableRead, seed: 11 }.run(&mut testbed);
        let rows = "SELECT count(*), sum(length(v)) FROM ballast WHERE id < 0 AND id >= -6000";
        let there = if back { &testbed.source } else { &testbed.target };
        assert_eq!(there.sql("shop", rows), "6000|57600000");
        if !back {
            let mut clean = psql(&testbed, "DELETE FROM ballast WHERE id < 0;");
            drop(clean.stdin.take());
            assert!(clean.wait().unwrap().success());
        }
    }
}
