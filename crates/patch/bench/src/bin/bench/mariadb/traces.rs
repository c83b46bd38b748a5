//! Ten workers with analytical queries (VLDB'25, figure 6): start and end of each query, and the delay of a patch.

use super::{ALL, Amount, WITHOUT, in_mode, ms, part, shown, start, traffic, until};
use crate::results::{Section, number};
use serde::Serialize;
use std::time::Duration;
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::record::{Outcome, Sample};
use stillpoint_patch_bench::operation::{RESTART, Spread};
use stillpoint_patch_tests::mariadb::Policy;
use stillpoint_patch_tests::mariadb::annotation::Annotated;
use stillpoint_patch_tests::mariadb::effect::half;
use stillpoint_patch_tests::mariadb::traffic::{Plan, Work};
use stillpoint_patch_tests::patch_calls;
use stillpoint_testing::figure::{Axis, Curve, Figure};

/// Number of workers, as in the paper.
const WORKERS: u32 = 10;

#[derive(Serialize)]
struct Trace {
    policy: &'static str,
    mode: &'static str,
    queries: usize,
    query_s: Spread,
    /// Time from the request until every thread ran the new code; `None` if that was not within the time limit.
    over_ms: Option<f64>,
    gave_up_after_ms: Option<f64>,
    ended_in_window: usize,
    /// Time, for a restart, until the old process was gone.
    process_gone_ms: Option<f64>,
    /// Worker, start and end of each query, in seconds.
    all: Vec<(u32, f64, f64)>,
    /// Worker, start and end of queries without an answer.
    lost: Vec<(u32, f64, f64)>,
}

pub(super) fn traces(server: &Annotated, amount: Amount) -> Section {
    // A tenth of the window passes before the request; it is aborted when the window ends.
    let window_ns = amount.seconds.min(30) * 1_000_000_000;
    let columns = [
        "connections",
        "mode",
        "queries",
        "a query, s: median (max)",
        "all threads over after, ms (restart: answers again)",
        "queries ended while it waited",
        "queries lost",
    ];
    let title = format!("MariaDB: {WORKERS} workers with analytical queries, one patch, or a restart");
    let mut section = Section::new("mariadb-traces", title, &columns);
    let mut rows = Vec::new();
    for policy in Policy::ALL {
        for mode in ALL {
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
                trace.lost.len().to_string(),
            ]);
            if let Some(gone) = trace.process_gone_ms {
                section.notes.push(format!(
                    "Restart, {}: the server does not wait for queries, it ends them: {} of {WORKERS} lost, {} answered before the process was gone, after {} ms.",
                    trace.policy, trace.lost.len(), trace.ended_in_window, number(gone)
                ));
            }
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
        ("threads", RESTART) => "threads-restart",
        ("threads", _) => "threads-global",
        (_, WITHOUT) => "pool-none",
        (_, "local") => "pool-local",
        (_, "probe") => "pool-probe",
        (_, RESTART) => "pool-restart",
        _ => "pool-global",
    }
}

fn trace(server: &Annotated, policy: Policy, mode: &'static str, window_ns: u64) -> Trace {
    let mut mariadb = start(server, policy, Work::Olap, &["--thread-pool-size=3"]);
    let load = traffic(&mariadb, &Plan { work: Work::Olap, connections: WORKERS, rate: None, first: 0 }, mode);
    let began = now_ns();
    let request = began + window_ns / 10;
    until(request);
    let (mut over_ms, mut gave_up_after_ms, mut process_gone_ms) = (None, None, None);
    let waited_until = match mode {
        WITHOUT => request,
        RESTART => {
            let done = mariadb.restart(None);
            over_ms = Some(done.ms());
            process_gone_ms = Some(ms(done.ended_ns - done.began_ns));
            done.ended_ns
        }
        _ => {
            let call = patch_calls::apply(half(server), mariadb.pid());
            let operation = in_mode(call, mode, Duration::from_nanos(window_ns - window_ns / 10));
            match operation.run.code {
                Some(0) => over_ms = Some(ms(operation.reached_and_rest_ns().0)),
                Some(4) => gave_up_after_ms = Some(ms(operation.elapsed_ns())),
                _ => panic!("{}", operation.run),
            }
            operation.window_ns.1
        }
    };
    until(began + window_ns);
    let (samples, lost): (Vec<Sample>, Vec<Sample>) =
        load.finish().record.samples.into_iter().partition(|sample| sample.outcome == Outcome::Ok);
    let seconds = |ns: u64| ns.saturating_sub(began) as f64 / 1e9;
    let span = |s: &Sample| (s.connection + 1, seconds(s.scheduled_ns), seconds(s.ended_ns()));
    let inside = |s: &&Sample| (request..waited_until).contains(&s.ended_ns());
    Trace {
        policy: policy.name(),
        mode,
        queries: samples.len(),
        query_s: Spread::of(samples.iter().map(|s| s.latency_ns as f64 / 1e9).collect()),
        over_ms,
        gave_up_after_ms,
        ended_in_window: samples.iter().filter(inside).count(),
        process_gone_ms,
        all: samples.iter().map(span).collect(),
        lost: lost.iter().map(span).collect(),
    }
}

fn figure(trace: &Trace, window_ns: u64) -> Figure {
    let breaks = (f64::NAN, f64::NAN);
    let line = |&(worker, from, to): &(u32, f64, f64)| [(from, f64::from(worker)), (to, f64::from(worker)), breaks];
    let drawn = |name: &str, queries: &[(u32, f64, f64)]| Curve {
        name: name.into(),
        points: queries.iter().flat_map(line).collect(),
        joined: true,
    };
    let mut curves = vec![drawn("a query", &trace.all)];
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
    if !trace.lost.is_empty() {
        curves.push(drawn("a query that was lost", &trace.lost));
    }
    Figure { x: Axis { label: "time, s", logarithmic: false }, y: Axis { label: "worker", logarithmic: false }, curves }
}
