//! Whole migrations that replay the statements of clients at the real proxy, in the paper's schedules.

use crate::engine::support::{Bench, observer, proxy};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_control::{Client, Reply, Request};
use stillpoint_migrate_engine::{Capture, Error, Observer, Options, Outcome, Schedule, Server, State, fallback, run};
use stillpoint_operation::{FaultPoint, Faults};
use stillpoint_testing::postgresql::{Cluster, Load, LoadOutcome, available};
use tokio::sync::Notify;
use tokio_postgres::NoTls;

/// Settings of a server whose log has no row changes, and that has no room for slots.
const NO_LOGICAL_LOG: [&str; 2] = ["wal_level=replica", "max_replication_slots=0"];

/// Cost of an order that depends on concurrent writes: correct only in a schedule that keeps what each transaction
/// could see.
const DEPENDS: &str = "max(stock) + (SELECT count(*) FROM orders)::int";
/// Cost that does not depend on other writes.
const GIVEN: &str = "max(cost)";

/// A shop behind a proxy.
struct Shop {
    bench: Bench,
    port: u16,
    options: Options,
}

impl Shop {
    fn open(schedule: Schedule) -> Shop {
        let bench = Bench::start_apart(&NO_LOGICAL_LOG, &[]);
        for server in [&bench.source, &bench.target] {
            server.sql("postgres", "CREATE ROLE clerk LOGIN");
        }
        bench.source.sql("postgres", "CREATE DATABASE shop");
        bench.source.sql(
            "shop",
            "CREATE TABLE item (id int PRIMARY KEY, stock int NOT NULL, cost int NOT NULL); \
             CREATE TABLE orders (id bigint PRIMARY KEY, item int NOT NULL, total int NOT NULL); \
             CREATE SCHEMA other; CREATE TABLE other.note (id bigint PRIMARY KEY, at timestamptz NOT NULL, who text); \
             CREATE FUNCTION other.abs(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT current_user::text'; \
             GRANT USAGE ON SCHEMA other TO clerk; GRANT SELECT, INSERT ON other.note TO clerk; \
             CREATE TABLE ballast (id int PRIMARY KEY, v text); \
             INSERT INTO item SELECT i, 0, i FROM generate_series(1, 100) i; \
             INSERT INTO ballast SELECT i, repeat(md5(i::text), 10) FROM generate_series(1, 20000) i; ANALYZE",
        );
        let (port, control) = proxy(bench.dir.path(), &bench.source);
        let capture = Some(Capture::Statements);
        let options = Options { proxy: control, share: 0.0, capture, schedule, ..bench.options("shop") };
        Shop { bench, port, options }
    }

    fn load(&self, name: &str, database: &str, arguments: &[&str], script: &str) -> Load {
        let path = self.bench.dir.path().join(name);
        let begin = "\\set id random(1, 1000000000000000)\n\\set item random(1, 100)\n\\set one random(1, 90)\n\
                     BEGIN ISOLATION LEVEL REPEATABLE READ;\n";
        std::fs::write(&path, format!("{begin}{script}END;\n")).expect("write a script");
        let always = ["-n", "-T", "600", "--max-tries", "1000", "-f", path.to_str().expect("a path")];
        self.bench.source.pgbench_load(database, self.port, &[&always, arguments].concat())
    }

    /// Starts clients of three kinds: one orders, one orders slowly, and one has settings and rights of its own.
    fn busy(&self, total: &str) -> [Load; 3] {
        let order = format!(
            "SELECT cost FROM item WHERE id = :one;\nUPDATE item SET stock = stock + 1 WHERE id = :item;\n\
             INSERT INTO orders (id, item, total) SELECT :id, :item, {total} FROM item WHERE id BETWEEN :one AND :one + 5;\n"
        );
        let slow = format!(
            "SELECT count(*) FROM item;\n\\sleep 300 ms\n\
             INSERT INTO orders (id, item, total) SELECT :id, 0, {total} FROM item;\n"
        );
        let note = "INSERT INTO note (id, at, who) VALUES (:id, '2026-01-02 12:00', abs('x'::text));\n";
        let far = "user=clerk dbname=shop options='-c search_path=other -c TimeZone=Asia/Tokyo'";
        [
            self.load("order.sql", "shop", &["-c", "4", "-R", "60"], &order),
            self.load("slow.sql", "shop", &["-c", "2"], &slow),
            self.load("note.sql", far, &["-c", "2", "-R", "20"], note),
        ]
    }

    /// Asserts that no client failed, and that each commit is there once.
    #[track_caller]
    fn judge(&self, loads: [Load; 3], at: &Cluster) {
        let outcomes: Vec<LoadOutcome> = loads.into_iter().map(Load::stop).collect();
        for outcome in &outcomes {
            assert!(outcome.success && outcome.failed == 0 && outcome.transactions > 0, "{}", outcome.text);
        }
        let count = |sql: &str| at.sql("shop", sql).parse::<u64>().expect("a number");
        let [orders, slow, notes] = [0, 1, 2].map(|kind: usize| outcomes[kind].transactions);
        assert_eq!(count("SELECT count(*) FROM orders WHERE item > 0"), orders, "every commit exactly once");
        assert_eq!(count("SELECT sum(stock) FROM item"), orders, "every commit exactly once");
        assert_eq!(count("SELECT count(*) FROM orders WHERE item = 0"), slow, "every commit exactly once");
        assert_eq!(count("SELECT count(*) FROM other.note"), notes, "every commit exactly once");
        assert_eq!(
            count("SELECT count(*) FROM other.note WHERE at <> '2026-01-02 12:00+09' OR who <> 'clerk'"),
            0,
            "as it was meant"
        );
    }

    /// Asserts that the rows added before the switch are the same on both sides; clients may have added others since.
    #[track_caller]
    fn both_sides_are_equal(&self) {
        self.bench.look_into_source("shop");
        let rows = "SELECT string_agg(r, ' ' ORDER BY r) FROM (SELECT o::text FROM orders o UNION ALL SELECT n::text \
                    FROM other.note n) x(r)";
        let [there, here] = [&self.bench.target, &self.bench.source].map(|side| side.sql("shop", rows));
        let there: std::collections::HashSet<&str> = there.split(' ').collect();
        let missing: Vec<&str> = here.split(' ').filter(|row| !there.contains(row)).collect();
        assert!(missing.is_empty() && here.len() > 100, "{} of {} bytes: {missing:?}", missing.len(), here.len());
    }
}

async fn there_and_back(schedule: Schedule, total: &str) {
    if !available() {
        return;
    }
    let shop = Shop::open(schedule);
    let mut loads = shop.busy(total);
    let (observer, _events) = observer();
    let outcome = run(&shop.options, observer.clone()).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert!(loads.iter_mut().all(Load::running), "the load was there all the time");
    shop.both_sides_are_equal();
    let again = run(&shop.options, observer.clone()).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(again, Outcome::AlreadyThere);
    let back = fallback(&shop.options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    println!("{back:?} on the way back");
    shop.judge(loads, &shop.bench.source);
    shop.bench.assert_clean("shop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statements_are_repeated_under_lsir() {
    there_and_back(Schedule::Lsir, DEPENDS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statements_are_repeated_one_transaction_at_a_time() {
    there_and_back(Schedule::BMin, GIVEN).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statements_are_repeated_with_one_commit_at_a_time_and_with_all_reads() {
    there_and_back(Schedule::BCon, DEPENDS).await;
    there_and_back(Schedule::BAll, GIVEN).await;
}

/// An observer that notifies when a phase has begun.
fn telling(phase: &'static str) -> (Observer, Arc<Notify>) {
    let (reached, (observer, _events)) = (Arc::new(Notify::new()), observer());
    let told = Arc::clone(&reached);
    let observer: Observer = Arc::new(move |event: Event| {
        if matches!(&event.kind, EventKind::PhaseStarted { phase: begun, .. } if begun == phase) {
            told.notify_one();
        }
        observer(event);
    });
    (observer, reached)
}

async fn connect(port: u16, name: &str) -> tokio_postgres::Client {
    let conninfo = format!("host=127.0.0.1 port={port} user=postgres dbname=shop application_name={name}");
    let (client, connection) = tokio_postgres::connect(&conninfo, NoTls).await.expect("connect");
    tokio::spawn(connection);
    client
}

/// Returns when the proxy captures all that begins from now on.
async fn captured(control: &Path) {
    let mut client = Client::connect(control).await.expect("the proxy answers");
    let request = Request::Captured { tenant: "shop".into() };
    while !matches!(client.ask(&request).await, Ok(Reply::Captured { over: None, .. })) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A transaction that was there before holds up the capture, and with it the snapshot. A transaction that begins
/// meanwhile is captured and does not see the first one's commit; it commits after the snapshot, which does see it. Its
/// statement, if repeated, would find more rows there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_straddles_the_snapshot_is_repeated_by_its_rows() {
    if !available() {
        return;
    }
    for schedule in [Schedule::Lsir, Schedule::BMin] {
        let shop = Shop::open(schedule);
        let early = connect(shop.port, "early").await;
        early.batch_execute("BEGIN; INSERT INTO orders VALUES (1, 1, 0)").await.expect("begin");
        let (observer, copying) = telling("copy");
        let (committed, wait) = mpsc::channel();
        let wait = Mutex::new(wait);
        let observer: Observer = Arc::new(move |event: Event| {
            let copies = matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "copy");
            observer(event);
            if copies {
                // The replay begins after its commit.
                let wait = wait.lock().expect("no test thread panicked");
                wait.recv_timeout(Duration::from_secs(30)).expect("it commits");
            }
        });
        let (port, control) = (shop.port, shop.options.proxy.clone());
        let clients = tokio::spawn(async move {
            captured(&control).await;
            let straddler = connect(port, "straddler").await;
            let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ; UPDATE item SET stock = 1 WHERE id = 1";
            straddler.batch_execute(begin).await.expect("begin");
            early.batch_execute("COMMIT").await.expect("commit");
            copying.notified().await;
            let counts = "INSERT INTO orders (id, item, total) SELECT 2, 2, (SELECT count(*) FROM orders)::int FROM item \
                          WHERE id = 1; COMMIT";
            straddler.batch_execute(counts).await.expect("commit");
            committed.send(()).expect("it is waited for");
        });
        let options = Options { compare: false, ..shop.options.clone() };
        let outcome = run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
        assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
        clients.await.expect("no client failed");
        let orders = shop.bench.target.sql("shop", "SELECT string_agg(o::text, ' ' ORDER BY id) FROM orders o");
        assert_eq!(orders, "(1,1,0) (2,2,0)", "{schedule:?}: what it counted on the source");
        let (source, target) = shop.bench.sums("shop");
        assert_eq!(source, target, "{schedule:?}");
    }
}

/// A statement that cannot be repeated ends the migration, but no client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_repeated_ends_the_migration_by_name() {
    if !available() {
        return;
    }
    let shop = Shop::open(Schedule::Lsir);
    let client = connect(shop.port, "customer").await;
    let write = "BEGIN ISOLATION LEVEL REPEATABLE READ; UPDATE item SET stock = stock + 1 WHERE id = 1; COMMIT";
    let options = Options { compare: false, ..shop.options.clone() };
    for (port, statement, why) in [
        (
            shop.port,
            "BEGIN ISOLATION LEVEL REPEATABLE READ; UPDATE item SET cost = (random() * 9)::int WHERE id = 2; COMMIT",
            "function random",
        ),
        (shop.port, "UPDATE item SET cost = 7 WHERE id = 3", "a transaction that writes is not at REPEATABLE READ"),
        (shop.bench.source.port(), "UPDATE item SET cost = 7 WHERE id = 4", "stranger of postgres"),
    ] {
        let (observer, reached) = telling("catch-up");
        let speaking = async {
            reached.notified().await;
            let other = connect(port, "stranger").await;
            other.batch_execute(statement).await.expect("it is not harmed");
            other
        };
        let (ended, other) = tokio::join!(run(&options, observer), speaking);
        let failure = ended.unwrap_err();
        assert!(matches!(&failure.error, Error::Capture(told) if told.contains(why)), "{failure:?}");
        assert_eq!(failure.state, State::OnSource);
        client.batch_execute(write).await.expect("clients go on");
        drop(other);
        shop.bench.assert_clean("shop");
    }
    for fault in [FaultPoint::after("rows"), FaultPoint::after("catch-up"), FaultPoint::after("drain")] {
        let options = Options { faults: Faults::none().failing(fault.clone()), ..options.clone() };
        let failure = run(&options, observer().0).await.unwrap_err();
        assert!(matches!(failure.error, Error::Fault(_)), "{fault:?}: {failure:?}");
        assert_eq!(failure.state, State::OnSource, "{fault:?}");
        client.batch_execute(write).await.expect("clients go on");
        shop.bench.assert_clean("shop");
    }
    assert_eq!(shop.bench.source.sql("shop", "SELECT stock FROM item WHERE id = 1"), "6");
}

/// Variable with source, target, control socket and state, for the process that [`a_killed_run_starts_again`] starts.
const TOLD: &str = "STILLPOINT_TEST_MOVES";

/// Moves in a process of its own, which is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn moves_when_it_is_told_to() {
    let Ok(told) = std::env::var(TOLD) else { return };
    let [source, target, proxy, state] = told.split('\n').collect::<Vec<_>>()[..] else { panic!("{told}") };
    let server = |side, place| Server::parse(side, place, None).expect("a connection string");
    let mut options =
        Options::new(server("source", source), server("target", target), PathBuf::from(proxy), PathBuf::from(state));
    (options.capture, options.share) = (Some(Capture::Statements), 0.0);
    let observer: Observer = Arc::new(|event: Event| eprintln!("{:?}", event.kind));
    run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_run_starts_again() {
    if !available() {
        return;
    }
    let shop = Shop::open(Schedule::Lsir);
    let mut loads = shop.busy(DEPENDS);
    let places = [shop.bench.source.conninfo("shop"), shop.bench.target.conninfo("shop")];
    let paths = [&shop.options.proxy, &shop.options.state].map(|path| path.to_str().expect("a path").to_owned());
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["engine::statements::moves_when_it_is_told_to", "--exact", "--nocapture"])
        .env(TOLD, [places, paths].concat().join("\n"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("run this program");
    let lines = BufReader::new(child.stderr.take().expect("piped")).lines();
    let reached = lines.map_while(Result::ok).inspect(|line| println!("child: {line}"));
    let reached = reached.into_iter().any(|line| line.contains("PhaseStarted") && line.contains("catch-up"));
    assert!(reached, "it ended before");
    tokio::time::sleep(Duration::from_millis(30)).await;
    child.kill().expect("kill it");
    child.wait().expect("it ends");
    assert!(loads.iter_mut().all(Load::running), "clients go on");
    let (observer, events) = observer();
    let outcome = run(&shop.options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    let restarts = |event: &Event| matches!(&event.kind, EventKind::Warning { text } if text.contains("starts again"));
    assert!(events.lock().expect("no test thread panicked").iter().any(restarts), "a capture ends with its follower");
    assert!(loads.iter_mut().all(Load::running), "clients went on");
    shop.both_sides_are_equal();
    shop.judge(loads, &shop.bench.target);
}
