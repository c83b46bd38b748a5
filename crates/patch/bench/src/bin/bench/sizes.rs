//! Cost of new code by the size of a redis: patching in each mode, a restart, and `fork()`, which represents the second
//! address space of the papers' method.

use crate::results::{Section, number};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;
use stillpoint_measure::clock::now_ns;
use stillpoint_patch_bench::operation::{MODES, Operation, RESTART, Spread};
use stillpoint_patch_tests::load::{Clients, Load, LoadResult};
use stillpoint_patch_tests::packages::Binary;
use stillpoint_patch_tests::patch_calls;
use stillpoint_patch_tests::resp::Client;
use stillpoint_patch_tests::server::Redis;
use stillpoint_testing::figure::{Axis, Curve, Figure};

const ALONE: &str = "left alone";
const FORK: &str = "fork()";
/// Time after a restart: clients wait for up to half a second before they try again.
const AFTER_RESTART_NS: u64 = 2_000_000_000;

#[derive(Serialize)]
struct Row {
    gigabytes: f64,
    resident_gigabytes: f64,
    way: &'static str,
    /// Time until every thread ran the new code; for `fork()`, the time for which all were stopped; for a restart, the
    /// time until the first answer.
    over_ms: Spread,
    command_ms: Spread,
    longest_request_ms: f64,
    /// Longest time in which a client waited and none got an answer.
    blackout_ms: f64,
    failed: u64,
}

/// Operations of one kind: their durations, and their windows.
struct OperationSamples {
    way: &'static str,
    over_ms: Vec<f64>,
    command_ms: Vec<f64>,
    windows: Vec<(u64, u64)>,
}

/// Measures each kind of operation at each size of the database.
pub(crate) fn sizes(binary: &Binary, patch: &Path, gigabytes: &[f64], runs: usize) -> Section {
    let title = format!(
        "Database size: {runs} applies and reverts in each mode, one `fork()` by the server itself, one restart, under 2,000 GETs a second"
    );
    let columns = [
        "data, GB",
        "resident, GB",
        "way",
        "all over, ms: median (max)",
        "whole command, ms",
        "longest request, ms",
        "longest without an answer, ms",
        "failed requests",
    ];
    let mut section = Section::new("sizes", title, &columns);
    let mut rows = Vec::new();
    for &size in gigabytes {
        let measured = at_size(binary, patch, size, runs);
        for row in &measured {
            let (over, command) = (&row.over_ms, &row.command_ms);
            section.rows.push(vec![
                number(row.gigabytes),
                number(row.resident_gigabytes),
                row.way.into(),
                if over.count == 0 { "-".into() } else { format!("{} ({})", number(over.median), number(over.max)) },
                if command.count == 0 { "-".into() } else { number(command.median) },
                number(row.longest_request_ms),
                number(row.blackout_ms),
                row.failed.to_string(),
            ]);
        }
        rows.extend(measured);
    }
    section.notes.push(
        "All over: of `fork()`, the time for which all threads are stopped; of a restart, from SHUTDOWN SAVE until the data are loaded. Clients that lost their connection try again after 20 ms, and twice as long each time up to half a second; a request without an answer fails after 10 s, and one that meets the server as it loads at once."
            .into(),
    );
    let ways = [ALONE].into_iter().chain(MODES).chain([FORK, RESTART]);
    let curve = |way: &'static str| Curve {
        name: way.to_owned(),
        points: rows.iter().filter(|row| row.way == way).map(|row| (row.gigabytes, noticed_ms(row))).collect(),
        joined: true,
    };
    section.figures.push((
        "",
        Figure {
            x: Axis { label: "data, GB", logarithmic: false },
            y: Axis { label: "longest request (restart: no answer), ms", logarithmic: true },
            curves: ways.map(curve).collect(),
        },
    ));
    section.raw(&rows);
    section
}

/// Returns the longest delay for a client: a request that a restart refuses has an end, and no answer.
fn noticed_ms(row: &Row) -> f64 {
    if row.way == RESTART { row.blackout_ms } else { row.longest_request_ms }
}

fn at_size(binary: &Binary, patch: &Path, gigabytes: f64, runs: usize) -> Vec<Row> {
    const VALUE: u64 = 8_000;
    let mut redis = Redis::start(binary, &[]);
    let keys = (gigabytes * 1e9) as u64 / VALUE;
    let mut client = redis.client();
    client.set_timeout(Duration::from_secs(600)).expect("set a time-out");
    let reply =
        client.command(&["DEBUG", "POPULATE", &keys.to_string(), "key", &VALUE.to_string()]).expect("an answer");
    assert_eq!(reply.text(), "OK");
    let clients = Clients {
        connections: 16,
        rate: 2_000,
        idle: 0,
        blocking: 0,
        mix: "get=100",
        keys: 1_000,
        ..Clients::default()
    };
    let dir = tempfile::tempdir().expect("make a directory for the record");
    Load::fill(redis.port(), &clients);
    let load = Load::start(redis.port(), &clients, dir.path(), "sizes");
    std::thread::sleep(Duration::from_secs(1));
    let alone = (now_ns(), now_ns() + 2_000_000_000);
    std::thread::sleep(Duration::from_secs(2));
    let mut all =
        vec![OperationSamples { way: ALONE, over_ms: Vec::new(), command_ms: Vec::new(), windows: vec![alone] }];
    all.extend(MODES.map(|mode| patched(mode, redis.pid(), patch, runs)));
    let resident_gigabytes = info(&mut client, "used_memory_rss") / 1e9;
    all.push(forked(&mut client));
    // No request belongs to both.
    std::thread::sleep(Duration::from_millis(200));
    let done = redis.restart();
    std::thread::sleep(Duration::from_nanos(AFTER_RESTART_NS));
    all.push(OperationSamples {
        way: RESTART,
        over_ms: vec![done.ms()],
        command_ms: Vec::new(),
        windows: vec![(done.began_ns, done.answered_ns + AFTER_RESTART_NS)],
    });
    let observed = load.finish();
    all.into_iter().map(|done| row(gigabytes, resident_gigabytes, done, &observed)).collect()
}

fn patched(mode: &'static str, pid: i32, patch: &Path, runs: usize) -> OperationSamples {
    let mut done = OperationSamples { way: mode, over_ms: Vec::new(), command_ms: Vec::new(), windows: Vec::new() };
    for _ in 0..runs {
        for call in [patch_calls::apply(patch, pid), patch_calls::revert(pid)] {
            let operation = Operation::of(call.args(["--quiescence", mode])).succeeded();
            done.over_ms.extend(operation.migrated_ns.map(|ns| ns as f64 / 1e6));
            done.command_ms.push(operation.elapsed_ns() as f64 / 1e6);
            done.windows.push(operation.window_ns);
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    done
}

fn forked(client: &mut Client) -> OperationSamples {
    let from = now_ns();
    assert!(client.command(&["BGSAVE"]).expect("BGSAVE is answered").text().contains("saving started"));
    let fork_ms = info(client, "latest_fork_usec") / 1e3;
    std::thread::sleep(Duration::from_millis(200));
    OperationSamples { way: FORK, over_ms: vec![fork_ms], command_ms: Vec::new(), windows: vec![(from, now_ns())] }
}

fn row(gigabytes: f64, resident_gigabytes: f64, done: OperationSamples, observed: &LoadResult) -> Row {
    // Each window separately: the pauses between them belong to no operation.
    let windows: Vec<_> = done.windows.iter().map(|window| observed.windows(&[*window])).collect();
    let max_ms = |values: &mut dyn Iterator<Item = u64>| values.max().unwrap_or(0) as f64 / 1e6;
    Row {
        gigabytes,
        resident_gigabytes,
        way: done.way,
        over_ms: Spread::of(done.over_ms),
        command_ms: Spread::of(done.command_ms),
        longest_request_ms: max_ms(&mut windows.iter().map(|w| w.latency.max_ns)),
        blackout_ms: max_ms(&mut windows.iter().map(|w| w.blackout.duration_ns)),
        failed: windows.iter().map(|w| w.counts.failed()).sum(),
    }
}

fn info(client: &mut Client, field: &str) -> f64 {
    let text = client.command(&["INFO", "everything"]).expect("INFO is answered").text().to_owned();
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("INFO has no {field}"))
}
