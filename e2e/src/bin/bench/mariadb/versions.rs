//! Three patches one after another while connections come and go (VLDB'25, figure 1): which version answered which statement.

use super::{Amount, MODES, apply, ms, part, start, until};
use crate::results::{Section, number};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use stillpoint_e2e::mariadb::Policy;
use stillpoint_e2e::mariadb::annotated::Annotated;
use stillpoint_e2e::mariadb::effect::{half, of_change};
use stillpoint_e2e::mariadb::traffic::{Plan, Traffic, Work};
use stillpoint_e2e::operation::Spread;
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::figure::{Axis, Curve, Figure};
use stillpoint_measure::record::Sample;

/// Of each group of connections: from when to when it is there, in quarters of the time between two patches.
const GROUPS: [(u64, u64); 4] = [(0, 16), (2, 11), (5, 14), (9, 16)];
const CONNECTIONS: u32 = 4;
/// Statements a second of one connection.
const RATE: f64 = 25.0;

#[derive(Serialize)]
struct Row {
    policy: &'static str,
    mode: &'static str,
    statements: usize,
    by_version: BTreeMap<u8, usize>,
    went_back: usize,
    over_ms: Spread,
    p50_ms: f64,
    max_ms: f64,
}

pub(super) fn versions(server: &Annotated, amount: Amount) -> Section {
    let patches = [half(server).to_owned(), of_change(server, "sql-ascii"), of_change(server, "sql-reverse")];
    // 5 s between patches, as in the paper, and less in small.
    let quarter_ns = amount.seconds.min(20) * 1_000_000_000 / 16;
    let columns = [
        "connections",
        "mode",
        "statements",
        "by version 0 / 1 / 2 / 3",
        "a connection went back",
        "threads over, ms: median (max)",
        "latency p50, ms",
        "max, ms",
    ];
    let mut section =
        Section::new("mariadb-versions", "MariaDB: four versions of the code while connections come and go", &columns);
    let mut rows = Vec::new();
    for policy in Policy::ALL {
        for mode in MODES {
            let (row, samples, began) = watch(server, policy, mode, &patches, quarter_ns);
            section.figures.push((name(policy, mode), figure(&samples, began)));
            let versions: Vec<String> = (0..=3).map(|v| row.by_version.get(&v).unwrap_or(&0).to_string()).collect();
            section.rows.push(vec![
                row.policy.into(),
                mode.into(),
                row.statements.to_string(),
                versions.join(" / "),
                row.went_back.to_string(),
                format!("{} ({})", number(row.over_ms.median), number(row.over_ms.max)),
                number(row.p50_ms),
                number(row.max_ms),
            ]);
            rows.push(row);
        }
    }
    section.raw(&rows);
    section
}

fn name(policy: Policy, mode: &str) -> &'static str {
    match (part(policy, Work::Versions), mode) {
        ("threads", "local") => "threads-local",
        ("threads", "probe") => "threads-probe",
        ("threads", _) => "threads-global",
        (_, "local") => "pool-local",
        (_, "probe") => "pool-probe",
        _ => "pool-global",
    }
}

fn watch(
    server: &Annotated,
    policy: Policy,
    mode: &'static str,
    patches: &[PathBuf; 3],
    quarter_ns: u64,
) -> (Row, Vec<Sample>, u64) {
    let mariadb = start(server, policy, Work::Versions, &[]);
    let began = now_ns();
    let mut groups: Vec<Option<Traffic>> = GROUPS.map(|_| None).into();
    let (mut samples, mut operations) = (Vec::new(), Vec::new());
    for quarter in 0..=16 {
        until(began + quarter * quarter_ns);
        for (number, (from, to)) in GROUPS.into_iter().enumerate() {
            if quarter == from {
                let first = number as u32 * CONNECTIONS;
                let rate = Some(RATE * f64::from(CONNECTIONS));
                let plan = Plan { work: Work::Versions, connections: CONNECTIONS, rate, first };
                groups[number] = Some(Traffic::start(&mariadb, &plan));
            } else if quarter == to {
                let group = groups[number].take().expect("it was started");
                samples.extend(group.finish().record.samples);
            }
        }
        if let 4 | 8 | 12 = quarter {
            operations.push(apply(&mariadb, &patches[quarter as usize / 4 - 1], mode));
        }
    }
    samples.sort_by_key(Sample::ended_ns);
    let mut by_version = BTreeMap::new();
    let mut last = BTreeMap::new();
    let mut went_back = 0;
    for sample in &samples {
        *by_version.entry(sample.kind).or_default() += 1;
        let before = last.insert(sample.connection, sample.kind);
        went_back += usize::from(before.is_some_and(|before| before > sample.kind));
    }
    let latencies = Spread::of(samples.iter().map(|s| ms(s.latency_ns)).collect());
    let row = Row {
        policy: policy.name(),
        mode,
        statements: samples.len(),
        by_version,
        went_back,
        over_ms: Spread::of(operations.iter().map(|o| ms(o.reached_and_rest_ns().0)).collect()),
        p50_ms: latencies.median,
        max_ms: latencies.max,
    };
    (row, samples, began)
}

fn figure(samples: &[Sample], began: u64) -> Figure {
    let curve = |version: u8| {
        let of = samples.iter().filter(|s| s.kind == version);
        let points = of.map(|s| (s.scheduled_ns.saturating_sub(began) as f64 / 1e9, ms(s.latency_ns))).collect();
        Curve { name: format!("version {version}"), points, joined: false }
    };
    Figure {
        x: Axis { label: "time, s", logarithmic: false },
        y: Axis { label: "latency of a statement, ms", logarithmic: true },
        curves: (0..=3).map(curve).collect(),
    }
}
