//! Three patches in sequence while connections open and close (VLDB'25, figure 1): the version that answered each
//! statement.

use super::{Amount, WAYS, apply, lost, ms, part, start, traffic, until};
use crate::results::{Section, number};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::record::{Outcome, Sample};
use stillpoint_patch_bench::operation::{RESTART, Spread};
use stillpoint_patch_tests::mariadb::Policy;
use stillpoint_patch_tests::mariadb::annotation::Annotated;
use stillpoint_patch_tests::mariadb::effect::{edits_of_half_and, half, of_change};
use stillpoint_patch_tests::mariadb::traffic::{Plan, Traffic, Work};
use stillpoint_patch_tests::packages::Binary;
use stillpoint_testing::figure::{Axis, Curve, Figure};

/// Lifetime of each group of connections, in quarters of the time between two patches.
const GROUPS: [(u64, u64); 4] = [(0, 16), (2, 11), (5, 14), (9, 16)];
const CONNECTIONS: u32 = 4;
/// Statements a second of one connection.
const STATEMENTS_PER_S: f64 = 25.0;

/// The first, second and third change: a patch for each, or programs that have one, two, three of them.
struct Versions {
    patches: [PathBuf; 3],
    programs: Vec<Binary>,
}

#[derive(Serialize)]
struct Row {
    policy: &'static str,
    mode: &'static str,
    statements: usize,
    by_version: BTreeMap<u8, usize>,
    went_back: usize,
    /// Connections that ended without a request of their client.
    lost: usize,
    over_ms: Spread,
    p50_ms: f64,
    max_ms: f64,
}

pub(super) fn versions(server: &Annotated, amount: Amount) -> Section {
    let changes = ["sql-ascii", "sql-reverse"];
    let [ascii, reverse] = changes.map(|name| of_change(server, name));
    let dir = tempfile::tempdir().expect("make a directory for programs");
    let programs = server.rebuilt(&edits_of_half_and(&changes), dir.path());
    let versions = Versions { patches: [half(server).to_owned(), ascii, reverse], programs };
    // 5 s between patches, as in the paper, and less in short runs.
    let quarter_ns = amount.seconds.min(20) * 1_000_000_000 / 16;
    let columns = [
        "connections",
        "mode",
        "statements",
        "by version 0 / 1 / 2 / 3",
        "a connection went back",
        "connections lost",
        "threads over, ms: median (max)",
        "latency p50, ms",
        "max, ms",
    ];
    let mut section =
        Section::new("mariadb-versions", "MariaDB: four versions of the code while connections come and go", &columns);
    let mut rows = Vec::new();
    for policy in Policy::ALL {
        for mode in WAYS {
            let (row, samples, began) = watch(server, policy, mode, &versions, quarter_ns);
            section.figures.push((name(policy, mode), figure(&samples, began)));
            let versions: Vec<String> = (0..=3).map(|v| row.by_version.get(&v).unwrap_or(&0).to_string()).collect();
            section.rows.push(vec![
                row.policy.into(),
                mode.into(),
                row.statements.to_string(),
                versions.join(" / "),
                row.went_back.to_string(),
                row.lost.to_string(),
                format!("{} ({})", number(row.over_ms.median), number(row.over_ms.max)),
                number(row.p50_ms),
                number(row.max_ms),
            ]);
            rows.push(row);
        }
    }
    section.notes.push(
        "Restart: as a program with the next change; over when a client is answered again. A statement counts from the moment at which it was due."
            .into(),
    );
    section.raw(&rows);
    section
}

fn name(policy: Policy, mode: &str) -> &'static str {
    match (part(policy, Work::Versions), mode) {
        ("threads", "local") => "threads-local",
        ("threads", "probe") => "threads-probe",
        ("threads", RESTART) => "threads-restart",
        ("threads", _) => "threads-global",
        (_, "local") => "pool-local",
        (_, "probe") => "pool-probe",
        (_, RESTART) => "pool-restart",
        _ => "pool-global",
    }
}

fn watch(
    server: &Annotated,
    policy: Policy,
    mode: &'static str,
    versions: &Versions,
    quarter_ns: u64,
) -> (Row, Vec<Sample>, u64) {
    let mut mariadb = start(server, policy, Work::Versions, &[]);
    let began = now_ns();
    let mut groups: Vec<Option<Traffic>> = GROUPS.map(|_| None).into();
    let (mut samples, mut over_ms) = (Vec::new(), Vec::new());
    for quarter in 0..=16 {
        until(began + quarter * quarter_ns);
        for (number, (from, to)) in GROUPS.into_iter().enumerate() {
            if quarter == from {
                let first = number as u32 * CONNECTIONS;
                let rate = Some(STATEMENTS_PER_S * f64::from(CONNECTIONS));
                let plan = Plan { work: Work::Versions, connections: CONNECTIONS, rate, first };
                groups[number] = Some(traffic(&mariadb, &plan, mode));
            } else if quarter == to {
                let group = groups[number].take().expect("it was started");
                samples.extend(group.finish().record.samples);
            }
        }
        if let 4 | 8 | 12 = quarter {
            let at = quarter as usize / 4 - 1;
            over_ms.push(match mode {
                RESTART => mariadb.restart(Some(&versions.programs[at])).ms(),
                _ => ms(apply(&mariadb, &versions.patches[at], mode).reached_and_rest_ns().0),
            });
        }
    }
    let lost = lost(&samples);
    samples.retain(|sample: &Sample| sample.outcome == Outcome::Ok);
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
        lost,
        over_ms: Spread::of(over_ms),
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
