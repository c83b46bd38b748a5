//! Whole migrations on two real servers, with load on the source.

use crate::engine::support::{Bench, FakeClients, observer, sums};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use stillpoint_events::{EventKind, migrate};
use stillpoint_migrate_engine::{CopyProgress, Observer, Outcome, fallback, finish, run, status};
use stillpoint_testing::postgresql::available;

/// Tables of every kind that needs its own way of copying and replaying.
const SCHEMA: &str = "
    CREATE TYPE mood AS ENUM ('ok', 'bad');
    CREATE TABLE kinds (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, m mood DEFAULT 'ok', ms mood[], j json,
        n numeric(10, 3), b bytea, t timestamptz DEFAULT now(), f float8, wide text, doubled numeric
        GENERATED ALWAYS AS (n * 2) STORED);
    CREATE TABLE keyless (a int, j json);
    CREATE TABLE numbers (n numeric PRIMARY KEY, v int);
    CREATE TABLE mails (id int PRIMARY KEY, mail text UNIQUE);
    CREATE TABLE parts (a int PRIMARY KEY, v text) PARTITION BY RANGE (a);
    CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (100);
    CREATE TABLE parts_high PARTITION OF parts FOR VALUES FROM (100) TO (1000);
    CREATE TABLE child (id int PRIMARY KEY, mail int REFERENCES mails ON DELETE CASCADE);
    CREATE SEQUENCE tickets START 100;
    ALTER TABLE kinds ALTER COLUMN wide SET STORAGE EXTERNAL;
    INSERT INTO kinds (ms, j, n, b, f, wide) SELECT '{ok,bad}', '{\"a\": 1}', i * 1.5, 'x', i / 3.0, repeat('w', 9000)
        FROM generate_series(1, 50) i;
    INSERT INTO keyless SELECT i % 5, '{}' FROM generate_series(1, 20) i;
    INSERT INTO numbers SELECT i, i FROM generate_series(1, 20) i;
    INSERT INTO mails SELECT i, 'm' || i FROM generate_series(1, 20) i;
    INSERT INTO child SELECT i, i FROM generate_series(1, 20) i;
    INSERT INTO parts SELECT i, 'p' FROM generate_series(1, 300) i;
    SELECT nextval('tickets');
";

/// Changes of every kind, made while the migration runs.
const CHANGES: &str = r"
\set i random(1, 20)
\set k random(1, 50)
\set p random(1, 999)
UPDATE kinds SET n = n + 1 WHERE id = :k;
UPDATE kinds SET wide = repeat('v', 9000), m = 'bad' WHERE id = :k;
INSERT INTO kinds (j, n) VALUES (NULL, 1);
UPDATE keyless SET j = '[2]' WHERE a = :i;
DELETE FROM keyless WHERE ctid = (SELECT min(ctid) FROM keyless);
INSERT INTO keyless VALUES (:i, NULL);
UPDATE numbers SET v = v + 1 WHERE n = :i;
DELETE FROM mails WHERE id = :i;
INSERT INTO mails VALUES (:i, 'm' || :i) ON CONFLICT DO NOTHING;
INSERT INTO parts VALUES (:p, 'new') ON CONFLICT (a) DO UPDATE SET v = parts.v || 'x';
SELECT nextval('tickets');
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pgbench_moves_and_comes_back() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.pgbench("shop", &["-i", "-s", "2", "-q"]);
    let load = bench.source.pgbench_load("shop", bench.source.port(), &["-c", "4", "-T", "300", "-R", "400"]);
    bench.fake_proxy.lock().unwrap().loads.push(load);
    let (observer, events) = observer();
    let options = bench.options("shop");
    let outcome = run(&options, observer.clone()).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let Outcome::Switched { paused } = outcome else { panic!("{outcome:?}") };
    println!("paused {paused:?}");
    let refused = bench.source.try_sql("shop", "SELECT 1").unwrap_err();
    assert!(refused.contains("not currently accepting connections"), "{refused}");
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
    assert!(
        events
            .lock()
            .unwrap()
            .iter()
            .any(|event| matches!(event.kind, EventKind::Migrate(migrate::Event::Compared { tables: 4, .. })))
    );
    let balance = "SELECT sum(abalance) = (SELECT sum(delta) FROM pgbench_history) FROM pgbench_accounts";
    assert_eq!(bench.target.sql("shop", balance), "t");
    assert!(bench.source.try_sql("shop", "INSERT INTO pgbench_history VALUES (1)").is_err(), "the source is fenced");

    let outcome = bench.target.pgbench("shop", &["-c", "4", "-t", "500", "-n"]);
    assert_eq!(outcome.failed, 0);
    let before = sums(&bench.target, "shop");
    fallback(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(sums(&bench.source, "shop"), before, "what was committed on the target is on the source");
    bench.assert_clean("shop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_table_and_change_arrives() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql("shop", SCHEMA);
    // At a place where pgbench, which runs as postgres, can read it.
    let script = bench.source.socket_dir().join("changes.sql");
    std::fs::write(&script, CHANGES).unwrap();
    let script = script.display().to_string();
    // At this rate the replay keeps up on a busy machine: tables without keys are read whole for each change.
    let load = ["-n", "-c", "4", "-T", "300", "-R", "100", "-f", &script];
    let load = bench.source.pgbench_load("shop", bench.source.port(), &load);
    bench.fake_proxy.lock().unwrap().loads.push(load);
    let (observer, _events) = observer();
    let options = bench.options("shop");
    run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
    let ticket = |sql: &str| (bench.source.sql("shop", sql), bench.target.sql("shop", sql));
    for sequence in ["tickets", "kinds_id_seq"] {
        let (source, target) = ticket(&format!("SELECT last_value, is_called FROM {sequence}"));
        assert_eq!(source, target, "{sequence}");
    }
    let indexes = "SELECT count(*) FROM pg_indexes WHERE schemaname = 'public'";
    assert_eq!(bench.source.sql("shop", indexes), bench.target.sql("shop", indexes));
    finish(&options).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(bench.target.sql("shop", "SELECT count(*) FROM pg_class WHERE relreplident = 'f'"), "0");
    assert_eq!(bench.target.sql("postgres", "SELECT count(*) FROM pg_replication_slots"), "0");
    assert!(!bench.state().join("shop.json").exists());
}

/// Pages of a piece, as the copy cuts tables.
const PIECE_PAGES: usize = 8192;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_one_table_are_copied_at_the_same_time() {
    if !available() {
        return;
    }
    // The log has each statement when it begins, and its end.
    let bench = Bench::start_apart(&["log_statement=all", "log_duration=on"], &[]);
    bench.source.sql("postgres", "CREATE DATABASE shop");
    let wide = "CREATE TABLE wide (id int PRIMARY KEY, n int, pad text); ALTER TABLE wide ALTER COLUMN pad SET STORAGE PLAIN; \
         INSERT INTO wide SELECT i, 0, repeat(md5(i::text), 120) FROM generate_series(1, 34000) i";
    bench.source.sql("shop", wide);
    let pages = bench.source.sql("shop", "SELECT pg_relation_size('wide') / 8192").parse::<usize>().expect("a number");
    let pieces = pages.div_ceil(PIECE_PAGES);
    assert!(pieces > 2, "{pages} pages");
    let script = bench.dir.path().join("wide.sql");
    let changes = "\\set i random(1, 34000)\nUPDATE wide SET n = n + 1 WHERE id = :i;\nDELETE FROM wide WHERE id = :i + 7;\n\
         INSERT INTO wide SELECT :i + 7, 0, repeat('x', 3840) ON CONFLICT DO NOTHING;\n";
    std::fs::write(&script, changes).expect("write a script");
    let load = ["-n", "-c", "2", "-T", "300", "-R", "50", "-f", script.to_str().expect("a path")];
    let load = bench.source.pgbench_load("shop", bench.source.port(), &load);
    bench.fake_proxy.lock().unwrap().loads.push(load);
    let outcome = run(&bench.options("shop"), observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");

    let log = bench.source.log_text();
    let (mut places, mut under_way, mut most) = (BTreeSet::new(), BTreeMap::new(), 0);
    for line in log.lines() {
        let Some(process) = line.split(['[', ']']).nth(1) else { continue };
        if let Some((_, place)) =
            line.split_once("statement: COPY (SELECT").and_then(|(_, copy)| copy.split_once("WHERE "))
        {
            assert!(places.insert(place.to_owned()), "{place} is copied once");
            under_way.insert(process, place);
            most = most.max(under_way.len());
        } else if line.contains("duration: ") {
            under_way.remove(process);
        }
    }
    // The load may have made the table grow before it was measured.
    assert!(places.len() == pieces || places.len() == pieces + 1, "{pages} pages: {places:?}");
    assert!(places.iter().any(|place| place.contains("ctid >= '(8192,0)' AND ctid < '(16384,0)'")), "{places:?}");
    assert_eq!(most, 2, "two are copied at the same time: {places:?}");
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn how_long_the_copy_takes_is_reported_by_status() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.fill_big(56_000);
    // These clients make the copy begin with 16 MiB a second.
    bench.fake_proxy.lock().unwrap().clients = Some(FakeClients::at(1000.0, 3000));
    let options = bench.options("shop");
    let (told, asked, target) = (Arc::new(Mutex::new(0)), options.clone(), options.target.to_string());
    let counted = Arc::clone(&told);
    let observer: Observer = Arc::new(move |event| {
        println!("{:?}", event.kind);
        let EventKind::Migrate(migrate::Event::Copying { bytes, bytes_total, bytes_per_s, estimate_s }) = event.kind
        else {
            return;
        };
        let asked = asked.clone();
        let status = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(status(&asked)).expect("a status")
        });
        let status = status.join().expect("the other thread does not panic");
        let copying = CopyProgress { bytes, bytes_total, bytes_per_s, estimate_s };
        assert_eq!(status.copying, BTreeMap::from([(target.clone(), copying)]));
        *counted.lock().unwrap() += i32::from(estimate_s.is_some());
    });
    let outcome = run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert!(*told.lock().unwrap() > 1, "the rest was estimated while rows were copied");
    assert_eq!(status(&options).await.expect("a status").copying, BTreeMap::new(), "the copy is over");
}
