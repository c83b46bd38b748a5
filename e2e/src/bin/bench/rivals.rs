//! The other ways to get new code into a redis under load: stop all threads at once, or restart. And the price of
//! another address space, which the papers' way needs: `fork()`.

use crate::results::{Section, number};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;
use stillpoint_e2e::load::{Clients, Load};
use stillpoint_e2e::operation::{Operation, Spread};
use stillpoint_e2e::packages::Binary;
use stillpoint_e2e::server::Redis;
use stillpoint_e2e::{patching, wait};
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::figure::{Axis, Curve, Figure};

#[derive(Serialize)]
struct Way {
    way: &'static str,
    runs: usize,
    blackout_ms: Spread,
    max_ms: Spread,
    failed_requests: u64,
    dropped_connections: u64,
}

/// Around each operation this much is looked at, in nanoseconds.
const AROUND: u64 = 500_000_000;

/// Compares probing, stopping all, and a restart with `keys` keys, each `runs` times.
pub(crate) fn rivals(binary: &Binary, patch: &Path, clients: &Clients, keys: u64, runs: usize) -> Section {
    let title = format!("Ways to bring new code to a redis with {keys} keys under load: median (max) of {runs} runs");
    let columns = ["way", "blackout, ms", "longest request, ms", "failed requests", "dropped connections"];
    let mut section = Section::new("rivals", title, &columns);
    let ways = [
        patched("stillpoint, `--quiescence probe`", "probe", binary, patch, clients, keys, runs),
        patched("stillpoint, `--quiescence stop`", "stop", binary, patch, clients, keys, runs),
        restarted(binary, clients, keys, runs.min(3)),
    ];
    for way in &ways {
        let cell = |spread: &Spread| format!("{} ({})", number(spread.median), number(spread.max));
        section.rows.push(vec![
            way.way.into(),
            cell(&way.blackout_ms),
            cell(&way.max_ms),
            way.failed_requests.to_string(),
            way.dropped_connections.to_string(),
        ]);
    }
    section.notes.push(
        "Blackout: the longest interval in which a client waited and none got an answer. A restart saves the data, ends the server, starts it, and loads the data."
            .into(),
    );
    section.raw(&ways);
    section
}

fn patched(
    way: &'static str,
    quiescence: &str,
    binary: &Binary,
    patch: &Path,
    clients: &Clients,
    keys: u64,
    runs: usize,
) -> Way {
    let redis = Redis::start(binary, &[]);
    let dir = tempfile::tempdir().expect("make a directory for the record");
    redis.populate(keys);
    Load::fill(redis.port(), clients);
    let load = Load::start(redis.port(), clients, dir.path(), "patched");
    std::thread::sleep(Duration::from_secs(2));
    let mut spans = Vec::new();
    for _ in 0..runs {
        for call in [patching::apply(patch, redis.pid()), patching::revert(redis.pid())] {
            let done = Operation::of(call.args(["--quiescence", quiescence])).succeeded();
            spans.push(done.window_ns);
            std::thread::sleep(Duration::from_nanos(2 * AROUND));
        }
    }
    finish(way, load, &spans)
}

fn restarted(binary: &Binary, clients: &Clients, keys: u64, runs: usize) -> Way {
    let mut redis = Redis::start(binary, &[]);
    let dir = tempfile::tempdir().expect("make a directory for the record");
    redis.populate(keys);
    Load::fill(redis.port(), clients);
    let load = Load::start(redis.port(), clients, dir.path(), "restarted");
    std::thread::sleep(Duration::from_secs(2));
    let mut spans = Vec::new();
    for _ in 0..runs {
        let from = now_ns();
        redis = redis.restart(binary);
        wait::until("redis to have loaded its data", || {
            redis
                .client()
                .command(&["DBSIZE"])
                .ok()
                .filter(|reply| matches!(reply, stillpoint_e2e::resp::Reply::Integer(_)))
        });
        spans.push((from, now_ns()));
        std::thread::sleep(Duration::from_secs(2));
    }
    finish("restart", load, &spans)
}

fn finish(way: &'static str, load: Load, spans: &[(u64, u64)]) -> Way {
    let observed = load.finish();
    let windows: Vec<_> = spans.iter().map(|&(from, to)| observed.windows(&[(from - AROUND, to + AROUND)])).collect();
    let ms = |values: Vec<u64>| Spread::of(values.into_iter().map(|ns| ns as f64 / 1e6).collect());
    Way {
        way,
        runs: spans.len(),
        blackout_ms: ms(windows.iter().map(|w| w.blackout.duration_ns).collect()),
        max_ms: ms(windows.iter().map(|w| w.latency.max_ns).collect()),
        failed_requests: observed.all().counts.failed(),
        dropped_connections: observed.dropped(),
    }
}

#[derive(Serialize)]
struct Size {
    gigabytes: f64,
    resident_gigabytes: f64,
    migrated_ms: Spread,
    command_ms: Spread,
    fork_ms: f64,
    /// The longest request of clients: left alone, while patched or reverted, around the fork.
    alone_max_ms: f64,
    patched_max_ms: f64,
    forked_max_ms: f64,
}

/// Applies and reverts at each size of the database; `fork()` at the same size is the rival.
pub(crate) fn sizes(binary: &Binary, patch: &Path, gigabytes: &[f64], runs: usize) -> Section {
    let title = format!(
        "Database size: {runs} applies and reverts, and one `fork()` by the server itself, under 2,000 GETs a second"
    );
    let columns = [
        "data, GB",
        "resident, GB",
        "all over, ms: median (max)",
        "whole command, ms",
        "fork(), ms: all threads stand",
        "longest request, ms: left alone",
        "patched",
        "forked",
    ];
    let mut section = Section::new("sizes", title, &columns);
    let mut sizes = Vec::new();
    for &size in gigabytes {
        let measured = at_size(binary, patch, size, runs);
        section.rows.push(vec![
            number(measured.gigabytes),
            number(measured.resident_gigabytes),
            format!("{} ({})", number(measured.migrated_ms.median), number(measured.migrated_ms.max)),
            number(measured.command_ms.median),
            number(measured.fork_ms),
            number(measured.alone_max_ms),
            number(measured.patched_max_ms),
            number(measured.forked_max_ms),
        ]);
        sizes.push(measured);
    }
    let curve = |name: &str, of: fn(&Size) -> f64| Curve {
        name: name.to_owned(),
        points: sizes.iter().map(|size| (size.gigabytes, of(size))).collect(),
        joined: true,
    };
    section.figures.push((
        "",
        Figure {
            x: Axis { label: "data, GB", logarithmic: false },
            y: Axis { label: "longest request, ms", logarithmic: true },
            curves: vec![
                curve("left alone", |size| size.alone_max_ms),
                curve("patched, reverted", |size| size.patched_max_ms),
                curve("fork()", |size| size.forked_max_ms),
            ],
        },
    ));
    section.raw(&sizes);
    section
}

fn at_size(binary: &Binary, patch: &Path, gigabytes: f64, runs: usize) -> Size {
    const VALUE: u64 = 8_000;
    let redis = Redis::start(binary, &["--save", ""]);
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
    let (mut migrated, mut command, mut patched) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..runs {
        for call in [patching::apply(patch, redis.pid()), patching::revert(redis.pid())] {
            let done = Operation::of(call).succeeded();
            migrated.extend(done.migrated_ns.map(|ns| ns as f64 / 1e6));
            command.push(done.elapsed_ns() as f64 / 1e6);
            patched.push(done.window_ns);
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    let before_fork = now_ns();
    assert!(client.command(&["BGSAVE"]).expect("BGSAVE is answered").text().contains("saving started"));
    let fork_us = info(&mut client, "latest_fork_usec");
    let resident = info(&mut client, "used_memory_rss");
    std::thread::sleep(Duration::from_millis(200));
    let forked = (before_fork, now_ns());
    let observed = load.finish();
    let max_ms = |windows: &[(u64, u64)]| observed.windows(windows).latency.max_ns as f64 / 1e6;
    // The child is of no further use; ending the server ends it.
    let _ = client.command(&["SHUTDOWN", "NOSAVE", "FORCE"]);
    Size {
        gigabytes,
        resident_gigabytes: resident / 1e9,
        migrated_ms: Spread::of(migrated),
        command_ms: Spread::of(command),
        fork_ms: fork_us / 1e3,
        alone_max_ms: max_ms(&[alone]),
        // Not in one window with the pauses between them.
        patched_max_ms: patched.iter().map(|window| max_ms(&[*window])).fold(0.0, f64::max),
        forked_max_ms: max_ms(&[forked]),
    }
}

fn info(client: &mut stillpoint_e2e::resp::Client, field: &str) -> f64 {
    let text = client.command(&["INFO", "everything"]).expect("INFO is answered").text().to_owned();
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("INFO has no {field}"))
}
