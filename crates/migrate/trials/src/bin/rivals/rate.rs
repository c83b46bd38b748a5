//! How fast a target repeats what has been committed while it did not follow.

use crate::native;
use crate::{Raw, cluster, spread};
use rustix::process::Signal;
use std::time::Instant;
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_testbed::Cluster;
use stillpoint_migrate_trials::Stage;

const SCALE: &str = "10";
/// Transactions to catch up with, of pgbench's own kind: three updates and an insert each.
const BACKLOG: u64 = 200_000;
const LOAD: [&str; 7] = ["-n", "-c", "8", "-j", "2", "-t", "25000"];

pub(crate) fn measure(rounds: usize) -> Raw {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        ours.push(stillpoint());
        theirs.push(rival());
    }
    println!("## Catching up with {BACKLOG} transactions, no load meanwhile\n");
    println!("| | transactions a second |");
    println!("|---|---|");
    println!("| stillpoint migrate, 4 players | {} |", median(&ours));
    println!("| logical replication, one worker | {} |", median(&theirs));
    println!("\nMedian of {rounds}, in turns; both with synchronous_commit=off at the target.\n");
    vec![("transactions a second, stillpoint".into(), ours), ("transactions a second, native".into(), theirs)]
}

fn median(rates: &[f64]) -> String {
    // The worst is the slowest here.
    let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
    let text = spread(rates);
    format!("{} (slowest {slowest:.0})", text.split(' ').next().unwrap_or_default())
}

fn fill(source: &Cluster) {
    source.pgbench("shop", &["-i", "-s", SCALE, "-q"]);
}

fn stillpoint() -> f64 {
    let stage = Stage::direct(cluster(), cluster());
    fill(&stage.source);
    let mut tool = stage.tool(&["run", "--share", "0"]);
    let begins = |wanted: &'static str| move |event: &Event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == wanted);
    assert!(tool.await_event(begins("indexes")), "it ended before: {:?}", tool.seen);
    // The snapshot is taken; everything from here on has to be repeated.
    tool.signal(Signal::STOP);
    stage.source.pgbench("shop", &LOAD);
    tool.signal(Signal::CONT);
    let ended = tool.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let took = ended.events.iter().find_map(|event| match &event.kind {
        EventKind::PhaseEnded { phase, duration_ns, .. } if phase == "catch-up" => Some(*duration_ns as f64 / 1e9),
        _ => None,
    });
    BACKLOG as f64 / took.expect("it caught up")
}

fn rival() -> f64 {
    let (source, target) = (cluster(), cluster());
    source.sql("postgres", "CREATE DATABASE shop");
    fill(&source);
    native::subscribe(&source, &target);
    target.sql("shop", "ALTER SUBSCRIPTION follower DISABLE");
    source.pgbench("shop", &LOAD);
    target.sql("shop", "ALTER SUBSCRIPTION follower ENABLE");
    let begun = Instant::now();
    native::await_target(&source);
    BACKLOG as f64 / begun.elapsed().as_secs_f64()
}
