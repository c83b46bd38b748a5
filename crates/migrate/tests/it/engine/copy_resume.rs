//! A copy whose command was killed goes on: what is on the target is not copied again, and nothing is lost.

use crate::engine::support::{Bench, assert_same_definitions, observer, sums};
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_engine::{Observer, Options, Outcome, run};
use stillpoint_testing::postgresql::available;
use stillpoint_testing::wait::until;

/// Tables of each way to be copied: without the snapshot, with it (large values, rules, no key), empty, partitioned.
const SETUP: &str = "CREATE TABLE big (id int PRIMARY KEY, n int DEFAULT 0, note text); \
    INSERT INTO big SELECT g, 0, repeat(md5(g::text), 20) FROM generate_series(1, 60000) g; \
    CREATE TABLE moved (id int PRIMARY KEY, n int DEFAULT 0, note text); \
    INSERT INTO moved SELECT g, 0, repeat(md5(g::text), 20) FROM generate_series(1, 40000) g; \
    CREATE TABLE wide (id int PRIMARY KEY, n int DEFAULT 0, note text); \
    ALTER TABLE wide ALTER note SET STORAGE EXTERNAL; \
    INSERT INTO wide SELECT g, 0, repeat(md5(g::text), 200) FROM generate_series(1, 2000) g; \
    CREATE TABLE bare (line text); INSERT INTO bare SELECT 'line ' || g FROM generate_series(1, 3000) g; \
    CREATE TABLE parts (id int, n int DEFAULT 0, PRIMARY KEY (id)) PARTITION BY RANGE (id); \
    CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (5000); CREATE TABLE parts_2 PARTITION OF parts DEFAULT; \
    INSERT INTO parts SELECT g FROM generate_series(1, 9000) g; CREATE TABLE nothing (id int PRIMARY KEY); \
    CREATE TABLE child (id int PRIMARY KEY REFERENCES big ON DELETE CASCADE); INSERT INTO child SELECT generate_series(1, 20000, 7); \
    CREATE INDEX ON big (n); CREATE UNIQUE INDEX ON moved (id, n)";

const WRITES: &str = "\\set id random(1, 60000)
BEGIN;
UPDATE big SET n = n + 1 WHERE id = :id;
UPDATE moved SET n = n + 1 WHERE id = :id;
UPDATE wide SET n = n + 1 WHERE id = :id / 30;
UPDATE parts SET n = n + 1 WHERE id = :id / 7;
DELETE FROM bare WHERE line = 'line ' || :id / 20;
INSERT INTO bare VALUES ('new :id');
COMMIT;
DELETE FROM big WHERE id = :id + 1 AND id % 10 = 0;
";

fn start() -> Arc<Bench> {
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql("shop", SETUP);
    let script = bench.dir.path().join("writes.sql");
    std::fs::write(&script, WRITES).unwrap();
    std::fs::set_permissions(bench.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let script = script.display().to_string();
    let load = bench.source.pgbench_load(
        "shop",
        bench.source.port(),
        &["-n", "-c", "2", "-T", "600", "-R", "150", "-f", &script],
    );
    bench.fake_proxy.lock().unwrap().loads.push(load);
    until("clients write", || (bench.source.sql("shop", "SELECT count(*) FROM big WHERE n > 0") != "0").then_some(()));
    Arc::new(bench)
}

/// Number of pieces that are on the target.
fn pieces(bench: &Bench) -> u64 {
    bench.target.try_sql("shop", "SELECT count(*) FROM stillpoint.pieces").map_or(0, |count| count.parse().unwrap())
}

/// Begins a command and ends it, as if it were killed, once `is_due` for an event.
async fn begin_and_kill(options: &Options, is_due: impl Fn(&EventKind) -> bool + Send + Sync + 'static) {
    let told = Arc::new(tokio::sync::Notify::new());
    let telling = Arc::clone(&told);
    let acting: Observer = Arc::new(move |event: Event| {
        println!("{:?}", event.kind);
        if is_due(&event.kind) {
            telling.notify_one();
        }
    });
    tokio::select! {
        biased;
        () = told.notified() => {}
        ended = run(options, acting) => panic!("{ended:?}"),
    }
}

fn assert_same(bench: &Bench) {
    bench.look_into_source("shop");
    let sorted = |sums: String| sums.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    assert_eq!(sorted(sums(&bench.source, "shop")), sorted(sums(&bench.target, "shop")));
    assert_same_definitions(bench);
}

async fn go_on(bench: &Bench, options: &Options) -> Vec<String> {
    let (observer, events) = observer();
    let outcome = run(options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert_same(bench);
    let warning = |event: &Event| match &event.kind {
        EventKind::Warning { text } => Some(text.clone()),
        _ => None,
    };
    events.lock().unwrap().iter().filter_map(warning).collect()
}

const GOES_ON: &str = "continues with the rows that are not on the target";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_was_killed_goes_on_where_it_stood() {
    if !available() {
        return;
    }
    let bench = start();
    let options = bench.options("shop");
    // Killed among the rows, before indexes, and when some of them are made.
    let among_rows = async {
        while pieces(&bench) < 2 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        biased;
        () = among_rows => {}
        ended = run(&options, observer().0) => panic!("{ended:?}"),
    }
    assert!(pieces(&bench) > 1);
    let first = bench.target.sql(
        "shop",
        "SELECT relation, first, xmin FROM stillpoint.pieces WHERE relation IN (SELECT relation \
        FROM stillpoint.pieces GROUP BY 1 HAVING count(*) > 1) ORDER BY 1, 2 LIMIT 1",
    );
    // Rows move to other pages; others are frozen.
    bench.source.sql("shop", "VACUUM FULL moved");
    bench.source.sql("shop", "VACUUM (FREEZE) big");
    begin_and_kill(&options, |kind| matches!(kind, EventKind::PhaseStarted { phase, .. } if phase == "indexes")).await;
    let again = bench.target.sql("shop", "SELECT relation, first, xmin FROM stillpoint.pieces");
    assert!(again.lines().any(|line| line == first) || first.is_empty(), "{first} is kept: {again}");
    let begun = Arc::new(AtomicU64::new(0));
    let counting = Arc::clone(&begun);
    begin_and_kill(&options, move |kind| {
        matches!(kind, EventKind::PhaseStarted { phase, .. } if phase == "statistics")
            && counting.fetch_add(1, Relaxed) == 0
    })
    .await;
    let told = go_on(&bench, &options).await;
    assert!(told.iter().any(|text| text.contains(GOES_ON)), "{told:?}");
}

/// A definition that changed between two commands is a reason to begin again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_begins_again_if_a_definition_changed() {
    if !available() {
        return;
    }
    let bench = start();
    let options = bench.options("shop");
    begin_and_kill(&options, |kind| matches!(kind, EventKind::PhaseStarted { phase, .. } if phase == "indexes")).await;
    bench.source.sql("shop", "ALTER TABLE parts ADD COLUMN more int DEFAULT 4");
    let told = go_on(&bench, &Options { share: 0.0, ..options }).await;
    assert!(told.iter().any(|text| text.contains("starts again")), "{told:?}");
}

/// A target that is restarted in the middle, as for an update of its machine: the command waits, and goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_goes_on_when_its_target_is_restarted() {
    if !available() {
        return;
    }
    let bench = start();
    let options = Options { share: 0.0, ..bench.options("shop") };
    let (observer, events) = observer();
    let pid = rustix::process::Pid::from_raw(bench.target.pid() as i32).unwrap();
    let restarting = async {
        while pieces(&bench) < 2 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        // The postmaster ends all sessions and starts again by itself, as after the crash of one of them.
        let session = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'background writer'";
        let writer: i32 = bench.target.sql("postgres", session).parse().unwrap();
        assert_ne!(writer, pid.as_raw_nonzero().get());
        rustix::process::kill_process(rustix::process::Pid::from_raw(writer).unwrap(), rustix::process::Signal::KILL)
            .unwrap();
    };
    let (outcome, ()) = tokio::join!(run(&options, observer), restarting);
    let outcome = outcome.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert_same(&bench);
    let told = events.lock().unwrap().iter().any(|event| match &event.kind {
        EventKind::Warning { text } => text.contains("the copy goes on when"),
        _ => false,
    });
    assert!(told);
}
