//! Comparison of both sides: every difference is named, at any place, and no snapshot is held for long.

use crate::engine::support::{Bench, FakeClients};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_migrate_engine::{Error, Observer, Options, State, Verdict, check, fallback, run};
use stillpoint_testing::postgresql::available;

/// Tables of several key ranges each, except some of the last: a library sorts their keys, or they have no keys, or no
/// rows. `heir` has its columns in another order at the target.
const SCHEMA: &str = "
    CREATE TABLE first AS SELECT i AS id, 0 AS v FROM generate_series(1, 40000) i;
    CREATE TABLE middle AS SELECT i AS id, 0 AS v FROM generate_series(1, 40000) i;
    CREATE TABLE last AS SELECT (i - 20000)::smallint AS \"the id\", 0 AS v FROM generate_series(1, 40000) i;
    CREATE TABLE same AS SELECT timestamptz '2026-02-28 12:00+01' + make_interval(mins => i) AS at, 0 AS v
        FROM generate_series(1, 40000) i;
    CREATE TABLE paired AS SELECT i / 9000 AS a, i AS b, 0 AS v FROM generate_series(1, 40000) i;
    CREATE TABLE named AS SELECT 'n' || i AS name, 0 AS v FROM generate_series(1, 4000) i;
    CREATE TABLE keyless AS SELECT i % 7 AS a, 0 AS v FROM generate_series(1, 4000) i;
    CREATE TABLE bare (id int PRIMARY KEY);
    CREATE TABLE elder (id int PRIMARY KEY);
    CREATE TABLE heir (v int, twice int GENERATED ALWAYS AS (2 * v) STORED) INHERITS (elder);
    ALTER TABLE elder ADD COLUMN since date;
    INSERT INTO heir (id, v, since) SELECT i, i, '2026-01-01' FROM generate_series(1, 10) i;
    ALTER TABLE first ADD PRIMARY KEY (id);
    ALTER TABLE middle ADD PRIMARY KEY (id);
    ALTER TABLE last ADD PRIMARY KEY (\"the id\");
    ALTER TABLE same ADD PRIMARY KEY (at);
    ALTER TABLE paired ADD PRIMARY KEY (a, b);
    ALTER TABLE named ADD PRIMARY KEY (name);
";

/// Rows of one kilobyte; the copy takes some seconds beside clients that suffer.
const ROWS: u32 = 100_000;

/// Sessions of others begin read-only on a side that follows.
const WRITABLE: &str = "SET TRANSACTION READ WRITE; ";

/// Changes of a third party at the target, before both sides are compared.
const MEDDLING: &str = "
    INSERT INTO first VALUES (-3, 0);
    UPDATE middle SET v = 1 WHERE id = 20000;
    DELETE FROM last WHERE \"the id\" = 20000;
    UPDATE named SET v = 1 WHERE name = 'n77';
    UPDATE paired SET b = 40001 WHERE b = 20000;
    DELETE FROM keyless WHERE ctid = '(1,1)';
    INSERT INTO bare VALUES (1);
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_differs_is_named() {
    if !available() {
        return;
    }
    let bench = Arc::new(Bench::start());
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql("shop", SCHEMA);
    let meddling = Arc::clone(&bench);
    let observer: Observer = Arc::new(move |event: Event| {
        println!("{:?}", event.kind);
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "compare") {
            meddling.target.sql("shop", &format!("{WRITABLE}{MEDDLING}"));
        }
    });
    let options = Options { share: 0.0, ..bench.options("shop") };
    let failure = run(&options, observer).await.unwrap_err();
    let Error::Differs(what) = &failure.error else { panic!("{failure:?}") };
    let expected = [
        "public.first (40000 and 40001 rows)",
        "public.middle (40000 and 40000 rows)",
        "public.last (40000 and 39999 rows)",
        "public.paired (40000 and 40000 rows)",
        "public.named (4000 and 4000 rows)",
        "public.keyless (4000 and 3999 rows)",
        "public.bare (0 and 1 rows)",
    ];
    assert_eq!(what, &expected);
    assert_eq!(failure.state, State::OnSource);
    bench.assert_clean("shop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_snapshot_is_held_until_all_is_compared() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.fill_big(ROWS);
    bench.fake_proxy.lock().unwrap().clients = Some(FakeClients::at(1000.0, 3000));
    let bench = Arc::new(bench);
    let (begun, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (looking, comparing, compared) = (Arc::clone(&bench), Arc::clone(&begun), Arc::clone(&over));
    let moments = std::thread::spawn(move || {
        let (mut moments, mut number) = (BTreeSet::new(), 0);
        while !compared.load(Ordering::Acquire) {
            if comparing.load(Ordering::Acquire) {
                // Rows come and go meanwhile, far from the place that it reads and has read.
                number += 1;
                let writes = format!(
                    "UPDATE big SET id = id + 1000000, note = 'n' WHERE id IN ({number}, {ROWS} + 1 - {number})"
                );
                looking.source.sql("shop", &writes);
                let begun = "SELECT extract(epoch FROM xact_start) FROM pg_stat_activity \
                             WHERE query LIKE '%_stillpoint_row%' AND pid <> pg_backend_pid() AND xact_start IS NOT NULL";
                moments.extend(looking.source.sql("shop", begun).lines().map(String::from));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        moments
    });
    let (fake_proxy, rows) = (Arc::clone(&bench.fake_proxy), Arc::new(Mutex::new(0)));
    let counted = Arc::clone(&rows);
    let observer: Observer = Arc::new(move |event: Event| {
        println!("{:?}", event.kind);
        let suffer = |rate: f64, wait| fake_proxy.lock().unwrap().clients.as_mut().expect("some").go_at(rate, wait);
        match &event.kind {
            EventKind::PhaseStarted { phase, .. } if phase == "compare" => {
                suffer(100.0, 30_000);
                begun.store(true, Ordering::Release);
            }
            EventKind::Migrate(migrate::Event::Compared { rows, .. }) => {
                *counted.lock().unwrap() = *rows;
                over.store(true, Ordering::Release);
                suffer(1000.0, 3000);
            }
            EventKind::FellBack { .. } => over.store(true, Ordering::Release),
            _ => {}
        }
    });
    let outcome = run(&bench.options("shop"), observer).await;
    let moments = moments.join().expect("the observer");
    outcome.unwrap_or_else(|failure| panic!("{failure:?}"));
    println!("{moments:?}");
    assert!(moments.len() >= 3, "both sides were looked at again: {moments:?}");
    // Rows that moved from the front to the back, where they had not been compared, were counted twice.
    let rows = *rows.lock().unwrap() as u32;
    assert!((ROWS - 10_000..=ROWS + 30_000).contains(&rows), "{rows}");
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
}

/// A value whose text would be longer than a server can make one: it is compared, and does not keep clients from coming
/// back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_of_more_than_half_a_gigabyte_are_compared() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql(
        "shop",
        "CREATE DOMAIN blob AS bytea; CREATE TABLE wide (id int PRIMARY KEY, b blob, t text, j json); \
         INSERT INTO wide SELECT 1, convert_to(repeat('x', 600000000), 'UTF8'); \
         INSERT INTO wide SELECT 2, 'x', repeat('\"', 300000000), to_json(repeat('y', 200000))",
    );
    let options = Options { share: 0.0, ..bench.options("shop") };
    run(&options, crate::engine::support::observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    bench.target.sql("shop", "UPDATE wide SET t = 'less' WHERE id = 2");
    fallback(&options, crate::engine::support::observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let lengths =
        "SELECT string_agg(octet_length(b) || ' ' || octet_length(coalesce(t, '')), ',' ORDER BY id) FROM wide";
    assert_eq!(bench.source.sql("shop", lengths), "600000000 0,1 4");
    bench.assert_clean("shop");
}

/// A large value that is written during a run is in no message of the log; the check names the ones that already exist.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_of_more_than_half_a_gigabyte_are_found_before_and_end_a_migration_by_name() {
    if !available() {
        return;
    }
    let bench = Arc::new(Bench::start());
    bench.source.sql("postgres", "CREATE DATABASE shop");
    // No target gives its types the same numbers: these rows are copied as text.
    bench.source.sql(
        "shop",
        "CREATE TYPE mood AS ENUM ('good'); CREATE TABLE wide (id int PRIMARY KEY, b bytea); \
         CREATE TABLE moody (id int PRIMARY KEY, b bytea, m mood[]); CREATE TABLE small (id int PRIMARY KEY, b bytea); \
         INSERT INTO small SELECT 1, decode(repeat('00', 9000000), 'hex'); ALTER TABLE small ALTER b SET STORAGE EXTERNAL",
    );
    const LONG: &str = "convert_to(repeat('x', 600000000), 'UTF8')";
    let meddling = Arc::clone(&bench);
    let observer: Observer = Arc::new(move |event: Event| {
        println!("{:?}", event.kind);
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "catch-up") {
            meddling.source.sql("shop", &format!("INSERT INTO wide SELECT 1, {LONG}"));
        }
    });
    let options = Options { share: 0.0, rehearse: true, ..bench.options("shop") };
    let failure = run(&options, observer).await.unwrap_err();
    let Error::TooLong { tables, .. } = &failure.error else { panic!("{failure:?}") };
    assert_eq!((&tables[..], &failure.state), (&["public.wide".to_owned()][..], &State::OnSource));
    bench.assert_clean("shop");

    bench.source.sql("shop", &format!("INSERT INTO moody SELECT 1, {LONG}, '{{}}'"));
    let report = check(&options).await.expect("a report");
    let found = |name: &str| {
        let large = report.findings.iter().filter(|found| found.kind == "large values" && found.name == name);
        large.map(|found| found.verdict).collect::<Vec<_>>()
    };
    assert_eq!(found("public.wide"), [Verdict::Moved]);
    assert_eq!(found("public.moody"), [Verdict::Refused]);
    assert_eq!(found("public.small"), []);
}

/// Differences in long values are found as in short ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_values_that_differ_are_found() {
    if !available() {
        return;
    }
    let bench = Arc::new(Bench::start());
    bench.source.sql("postgres", "CREATE DATABASE shop");
    for (number, kind) in ["bytea", "text", "varchar", "json", "xml", "jsonb"].iter().enumerate() {
        let table = format!("CREATE TABLE of_{kind} (id int PRIMARY KEY, v {kind})");
        let value = format!("INSERT INTO of_{kind} VALUES ({number}, ('\"' || repeat('x', 200000) || '\"')::{kind})");
        bench.source.sql("shop", &format!("{table}; {value}"));
    }
    let meddling = Arc::clone(&bench);
    let observer: Observer = Arc::new(move |event: Event| {
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "compare") {
            for kind in ["bytea", "text", "varchar", "json", "xml", "jsonb"] {
                let other = format!("UPDATE of_{kind} SET v = ('\"' || repeat('x', 199999) || 'y\"')::{kind}");
                meddling.target.sql("shop", &format!("{WRITABLE}{other}"));
            }
        }
    });
    let failure = run(&Options { share: 0.0, ..bench.options("shop") }, observer).await.unwrap_err();
    let Error::Differs(named) = &failure.error else { panic!("{failure:?}") };
    assert_eq!(named.len(), 6, "{named:?}");
}
