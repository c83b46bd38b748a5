//! Latencies of clients while a server is patched or reverted again and again, in each mode of quiescence, and beside that a
//! restart (OSDI 2020, figure 5); and answers around each request to the tool (figure 6).
//!
//! All modes see the same process and the same load, one after another. A subject without quiescence points has no mode but
//! probing.

use crate::{Subject, USAGE};
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::time::Duration;
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::record::Record;
use stillpoint_patch_bench::latencies::{drawn, label, within};
use stillpoint_patch_bench::operation::{ALONE, MODES, RESTART, Spread};
use stillpoint_patch_tests::daemons::Daemon;
use stillpoint_patch_tests::load::LoadResult;
use stillpoint_patch_tests::shipped_program::MonitoredLoad;
use stillpoint_testing::figure::{Axis, Curve, Figure};

/// Time between two operations.
const INTERVAL: Duration = Duration::from_millis(250);
/// Time for connecting and filling caches.
const BEFORE: Duration = Duration::from_secs(3);
/// Time around the start of an operation that the second figure shows, before and after, and the width of its classes.
const AROUND_NS: (u64, u64) = (50_000_000, 300_000_000);
const BIN_NS: u64 = 2_000_000;

/// Operations of one mode, and their time.
struct Window {
    mode: &'static str,
    /// Start and end, in nanoseconds of `CLOCK_MONOTONIC`.
    span: (u64, u64),
    /// The same of each operation.
    operations: Vec<(u64, u64)>,
}

/// Prints a table of all subjects, and writes two figures of each into its directory below `state`; `NAME*N` is watched N times as
/// long.
pub(crate) fn latency(state: &Path, seconds: u32, names: &[String]) -> Result<(), String> {
    if names.is_empty() {
        return Err(USAGE.into());
    }
    println!(
        "\n### Latency while a server is patched or reverted every {} ms, or restarted once, us ({seconds} s each; *N: N times as long)\n",
        INTERVAL.as_millis()
    );
    println!(
        "| server | patching | operations | operation, ms (max) | answers | p50 | p99.5 | max | longest without an answer | failed |"
    );
    println!("|{}", " --- |".repeat(10));
    for name in names {
        let (plain, factor) = name.split_once('*').unwrap_or((name, "1"));
        let factor: u32 = factor.parse().map_err(|_| format!("`{name}`: {factor} is no number"))?;
        let subject = Subject::named(plain)?;
        let state = subject.directory(state)?;
        let (windows, seen) = watch(&subject, &state, seconds * factor)?;
        for window in &windows {
            println!("{}", row(name, window, &seen));
        }
        for (file, figure) in [("latencies.svg", latencies(&windows, &seen)), ("answers.svg", answers(&windows, &seen))]
        {
            let file = state.join(file);
            fs::write(&file, figure.svg()).map_err(|e| format!("{}: {e}", file.display()))?;
        }
    }
    println!(
        "\nRestart: one, in the middle of its window, over when a client is answered again. Clients that lost their connection try again after 20 ms, and twice as long each time up to half a second."
    );
    Ok(())
}

fn watch(subject: &Subject, state: &Path, seconds: u32) -> Result<(Vec<Window>, LoadResult), String> {
    let (patch, _) = subject.patch_of_all(state)?;
    let (mut daemon, mut plan) = subject.serve()?;
    let record = state.join("latency.record");
    plan.record = Some(record.clone());
    let load = MonitoredLoad::of(plan);
    std::thread::sleep(BEFORE);
    let modes = if subject.has_points() { &MODES[..] } else { &MODES[..1] };
    let mut windows = Vec::new();
    for mode in [ALONE].into_iter().chain(modes.iter().copied()).chain([RESTART]) {
        let from = now_ns();
        let end = from + u64::from(seconds) * 1_000_000_000;
        let operations = match mode {
            ALONE => Vec::new(),
            RESTART => {
                sleep_until(end - u64::from(seconds) * 500_000_000);
                vec![restart(daemon.as_mut())]
            }
            mode => again_and_again(daemon.as_ref(), &patch, mode, end),
        };
        sleep_until(end);
        windows.push(Window { mode, span: (from, now_ns()), operations });
        daemon.assert_unharmed();
    }
    load.end();
    let records = Record::open(&record).map_err(|e| format!("{}: {e}", record.display()))?;
    fs::remove_file(&record).map_err(|e| format!("{}: {e}", record.display()))?;
    Ok((windows, LoadResult { record: records, result: serde_json::Value::Null }))
}

fn sleep_until(end: u64) {
    std::thread::sleep(Duration::from_nanos(end.saturating_sub(now_ns())));
}

/// Applies and reverts; the processes carry no patch before and after.
fn again_and_again(daemon: &dyn Daemon, patch: &Path, mode: &str, end: u64) -> Vec<(u64, u64)> {
    let mut operations = Vec::new();
    while now_ns() < end {
        for call in [daemon.call("apply").arg(patch), daemon.call("revert")] {
            let from = now_ns();
            call.args(["--timeout", "60s", "--quiescence", mode]).succeed();
            operations.push((from, now_ns()));
            std::thread::sleep(INTERVAL);
        }
    }
    operations
}

fn restart(daemon: &mut dyn Daemon) -> (u64, u64) {
    let server = daemon.server();
    let stop = |server: &mut stillpoint_patch_tests::server::Server| server.process().signal(Signal::TERM);
    let done = server.restart(None, stop, |server| std::net::TcpStream::connect(("127.0.0.1", server.port())).is_ok());
    (done.began_ns, done.answered_ns)
}

fn row(name: &str, window: &Window, seen: &LoadResult) -> String {
    let summary = seen.windows(&[window.span]);
    let (latencies, _) = within(seen, window.span);
    let us = |ns: u64| (ns as f64 / 1e3).round();
    let took = Spread::of(window.operations.iter().map(|(from, to)| (to - from) as f64 / 1e6).collect());
    format!(
        "| {name} | {} | {} | {:.0} ({:.0}) | {} | {} | {} | {} | {} | {} |",
        window.mode,
        window.operations.len(),
        took.median,
        took.max,
        summary.counts.ok,
        us(latencies.quantile(0.5)),
        us(latencies.quantile(0.995)),
        us(summary.latency.max_ns),
        us(summary.blackout.duration_ns),
        summary.counts.failed()
    )
}

/// Numbers of requests by latency.
fn latencies(windows: &[Window], seen: &LoadResult) -> Figure {
    let all: Vec<_> = windows.iter().map(|window| (window.mode, within(seen, window.span).1)).collect();
    drawn(all.iter().map(|(mode, histogram)| (*mode, histogram)))
}

/// Answers a second by the time since the start of an operation, over all operations of a mode.
fn answers(windows: &[Window], seen: &LoadResult) -> Figure {
    let mut ends: Vec<u64> = seen.record.samples.iter().map(stillpoint_measure::record::Sample::ended_ns).collect();
    ends.sort_unstable();
    let curve = |window: &Window| {
        let bins = (AROUND_NS.0 + AROUND_NS.1) / BIN_NS;
        let mut counts = vec![0_u64; bins as usize];
        for (start, _) in &window.operations {
            let first = start - AROUND_NS.0;
            let at = ends.partition_point(|end| *end < first);
            for end in ends[at..].iter().take_while(|end| **end < first + bins * BIN_NS) {
                counts[((end - first) / BIN_NS) as usize] += 1;
            }
        }
        let rate = |count: u64| count as f64 / window.operations.len() as f64 / (BIN_NS as f64 / 1e9);
        let ms = |bin: usize| (bin as f64 * BIN_NS as f64 - AROUND_NS.0 as f64) / 1e6;
        let points = counts.into_iter().enumerate().map(|(bin, count)| (ms(bin), rate(count)));
        Curve { name: label(window.mode), points: points.collect(), joined: true }
    };
    Figure {
        x: Axis { label: "time since the call of the tool, ms", logarithmic: false },
        y: Axis { label: "answers a second", logarithmic: false },
        curves: windows.iter().filter(|w| !w.operations.is_empty() && w.mode != RESTART).map(curve).collect(),
    }
}
