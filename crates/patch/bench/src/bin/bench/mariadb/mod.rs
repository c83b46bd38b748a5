//! Experiments on MariaDB with quiescence points, both connection policies: the common part of the sections.

mod extremes;
mod late_threads;
mod periodic_patching;
mod pool;
mod random_seconds;
mod steps;
mod throughput;
mod traces;
mod versions;

use crate::results::Section;
use std::path::Path;
use std::time::Duration;
use stillpoint_measure::clock::now_ns;
use stillpoint_measure::record::{Outcome, Sample};
use stillpoint_patch_bench::operation::{Operation, RESTART};
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::mariadb::annotation::{Annotated, annotated};
use stillpoint_patch_tests::mariadb::traffic::{Plan, Traffic, Work};
use stillpoint_patch_tests::mariadb::{MariaDb, Policy};
use stillpoint_patch_tests::patch_calls;

/// Names of the sections, in the order in which they run.
pub(crate) const SECTIONS: [&str; 11] = [
    "mariadb-steps",
    "mariadb-idle",
    "mariadb-versions",
    "mariadb-throughput",
    "mariadb-traces",
    "mariadb-pool",
    "mariadb-extremes",
    "mariadb-seconds",
    "mariadb-latency",
    "mariadb-latency-oltp",
    "mariadb-latency-busy",
];

/// Number and size of the measurements.
#[derive(Clone, Copy)]
pub(crate) struct Amount {
    /// Length, in seconds, of a window that is compared with others.
    pub(crate) seconds: u64,
    /// Number of repetitions.
    pub(crate) runs: usize,
}

/// Name of the run without a patch, the first of each comparison.
const WITHOUT: &str = "none";
const MODES: [&str; 3] = ["local", "probe", "global"];
/// All compared modes and the restart.
const WAYS: [&str; 4] = ["local", "probe", "global", RESTART];
const ALL: [&str; 5] = [WITHOUT, "local", "probe", "global", RESTART];
/// Kinds of load.
const WORKS: [Work; 3] = [Work::NoOp, Work::Ycsb, Work::TpcC];

/// Runs the requested sections.
pub(crate) fn run(
    wanted: &dyn Fn(&str) -> bool,
    amount: Amount,
    add: &mut dyn FnMut(Section) -> Result<(), String>,
) -> Result<(), String> {
    if !SECTIONS.into_iter().any(wanted) {
        return Ok(());
    }
    let server = annotated().as_ref().map_err(Clone::clone)?;
    for name in SECTIONS.into_iter().filter(|name| wanted(name)) {
        match name {
            "mariadb-steps" => add(steps::steps(server, amount))?,
            "mariadb-idle" => add(late_threads::measure(server, amount)?)?,
            "mariadb-versions" => add(versions::versions(server, amount))?,
            "mariadb-throughput" => add(throughput::throughput(server, amount))?,
            "mariadb-traces" => add(traces::traces(server, amount))?,
            "mariadb-pool" => add(pool::pool(server, amount))?,
            "mariadb-extremes" => add(extremes::extremes(server, amount))?,
            "mariadb-seconds" => add(random_seconds::measure(server, amount))?,
            "mariadb-latency" => add(periodic_patching::measure(server, periodic_patching::Load::Statements, amount)?)?,
            "mariadb-latency-oltp" => {
                add(periodic_patching::measure(server, periodic_patching::Load::Transactions, amount)?)?
            }
            _ => add(periodic_patching::measure(server, periodic_patching::Load::ManyTransactions, amount)?)?,
        }
    }
    Ok(())
}

/// Starts a server with the tables of this load.
fn start(server: &Annotated, policy: Policy, work: Work, extra: &[&str]) -> MariaDb {
    let mariadb = server.packaged.start(policy, extra);
    work.prepare(&mariadb);
    mariadb
}

/// Starts clients that continue after a restart; any other mode must lose no connection.
fn traffic(mariadb: &MariaDb, plan: &Plan, mode: &str) -> Traffic {
    if mode == RESTART { Traffic::start_through_restarts(mariadb, plan) } else { Traffic::start(mariadb, plan) }
}

fn lost(samples: &[Sample]) -> usize {
    samples.iter().filter(|sample| sample.outcome == Outcome::Lost).count()
}

fn in_mode(call: Stillpoint, mode: &str, limit: Duration) -> Operation {
    Operation::of(call.args(["--quiescence", mode, "--timeout", &format!("{}ms", limit.as_millis())]))
}

/// Time limit far above the expected times: reaching it is a failure.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

fn apply(mariadb: &MariaDb, patch: &Path, mode: &str) -> Operation {
    in_mode(patch_calls::apply(patch, mariadb.pid()), mode, CALL_TIMEOUT).succeeded()
}

fn revert(mariadb: &MariaDb, mode: &str) -> Operation {
    in_mode(patch_calls::revert(mariadb.pid()), mode, CALL_TIMEOUT).succeeded()
}

/// Sleeps until this moment of `CLOCK_MONOTONIC`.
fn until(ns: u64) {
    std::thread::sleep(Duration::from_nanos(ns.saturating_sub(now_ns())));
}

fn rest(seconds: f64) {
    std::thread::sleep(Duration::from_secs_f64(seconds));
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// Returns the name of a mode for people.
fn shown(mode: &str) -> String {
    match mode {
        WITHOUT => "left alone".into(),
        RESTART => "restarted".into(),
        mode => format!("--quiescence {mode}"),
    }
}

/// Returns the part of a drawing's file name.
fn part(policy: Policy, work: Work) -> &'static str {
    match (policy, work) {
        (Policy::ThreadPerConnection, Work::NoOp) => "threads-noop",
        (Policy::ThreadPerConnection, Work::Ycsb) => "threads-ycsb",
        (Policy::ThreadPerConnection, Work::TpcC) => "threads-tpcc",
        (Policy::ThreadPerConnection, _) => "threads",
        (Policy::Pool, Work::NoOp) => "pool-noop",
        (Policy::Pool, Work::Ycsb) => "pool-ycsb",
        (Policy::Pool, Work::TpcC) => "pool-tpcc",
        (Policy::Pool, _) => "pool",
    }
}

/// Returns the value below which this share of sorted values is.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}
