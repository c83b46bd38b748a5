//! The longest latencies around a patching, for five patches (VLDB'25, figure 8), one thread per connection.

use super::{
    ALL, Amount, MODES, WITHOUT, WORKS, apply, lost, ms, quantile, rest, revert, shown, start, traffic, until,
};
use crate::results::{Section, number};
use serde::Serialize;
use std::path::PathBuf;
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::record::Sample;
use stillpoint_patch_bench::operation::{RESTART, Spread};
use stillpoint_patch_tests::mariadb::Policy;
use stillpoint_patch_tests::mariadb::annotation::Annotated;
use stillpoint_patch_tests::mariadb::effect::{half, nothing, of_change};
use stillpoint_patch_tests::mariadb::traffic::{Plan, Work};
use stillpoint_testing::figure::{Axis, Curve, Figure};

/// Number of connections, as in the paper.
const CONNECTIONS: u32 = 10;
/// Time before a patching, and after it, as in the paper.
const AROUND_NS: u64 = 1_500_000_000;
/// Limit of points in a drawing; the slowest ones stay.
const POINTS_MAX: usize = 500;

#[derive(Serialize)]
struct Row {
    work: Work,
    mode: &'static str,
    patch: &'static str,
    statements: usize,
    lost: usize,
    over_ms: f64,
    p50_ms: f64,
    p9995_ms: f64,
    max_ms: f64,
    /// Drawn requests, the slowest among them: time from the patching, and latency, in milliseconds.
    #[serde(skip)]
    drawn: Vec<(f64, f64)>,
}

pub(super) fn extremes(server: &Annotated, amount: Amount) -> Section {
    let mut patches: Vec<(&'static str, PathBuf)> = vec![
        ("half", half(server).to_owned()),
        ("nothing", nothing(server).to_owned()),
        ("sql-ascii", of_change(server, "sql-ascii")),
        ("sql-reverse", of_change(server, "sql-reverse")),
        ("sql-month", of_change(server, "sql-month")),
    ];
    if amount.seconds < 10 {
        patches.truncate(1);
    }
    let columns = [
        "work",
        "mode",
        "patchings",
        "threads over, ms: median (max)",
        "p50, ms",
        "p99.95, ms: median of patches (max)",
        "longest, ms: median (max)",
        "connections lost",
    ];
    let mut section = Section::new(
        "mariadb-extremes",
        "MariaDB, a thread per connection: latencies in the 3 s around a patching, five patches, or a restart",
        &columns,
    );
    let mut rows: Vec<Row> = Vec::new();
    for work in WORKS {
        let mut mariadb = start(server, Policy::ThreadPerConnection, work, &[]);
        for mode in ALL {
            for (name, patch) in &patches {
                let plan = Plan { work, connections: CONNECTIONS, rate: None, first: 0 };
                let load = traffic(&mariadb, &plan, mode);
                rest(0.3);
                let moment = now_ns() + AROUND_NS;
                until(moment);
                let (name, over_ms) = match mode {
                    WITHOUT => (*name, 0.0),
                    RESTART => ("any", mariadb.restart(None).ms()),
                    _ => (*name, ms(apply(&mariadb, patch, mode).reached_and_rest_ns().0)),
                };
                until(moment + AROUND_NS);
                let samples = load.finish().record.samples;
                rows.push(row(work, mode, name, over_ms, &samples, moment));
                if MODES.contains(&mode) {
                    revert(&mariadb, "probe");
                }
            }
        }
        let of: Vec<&Row> = rows.iter().filter(|row| row.work == work).collect();
        section.figures.push((work.file_name(), figure(&of)));
    }
    for work in WORKS {
        for mode in ALL {
            let of: Vec<&Row> = rows.iter().filter(|row| row.work == work && row.mode == mode).collect();
            let spread = |value: fn(&Row) -> f64| Spread::of(of.iter().map(|row| value(row)).collect());
            let both = |s: Spread| format!("{} ({})", number(s.median), number(s.max));
            section.rows.push(vec![
                work.name().into(),
                shown(mode),
                of.len().to_string(),
                if mode == WITHOUT { "-".into() } else { both(spread(|r| r.over_ms)) },
                number(spread(|r| r.p50_ms).median),
                both(spread(|r| r.p9995_ms)),
                both(spread(|r| r.max_ms)),
                of.iter().map(|row| row.lost).sum::<usize>().to_string(),
            ]);
        }
    }
    section.notes.push(
        "Restarted: over when a client is answered again; a statement that follows a lost one counts from the moment of the loss. The server has small caches to lose and small logs to read."
            .into(),
    );
    section.raw(&rows);
    section
}

fn row(work: Work, mode: &'static str, patch: &'static str, over_ms: f64, samples: &[Sample], moment: u64) -> Row {
    let lost = lost(samples);
    let inside = |s: &&Sample| s.ended_ns() >= moment - AROUND_NS && s.scheduled_ns <= moment + AROUND_NS;
    let samples: Vec<&Sample> = samples.iter().filter(inside).collect();
    let mut latencies: Vec<f64> = samples.iter().map(|s| ms(s.latency_ns)).collect();
    latencies.sort_by(f64::total_cmp);
    let slow = latencies.len().checked_sub(POINTS_MAX / 2).map_or(0.0, |at| latencies[at]);
    let step = (samples.len() / (POINTS_MAX / 2)).max(1);
    let drawn = samples.iter().enumerate().filter(|(at, s)| ms(s.latency_ns) >= slow || at % step == 0);
    Row {
        work,
        mode,
        patch,
        statements: samples.len(),
        lost,
        over_ms,
        p50_ms: quantile(&latencies, 0.5),
        p9995_ms: quantile(&latencies, 0.9995),
        max_ms: quantile(&latencies, 1.0),
        drawn: drawn.map(|(_, s)| (s.scheduled_ns as f64 / 1e6 - moment as f64 / 1e6, ms(s.latency_ns))).collect(),
    }
}

/// Draws the figure: half of the points are the slowest statements, half are any.
fn figure(rows: &[&Row]) -> Figure {
    let curve = |mode: &'static str| {
        let first = rows.iter().find(|row| row.mode == mode);
        Curve { name: shown(mode), points: first.map_or_else(Vec::new, |row| row.drawn.clone()), joined: false }
    };
    Figure {
        x: Axis { label: "from the patching, ms", logarithmic: false },
        y: Axis { label: "latency of a statement, ms", logarithmic: true },
        curves: ALL.into_iter().map(curve).collect(),
    }
}
