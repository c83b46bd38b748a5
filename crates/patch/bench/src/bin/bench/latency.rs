//! Latencies of clients while a redis is patched once a second, compared with the same redis without patching.

use crate::results::{Section, number};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;
use stillpoint_measure::clock::now_ns;
use stillpoint_patch_bench::operation::{Operation, PendingOperation, Spread, StopsUs};
use stillpoint_patch_tests::load::{Clients, Load, LoadResult};
use stillpoint_patch_tests::patch_calls;
use stillpoint_patch_tests::server::Redis;

/// Start and end, in nanoseconds of `CLOCK_MONOTONIC`.
pub(crate) type Span = (u64, u64);

/// Observations of clients in one window of time.
#[derive(Serialize, Deserialize)]
pub(crate) struct Window {
    pub(crate) seconds: f64,
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    pub(crate) max_us: f64,
    pub(crate) blackout_us: f64,
}

#[derive(Serialize)]
struct Pair {
    quiet: Window,
    patching: Window,
    operations: usize,
    p999_ratio: f64,
    max_ratio: f64,
}

#[derive(Serialize)]
struct Raw {
    clients: String,
    pairs: Vec<Pair>,
    p999_ratio: Spread,
    max_ratio: Spread,
    stopped_us: StopsUs,
    migrated_ms: Spread,
    dropped_connections: u64,
}

/// Measures `pairs` pairs of windows of `seconds` each; the order within a pair alternates.
pub(crate) fn latency(redis: &Redis, patch: &Path, clients: &Clients, pairs: usize, seconds: u64) -> Section {
    let dir = tempfile::tempdir().expect("make a directory for the record");
    let mut load = Load::start(redis.port(), clients, dir.path(), "latency");
    // The first seconds of a load include connecting and filling caches.
    rest(3);
    let mut spans = Vec::new();
    let mut called = Vec::new();
    for pair in 0..pairs {
        let (mut quiet, mut patching) = ((0, 0), (0, 0));
        for turn in 0..2 {
            if (pair + turn) % 2 == 0 {
                quiet = timed(|| rest(seconds));
            } else {
                let before = called.len();
                patching = timed(|| called.extend(once_a_second(redis.pid(), patch, seconds, &[])));
                assert!(called.len() > before, "nothing was applied in a window of {seconds} s");
            }
            load.assert_running();
        }
        spans.push([quiet, patching]);
    }
    let observed = load.finish();
    section(&observed, &spans, read(called), clients, seconds)
}

fn section(
    observed: &LoadResult,
    spans: &[[Span; 2]],
    operations: Vec<Operation>,
    clients: &Clients,
    seconds: u64,
) -> Section {
    let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    let pairs: Vec<Pair> = spans
        .iter()
        .map(|&[quiet, patching]| {
            let inside = |at: u64| (patching.0..patching.1).contains(&at);
            let operations = operations.iter().filter(|operation| inside(operation.window_ns.0)).count();
            let (quiet, patching) = (window(observed, quiet), window(observed, patching));
            let p999_ratio = ratio(patching.p999_us, quiet.p999_us);
            let max_ratio = ratio(patching.max_us, quiet.max_us);
            Pair { quiet, patching, operations, p999_ratio, max_ratio }
        })
        .collect();
    let title = format!("Latency of a redis under load, us: left alone, and patched once a second ({seconds} s each)");
    let columns = ["pair", "operations", "p50", "p99", "p99.9", "max", "p99.9 ratio", "max ratio"];
    let mut section = Section::new("latency", title, &columns);
    for (i, pair) in pairs.iter().enumerate() {
        let both = |of: fn(&Window) -> f64| format!("{} / {}", number(of(&pair.quiet)), number(of(&pair.patching)));
        section.rows.push(vec![
            (i + 1).to_string(),
            pair.operations.to_string(),
            both(|w| w.p50_us),
            both(|w| w.p99_us),
            both(|w| w.p999_us),
            both(|w| w.max_us),
            number(pair.p999_ratio),
            number(pair.max_ratio),
        ]);
    }
    let raw = Raw {
        clients: format!("{clients:?}"),
        p999_ratio: Spread::of(pairs.iter().map(|pair| pair.p999_ratio).collect()),
        max_ratio: Spread::of(pairs.iter().map(|pair| pair.max_ratio).collect()),
        stopped_us: StopsUs::of(&operations),
        migrated_ms: Spread::of(operations.iter().filter_map(|o| o.migrated_ns.map(|ns| ns as f64 / 1e6)).collect()),
        dropped_connections: observed.dropped(),
        pairs,
    };
    let all = observed.all();
    section.notes.push(format!(
        "Ratio of p99.9, patched to left alone: median {} ({} to {}); of the maxima: median {} ({} to {}).",
        number(raw.p999_ratio.median),
        number(raw.p999_ratio.min),
        number(raw.p999_ratio.max),
        number(raw.max_ratio.median),
        number(raw.max_ratio.min),
        number(raw.max_ratio.max)
    ));
    section.notes.push(format!(
        "{} applies and reverts; all threads over in {} ms (median; {} max); {}. {} requests, {} failed, {} connections dropped.",
        operations.len(),
        number(raw.migrated_ms.median),
        number(raw.migrated_ms.max),
        raw.stopped_us,
        all.counts.requests,
        all.counts.failed(),
        raw.dropped_connections
    ));
    section.raw(&raw);
    section
}

/// Returns the window of the requests in progress during `span`.
pub(crate) fn window(observed: &LoadResult, span: Span) -> Window {
    windows(observed, &[span])
}

/// Returns the window of the requests in progress during any of these spans.
pub(crate) fn windows(observed: &LoadResult, spans: &[Span]) -> Window {
    let summary = observed.windows(spans);
    let us = |ns: u64| ns as f64 / 1e3;
    Window {
        seconds: spans.iter().map(|span| span.1 - span.0).sum::<u64>() as f64 / 1e9,
        requests: summary.counts.requests,
        failed: summary.counts.failed(),
        p50_us: us(summary.latency.p50_ns),
        p99_us: us(summary.latency.p99_ns),
        p999_us: us(summary.latency.p999_ns),
        max_us: us(summary.latency.max_ns),
        blackout_us: us(summary.blackout.duration_ns),
    }
}

/// Applies and reverts in turn, one a second, with these options; the process carries no patch before and after.
pub(crate) fn once_a_second(pid: i32, patch: &Path, seconds: u64, options: &[&str]) -> Vec<PendingOperation> {
    let start = now_ns();
    let mut done = Vec::new();
    // An even number, so that the patch is reverted at the end.
    for second in 0..seconds / 2 * 2 {
        let due = start + second * 1_000_000_000;
        std::thread::sleep(Duration::from_nanos(due.saturating_sub(now_ns())));
        let call = if second % 2 == 0 { patch_calls::apply(patch, pid) } else { patch_calls::revert(pid) };
        done.push(PendingOperation::of(call.args(options.iter().copied())));
    }
    std::thread::sleep(Duration::from_nanos((start + seconds * 1_000_000_000).saturating_sub(now_ns())));
    done
}

/// Reads the results of these calls, each of which succeeded.
pub(crate) fn read(called: Vec<PendingOperation>) -> Vec<Operation> {
    called.into_iter().map(|called| called.operation().succeeded()).collect()
}

/// Runs `body` and returns the span of its execution.
pub(crate) fn timed(body: impl FnOnce()) -> Span {
    let from = now_ns();
    body();
    (from, now_ns())
}

pub(crate) fn rest(seconds: u64) {
    std::thread::sleep(Duration::from_secs(seconds));
}
