//! Ten workers with analytical queries (VLDB'25, figure 6): when each query began and ended, and how long a patch waits.

use super::{Amount, MODES, WITHOUT, in_mode, ms, part, shown, start, until};
use crate::results::{Section, number};
use serde::Serialize;
use std::time::Duration;
use stillpoint_e2e::mariadb::Policy;
use stillpoint_e2e::mariadb::annotated::Annotated;
use stillpoint_e2e::mariadb::effect::half;
use stillpoint_e2e::mariadb::traffic::{Plan, Traffic, Work};
use stillpoint_e2e::operation::Spread;
use stillpoint_e2e::patching;
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::figure::{Axis, Curve, Figure};
use stillpoint_measure::record::Sample;

/// As in the paper.
const WORKERS: u32 = 10;

#[derive(Serialize)]
struct Trace {
    policy: &'static str,
    mode: &'static str,
    queries: usize,
    query_s: Spread,
    /// From the request to the moment when every thread ran the new code; `None`: not within the time that it was given.
    over_ms: Option<f64>,
    gave_up_after_ms: Option<f64>,
    ended_in_window: usize,
    /// Worker, beginning and end of each query in seconds.
    all: Vec<(u32, f64, f64)>,
}

pub(super) fn traces(server: &Annotated, amount: Amount) -> Section {
    // A tenth of the window passes before the request; it is given up when the window ends.
    let window_ns = amount.seconds.min(30) * 1_000_000_000;
    let columns = [
        "connections",
        "mode",
        "queries",
        "a query, s: median (max)",
        "all threads over after, ms",
        "queries ended while it waited",
    ];
    let title = format!("MariaDB: {WORKERS} workers with analytical queries, one patch");
    let mut section = Section::new("mariadb-traces", title, &columns);
    let mut rows = Vec::new();
    for policy in Policy::ALL {
        for mode in [WITHOUT].into_iter().chain(MODES) {
            let trace = trace(server, policy, mode, window_ns);
            section.figures.push((name(policy, mode), figure(&trace, window_ns)));
            let over = match (mode, trace.over_ms, trace.gave_up_after_ms) {
                (WITHOUT, ..) => "-".into(),
                (_, Some(ms), _) => number(ms),
                (_, None, after) => format!("given up after {}", number(after.unwrap_or(0.0))),
            };
            section.rows.push(vec![
                trace.policy.into(),
                shown(mode),
                trace.queries.to_string(),
                format!("{} ({})", number(trace.query_s.median), number(trace.query_s.max)),
                over,
                trace.ended_in_window.to_string(),
            ]);
            rows.push(trace);
        }
    }
    section.notes.push(
        "Ten queries share two processors. The paper's queries ran for up to 26 minutes; these are cut to the window."
            .into(),
    );
    section.raw(&rows);
    section
}

fn name(policy: Policy, mode: &str) -> &'static str {
    match (part(policy, Work::Olap), mode) {
        ("threads", WITHOUT) => "threads-none",
        ("threads", "local") => "threads-local",
        ("threads", "probe") => "threads-probe",
        ("threads", _) => "threads-global",
        (_, WITHOUT) => "pool-none",
        (_, "local") => "pool-local",
        (_, "probe") => "pool-probe",
        _ => "pool-global",
    }
}

fn trace(server: &Annotated, policy: Policy, mode: &'static str, window_ns: u64) -> Trace {
    let mariadb = start(server, policy, Work::Olap, &["--thread-pool-size=3"]);
    let load = Traffic::start(&mariadb, &Plan { work: Work::Olap, connections: WORKERS, rate: None, first: 0 });
    let began = now_ns();
    let request = began + window_ns / 10;
    until(request);
    let operation = (mode != WITHOUT).then(|| {
        let call = patching::apply(half(server), mariadb.pid());
        in_mode(call, mode, Duration::from_nanos(window_ns - window_ns / 10))
    });
    let waited_until = operation.as_ref().map_or(request, |o| o.window_ns.1);
    until(began + window_ns);
    let samples = load.finish().record.samples;
    let over = operation.as_ref().filter(|o| o.run.code == Some(0));
    if let Some(operation) = &operation {
        assert!(matches!(operation.run.code, Some(0 | 4)), "{}", operation.run);
    }
    let seconds = |ns: u64| ns.saturating_sub(began) as f64 / 1e9;
    let inside = |s: &&Sample| (request..waited_until).contains(&s.ended_ns());
    Trace {
        policy: policy.name(),
        mode,
        queries: samples.len(),
        query_s: Spread::of(samples.iter().map(|s| s.latency_ns as f64 / 1e9).collect()),
        over_ms: over.map(|o| ms(o.reached_and_rest_ns().0)),
        gave_up_after_ms: operation.as_ref().filter(|_| over.is_none()).map(|o| ms(o.elapsed_ns())),
        ended_in_window: samples.iter().filter(inside).count(),
        all: samples.iter().map(|s| (s.connection + 1, seconds(s.scheduled_ns), seconds(s.ended_ns()))).collect(),
    }
}

fn figure(trace: &Trace, window_ns: u64) -> Figure {
    let breaks = (f64::NAN, f64::NAN);
    let line = |&(worker, from, to): &(u32, f64, f64)| [(from, f64::from(worker)), (to, f64::from(worker)), breaks];
    let mut curves =
        vec![Curve { name: "a query".into(), points: trace.all.iter().flat_map(line).collect(), joined: true }];
    if trace.mode != WITHOUT {
        let from = window_ns as f64 / 1e10;
        let (to, name) = match (trace.over_ms, trace.gave_up_after_ms) {
            (Some(ms), _) => (from + ms / 1e3, format!("over after {} ms", number(ms))),
            (None, after) => (from + after.unwrap_or(0.0) / 1e3, "given up".into()),
        };
        let top = f64::from(WORKERS) + 0.5;
        let points = vec![(from, 0.5), (to, 0.5), (to, top), (from, top), (from, 0.5)];
        curves.push(Curve { name: format!("{}: {name}", trace.mode), points, joined: true });
    }
    Figure { x: Axis { label: "time, s", logarithmic: false }, y: Axis { label: "worker", logarithmic: false }, curves }
}
