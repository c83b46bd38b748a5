//! The throttle: a migration slows down while clients suffer, and speeds up when they do not.

use crate::engine::support::{Bench, FakeClients};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use stillpoint_events::{EventKind, migrate};
use stillpoint_migrate_engine::{Observer, Outcome, run};
use stillpoint_testing::postgresql::available;

/// Statements a second of clients, and microseconds for each.
type Fare = (f64, u64);

const USUAL: Fare = (1000.0, 3000);
/// Bytes a second at which clients recover.
const BEARABLE: u64 = 11 << 20;
/// Rows of one kilobyte: enough for the rate to fall below that, and to rise again.
const ROWS: u32 = 220_000;

#[tokio::test]
async fn rows_are_copied_no_faster_than_throughput_bears() {
    copied_with_care((400.0, 3000)).await;
}

#[tokio::test]
async fn rows_are_copied_no_faster_than_waits_bear() {
    copied_with_care((1000.0, 40_000)).await;
}

async fn copied_with_care(suffering: Fare) {
    let Some(rates) = copied(move |bytes_per_s| if bytes_per_s > BEARABLE { suffering } else { USUAL }).await else {
        return;
    };
    let lowest = rates.iter().position(|rate| *rate <= BEARABLE).expect("slower while they suffer");
    assert!(rates[lowest..].windows(2).any(|pair| pair[1] > pair[0]), "faster when they do not: {rates:?}");
}

/// A table whose index takes a while for each row.
const SLOW: &str = "
    CREATE FUNCTION slow(i int) RETURNS int IMMUTABLE LANGUAGE plpgsql
        AS $$ BEGIN PERFORM pg_catalog.pg_sleep(0.1); RETURN i; END $$;
    CREATE TABLE t (id int PRIMARY KEY);
    INSERT INTO t SELECT generate_series(1, 30);
    CREATE INDEX slowly ON t (slow(id));
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn indexes_are_made_with_less_weight_than_clients_have() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.sql("shop", SLOW);
    bench.fake_proxy.lock().unwrap().clients = Some(FakeClients::at(USUAL.0, USUAL.1));
    let (fake_proxy, weights) = (Arc::clone(&bench.fake_proxy), Arc::new(Mutex::new(Vec::new())));
    let (bench, over) = (Arc::new(bench), Arc::new(AtomicBool::new(false)));
    let (looking, ended) = (Arc::clone(&bench), Arc::clone(&over));
    let nices = std::thread::spawn(move || {
        let mut nices = Vec::new();
        while !ended.load(Ordering::Acquire) {
            let makes = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX slowly%' AND state = 'active'";
            nices.extend(looking.target.sql("postgres", makes).lines().filter_map(niceness));
            std::thread::sleep(Duration::from_millis(50));
        }
        nices
    });
    let told = Arc::clone(&weights);
    let observer: Observer = Arc::new(move |event| {
        println!("{:?}", event.kind);
        let go_at = |rate, wait| fake_proxy.lock().unwrap().clients.as_mut().expect("some").go_at(rate, wait);
        match event.kind {
            EventKind::PhaseStarted { phase, .. } if phase == "indexes" => go_at(400.0, 30_000),
            EventKind::PhaseEnded { phase, .. } if phase == "statistics" => go_at(USUAL.0, USUAL.1),
            EventKind::Migrate(migrate::Event::Yielding { weight_percent, .. }) => {
                told.lock().unwrap().push(weight_percent)
            }
            _ => {}
        }
    });
    let outcome = run(&bench.options("shop"), observer).await;
    over.store(true, Ordering::Release);
    let (nices, weights) = (nices.join().expect("the observer"), weights.lock().unwrap());
    assert!(matches!(outcome, Ok(Outcome::Switched { .. })), "{outcome:?}");
    assert!(weights.iter().any(|weight| *weight < 30), "less, as clients suffer: {weights:?}");
    assert!(nices.iter().any(|nice| *nice > 5), "by its nice value: {nices:?}");
}

/// Nice values of the command's sessions at the target.
fn ours(bench: &Bench) -> Vec<i32> {
    let which = "SELECT pid FROM pg_stat_activity WHERE application_name = 'stillpoint migrate' AND datname = 'shop'";
    bench.target.sql("postgres", which).lines().filter_map(niceness).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_follow_have_less_weight_than_clients_until_a_pause_may_wait_for_them() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.fill_big(1000);
    bench.fake_proxy.lock().unwrap().clients = Some(FakeClients::at(USUAL.0, USUAL.1));
    let (bench, seen) = (Arc::new(bench), Arc::new(Mutex::new((Vec::new(), Vec::new()))));
    let (looking, noted) = (Arc::clone(&bench), Arc::clone(&seen));
    let observer: Observer = Arc::new(move |event| {
        let EventKind::PhaseStarted { phase, .. } = event.kind else { return };
        match phase.as_str() {
            "compare" => {
                let end = Instant::now() + Duration::from_secs(60);
                // At least the apply workers.
                let weighed =
                    || Some(ours(&looking)).filter(|nices| nices.iter().filter(|nice| **nice > 0).count() >= 4);
                let nices = std::iter::repeat_with(weighed).find(|nices| nices.is_some() || Instant::now() > end);
                noted.lock().unwrap().0 = nices.flatten().unwrap_or_default();
            }
            "switch-over" => noted.lock().unwrap().1 = ours(&looking),
            _ => {}
        }
    });
    let outcome = run(&bench.options("shop"), observer).await;
    assert!(matches!(outcome, Ok(Outcome::Switched { .. })), "{outcome:?}");
    let (following, switching) = &*seen.lock().unwrap();
    assert!(following.contains(&15), "{following:?}");
    assert!(switching.len() >= 4 && switching.iter().all(|nice| *nice == 0), "{switching:?}");
}

/// Nice value of a process, if it still exists.
fn niceness(pid: &str) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(16)?.parse().ok()
}

/// Migrates beside clients whose load depends on the copied bytes a second; returns the rates that the copy was
/// allowed.
async fn copied(fare: impl Fn(u64) -> Fare + Send + Sync + 'static) -> Option<Vec<u64>> {
    if !available() {
        return None;
    }
    let bench = Bench::start();
    bench.fill_big(ROWS);
    bench.fake_proxy.lock().unwrap().clients = Some(FakeClients::at(USUAL.0, USUAL.1));
    let (fake_proxy, rates) = (Arc::clone(&bench.fake_proxy), Arc::new(Mutex::new((true, Vec::new()))));
    let told = Arc::clone(&rates);
    let observer: Observer = Arc::new(move |event| {
        println!("{:?}", event.kind);
        let go_at =
            |(rate, wait)| fake_proxy.lock().unwrap().clients.iter_mut().for_each(|clients| clients.go_at(rate, wait));
        match event.kind {
            EventKind::Migrate(migrate::Event::Copying { bytes_per_s, .. }) => go_at(fare(bytes_per_s)),
            EventKind::PhaseStarted { phase, .. } if phase == "indexes" => {
                go_at(USUAL);
                told.lock().unwrap().0 = false;
            }
            EventKind::Migrate(migrate::Event::Throttled { allowed_per_s, .. }) => {
                let (copies, rates) = &mut *told.lock().unwrap();
                if *copies {
                    rates.push(allowed_per_s);
                }
            }
            _ => {}
        }
    });
    let outcome = run(&bench.options("shop"), observer).await;
    assert!(matches!(outcome, Ok(Outcome::Switched { .. })), "{outcome:?}");
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
    Some(std::mem::take(&mut rates.lock().unwrap().1))
}
