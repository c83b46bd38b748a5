//! Statements answered around a patching (VLDB'25, figure 5), compared with the same load without patching.

use super::{ALL, Amount, WITHOUT, WORKS, apply, lost, part, rest, revert, shown, start, traffic, until};
use crate::results::{Section, number};
use serde::Serialize;
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::record::{Outcome, Sample};
use stillpoint_patch_bench::operation::{RESTART, Spread};
use stillpoint_patch_tests::mariadb::annotation::Annotated;
use stillpoint_patch_tests::mariadb::effect::half;
use stillpoint_patch_tests::mariadb::traffic::{Plan, Work};
use stillpoint_patch_tests::mariadb::{MariaDb, Policy};
use stillpoint_testing::figure::{Axis, Curve, Figure};

/// Number of connections, as in the paper.
const CONNECTIONS: u32 = 10;
const BIN_NS: u64 = 100_000_000;
/// Bins before a patching, and after it.
const BINS_AROUND: u64 = 8;

#[derive(Serialize)]
struct Row {
    policy: &'static str,
    work: Work,
    mode: &'static str,
    operations: usize,
    /// Time of an operation; for a restart, until a client gets an answer again.
    over_ms: Spread,
    /// Number of lost connections.
    lost: usize,
    /// Statements in each 100 ms from 800 ms before a patching to 800 ms after it, mean of all patchings.
    bins: Vec<f64>,
}

impl Row {
    fn mean(&self, bins: std::ops::Range<u64>) -> f64 {
        let bins = &self.bins[bins.start as usize..bins.end as usize];
        bins.iter().sum::<f64>() / bins.len() as f64
    }
}

pub(super) fn throughput(server: &Annotated, amount: Amount) -> Section {
    let operations = (amount.seconds / 10).clamp(1, 3) * 2;
    let columns = [
        "connections",
        "work",
        "mode",
        "operations",
        "threads over, ms: median (max)",
        "per 100 ms before",
        "in the 100 ms of the patching",
        "in the 300 ms from its start",
        "that, to before",
        "connections lost",
    ];
    let title = format!("MariaDB: statements of {CONNECTIONS} clients around a patching, or a restart");
    let mut section = Section::new("mariadb-throughput", title, &columns);
    let mut rows = Vec::new();
    for policy in Policy::ALL {
        for work in WORKS {
            let mut mariadb = start(server, policy, work, &[]);
            let plan = Plan { work, connections: CONNECTIONS, rate: None, first: 0 };
            let of: Vec<Row> = ALL
                .into_iter()
                .map(|mode| {
                    let load = traffic(&mariadb, &plan, mode);
                    rest(1.0);
                    let (moments, over_ms) = patchings(server, &mut mariadb, mode, operations);
                    let samples = load.finish().record.samples;
                    let (bins, lost) = (around(&samples, &moments), lost(&samples));
                    Row { policy: policy.name(), work, mode, operations: over_ms.count, over_ms, lost, bins }
                })
                .collect();
            section.figures.push((part(policy, work), figure(&of)));
            rows.extend(of);
        }
    }
    for row in &rows {
        let (before, at, after) =
            (row.mean(0..BINS_AROUND), row.mean(BINS_AROUND..BINS_AROUND + 1), row.mean(BINS_AROUND..BINS_AROUND + 3));
        section.rows.push(vec![
            row.policy.into(),
            row.work.name().into(),
            shown(row.mode),
            row.operations.to_string(),
            if row.operations == 0 {
                "-".into()
            } else {
                format!("{} ({})", number(row.over_ms.median), number(row.over_ms.max))
            },
            number(before),
            number(at),
            number(after),
            number(after / before),
            row.lost.to_string(),
        ]);
    }
    section
        .notes
        .push("Clients, server and tool share two processors: what the tool uses is missing from all bars.".into());
    section.raw(&rows);
    section
}

/// Returns the times of operations (without patching, the times at which they would have been), and the migration
/// times.
fn patchings(server: &Annotated, mariadb: &mut MariaDb, mode: &str, count: u64) -> (Vec<u64>, Spread) {
    let began = now_ns();
    let (mut moments, mut over) = (Vec::new(), Vec::new());
    for number in 0..count {
        let moment = began + (2 * number + 1) * BINS_AROUND * BIN_NS;
        until(moment);
        moments.push(moment);
        let operation = match mode {
            WITHOUT => continue,
            RESTART => {
                over.push(mariadb.restart(None).ms());
                continue;
            }
            _ if number % 2 == 0 => apply(mariadb, half(server), mode),
            _ => revert(mariadb, mode),
        };
        over.push(super::ms(operation.reached_and_rest_ns().0));
    }
    until(began + 2 * count * BINS_AROUND * BIN_NS);
    (moments, Spread::of(over))
}

/// Returns the statements answered in each bin around the times, mean of all.
fn around(samples: &[Sample], moments: &[u64]) -> Vec<f64> {
    let mut bins = vec![0u64; 2 * BINS_AROUND as usize];
    for moment in moments {
        let from = moment - BINS_AROUND * BIN_NS;
        for sample in samples.iter().filter(|sample| sample.outcome == Outcome::Ok) {
            let at = sample.ended_ns().checked_sub(from).map(|ns| (ns / BIN_NS) as usize);
            if let Some(bin) = at.and_then(|at| bins.get_mut(at)) {
                *bin += 1;
            }
        }
    }
    bins.into_iter().map(|bin| bin as f64 / moments.len() as f64).collect()
}

fn figure(rows: &[Row]) -> Figure {
    let place = |bin: usize| (bin as f64 - BINS_AROUND as f64) * 100.0;
    let curve = |row: &Row| Curve {
        name: shown(row.mode),
        points: row.bins.iter().enumerate().map(|(bin, &count)| (place(bin), count)).collect(),
        joined: true,
    };
    Figure {
        x: Axis { label: "from the patching, ms", logarithmic: false },
        y: Axis { label: "statements in 100 ms", logarithmic: false },
        curves: rows.iter().map(curve).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_are_counted_where_they_end() {
        let sample = |ended: u64| Sample {
            scheduled_ns: ended - 5,
            latency_ns: 5,
            late_us: 0,
            connection: 0,
            kind: 0,
            outcome: Outcome::Ok,
        };
        let moment = 2_000_000_000;
        let samples = [sample(moment - 1), sample(moment), sample(moment + BIN_NS), sample(moment + 100 * BIN_NS)];
        let bins = around(&samples, &[moment]);
        let (before, after) = bins.split_at(BINS_AROUND as usize);
        assert_eq!((before.last(), after[0], after[1], bins.iter().sum::<f64>()), (Some(&1.0), 1.0, 1.0, 3.0));
    }
}
