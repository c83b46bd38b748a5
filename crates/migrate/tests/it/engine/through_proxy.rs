//! Whole migrations with clients at the real proxy: they go on through both switches and see no error.

use crate::engine::support::{Bench, observer, proxy, sums};
use std::time::Duration;
use stillpoint_migrate_engine::{Error, Options, Outcome, State, fallback, run};
use stillpoint_operation::{FaultPoint, Faults};
use stillpoint_testing::postgresql::available;
use tokio_postgres::NoTls;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_go_over_and_come_back() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.pgbench("shop", &["-i", "-s", "2", "-q"]);
    let (port, control) = proxy(bench.dir.path(), &bench.source);
    let mut options = bench.options("shop");
    options.proxy = control;
    let mut load =
        bench.source.pgbench_load("shop", port, &["-n", "-c", "8", "-T", "600", "-R", "600", "-M", "prepared"]);
    let (observer, _events) = observer();
    let outcome = run(&options, observer.clone()).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    let Outcome::Switched { paused } = outcome else { panic!("{outcome:?}") };
    println!("paused {paused:?} on the way there");
    assert!(load.running(), "the load was there all the time");
    let history = "SELECT count(*) FROM pgbench_history";
    bench.look_into_source("shop");
    let (there, then) = (bench.target.sql("shop", history), bench.source.sql("shop", history));
    assert!(there.parse::<u64>().unwrap() >= then.parse::<u64>().unwrap(), "{there} {then}");

    let back = fallback(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    println!("{back:?} on the way back");
    assert!(load.running(), "the load was there all the time");
    let outcome = load.stop();
    assert!(outcome.success && outcome.failed == 0, "{}", outcome.text);
    assert_eq!(bench.source.sql("shop", history), outcome.transactions.to_string(), "every commit exactly once");
    let balance = "SELECT sum(abalance) = (SELECT sum(delta) FROM pgbench_history) FROM pgbench_accounts";
    assert_eq!(bench.source.sql("shop", balance), "t");
    assert!(!sums(&bench.source, "shop").is_empty());
    bench.assert_clean("shop");
}

/// A session that is not ready does not change the counterparts of the others at the target.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_are_ready_are_not_prepared_again_for_one_that_is_not() {
    const CLIENTS: usize = 8;
    if !available() {
        return;
    }
    let bench = Bench::start_with(&["log_connections=on"]);
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql("shop", "CREATE TABLE item (id int PRIMARY KEY)");
    let (port, control) = proxy(bench.dir.path(), &bench.source);
    let options = |seconds| Options {
        proxy: control.clone(),
        share: 0.0,
        prepare_limit: Duration::from_secs(seconds),
        ..bench.options("shop")
    };
    let conninfo = format!("host=127.0.0.1 port={port} user=postgres dbname=shop application_name=customer");
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let (client, connection) = tokio_postgres::connect(&conninfo, NoTls).await.expect("connect");
        tokio::spawn(connection);
        clients.push(client);
    }
    let opened = || {
        let log = bench.target.log_text();
        log.lines().filter(|line| line.contains("authorized") && line.contains("application_name=customer")).count()
    };
    let held = [
        ("BEGIN", "its client holds a transaction open"),
        ("CREATE TEMP TABLE mine (a int)", "temporary relation mine"),
    ];
    for (statement, why) in held {
        clients[0].batch_execute(statement).await.expect("a statement");
        let before = opened();
        let failure = run(&options(6), observer().0).await.unwrap_err();
        let Error::TimedOut { who, .. } = &failure.error else { panic!("{failure:?}") };
        assert!(who.len() == 1 && who[0].contains(why), "{who:?}");
        assert_eq!(failure.state, State::OnSource);
        // Up to twice as many: a busy machine may refuse a login.
        assert!(
            (CLIENTS..=2 * CLIENTS).contains(&(opened() - before)),
            "{statement}: {} were opened",
            opened() - before
        );
        if statement == "BEGIN" {
            clients[0].batch_execute("COMMIT").await.expect("a commit");
        }
    }
    clients[0].batch_execute("DROP TABLE mine").await.expect("drop it");
    let outcome = run(&options(120), observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    for client in &clients {
        client.batch_execute("INSERT INTO item SELECT count(*) FROM item").await.expect("sessions go on");
    }
    assert_eq!(bench.target.sql("shop", "SELECT count(*) FROM item"), CLIENTS.to_string());
}

/// Settings of a server whose log has no row changes, and that has no room for slots.
const NO_LOGICAL_LOG: [&str; 2] = ["wal_level=replica", "max_replication_slots=0"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_without_a_logical_log_is_moved_by_images_of_rows() {
    if !available() {
        return;
    }
    let bench = Bench::start_apart(&NO_LOGICAL_LOG, &[]);
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.pgbench("shop", &["-i", "-s", "2", "-q"]);
    let setup = "CREATE TABLE item (stock int, id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text UNIQUE, \
         twice int GENERATED ALWAYS AS (stock * 2) STORED, at timestamptz DEFAULT clock_timestamp(), tags text[]); \
         CREATE TABLE parts (part int, n int, v text, PRIMARY KEY (part, n)) PARTITION BY LIST (part); \
         CREATE TABLE parts_1 PARTITION OF parts FOR VALUES IN (1); CREATE TABLE parts_rest PARTITION OF parts DEFAULT";
    bench.source.sql("shop", setup);
    let (port, control) = proxy(bench.dir.path(), &bench.source);
    let mut options = bench.options("shop");
    options.proxy = control;
    let script = bench.dir.path().join("items.sql");
    let text = "\\set n random(1, 300)\n\\set m random(1, 300)\nBEGIN;\n\
         INSERT INTO item (stock, name, tags) VALUES (:n, 'n' || :n, ARRAY['a', NULL, '\"']) \
         ON CONFLICT (name) DO UPDATE SET stock = item.stock + 1, at = clock_timestamp();\n\
         DELETE FROM item WHERE name = 'n' || :m;\n\
         INSERT INTO parts VALUES (:n % 3, :n, '') ON CONFLICT (part, n) DO UPDATE SET v = parts.v || 'x';\n\
         UPDATE parts SET v = 'y' WHERE n = :m;\nDELETE FROM parts WHERE n = :m + 1;\nEND;\n";
    std::fs::write(&script, text).expect("write a script");
    let items = ["-n", "-c", "3", "-T", "600", "-R", "60", "-f", script.to_str().expect("a path")];
    let items = bench.source.pgbench_load("shop", port, &items);
    let mut load =
        bench.source.pgbench_load("shop", port, &["-n", "-c", "4", "-T", "600", "-R", "200", "-M", "prepared"]);
    let (observer, _events) = observer();
    let outcome = run(&options, observer.clone()).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert!(load.running(), "the load was there all the time");
    // A second call finds all done, also without a slot that would show it.
    let again = run(&options, observer.clone()).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(again, Outcome::AlreadyThere);
    let back = fallback(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    println!("{back:?} on the way back");
    let (outcome, of_items) = (load.stop(), items.stop());
    assert!(outcome.success && outcome.failed == 0, "{}", outcome.text);
    assert!(of_items.success && of_items.failed == 0 && of_items.transactions > 0, "{}", of_items.text);
    let history = "SELECT count(*) FROM pgbench_history";
    assert_eq!(bench.source.sql("shop", history), outcome.transactions.to_string(), "every commit exactly once");
    let balance = "SELECT sum(abalance) = (SELECT sum(delta) FROM pgbench_history) FROM pgbench_accounts";
    assert_eq!(bench.source.sql("shop", balance), "t");
    bench.assert_clean("shop");
}

/// Writes that the proxy does not see, or not as rows, end the migration, but no client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_gives_no_images_of_rows_ends_the_migration_by_name() {
    if !available() {
        return;
    }
    let bench = Bench::start_apart(&NO_LOGICAL_LOG, &[]);
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql("shop", "CREATE TABLE item (id int PRIMARY KEY); INSERT INTO item SELECT generate_series(1, 100)");
    let (port, control) = proxy(bench.dir.path(), &bench.source);
    let options = Options { proxy: control, share: 0.0, compare: false, ..bench.options("shop") };
    let connect = async |port: u16, name: &str| {
        let conninfo = format!("host=127.0.0.1 port={port} user=postgres dbname=shop application_name={name}");
        let (client, connection) = tokio_postgres::connect(&conninfo, NoTls).await.expect("connect");
        tokio::spawn(connection);
        client
    };
    let client = connect(port, "customer").await;
    for (at, statement, why) in [
        (port, "TRUNCATE item", "TRUNCATE"),
        (bench.source.port(), "INSERT INTO item VALUES (1000)", "stranger of postgres"),
    ] {
        let (reached, when) = (std::sync::Arc::new(tokio::sync::Notify::new()), "catch-up");
        let (observer, _events) = observer();
        let (told, asked) = (reached.clone(), observer.clone());
        let observer: stillpoint_migrate_engine::Observer =
            std::sync::Arc::new(move |event: stillpoint_events::Event| {
                if format!("{:?}", event.kind).contains(when) {
                    told.notify_one();
                }
                asked(event);
            });
        let speaking = async {
            reached.notified().await;
            let other = connect(at, "stranger").await;
            other.batch_execute(statement).await.expect("it is not harmed");
            other
        };
        let (ended, other) = tokio::join!(run(&options, observer), speaking);
        let failure = ended.unwrap_err();
        assert!(matches!(&failure.error, Error::Capture(told) if told.contains(why)), "{failure:?}");
        assert_eq!(failure.state, State::OnSource);
        client
            .batch_execute("INSERT INTO item SELECT coalesce(max(id), 0) + 1 FROM item")
            .await
            .expect("clients go on");
        drop(other);
        bench.assert_clean("shop");
    }
    // After any failure on the way the capture is gone, and the next run starts it again.
    for fault in [
        FaultPoint::after("snapshot"),
        FaultPoint::after("rows"),
        FaultPoint::after("catch-up"),
        FaultPoint::after("prepare"),
        FaultPoint::after("drain"),
    ] {
        let options = Options { faults: Faults::none().failing(fault.clone()), ..options.clone() };
        let failure = run(&options, observer().0).await.unwrap_err();
        assert!(matches!(failure.error, Error::Fault(_)), "{fault:?}: {failure:?}");
        assert_eq!(failure.state, State::OnSource, "{fault:?}");
        client
            .batch_execute("INSERT INTO item SELECT coalesce(max(id), 0) + 1 FROM item")
            .await
            .expect("clients go on");
        bench.assert_clean("shop");
    }
    // After the switch the next command completes the rest.
    let failing = Options { faults: Faults::none().failing(FaultPoint::after("switch-over")), ..options.clone() };
    let failure = run(&failing, observer().0).await.unwrap_err();
    assert_eq!(failure.state, State::OnTarget, "{failure:?}");
    for _ in 0..2 {
        let again = run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
        assert_eq!(again, Outcome::AlreadyThere);
    }
    client.batch_execute("INSERT INTO item SELECT coalesce(max(id), 0) + 1 FROM item").await.expect("clients go on");
    let back = fallback(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(back, Outcome::Switched { .. }), "{back:?}");
    bench.assert_clean("shop");
    assert_eq!(bench.source.sql("shop", "SELECT count(*) FROM item"), (2 + 5 + 1 + 1).to_string());
}
