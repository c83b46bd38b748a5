//! The longest wait of any of 64 clients for an answer while the database changed servers.

use crate::native::{self, Pgbouncer};
use crate::pgbench::{Answer, answers, now_s};
use crate::phases::{Phases, percentile};
use crate::{Raw, Size, against, cluster, of_rounds, spread};
use std::collections::BTreeSet;
use std::time::Duration;
use stillpoint_events::{EventKind, migrate};
use stillpoint_migrate_tests::Testbed;
use stillpoint_testing::postgresql::{Cluster, Load};

/// Sessions, and transactions a second of all together: the machine is not fully loaded.
const SESSIONS: u32 = 64;
const LOAD: [&str; 10] = ["-n", "-l", "-c", "64", "-j", "2", "-R", "400", "-T", "600"];
/// Seconds in which each session has asked again; together they ask some six times a second each.
const AFTER_S: f64 = 3.0;
/// Time before and after the switch-over, for comparison.
const SETTLE_TIME: Duration = Duration::from_secs(4);

/// One switch-over, as clients saw it.
struct ClientReport {
    /// The longest latency from a transaction's due time, in ms, around the switch-over.
    gap_ms: f64,
    /// The 99th percentile of all the others, in ms.
    p99_ms: f64,
    /// Sessions that failed before the end.
    failed: u64,
    /// Pause that the tool itself reported, in ms.
    paused_ms: Option<f64>,
    /// Phases: name, duration in seconds, and the latencies of answers during it.
    phases: Vec<(String, f64, Vec<f64>)>,
}

pub(crate) fn measure(size: &Size, rounds: usize) -> Raw {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        ours.push(stillpoint(size));
        if native::available() {
            theirs.push(rival(size));
        }
    }
    println!("## Switch-over: 64 sessions, 400 transactions a second\n");
    println!(
        "| | longest gap of any client, ms | stillpoint / this | pause by its own account, ms | p99 otherwise, ms | failed |"
    );
    println!("|---|---|---|---|---|---|");
    let gaps = |seen: &[ClientReport]| seen.iter().map(|seen| seen.gap_ms).collect::<Vec<_>>();
    let p99s = |seen: &[ClientReport]| seen.iter().map(|seen| seen.p99_ms).collect::<Vec<_>>();
    let times = against(&gaps(&ours), &gaps(&theirs));
    for (name, times, seen) in
        [("stillpoint migrate", "", &ours), ("logical replication + pgbouncer", &times[..], &theirs)]
    {
        let failed: u64 = seen.iter().map(|seen| seen.failed).sum();
        let paused: Vec<f64> = seen.iter().filter_map(|seen| seen.paused_ms).collect();
        let (gap, paused, p99) = (spread(&gaps(seen)), spread(&paused), spread(&p99s(seen)));
        println!("| {name} | {gap} | {times} | {paused} | {p99} | {failed} |");
    }
    println!("\n{}. A gap counts from when a transaction was due to its answer.\n", of_rounds(rounds));
    print_phases(&ours);
    vec![
        ("gap_ms, stillpoint".into(), gaps(&ours)),
        ("gap_ms, native and pgbouncer".into(), gaps(&theirs)),
        ("p99_ms otherwise, stillpoint".into(), p99s(&ours)),
        ("p99_ms otherwise, native and pgbouncer".into(), p99s(&theirs)),
    ]
}

/// Prints the effect of each phase on clients, over all rounds.
fn print_phases(seen: &[ClientReport]) {
    println!("| phase of `stillpoint migrate run` | took, s | p50, ms | p99, ms | longest, ms |");
    println!("|---|---|---|---|---|");
    for (phase, ..) in seen.first().map(|first| &first.phases[..]).unwrap_or_default() {
        let of = || seen.iter().flat_map(|seen| &seen.phases).filter(|(name, ..)| name == phase);
        let all: Vec<f64> = of().flat_map(|(.., latencies)| latencies).copied().collect();
        let took: Vec<f64> = of().map(|(_, took, _)| *took).collect();
        let [took, longest] = [percentile(&took, 50), percentile(&all, 100)];
        println!("| {phase} | {took:.1} | {:.0} | {:.0} | {longest:.0} |", percentile(&all, 50), percentile(&all, 99));
    }
    println!();
}

fn stillpoint(size: &Size) -> ClientReport {
    let testbed = Testbed::direct(cluster(), cluster());
    testbed.source.pgbench("shop", &["-i", "-s", size.scale, "-q"]);
    let load = testbed.source.pgbench_load("shop", testbed.port(), &[&LOAD[..], &["-M", "simple"]].concat());
    std::thread::sleep(SETTLE_TIME);
    let mut tool = testbed.tool(&["run"]);
    let switches = |event: &stillpoint_events::Event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "switch-over");
    assert!(tool.await_event(switches), "it ended before the switch-over: {:?}", tool.seen);
    let at = now_s();
    let ended = tool.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let paused = ended.events.iter().find_map(|event| match event.kind {
        EventKind::Migrate(migrate::Event::SwitchedOver { paused_us, .. }) => Some(paused_us as f64 / 1e3),
        _ => None,
    });
    // It holds only the output that STILLPOINT_LOG asked for.
    eprint!("{}", ended.complaints);
    std::thread::sleep(SETTLE_TIME);
    let seen = client_report(&testbed.source, load, at);
    let phases = Phases::of(&ended.events).table(&answers(&testbed.source));
    ClientReport { paused_ms: paused, phases, ..seen }
}

fn rival(size: &Size) -> ClientReport {
    let (source, target) = (cluster(), cluster());
    source.sql("postgres", "CREATE DATABASE shop");
    source.pgbench("shop", &["-i", "-s", size.scale, "-q"]);
    // Updates of a table without a key would fail.
    source.sql("shop", "ALTER TABLE pgbench_history REPLICA IDENTITY FULL");
    let pgbouncer = Pgbouncer::start(&source);
    let load = source.pgbench_load("shop", pgbouncer.port(), &[&LOAD[..], &["-M", "simple"]].concat());
    std::thread::sleep(SETTLE_TIME);
    native::subscribe(&source, &target);
    std::thread::sleep(SETTLE_TIME);
    let at = now_s();
    pgbouncer.pause_to(&source, &target, || native::await_target(&source));
    std::thread::sleep(SETTLE_TIME);
    client_report(&source, load, at)
}

/// Reads pgbench's logs, which give latencies from a transaction's due time.
fn client_report(at_server: &Cluster, mut load: Load, switched_s: f64) -> ClientReport {
    let ran = load.running();
    let ended_s = now_s();
    load.end();
    let all = answers(at_server);
    // pgbench goes on without a session that has failed.
    let alive: BTreeSet<u32> =
        all.iter().filter(|answer| answer.at_s > ended_s - AFTER_S).map(|answer| answer.client).collect();
    let failed = if ran { u64::from(SESSIONS) - alive.len() as u64 } else { u64::from(SESSIONS) };
    // From shortly before the first pause until its queue is worked off.
    let around = |answer: &Answer| (-0.2..SETTLE_TIME.as_secs_f64() / 2.0).contains(&(answer.at_s - switched_s));
    let (during, otherwise): (Vec<Answer>, Vec<Answer>) = all.into_iter().partition(around);
    let longest = during.iter().map(|answer| answer.latency_ms).fold(0.0, f64::max);
    let otherwise: Vec<f64> = otherwise.iter().map(|answer| answer.latency_ms).collect();
    let p99_ms = percentile(&otherwise, 99);
    ClientReport { gap_ms: longest, p99_ms, failed, paused_ms: None, phases: Vec::new() }
}
