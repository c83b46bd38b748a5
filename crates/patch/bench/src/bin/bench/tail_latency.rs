//! Latencies of clients in each mode while a server is patched repeatedly, compared with the same server without
//! patching.

use crate::results::{Section, number};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;
use stillpoint_measure::clock::now_ns;
use stillpoint_patch_bench::latencies::{Histogram, drawn, within};
use stillpoint_patch_bench::operation::{ALONE, MODES, Operation, RESTART, Spread};
use stillpoint_patch_tests::load::{Clients, Load, LoadResult};
use stillpoint_patch_tests::patch_calls;
use stillpoint_patch_tests::server::Restart;

/// Time between two operations.
const OPERATION_INTERVAL: Duration = Duration::from_millis(250);

/// A server under test: its process and port, its restart, a patch for it, and the load of its clients.
pub(crate) struct Server<'a> {
    pub(crate) restart: Box<dyn FnMut() -> Restart + 'a>,
    pub(crate) name: &'static str,
    pub(crate) pid: i32,
    pub(crate) port: u16,
    pub(crate) patch: &'a Path,
    pub(crate) clients: Clients,
}

#[derive(Serialize)]
struct ModeLatencies {
    server: &'static str,
    mode: &'static str,
    requests: u64,
    failed: u64,
    operations: usize,
    /// Time of a restart from the request to end to the first answer.
    reach_ms: Spread,
    p50_us: f64,
    p995_us: f64,
    max_us: f64,
    blackout_us: f64,
    histogram: Histogram,
}

/// Measures latencies of each server, without patching and in each mode, for `seconds` each.
pub(crate) fn tail_latency(servers: &mut [Server], seconds: u64) -> Section {
    let title =
        format!("Latency while a server is patched or reverted every 250 ms, or restarted once, us ({seconds} s each)");
    let columns = [
        "server",
        "patching",
        "operations",
        "threads over, ms (max)",
        "p50",
        "p99.5",
        "max",
        "longest without an answer",
        "failed",
    ];
    let mut section = Section::new("tail", title, &columns);
    let mut all = Vec::new();
    for server in servers {
        let seen = watch(server, seconds);
        section.figures.push((server.name, drawn(seen.iter().map(|seen| (seen.mode, &seen.histogram)))));
        all.extend(seen);
    }
    for seen in &all {
        section.rows.push(vec![
            seen.server.into(),
            seen.mode.into(),
            seen.operations.to_string(),
            format!("{} ({})", number(seen.reach_ms.median), number(seen.reach_ms.max)),
            number(seen.p50_us),
            number(seen.p995_us),
            number(seen.max_us),
            number(seen.blackout_us),
            seen.failed.to_string(),
        ]);
    }
    section.notes.push(
        "Restart: one, in the middle of its window; over when a client is answered again. Redis saves its data and loads them, memcached comes back empty, and every key that it has lost is a request that failed. Clients that lost their connection try again after 20 ms, and twice as long each time up to half a second."
            .into(),
    );
    section.raw(&all);
    section
}

fn watch(server: &mut Server, seconds: u64) -> Vec<ModeLatencies> {
    let dir = tempfile::tempdir().expect("make a directory for the record");
    Load::fill(server.port, &server.clients);
    let mut load = Load::start(server.port, &server.clients, dir.path(), server.name);
    // The first seconds of a load include connecting and filling caches.
    std::thread::sleep(Duration::from_secs(2));
    let mut windows = Vec::new();
    for mode in [ALONE].into_iter().chain(MODES).chain([RESTART]) {
        let from = now_ns();
        let over_ms = match mode {
            ALONE => rest(seconds as f64),
            RESTART => once(server, seconds),
            mode => again_and_again(server, mode, seconds),
        };
        windows.push((mode, (from, now_ns()), over_ms));
        load.assert_running();
    }
    let observed = load.finish();
    windows.into_iter().map(|(mode, span, over_ms)| seen(server.name, mode, &observed, span, over_ms)).collect()
}

fn rest(seconds: f64) -> Vec<f64> {
    std::thread::sleep(Duration::from_secs_f64(seconds));
    Vec::new()
}

fn once(server: &mut Server, seconds: u64) -> Vec<f64> {
    let half = seconds as f64 / 2.0;
    rest(half);
    let done = (server.restart)().ms();
    rest(half);
    vec![done]
}

/// Applies and reverts repeatedly; the process carries no patch before and after.
fn again_and_again(server: &Server, mode: &str, seconds: u64) -> Vec<f64> {
    let end = now_ns() + seconds * 1_000_000_000;
    let mut done = Vec::new();
    while now_ns() < end {
        for call in [patch_calls::apply(server.patch, server.pid), patch_calls::revert(server.pid)] {
            let operation = Operation::of(call.args(["--quiescence", mode])).succeeded();
            done.push(operation.reached_and_rest_ns().0 as f64 / 1e6);
            std::thread::sleep(OPERATION_INTERVAL);
        }
    }
    done
}

fn seen(
    server: &'static str,
    mode: &'static str,
    observed: &LoadResult,
    span: (u64, u64),
    over_ms: Vec<f64>,
) -> ModeLatencies {
    let summary = observed.windows(&[span]);
    let (latencies, histogram) = within(observed, span);
    let us = |ns: u64| ns as f64 / 1e3;
    ModeLatencies {
        server,
        mode,
        requests: summary.counts.requests,
        failed: summary.counts.failed(),
        operations: over_ms.len(),
        reach_ms: Spread::of(over_ms),
        p50_us: us(latencies.quantile(0.5)),
        p995_us: us(latencies.quantile(0.995)),
        max_us: us(summary.latency.max_ns),
        blackout_us: us(summary.blackout.duration_ns),
        histogram,
    }
}
