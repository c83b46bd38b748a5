//! Rate at which a target repeats commits that were made while it did not follow.

use crate::native;
use crate::{Raw, Size, against, cluster, of_rounds, spread};
use rustix::process::Signal;
use std::time::Instant;
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_tests::Testbed;
use stillpoint_testing::postgresql::Cluster;

/// Clients that make the backlog, by transactions of pgbench's own kind: three updates and an insert each.
const CLIENTS: u32 = 8;

impl Size {
    fn backlog(&self) -> u32 {
        CLIENTS * self.backlog_each
    }

    fn make_backlog(&self, source: &Cluster) {
        let (clients, each) = (CLIENTS.to_string(), self.backlog_each.to_string());
        // No commit waits for the disk: the number of commits counts, not their speed.
        source.sql("postgres", "ALTER ROLE postgres SET synchronous_commit = off");
        source.pgbench("shop", &["-n", "-c", &clients, "-j", "2", "-t", &each]);
        source.sql("postgres", "ALTER ROLE postgres RESET synchronous_commit");
    }
}

pub(crate) fn measure(size: &Size, rounds: usize) -> Raw {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        ours.push(stillpoint(size));
        theirs.push(rival(size));
    }
    println!("## Catching up with {} transactions, no load meanwhile\n", size.backlog());
    println!("| | transactions a second | stillpoint / this |");
    println!("|---|---|---|");
    println!("| stillpoint migrate, 4 players | {} | |", spread(&ours));
    println!("| logical replication, one worker | {} | {} |", spread(&theirs), against(&ours, &theirs));
    println!("\n{}; both with synchronous_commit=off at the target.\n", of_rounds(rounds));
    vec![("transactions a second, stillpoint".into(), ours), ("transactions a second, native".into(), theirs)]
}

fn fill(size: &Size, source: &Cluster) {
    source.pgbench("shop", &["-i", "-s", size.scale, "-q"]);
}

fn stillpoint(size: &Size) -> f64 {
    let testbed = Testbed::direct(cluster(), cluster());
    fill(size, &testbed.source);
    let mut tool = testbed.tool(&["run", "--share", "0"]);
    let begins = |wanted: &'static str| move |event: &Event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == wanted);
    assert!(tool.await_event(begins("indexes")), "it ended before: {:?}", tool.seen);
    // The snapshot is taken; everything from here on has to be repeated.
    tool.signal(Signal::STOP);
    size.make_backlog(&testbed.source);
    tool.signal(Signal::CONT);
    let ended = tool.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let took = ended.events.iter().find_map(|event| match &event.kind {
        EventKind::PhaseEnded { phase, duration_ns, .. } if phase == "catch-up" => Some(*duration_ns as f64 / 1e9),
        _ => None,
    });
    f64::from(size.backlog()) / took.expect("it caught up")
}

fn rival(size: &Size) -> f64 {
    let (source, target) = (cluster(), cluster());
    source.sql("postgres", "CREATE DATABASE shop");
    fill(size, &source);
    native::subscribe(&source, &target);
    target.sql("shop", "ALTER SUBSCRIPTION follower DISABLE");
    size.make_backlog(&source);
    target.sql("shop", "ALTER SUBSCRIPTION follower ENABLE");
    let begun = Instant::now();
    native::await_target(&source);
    f64::from(size.backlog()) / begun.elapsed().as_secs_f64()
}
