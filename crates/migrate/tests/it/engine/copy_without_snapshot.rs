//! Rows are copied without a held snapshot: the log delivers changes that were made before a row is read.

use crate::engine::support::{Bench, FakeClients, observer};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_migrate_engine::{Observer, Options, Outcome, Phase, run, status};
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};
use tokio::sync::Notify;
use tokio_postgres::{Client, NoTls};

/// `wide` has large values, `keyless` no key and `ruled` a rule: they are copied with the snapshot, which takes long
/// enough for rows of the others to change.
const SCHEMA: &str = "
    CREATE SEQUENCE ids START 100000;
    CREATE TABLE wide (id int PRIMARY KEY, n int, w text);
    ALTER TABLE wide ALTER COLUMN w SET STORAGE EXTERNAL;
    CREATE TABLE keyless (a int, b int);
    CREATE TABLE ruled (id int PRIMARY KEY, v int);
    CREATE RULE also AS ON UPDATE TO ruled WHERE old.id < 0 DO ALSO NOTHING;
    CREATE TABLE hot (id int PRIMARY KEY, n int, pad text);
    CREATE TABLE nested (id int PRIMARY KEY, n int);
    CREATE TABLE mails (id bigint PRIMARY KEY, mail text UNIQUE);
    CREATE TABLE moved (id bigint PRIMARY KEY, v int);
    CREATE TABLE pairs (a int, b int, PRIMARY KEY (a, b));
    CREATE TABLE numbers (n numeric PRIMARY KEY, v int);
    CREATE TABLE numbered (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v int);
    CREATE TABLE renumbered (id int PRIMARY KEY, version int GENERATED ALWAYS AS IDENTITY, v int);
    CREATE TABLE named (id int NOT NULL, name text NOT NULL, v int, CONSTRAINT by_name UNIQUE (name));
    ALTER TABLE named REPLICA IDENTITY USING INDEX by_name;
    CREATE TABLE late (id int PRIMARY KEY, n int, big text);
    ALTER TABLE late ALTER COLUMN big SET STORAGE EXTERNAL;
    CREATE TABLE parent (id bigint PRIMARY KEY, n int);
    CREATE TABLE child (id bigint PRIMARY KEY, of bigint CONSTRAINT of_parent REFERENCES parent ON DELETE CASCADE);
    COMMENT ON CONSTRAINT of_parent ON child IS 'belongs to it';
    INSERT INTO wide SELECT i, 0, repeat('w', 9000) FROM generate_series(1, 4000) i;
    INSERT INTO keyless SELECT i % 7, 0 FROM generate_series(1, 30) i;
    INSERT INTO ruled SELECT i, 0 FROM generate_series(1, 200) i;
    INSERT INTO hot SELECT i, 0, repeat('h', 400) FROM generate_series(1, 20000) i;
    INSERT INTO nested SELECT i, 0 FROM generate_series(1, 2000) i;
    INSERT INTO mails SELECT i, 'm' || i FROM generate_series(1, 2000) i;
    INSERT INTO moved SELECT i, 0 FROM generate_series(1, 2000) i;
    INSERT INTO pairs SELECT i, i FROM generate_series(1, 200) i;
    INSERT INTO numbers SELECT i, 0 FROM generate_series(1, 200) i;
    INSERT INTO numbered (v) SELECT 0 FROM generate_series(1, 2000) i;
    INSERT INTO renumbered (id, v) SELECT i, 0 FROM generate_series(1, 200) i;
    INSERT INTO named SELECT i, 'n' || i, 0 FROM generate_series(1, 200) i;
    INSERT INTO late SELECT i, 0, 'small' FROM generate_series(1, 2000) i;
    INSERT INTO parent SELECT i, 0 FROM generate_series(1, 2000) i;
    INSERT INTO child SELECT i, i FROM generate_series(1, 2000) i;
";

/// Changes of rows that belong to one client.
const CHANGES: &str = r"
\set i 1 + :client_id + 4 * random(0, 4999)
\set k 1 + :client_id + 4 * random(0, 499)
\set j 1 + :client_id + 4 * random(0, 49)
UPDATE hot SET n = n + 1 WHERE id = :i;
UPDATE wide SET n = n + 1 WHERE id = :k;
UPDATE ruled SET v = v + 1 WHERE id = :j;
UPDATE mails SET mail = mail || 'x' WHERE id = :k;
WITH gone AS (DELETE FROM mails WHERE id = :k + 200 RETURNING mail) INSERT INTO mails SELECT nextval('ids'), mail FROM gone;
INSERT INTO mails VALUES (:k, 'm' || :k) ON CONFLICT DO NOTHING;
UPDATE moved SET id = nextval('ids'), v = v + 1 WHERE id = :k;
UPDATE pairs SET a = a WHERE a = :j;
UPDATE pairs SET b = b + 1 WHERE a = :j + 4;
UPDATE numbers SET v = v + 1 WHERE n = :j;
UPDATE numbered SET v = v + 1 WHERE id = :k;
UPDATE numbered SET id = DEFAULT WHERE id = :k + 4;
UPDATE renumbered SET version = DEFAULT WHERE id = :j;
UPDATE named SET v = v + 1 WHERE id = :j;
UPDATE named SET name = 'o' || nextval('ids') WHERE id = :j + 4;
UPDATE parent SET n = n + 1 WHERE id = :k;
DELETE FROM parent WHERE id = :k + 4;
WITH p AS (INSERT INTO parent VALUES (nextval('ids'), 0) RETURNING id) INSERT INTO child SELECT nextval('ids'), id FROM p;
INSERT INTO keyless VALUES (:j, 0);
UPDATE keyless SET b = b + 1 WHERE a = :j;
DELETE FROM keyless WHERE ctid = (SELECT min(ctid) FROM keyless);
";

/// Subtransactions, one of them aborted, of a transaction that is under way for a while.
const NESTED: &str = r"
\set k 1 + :client_id + 2 * random(0, 900)
BEGIN;
UPDATE nested SET n = n + 1 WHERE id = :k;
SAVEPOINT a;
UPDATE nested SET n = n + 10 WHERE id = :k + 2;
RELEASE a;
SAVEPOINT b;
UPDATE nested SET n = n + 100 WHERE id = :k;
ROLLBACK TO b;
\sleep 10 ms
COMMIT;
";

/// Values become large, and then stay unchanged: the first of them is written when the snapshot is taken.
const LATE: &str = r"
\set k random(1, 2000)
UPDATE late SET big = repeat('b', 9000) WHERE id = :k;
UPDATE late SET n = n + 1 WHERE id = :k;
UPDATE late SET n = n + 1 WHERE id = 2001 - :k;
";

/// Two servers, a database with all of that, clients that write, and others that slow the copy down.
fn bench() -> Bench {
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql("shop", SCHEMA);
    bench.fake_proxy.lock().unwrap().clients = Some(FakeClients::at(1000.0, 3000));
    writes(&bench, "changes.sql", CHANGES, &["-c", "4", "-R", "40"]);
    writes(&bench, "nested.sql", NESTED, &["-c", "2"]);
    bench
}

/// Starts clients that write until the pause.
fn writes(bench: &Bench, name: &str, text: &str, how: &[&str]) {
    // At a place where pgbench, which runs as postgres, can read it.
    let path = bench.source.socket_dir().join(name);
    std::fs::write(&path, text).unwrap();
    let arguments = [&["-n", "-T", "600", "-f", path.to_str().unwrap()], how].concat();
    let load = bench.source.pgbench_load("shop", bench.source.port(), &arguments);
    bench.fake_proxy.lock().unwrap().loads.push(load);
}

fn quick(bench: &Bench) -> Options {
    Options { share: 0.0, ..bench.options("shop") }
}

#[track_caller]
fn holds_the_same(bench: &Bench) {
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
    let constraints = "SELECT string_agg(concat_ws(' ', conname, conrelid::regclass, pg_get_constraintdef(oid), convalidated, \
         obj_description(oid)), E'\\n' ORDER BY conname, conrelid::regclass::text) FROM pg_constraint \
         WHERE connamespace = 'public'::regnamespace";
    let [source, target] = [&bench.source, &bench.target].map(|cluster| cluster.sql("shop", constraints));
    assert!(source.contains("of_parent child FOREIGN KEY") && source.contains("belongs to it"), "{source}");
    assert_eq!(source, target);
}

async fn session(source: &Cluster) -> Client {
    let conninfo = format!("host=127.0.0.1 port={} user=postgres dbname=shop", source.port());
    let (client, connection) = tokio_postgres::connect(&conninfo, NoTls).await.expect("connect");
    tokio::spawn(connection);
    client
}

/// Waits until the server has logged this text.
async fn wait_for_log(source: &Cluster, what: &str) {
    while !source.log_text().contains(what) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Runs a transaction that is under way when the snapshot is taken, and commits while rows are copied. It has a
/// subtransaction that was released, and one that was aborted. A slot waits twice for running transactions: it begins
/// after the end of the second wait.
async fn straddles(source: &Cluster) {
    let [first, second, under_way] = [session(source).await, session(source).await, session(source).await];
    const WRITES: &str = "BEGIN; UPDATE nested SET n = n WHERE id =";
    first.batch_execute(&format!("{WRITES} 1997")).await.expect("a transaction");
    wait_for_log(source, "logical decoding found initial starting point").await;
    second.batch_execute(&format!("{WRITES} 1998")).await.expect("a transaction");
    first.batch_execute("COMMIT").await.expect("a commit");
    wait_for_log(source, "logical decoding found initial consistent point").await;
    under_way
        .batch_execute(
            "BEGIN; UPDATE nested SET n = 7 WHERE id = 1990; INSERT INTO nested VALUES (3000, 7); \
             SAVEPOINT a; UPDATE nested SET n = 7 WHERE id = 1991; INSERT INTO nested VALUES (3001, 7); RELEASE a; \
             SAVEPOINT b; UPDATE nested SET n = 8 WHERE id = 1990; INSERT INTO nested VALUES (3002, 8); ROLLBACK TO b",
        )
        .await
        .expect("a transaction");
    // A later transaction number is committed.
    first.batch_execute("UPDATE nested SET n = 7 WHERE id = 1997").await.expect("a change");
    second.batch_execute("COMMIT").await.expect("a commit");
    wait_for_log(source, "exported logical decoding snapshot").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    under_way.batch_execute("COMMIT").await.expect("a commit");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_changes_before_it_is_read_is_brought_by_the_log() {
    if !available() {
        return;
    }
    let bench = Arc::new(bench());
    let (looking, missing) = (Arc::clone(&bench), Arc::new(Mutex::new(Vec::new())));
    let found = Arc::clone(&missing);
    let observer: Observer = Arc::new(move |event: Event| {
        println!("{:?}", event.kind);
        match event.kind {
            EventKind::Migrate(migrate::Event::Copying { .. }) => {
                drop(looking.source.sql("shop", "VACUUM (FREEZE) hot, nested, late"))
            }
            EventKind::PhaseStarted { phase, .. } if phase == "copy" => {
                writes(&looking, "late.sql", LATE, &["-c", "1", "-R", "100"]);
            }
            EventKind::PhaseStarted { phase, .. } if phase == "indexes" => {
                // No row of these tables is ever inserted or deleted.
                let missing = "SELECT 20000 - (SELECT count(*) FROM hot), 2000 - (SELECT count(*) FROM nested WHERE id <= 2000), \
                               2000 - (SELECT count(*) FROM late), 200 - (SELECT count(*) FROM ruled)";
                let missing = looking.target.sql("shop", missing);
                found.lock().unwrap().extend(missing.split('|').map(|count| count.parse::<u32>().unwrap()));
            }
            _ => {}
        }
    });
    let options = bench.options("shop");
    let (outcome, ()) = tokio::join!(run(&options, observer), straddles(&bench.source));
    assert!(matches!(outcome, Ok(Outcome::Switched { .. })), "{outcome:?}");
    let missing = missing.lock().unwrap();
    println!("missing: {missing:?}");
    assert!(missing[..3].iter().all(|count| *count > 10), "rows changed before they were read: {missing:?}");
    assert_eq!(missing[3], 0, "what has rules is copied with the snapshot");
    let log = bench.source.log_text();
    let exported = log.lines().find_map(|line| line.split_once("exported logical decoding snapshot: ")).expect("one");
    let running: u32 = exported.1.split(' ').nth(2).and_then(|count| count.parse().ok()).expect("a number");
    assert!(running >= 3, "transactions were under way, and their subtransactions: {exported:?}");
    holds_the_same(&bench);
    let nested =
        "SELECT string_agg(id || ' ' || n, ', ' ORDER BY id) FROM nested WHERE id IN (1990, 1991) OR id >= 3000";
    assert_eq!(bench.target.sql("shop", nested), "1990 7, 1991 7, 3000 7, 3001 7");
}

/// A commit that is in the log before the snapshot, and that no transaction sees until it need not wait for a standby
/// any more.
async fn waits_for_a_standby(source: &Cluster) {
    let [first, second, waits] = [session(source).await, session(source).await, session(source).await];
    const WRITES: &str = "BEGIN; UPDATE t SET n = n WHERE id =";
    first.batch_execute(&format!("{WRITES} 997")).await.expect("a transaction");
    wait_for_log(source, "logical decoding found initial starting point").await;
    second.batch_execute(&format!("{WRITES} 998")).await.expect("a transaction");
    first.batch_execute("COMMIT").await.expect("a commit");
    wait_for_log(source, "logical decoding found initial consistent point").await;
    let writes =
        "SET synchronous_commit = on; BEGIN; UPDATE t SET n = 1 WHERE id = 1; INSERT INTO t VALUES (2000, 1); COMMIT";
    let waiting = tokio::spawn(async move { waits.batch_execute(writes).await });
    until("a commit to wait", || {
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        (source.sql("shop", waiting) == "1").then_some(())
    });
    second.batch_execute("COMMIT").await.expect("a commit");
    wait_for_log(source, "exported logical decoding snapshot").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(source.sql("shop", "SELECT count(*) FROM t WHERE n = 1"), "0", "no session has seen it");
    source.sql("shop", "ALTER SYSTEM RESET synchronous_standby_names");
    source.sql("shop", "SELECT pg_reload_conf()");
    waiting.await.expect("the client's task").expect("a commit");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_log_tells_before_any_session_sees_it_is_copied() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql("postgres", "ALTER DATABASE shop SET synchronous_commit = local");
    let table = "CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t SELECT i, 0 FROM generate_series(1, 1000) i";
    bench.source.sql("shop", table);
    bench.source.sql("shop", "ALTER SYSTEM SET synchronous_standby_names = 'absent'");
    bench.source.sql("shop", "SELECT pg_reload_conf()");
    let options = quick(&bench);
    let (outcome, ()) = tokio::join!(run(&options, observer().0), waits_for_a_standby(&bench.source));
    assert!(matches!(outcome, Ok(Outcome::Switched { .. })), "{outcome:?}");
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
    assert_eq!(bench.target.sql("shop", "SELECT string_agg(id::text, ' ' ORDER BY id) FROM t WHERE n = 1"), "1 2000");
}

/// Commits in the first of a slot's two waits, of which the slot keeps no count, and none in the second; another
/// transaction still writes when that ends. The exported snapshot sees all below its `xmin`, which is then the larger
/// number.
async fn commits_while_the_slot_is_made(source: &Cluster) {
    let [first, second, third, commits] =
        [session(source).await, session(source).await, session(source).await, session(source).await];
    const WRITES: &str = "BEGIN; UPDATE t SET n = n WHERE id =";
    first.batch_execute(&format!("{WRITES} 997")).await.expect("a transaction");
    wait_for_log(source, "logical decoding found initial starting point").await;
    let changes = "INSERT INTO t VALUES (2000, 1); UPDATE t SET n = 1 WHERE id = 1; DELETE FROM t WHERE id = 2";
    commits.batch_execute(changes).await.expect("a commit");
    second.batch_execute(&format!("{WRITES} 998")).await.expect("a transaction");
    first.batch_execute("COMMIT").await.expect("a commit");
    wait_for_log(source, "logical decoding found initial consistent point").await;
    third.batch_execute(&format!("{WRITES} 999")).await.expect("a transaction");
    second.batch_execute("ROLLBACK").await.expect("a rollback");
    wait_for_log(source, "exported logical decoding snapshot").await;
    let exported = std::fs::read_dir(source.data_dir().join("pg_snapshots")).expect("exported snapshots").next();
    let exported = std::fs::read_to_string(exported.expect("one").expect("its name").path()).expect("a snapshot");
    let number = |name: &str| {
        let line = exported.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|number| number.parse::<u32>().ok()).expect("a number")
    };
    assert!(number("xmin:") > number("xmax:"), "what commits is not met: {exported}");
    third.batch_execute("ROLLBACK").await.expect("a rollback");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_commits_while_the_slot_is_made_is_copied() {
    if !available() {
        return;
    }
    // Without autovacuum no other transaction commits.
    let bench = Bench::start_with(&["autovacuum=off"]);
    bench.source.sql("postgres", "CREATE DATABASE shop");
    let table = "CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t SELECT i, 0 FROM generate_series(1, 1000) i";
    bench.source.sql("shop", table);
    let options = quick(&bench);
    let (outcome, ()) = tokio::join!(run(&options, observer().0), commits_while_the_slot_is_made(&bench.source));
    assert!(matches!(outcome, Ok(Outcome::Switched { .. })), "{outcome:?}");
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
    assert_eq!(bench.target.sql("shop", "SELECT string_agg(id::text, ' ' ORDER BY id) FROM t WHERE n = 1"), "1 2000");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_session_holds_a_snapshot_while_rows_are_copied() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.fill_big(220_000);
    bench.source.sql("shop", "CREATE TABLE ticks (n int PRIMARY KEY); INSERT INTO ticks VALUES (1)");
    writes(&bench, "tick.sql", "UPDATE ticks SET n = n + 1;", &["-c", "1", "-R", "200"]);
    bench.fake_proxy.lock().unwrap().clients = Some(FakeClients::at(1000.0, 3000));
    let bench = Arc::new(bench);
    let (looking, seen) = (Arc::clone(&bench), Arc::new(Mutex::new(Vec::new())));
    let found = Arc::clone(&seen);
    let observer: Observer = Arc::new(move |event: Event| {
        println!("{:?}", event.kind);
        let EventKind::Migrate(migrate::Event::Copying { bytes, .. }) = event.kind else { return };
        // The next transaction number, the oldest that any snapshot of the command needs, and the number of slots that
        // hold one.
        let ages = "SELECT pg_snapshot_xmax(pg_current_snapshot()), (SELECT max(age(backend_xmin)) FROM pg_stat_activity \
             WHERE application_name = 'stillpoint migrate'), (SELECT count(xmin) FROM pg_replication_slots)";
        let row = looking.source.sql("shop", ages);
        let row: Vec<u64> = row.split('|').map(|number| number.parse().unwrap_or(0)).collect();
        if bytes > 0 {
            found.lock().unwrap().push((row[0], row[1], row[2]));
        }
    });
    run(&bench.options("shop"), observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let seen = seen.lock().unwrap();
    println!("{seen:?}");
    assert!(seen.len() > 5, "a copy that takes a while: {seen:?}");
    for window in seen.windows(4) {
        let ((before, ..), (now, age, slots)) = (window[0], window[3]);
        assert!(now > before + 50, "clients go on: {seen:?}");
        assert!(age < now - before, "as old as three looks ago: {window:?}");
        assert_eq!(slots, 0, "{window:?}");
    }
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
}

/// Runs until an event for which `killed` returns true, and stops there.
async fn killed_at(options: &Options, killed: impl Fn(&EventKind) -> bool + Send + Sync + 'static) {
    let reached = Arc::new(Notify::new());
    let told = Arc::clone(&reached);
    let observer: Observer = Arc::new(move |event: Event| {
        println!("{:?}", event.kind);
        if killed(&event.kind) {
            told.notify_one();
        }
    });
    tokio::select! {
        biased;
        () = reached.notified() => {}
        ended = run(options, observer) => panic!("{ended:?}"),
    }
}

fn begins(wanted: &'static str) -> impl Fn(&EventKind) -> bool {
    move |kind| matches!(kind, EventKind::PhaseStarted { phase, .. } if phase == wanted)
}

fn ends(wanted: &'static str) -> impl Fn(&EventKind) -> bool {
    move |kind| matches!(kind, EventKind::PhaseEnded { phase, .. } if phase == wanted)
}

/// Resumes from the phase in which the target follows: every row arrives, and so do foreign keys.
async fn goes_on(bench: &Bench) {
    let record = status(&quick(bench)).await.unwrap().record.expect("a journal is left");
    assert_eq!(record.phase, Phase::Following);
    let (observer, events) = observer();
    run(&quick(bench), observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let restarts = |event: &Event| begins("snapshot")(&event.kind);
    assert!(!events.lock().unwrap().iter().any(restarts), "it goes on");
    holds_the_same(bench);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_while_rows_are_missing_it_goes_on_from_the_log() {
    if !available() {
        return;
    }
    let bench = bench();
    killed_at(&bench.options("shop"), begins("catch-up")).await;
    assert_ne!(bench.target.sql("shop", "SELECT count(*) FROM hot"), "20000", "some are missing");
    goes_on(&bench).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_before_foreign_keys_are_there_it_makes_them() {
    if !available() {
        return;
    }
    let bench = bench();
    killed_at(&quick(&bench), begins("foreign keys")).await;
    goes_on(&bench).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_when_foreign_keys_are_there_it_leaves_them() {
    if !available() {
        return;
    }
    let bench = bench();
    killed_at(&quick(&bench), ends("foreign keys")).await;
    let keys = "SELECT count(*) FROM pg_constraint WHERE contype = 'f'";
    assert_eq!(bench.target.sql("shop", keys), "1", "before the journal tells of it");
    goes_on(&bench).await;
}
