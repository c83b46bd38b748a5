//! Other ways to install new code in a redis under load: stop all threads at once, or restart.

use crate::results::{Section, number};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;
use stillpoint_patch_bench::operation::{Operation, Spread};
use stillpoint_patch_tests::load::{Clients, Load};
use stillpoint_patch_tests::packages::Binary;
use stillpoint_patch_tests::patch_calls;
use stillpoint_patch_tests::server::Redis;

#[derive(Serialize)]
struct Alternative {
    way: &'static str,
    runs: usize,
    blackout_ms: Spread,
    max_ms: Spread,
    failed_requests: u64,
    dropped_connections: u64,
}

/// Time around each operation that is evaluated, in nanoseconds.
const WINDOW_NS: u64 = 500_000_000;

/// Compares probing, stopping all, and a restart with `keys` keys, each `runs` times.
pub(crate) fn alternatives(binary: &Binary, patch: &Path, clients: &Clients, keys: u64, runs: usize) -> Section {
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
) -> Alternative {
    let redis = Redis::start(binary, &[]);
    let dir = tempfile::tempdir().expect("make a directory for the record");
    redis.populate(keys);
    Load::fill(redis.port(), clients);
    let load = Load::start(redis.port(), clients, dir.path(), "patched");
    std::thread::sleep(Duration::from_secs(2));
    let mut spans = Vec::new();
    for _ in 0..runs {
        for call in [patch_calls::apply(patch, redis.pid()), patch_calls::revert(redis.pid())] {
            let done = Operation::of(call.args(["--quiescence", quiescence])).succeeded();
            spans.push(done.window_ns);
            std::thread::sleep(Duration::from_nanos(2 * WINDOW_NS));
        }
    }
    finish(way, load, &spans)
}

fn restarted(binary: &Binary, clients: &Clients, keys: u64, runs: usize) -> Alternative {
    let mut redis = Redis::start(binary, &[]);
    let dir = tempfile::tempdir().expect("make a directory for the record");
    redis.populate(keys);
    Load::fill(redis.port(), clients);
    let load = Load::start(redis.port(), clients, dir.path(), "restarted");
    std::thread::sleep(Duration::from_secs(2));
    let mut spans = Vec::new();
    for _ in 0..runs {
        let done = redis.restart();
        spans.push((done.began_ns, done.answered_ns));
        std::thread::sleep(Duration::from_secs(2));
    }
    finish("restart", load, &spans)
}

fn finish(way: &'static str, load: Load, spans: &[(u64, u64)]) -> Alternative {
    let observed = load.finish();
    let windows: Vec<_> =
        spans.iter().map(|&(from, to)| observed.windows(&[(from - WINDOW_NS, to + WINDOW_NS)])).collect();
    let ms = |values: Vec<u64>| Spread::of(values.into_iter().map(|ns| ns as f64 / 1e6).collect());
    Alternative {
        way,
        runs: spans.len(),
        blackout_ms: ms(windows.iter().map(|w| w.blackout.duration_ns).collect()),
        max_ms: ms(windows.iter().map(|w| w.latency.max_ns).collect()),
        failed_requests: observed.all().counts.failed(),
        dropped_connections: observed.dropped(),
    }
}
