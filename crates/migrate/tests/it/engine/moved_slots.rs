//! Slots of other readers: nothing that clients commit is missing for a reader that changes sides after them.

use crate::engine::support::{Bench, observer};
use std::collections::BTreeSet;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_migrate_engine::{Error, Observer, Options, Outcome, State, check, run};
use stillpoint_testing::postgresql::{Cluster, available};

/// A reader that writes what it receives into a file, as `pg_recvlogical` does.
struct Reader {
    child: Child,
    file: std::path::PathBuf,
}

impl Reader {
    fn of(cluster: &Cluster) -> Reader {
        let file = cluster.socket_dir().join("received");
        let mut command = cluster.client("pg_recvlogical");
        command
            .args(["-d", "shop", "-S", "feed", "--start", "-n", "-s", "1", "-o", "skip-empty-xacts=1", "-f"])
            .arg(&file);
        Reader { child: command.stderr(Stdio::inherit()).spawn().unwrap(), file }
    }

    /// Numbers of the rows that it has received.
    fn received(&self) -> BTreeSet<u64> {
        let text = std::fs::read_to_string(&self.file).unwrap_or_default();
        let numbers =
            text.lines().filter_map(|line| line.split("table public.told: INSERT: id[integer]:").nth(1)?.parse().ok());
        numbers.collect()
    }

    fn end(mut self) -> BTreeSet<u64> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.received()
    }
}

fn bench() -> Arc<Bench> {
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql("shop", "CREATE TABLE told (id int PRIMARY KEY)");
    bench.source.sql("shop", "SELECT pg_create_logical_replication_slot('feed', 'test_decoding')");
    Arc::new(bench)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_follows_the_clients_misses_nothing() {
    if !available() {
        return;
    }
    let bench = bench();
    let options = Options { share: 0.0, move_slots: true, ..bench.options("shop") };
    let over = Arc::new(AtomicBool::new(false));
    let first = Reader::of(&bench.source);
    let writer = std::thread::spawn({
        let (bench, over) = (Arc::clone(&bench), Arc::clone(&over));
        move || {
            let mut written = BTreeSet::new();
            for id in 1..u64::MAX {
                // The stand-in for the proxy holds no client: this one changes sides by itself.
                let on_target = bench.fake_proxy.lock().unwrap().serving.1 == bench.target.port();
                let cluster = if on_target { &bench.target } else { &bench.source };
                if over.load(Relaxed) {
                    break;
                }
                if cluster.try_sql("shop", &format!("INSERT INTO told VALUES ({id})")).is_ok() {
                    written.insert(id);
                }
            }
            written
        }
    });
    let (observer, events) = observer();
    let outcome = run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    let made =
        |kind: &EventKind| matches!(kind, EventKind::Migrate(migrate::Event::SlotMade { slot, .. }) if slot == "feed");
    assert!(events.lock().unwrap().iter().any(|event| made(&event.kind)));
    let mut received = first.end();
    let second = Reader::of(&bench.target);
    over.store(true, Relaxed);
    let written = writer.join().unwrap();
    let begun = std::time::Instant::now();
    loop {
        received.extend(second.received());
        if received.is_superset(&written) {
            break;
        }
        let missing: Vec<_> = written.difference(&received).take(5).collect();
        assert!(begun.elapsed() < Duration::from_secs(30), "of {} it misses {missing:?}", written.len());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(written.len() > 20 && received.len() == written.len(), "{} of {}", received.len(), written.len());
    second.end();
}

/// Without a reader the target's slot would begin after changes that the source's has not given away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_stay_when_a_reader_does_not_follow() {
    if !available() {
        return;
    }
    let bench = bench();
    bench.source.sql("shop", "INSERT INTO told VALUES (1)");
    let options =
        Options { share: 0.0, move_slots: true, prepare_limit: Duration::from_millis(300), ..bench.options("shop") };
    let failure = run(&options, observer().0).await.unwrap_err();
    let told = failure.to_string();
    assert!(told.contains("slot feed") && told.contains("no reader is connected"), "{told}");
    assert!(matches!(&failure.error, Error::TimedOut { .. }), "{failure:?}");
    assert_eq!(failure.state, State::OnSource);
    assert_eq!(bench.target.sql("postgres", "SELECT count(*) FROM pg_replication_slots"), "0");
    assert_eq!(bench.target.sql("postgres", "SELECT count(*) FROM pg_database WHERE datname = 'shop'"), "0");
    // The slot of another user is not touched.
    bench.target.sql("postgres", "SELECT pg_create_logical_replication_slot('feed', 'test_decoding')");
    bench.source.sql("shop", "SELECT pg_drop_replication_slot('feed')");
    // It appears after the check.
    let late = std::sync::Once::new();
    let making = Arc::clone(&bench);
    let observer: Observer = Arc::new(move |event: Event| {
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "compare") {
            late.call_once(|| {
                making.source.sql("shop", "SELECT pg_create_logical_replication_slot('feed', 'test_decoding')");
            });
        }
    });
    let failure = run(&options, observer).await.unwrap_err();
    assert!(failure.to_string().contains("the target has a slot of this name"), "{failure:?}");
    assert_eq!(
        bench.target.sql("postgres", "SELECT database FROM pg_replication_slots"),
        "postgres",
        "it is left alone"
    );
    let report = check(&options).await.unwrap();
    let found = report.findings.iter().find(|finding| finding.kind == "replication slot").unwrap();
    assert!(found.note.contains("has a slot of this name"), "{found:?}");
    let report = check(&Options { move_slots: false, ..options }).await.unwrap();
    let found = report.findings.iter().find(|finding| finding.kind == "replication slot").unwrap();
    assert!(found.note.contains("--move-slots"), "{found:?}");
}
