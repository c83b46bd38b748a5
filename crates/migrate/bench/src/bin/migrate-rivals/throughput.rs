//! Throughput that clients keep while a migration copies rows and catches up.

use crate::native::{self, Pgbouncer};
use crate::pgbench::{answers, now_s, of_event_s};
use crate::{Raw, cluster};
use std::time::Duration;
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_bench::processors::{pin, processors};
use stillpoint_migrate_tests::Testbed;
use stillpoint_testing::postgresql::Cluster;

/// Scale of pgbench; about 450 MB.
const SCALE: &str = "30";
/// Each client sends its next transaction when it has the answer: it cannot make up for waiting time.
const LOAD: [&str; 9] = ["-n", "-l", "-c", "8", "-j", "2", "-T", "600", "-Msimple"];
/// Time before the migration that is measured, once the load has settled.
const BASELINE_TIME: Duration = Duration::from_secs(8);
const SETTLE_TIME: Duration = Duration::from_secs(3);
/// Time for which a server without a migration is measured.
const UNDISTURBED_TIME: Duration = Duration::from_secs(60);
/// Longest time of a whole migration, beside clients that leave it no idle processor.
const ROUND_TIMEOUT: Duration = Duration::from_secs(580);

/// Throughput before, and the parts of it that were kept.
#[derive(Default)]
struct KeptThroughput {
    before: Vec<f64>,
    copy: Vec<f64>,
    indexes: Vec<f64>,
    following: Vec<f64>,
    comparing: Vec<f64>,
    took_s: Vec<f64>,
}

pub(crate) fn measure(rounds: usize) -> Raw {
    let mut all: [KeptThroughput; 6] = Default::default();
    for _ in 0..rounds {
        let [alone, snapshot, with, apart, without, native] = &mut all;
        measure_without_copy(alone, false);
        measure_without_copy(snapshot, true);
        stillpoint(&["run"], with);
        if processors() > 1 {
            stillpoint_apart(apart);
        }
        stillpoint(&["run", "--share", "0"], without);
        if native::available() {
            rival(native);
        }
    }
    println!("## Clients' throughput meanwhile: 8 sessions without think time, pgbench of scale {SCALE}\n");
    println!("| | transactions a second before | rows are copied | indexes | catching up | comparing | whole, s |");
    println!("|---|---|---|---|---|---|---|");
    let names = [
        "left alone for a minute",
        "the same while a snapshot is held",
        "stillpoint migrate",
        "the same, with target and tool on processors of their own",
        "stillpoint migrate, `--share 0`",
        "logical replication",
    ];
    let median = |values: &[f64], scale: f64, unit: &str| {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).map_or_else(|| "-".into(), |value| format!("{:.0}{unit}", value * scale))
    };
    let mut raw = Raw::new();
    for (name, kept) in names.into_iter().zip(all) {
        let part = |values: &[f64]| median(values, 100.0, " %");
        println!(
            "| {name} | {} | {} | {} | {} | {} | {} |",
            median(&kept.before, 1.0, ""),
            part(&kept.copy),
            part(&kept.indexes),
            part(&kept.following),
            part(&kept.comparing),
            median(&kept.took_s, 1.0, "")
        );
        let parts = [
            ("copy", kept.copy),
            ("indexes", kept.indexes),
            ("following", kept.following),
            ("comparing", kept.comparing),
        ];
        for (what, values) in parts {
            raw.push((format!("kept, {name}, {what}"), values));
        }
    }
    println!(
        "\nMedian of {rounds}, in turns. Both servers and the clients share the machine: but where it says otherwise, what the target does"
    );
    println!(
        "costs the clients as well. Logical replication makes its indexes before it copies. For the sake of a snapshot the source"
    );
    println!("keeps every version of every row: those of pgbench's hottest rows lie in its clients' way.\n");
    raw
}

/// Transactions a second between two moments.
fn rate(answers: &[f64], (from, to): (f64, f64)) -> f64 {
    answers.iter().filter(|at| (from..to).contains(at)).count() as f64 / (to - from).max(0.001)
}

fn times(at_server: &Cluster) -> Vec<f64> {
    answers(at_server).iter().map(|answer| answer.at_s).collect()
}

/// Measures the same load alone: its tables get old row versions, which are cleaned up meanwhile, or not while a
/// snapshot is held. A copy that moves nothing does no more than hold one.
fn measure_without_copy(kept: &mut KeptThroughput, held: bool) {
    let testbed = Testbed::direct(cluster(), cluster());
    testbed.source.pgbench("shop", &["-i", "-s", SCALE, "-q"]);
    let load = testbed.source.pgbench_load("shop", testbed.port(), &LOAD);
    std::thread::sleep(SETTLE_TIME + BASELINE_TIME);
    let begun = now_s();
    if held {
        let hold = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pgbench_branches";
        let rest = format!("SELECT pg_sleep({})", UNDISTURBED_TIME.as_secs());
        let arguments = ["-q", "-d", "shop", "-c", hold, "-c", &rest];
        let output = testbed.source.client("psql").args(arguments).output().expect("run psql");
        assert!(output.status.success(), "{output:?}");
    } else {
        std::thread::sleep(UNDISTURBED_TIME);
    }
    load.end();
    let answered = times(&testbed.source);
    let before = rate(&answered, (begun - BASELINE_TIME.as_secs_f64(), begun));
    kept.before.push(before);
    kept.copy.push(rate(&answered, (begun, begun + UNDISTURBED_TIME.as_secs_f64())) / before);
    kept.took_s.push(UNDISTURBED_TIME.as_secs_f64());
}

fn stillpoint(words: &[&str], kept: &mut KeptThroughput) {
    move_it(&Testbed::direct(cluster(), cluster()), words, kept, || ());
}

/// Measures as if the target were another machine: source, proxy and clients share the first processor, and no other
/// process uses it.
fn stillpoint_apart(kept: &mut KeptThroughput) {
    // Child processes run on the processors of this process.
    let us = std::process::id();
    let others = format!("1-{}", processors() - 1);
    pin(us, &others);
    let target = cluster();
    pin(us, "0");
    let testbed = Testbed::direct(cluster(), target);
    move_it(&testbed, &["run"], kept, || pin(us, &others));
    pin(us, &format!("0-{}", processors() - 1));
}

/// Runs a whole migration beside a load; calls `before_it` once the load runs.
fn move_it(testbed: &Testbed, words: &[&str], kept: &mut KeptThroughput, before_it: impl FnOnce()) {
    testbed.source.pgbench("shop", &["-i", "-s", SCALE, "-q"]);
    let mut load = testbed.source.pgbench_load("shop", testbed.port(), &LOAD);
    std::thread::sleep(SETTLE_TIME + BASELINE_TIME);
    before_it();
    let begun = now_s();
    let ended = testbed.tool(words).end_within(ROUND_TIMEOUT);
    assert!(ended.code == Some(0) && load.running(), "{ended:?}");
    load.end();
    let at = |wanted: fn(&Event, &str) -> bool, phase: &str| {
        let event = ended.events.iter().find(|event| wanted(event, phase));
        of_event_s(event.unwrap_or_else(|| panic!("no phase {phase}")).t_ns)
    };
    let starts =
        |event: &Event, wanted: &str| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == wanted);
    let ends =
        |event: &Event, wanted: &str| matches!(&event.kind, EventKind::PhaseEnded { phase, .. } if phase == wanted);
    let answered = times(&testbed.source);
    let before = rate(&answered, (begun - BASELINE_TIME.as_secs_f64(), begun));
    kept.before.push(before);
    let mut part = |values: fn(&mut KeptThroughput) -> &mut Vec<f64>, from: f64, to: f64, name: &str| {
        let part = rate(&answered, (from, to)) / before;
        eprintln!("{}: {name} took {:.1} s, {:.0} % kept", words.join(" "), to - from, part * 100.0);
        values(kept).push(part);
    };
    part(|kept| &mut kept.copy, at(starts, "copy"), at(starts, "indexes"), "copy");
    part(|kept| &mut kept.indexes, at(starts, "indexes"), at(ends, "statistics"), "indexes");
    part(|kept| &mut kept.following, at(starts, "catch-up"), at(starts, "compare"), "catching up");
    part(|kept| &mut kept.comparing, at(starts, "compare"), at(ends, "compare"), "comparing");
    kept.took_s.push(at(ends, "switch-over") - begun);
}

fn rival(kept: &mut KeptThroughput) {
    let (source, target) = (cluster(), cluster());
    source.sql("postgres", "CREATE DATABASE shop");
    source.pgbench("shop", &["-i", "-s", SCALE, "-q"]);
    source.sql("shop", "ALTER TABLE pgbench_history REPLICA IDENTITY FULL");
    let pgbouncer = Pgbouncer::start(&source);
    let load = source.pgbench_load("shop", pgbouncer.port(), &LOAD);
    std::thread::sleep(SETTLE_TIME + BASELINE_TIME);
    let begun = now_s();
    native::subscribe(&source, &target);
    let copied = now_s();
    native::await_target(&source);
    std::thread::sleep(Duration::from_secs(2));
    let followed = now_s();
    load.end();
    let answered = times(&source);
    let before = rate(&answered, (begun - BASELINE_TIME.as_secs_f64(), begun));
    kept.before.push(before);
    kept.copy.push(rate(&answered, (begun, copied)) / before);
    kept.following.push(rate(&answered, (copied, followed)) / before);
    kept.took_s.push(followed - begun);
}
