//! Several targets: one that fails is dropped, and the migration goes on.

mod support;

use std::sync::{Arc, Mutex};
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_engine::{
    Error, Observer, Options, Outcome, Phase, Server, State, abort, check, fallback, finish, run, status,
};
use stillpoint_migrate_testbed::{Cluster, available};
use support::{Bench, observer, sums};

/// A bench with a second target, and load on the source.
fn bench() -> (Bench, Cluster) {
    let bench = Bench::start();
    let second = Cluster::start(&["wal_level=logical"]);
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.pgbench("shop", &["-i", "-s", "1", "-q"]);
    let load = bench.source.pgbench_load("shop", bench.source.port(), &["-n", "-c", "4", "-R", "100", "-T", "600"]);
    bench.front.lock().unwrap().load = Some(load);
    (bench, second)
}

/// Quick: what is tested here is not the throttle.
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
            // Dropped, it does not come back.
            victim.lock().unwrap().take().iter_mut().for_each(Cluster::crash);
        }
        told(event);
    });
    (observer, events)
}

fn dropped(events: &Mutex<Vec<Event>>) -> Vec<String> {
    let name = |event: &Event| match &event.kind {
        EventKind::TargetDropped { target, .. } => Some(target.clone()),
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
    let Bench { source, target, dir, front } = bench;
    let (observer, events) = crash_at(target, "copy, target 2");
    let outcome = run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    assert_eq!(dropped(&events), [options.target.to_string()]);
    assert_eq!(front.lock().unwrap().serving.1, second.port());
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
async fn those_to_which_nobody_goes_are_emptied_again() {
    if !available() {
        return;
    }
    let (bench, second) = bench();
    let options = options(&bench, &second);
    let (observer, events) = observer();
    run(&options, observer).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(dropped(&events), [""; 0]);
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
    let begun = Arc::new(tokio::sync::Notify::new());
    let told = Arc::clone(&begun);
    let observer: Observer = Arc::new(move |event| {
        if matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "catch-up, target 2") {
            told.notify_one();
        }
    });
    tokio::select! {
        ended = run(&options, observer) => panic!("{ended:?}"),
        // Dropped in the middle, as if the process had been killed.
        () = begun.notified() => {}
    }
    assert_eq!(abort(&options).await.unwrap_or_else(|failure| panic!("{failure:?}")), State::OnSource);
    bench.assert_clean("shop");
    assert_eq!(second.sql("postgres", "SELECT count(*) FROM pg_database WHERE datname = 'shop'"), "0");
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
    assert!(refusals.contains("exists on the target already"), "{refusals}");
    let failure = run(&options, support::observer().0).await.unwrap_err();
    assert!(matches!(failure.error, Error::Refused(_)) && failure.state == State::Untouched, "{failure:?}");
    let twice = Options { others: vec![options.target.clone()], ..options.clone() };
    let refusals = check(&twice).await.unwrap().refusals().join("\n");
    assert!(refusals.contains("same cluster as another target"), "{refusals}");
}
