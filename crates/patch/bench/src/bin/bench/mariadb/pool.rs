//! Time until all threads have migrated, by the number of the pool's groups (VLDB'25, figure 7).

use super::{Amount, MODES, WAYS, WORKS, apply, ms, quantile, rest, revert, shown, start, until};
use crate::results::{Section, number};
use serde::Serialize;
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::record::{Outcome, Sample};
use stillpoint_patch_bench::operation::RESTART;
use stillpoint_patch_tests::mariadb::annotation::Annotated;
use stillpoint_patch_tests::mariadb::effect::half;
use stillpoint_patch_tests::mariadb::traffic::{Plan, Traffic, Work};
use stillpoint_patch_tests::mariadb::{MariaDb, Policy};
use stillpoint_patch_tests::server::Restart;
use stillpoint_testing::figure::{Axis, Curve, Figure};

/// Groups of the pool, as in the paper from three to twenty.
const SIZES: [u32; 5] = [3, 5, 10, 15, 20];
/// Number of connections, as in the paper.
const CONNECTIONS: u32 = 10;
/// Minimum time between the starts of two requests.
const PAUSE_NS: u64 = 100_000_000;

#[derive(Serialize)]
struct Row {
    work: Work,
    mode: &'static str,
    groups: u32,
    /// Migration times in ascending order, in milliseconds.
    over_ms: Vec<f64>,
}

impl Row {
    fn at(&self, share: f64) -> f64 {
        quantile(&self.over_ms, share)
    }
}

pub(super) fn pool(server: &Annotated, amount: Amount) -> Section {
    let seconds = (amount.seconds / 12).clamp(1, 4);
    let columns = ["work", "mode", "groups", "requests", "quarter", "median", "three quarters", "p95", "max"];
    let title = format!("MariaDB: time until all threads are over by groups of the pool, ms ({CONNECTIONS} clients)");
    let mut section = Section::new("mariadb-pool", title, &columns);
    let mut rows = Vec::new();
    for work in WORKS {
        for groups in SIZES {
            let mut mariadb = start(server, Policy::Pool, work, &[&format!("--thread-pool-size={groups}")]);
            let load = Traffic::start(&mariadb, &Plan { work, connections: CONNECTIONS, rate: None, first: 0 });
            rest(0.5);
            for mode in MODES {
                let mut over_ms = Vec::new();
                let end = now_ns() + seconds * 1_000_000_000;
                while now_ns() < end {
                    for which in 0..2 {
                        let next = now_ns() + PAUSE_NS;
                        let operation =
                            if which == 0 { apply(&mariadb, half(server), mode) } else { revert(&mariadb, mode) };
                        over_ms.push(ms(operation.reached_and_rest_ns().0));
                        until(next);
                    }
                }
                over_ms.sort_by(f64::total_cmp);
                rows.push(Row { work, mode, groups, over_ms });
            }
            load.finish();
            let over_ms = restarts(&mut mariadb, work, amount.runs.min(3));
            rows.push(Row { work, mode: RESTART, groups, over_ms });
        }
        section.figures.push((work.file_name(), figure(&rows, work)));
    }
    for row in &rows {
        let mut cells =
            vec![row.work.name().into(), row.mode.into(), row.groups.to_string(), row.over_ms.len().to_string()];
        cells.extend([0.25, 0.5, 0.75, 0.95, 1.0].map(|share| number(row.at(share))));
        section.rows.push(cells);
    }
    section.notes.push("No request was given up. Restart: until each client has been answered again.".into());
    section.raw(&rows);
    section
}

/// Measures the time until every client is served again; in ascending order.
fn restarts(mariadb: &mut MariaDb, work: Work, count: usize) -> Vec<f64> {
    let plan = Plan { work, connections: CONNECTIONS, rate: None, first: 0 };
    let load = Traffic::start_through_restarts(mariadb, &plan);
    let mut done = Vec::new();
    for _ in 0..count {
        rest(0.5);
        done.push(mariadb.restart(None));
        rest(2.0);
    }
    let samples = load.finish().record.samples;
    let served = |restart: &Restart, connection: u32| {
        // After the end of the old process, an answer is from the new one.
        let by_new = |s: &&Sample| s.outcome == Outcome::Ok && s.ended_ns() > restart.ended_ns;
        let first = samples.iter().filter(|s| s.connection == connection).find(by_new);
        first.unwrap_or_else(|| panic!("client {connection} is not served two seconds behind a restart")).ended_ns()
    };
    let all = |restart: &Restart| (0..CONNECTIONS).map(|connection| served(restart, connection)).max();
    let mut over_ms: Vec<f64> =
        done.iter().map(|restart| ms(all(restart).unwrap_or(0).saturating_sub(restart.began_ns))).collect();
    over_ms.sort_by(f64::total_cmp);
    over_ms
}

/// Draws the figure: the line joins medians, a bar reaches from the first quarter to the third.
fn figure(rows: &[Row], work: Work) -> Figure {
    let breaks = (f64::NAN, f64::NAN);
    let curve = |(number, mode): (usize, &'static str)| {
        let of: Vec<&Row> = rows.iter().filter(|row| row.work == work && row.mode == mode).collect();
        let across = |row: &Row| f64::from(row.groups) + 0.25 * (number as f64 - 1.5);
        let mut points: Vec<(f64, f64)> = of.iter().map(|row| (across(row), row.at(0.5))).collect();
        for row in of {
            points.extend([breaks, (across(row), row.at(0.25)), (across(row), row.at(0.75))]);
        }
        Curve { name: shown(mode), points, joined: true }
    };
    Figure {
        x: Axis { label: "groups of the pool", logarithmic: false },
        y: Axis { label: "until all threads are over (restart: all clients served), ms", logarithmic: true },
        curves: WAYS.into_iter().enumerate().map(curve).collect(),
    }
}
