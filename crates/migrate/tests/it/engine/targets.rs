//! Several targets: all are filled at the same time, one that fails is dropped, and the migration goes on.

use crate::engine::support;
use crate::engine::support::{Bench, observer, sums};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use stillpoint_events::{Event, EventKind, migrate};
use stillpoint_migrate_control as control;
use stillpoint_migrate_engine::{
    Error, Observer, Options, Outcome, Phase, Server, State, abort, check, fallback, finish, run, status,
};
use stillpoint_testing::postgresql::{Cluster, available};
use tokio_postgres::NoTls;

/// A bench with a second target, and load on the source.
fn bench() -> (Bench, Cluster) {
    let bench = Bench::start();
    let second = Cluster::start(&["wal_level=logical"]);
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.pgbench("shop", &["-i", "-s", "1", "-q"]);
    let load = bench.source.pgbench_load("shop", bench.source.port(), &["-n", "-c", "4", "-R", "100", "-T", "600"]);
    bench.fake_proxy.lock().unwrap().loads.push(load);
    (bench, second)
}

/// Full speed: these tests are not about the throttle.
fn options(bench: &Bench, second: &Cluster) -> Options {
    let second = Server::parse("target", &second.conninfo("shop"), None).unwrap();
    Options { others: vec![second], share: 0.0, ..bench.options("shop") }
}

/// Crashes a server once a phase begins.
fn crash_at(victim: Cluster, phase: &'static str) -> (Observer, Arc<Mutex<Vec<Event>>>) {
    let (told, events) = observer();
    let victim = Mutex::new(Some(victim));
    let observer: Observer = Arc::new(move |event| {
        if matches!(&event.kind, EventKind::PhaseStarted { phase: begun, .. } if begun == phase) {
            // A dropped server does not come back.
            victim.lock().unwrap().take().iter_mut().for_each(Cluster::crash);
        }
        told(event);
    });
    (observer, events)
}

/// Runs until a phase begins, and is killed then: dropped in the middle.
async fn killed_at(options: &Options, phase: &'static str) {
    let begun = Arc::new(tokio::sync::Notify::new());
    let told = Arc::clone(&begun);
    let observer: Observer = Arc::new(move |event| {
        if matches!(&event.kind, EventKind::PhaseStarted { phase: begun, .. } if begun == phase) {
            told.notify_one();
        }
    });
    tokio::select! {
        ended = run(options, observer) => panic!("{ended:?}"),
        () = begun.notified() => {}
    }
}

/// Phases in the order in which they began, without phases inside another phase.
fn phases(events: &Mutex<Vec<Event>>) -> Vec<String> {
    let name = |event: &Event| match &event.kind {
        EventKind::PhaseStarted { phase, .. } => Some(phase.clone()),
        _ => None,
    };
    events.lock().unwrap().iter().filter_map(name).collect()
}

fn dropped(events: &Mutex<Vec<Event>>) -> Vec<String> {
    let name = |event: &Event| match &event.kind {
        EventKind::Migrate(migrate::Event::TargetDropped { target, .. }) => Some(target.clone()),
        _ => None,
    };
    events.lock().unwrap().iter().filter_map(name).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_is_dropped_when_it_dies_and_the_first_takes_the_clients() {
    if !available() {
        return;
    }
    let (bench, second) = bench();
    let options = options(&bench, &second);
    let (observer, events) = crash_at(second, "catch-up, target 2");
    let outcome = run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert_eq!(dropped(&events), [options.others[0].to_string()]);
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
    let record = status(&options).await.unwrap().record.expect("the migration is not finished");
    assert_eq!(record.target, options.target.to_string());
    let reason = record.others[0].dropped.as_deref();
    assert!(reason.is_some_and(|reason| reason.contains("target")), "{reason:?}");
    assert_eq!(bench.source.sql("postgres", "SELECT count(*) FROM pg_replication_slots"), "0");
    fallback(&options, support::observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    bench.assert_clean("shop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_takes_the_place_of_the_first() {
    if !available() {
        return;
    }
    let (bench, second) = bench();
    let options = options(&bench, &second);
    let Bench { source, target, dir, fake_proxy } = bench;
    // Both targets are being copied.
    let (observer, events) = crash_at(target, "copy, target 2");
    let outcome = run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert_eq!(dropped(&events), [options.target.to_string()]);
    assert_eq!(phases(&events).iter().filter(|phase| phase.starts_with("snapshot")).count(), 2, "no second copy");
    assert_eq!(fake_proxy.lock().unwrap().serving.1, second.port());
    source.sql("postgres", "ALTER DATABASE shop ALLOW_CONNECTIONS true");
    assert_eq!(sums(&source, "shop"), sums(&second, "shop"));
    let told = status(&options).await.unwrap();
    let record = told.record.expect("the migration is not finished");
    assert_eq!((record.target, record.phase), (options.others[0].to_string(), Phase::Switched));
    assert_eq!(told.serving, Some("target"));
    finish(&options).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(source.sql("postgres", "SELECT count(*) FROM pg_replication_slots"), "0");
    drop(dir);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_to_which_no_client_goes_are_emptied_again() {
    if !available() {
        return;
    }
    let (bench, second) = bench();
    let options = options(&bench, &second);
    let (observer, events) = observer();
    run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(dropped(&events), [""; 0]);
    let ended = |event: &Event| matches!(&event.kind, EventKind::PhaseEnded { phase, .. } if phase == "copy");
    let of_second = |event: &Event| matches!(&event.kind, EventKind::PhaseStarted { .. }) && event.target == Some(2);
    let events: Vec<Event> = events.lock().unwrap().clone();
    assert!(events.iter().position(of_second) < events.iter().position(ended), "both at the same time");
    let told = |target| {
        events
            .iter()
            .any(|e| e.target == target && matches!(e.kind, EventKind::Migrate(migrate::Event::Following { .. })))
    };
    assert!(told(None) && told(Some(2)), "it is told of each how far it is");
    let others = status(&options).await.unwrap().record.expect("the migration is not finished").others;
    assert!(!others[0].made_database && !others[0].is_following(), "{others:?}");
    let slots = bench.source.sql("postgres", "SELECT count(*) FROM pg_replication_slots");
    assert_eq!(slots, "0", "the source keeps nothing for any of them");
    let there = "SELECT count(*) FROM pg_database WHERE datname = 'shop'";
    assert_eq!((bench.target.sql("postgres", there), second.sql("postgres", there)), ("1".into(), "0".into()));
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_that_was_killed_is_taken_away_from_all() {
    if !available() {
        return;
    }
    let (bench, second) = bench();
    let options = options(&bench, &second);
    killed_at(&options, "catch-up, target 2").await;
    assert_eq!(abort(&options).await.unwrap_or_else(|failure| panic!("{failure:?}")), State::OnSource);
    bench.assert_clean("shop");
    assert_eq!(second.sql("postgres", "SELECT count(*) FROM pg_database WHERE datname = 'shop'"), "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_that_was_killed_in_the_copy_starts_again() {
    if !available() {
        return;
    }
    let (bench, second) = bench();
    let options = options(&bench, &second);
    killed_at(&options, "indexes").await;
    let record = status(&options).await.unwrap().record.expect("a journal is left");
    assert_eq!(record.phase, Phase::Copying);
    let (observer, events) = observer();
    let outcome = run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    let phases = phases(&events);
    for copied in ["snapshot", "snapshot, target 2"] {
        assert!(phases.iter().any(|phase| phase == copied), "{copied}: {phases:?}");
    }
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
    assert_eq!(second.sql("postgres", "SELECT count(*) FROM pg_database WHERE datname = 'shop'"), "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_that_was_killed_when_all_follow_goes_on_with_all() {
    if !available() {
        return;
    }
    let (bench, second) = bench();
    let options = options(&bench, &second);
    killed_at(&options, "prepare").await;
    let told = status(&options).await.unwrap();
    let record = told.record.as_ref().expect("a journal is left");
    assert!(record.phase == Phase::Following && record.others[0].is_following(), "{record:?}");
    assert!(told.kept_bytes.is_some() && told.kept_for_others.contains_key(&record.others[0].server), "{told:?}");
    assert!(told.orphans.is_empty(), "{told:?}");
    let Bench { source, target, dir, fake_proxy } = bench;
    // The second target alone could not be copied again before the switch: that would take a snapshot.
    let (observer, events) = crash_at(target, "switch-over");
    let outcome = run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert_eq!(dropped(&events), [options.target.to_string()]);
    assert!(!phases(&events).iter().any(|phase| phase.starts_with("snapshot")), "{:?}", phases(&events));
    assert_eq!(fake_proxy.lock().unwrap().serving.1, second.port());
    source.sql("postgres", "ALTER DATABASE shop ALLOW_CONNECTIONS true");
    assert_eq!(sums(&source, "shop"), sums(&second, "shop"));
    drop(dir);
}

/// Crashes a server while its future clients are stopped: a transaction begins when the switch-over begins, and ends
/// when the server is gone.
struct Crash {
    victim: Cluster,
    port: u16,
    control: PathBuf,
}

impl Crash {
    /// Begins a transaction on request, crashes the server in the pause, and returns the result of the commit.
    fn in_the_pause(mut self, begin: mpsc::Receiver<()>, begun: mpsc::Sender<()>) -> Result<(), String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let conninfo = format!("host=127.0.0.1 port={} user=postgres dbname=shop", self.port);
            let (client, connection) = tokio_postgres::connect(&conninfo, NoTls).await.expect("connect");
            tokio::spawn(connection);
            begun.send(()).expect("the test waits");
            // Nothing else runs in this thread.
            begin.recv().expect("it comes to a switch-over");
            client.batch_execute("BEGIN; INSERT INTO held VALUES (1)").await.expect("a transaction");
            begun.send(()).expect("the test waits");
            let mut asking = control::Client::connect(&self.control).await.expect("the proxy's control socket");
            loop {
                let reply = asking.ask(&control::Request::Status).await.expect("an answer");
                let control::Reply::Status(status) = reply else { panic!("{reply:?}") };
                if status.tenants.iter().any(|tenant| tenant.phase == control::Phase::Paused) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            self.victim.crash();
            client.batch_execute("COMMIT").await.map_err(|error| error.to_string())
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_stay_when_the_first_fails_in_the_pause_and_go_to_the_next() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    let second = Cluster::start(&["wal_level=logical"]);
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.pgbench("shop", &["-i", "-s", "1", "-q"]);
    bench.source.sql("shop", "CREATE TABLE held (n int PRIMARY KEY)");
    let (port, control) = support::proxy(bench.dir.path(), &bench.source);
    let options = Options { proxy: control.clone(), ..options(&bench, &second) };
    let Bench { source, target, dir, .. } = bench;
    let mut load = source.pgbench_load("shop", port, &["-n", "-c", "4", "-T", "600", "-R", "200", "-M", "prepared"]);
    let ((begin, to_begin), (begun, has_begun)) = (mpsc::channel(), mpsc::channel());
    let crash = Crash { victim: target, port, control };
    let held = std::thread::spawn(move || crash.in_the_pause(to_begin, begun));
    has_begun.recv().expect("it connects");
    let (told, events) = observer();
    let has_begun = Mutex::new(has_begun);
    let observer: Observer = Arc::new(move |event| {
        let first = matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "switch-over");
        told(event);
        if first {
            begin.send(()).expect("the client waits");
            has_begun.lock().unwrap().recv().expect("its transaction begins");
        }
    });
    let outcome = run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert_eq!(held.join().expect("the client's thread"), Ok(()), "it stays on the source, and commits there");
    assert_eq!(dropped(&events), [options.target.to_string()]);
    let phases = phases(&events);
    assert_eq!(phases.iter().filter(|phase| phase.starts_with("snapshot")).count(), 2, "no second copy: {phases:?}");
    assert_eq!(phases.iter().filter(|phase| phase.starts_with("switch-over")).count(), 2, "{phases:?}");
    assert!(load.running(), "the load was there all the time");
    let done = load.stop();
    assert!(done.success && done.failed == 0, "{}", done.text);
    let history = "SELECT count(*) FROM pgbench_history";
    assert_eq!(second.sql("shop", history), done.transactions.to_string(), "every commit exactly once");
    assert_eq!(second.sql("shop", "SELECT count(*) FROM held"), "1");
    finish(&options).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(source.sql("postgres", "SELECT count(*) FROM pg_replication_slots"), "0");
    drop(dir);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_target_that_will_not_do_is_refused() {
    if !available() {
        return;
    }
    let (bench, second) = bench();
    second.sql("postgres", "CREATE DATABASE shop");
    let options = options(&bench, &second);
    let refusals = check(&options).await.unwrap().refusals().join("\n");
    assert!(refusals.contains(&options.others[0].to_string()), "it is named: {refusals}");
    assert!(refusals.contains("already exists on the target"), "{refusals}");
    let failure = run(&options, support::observer().0).await.unwrap_err();
    assert!(matches!(failure.error, Error::Refused(_)) && failure.state == State::Untouched, "{failure:?}");
    let twice = Options { others: vec![options.target.clone()], ..options.clone() };
    let refusals = check(&twice).await.unwrap().refusals().join("\n");
    assert!(refusals.contains("same cluster as another target"), "{refusals}");
}
