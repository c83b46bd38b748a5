//! `experiments/migrate-rivals`: the effect of a switch-over on clients, and the time to fill a target and to catch up,
//! with `stillpoint migrate`, with PostgreSQL's own logical replication behind Debian's pgbouncer, and with Debian's
//! pgcopydb, in turns within one run.
//!
//! Prints a page. All ways get the same servers with default settings (and `wal_level=logical`), the same load by
//! pgbench and the same machine; the page does not judge the results.
#![forbid(unsafe_code)]

mod blackout;
mod copy;
mod native;
mod pgbench;
mod phases;
mod pool;
mod rate;
mod throughput;

use std::process::ExitCode;
use stillpoint_testing::postgresql::{Cluster, available};

/// Default settings except for the log, with memory for this machine.
const SETTINGS: [&str; 5] =
    ["max_connections=300", "wal_level=logical", "fsync=on", "shared_buffers=256MB", "max_wal_size=2GB"];

/// All measured values, by name.
type Raw = Vec<(String, Vec<f64>)>;

/// Amounts of data.
struct Size {
    /// Scale of pgbench for a target that is filled: 30 is about 450 MB.
    filled: &'static str,
    /// Scale of pgbench for everything else except the throughput that clients keep.
    scale: &'static str,
    /// Transactions of each of eight clients in the backlog.
    backlog_each: u32,
}

const FULL: Size = Size { filled: "30", scale: "10", backlog_each: 25_000 };
/// Size for a quick check.
const SMALL: Size = Size { filled: "5", scale: "2", backlog_each: 4_000 };

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (size, arguments) = match &arguments[..] {
        [small, rest @ ..] if small == "--small" => (&SMALL, rest),
        all => (&FULL, all),
    };
    let [part, rounds, raw] = arguments else { return usage() };
    let Ok(rounds) = rounds.parse::<usize>() else { return usage() };
    if !available() {
        return ExitCode::from(3);
    }
    let values = match part.as_str() {
        "gap" => blackout::measure(size, rounds),
        "rate" => rate::measure(size, rounds),
        "kept" => throughput::measure(rounds),
        "copy" => copy::measure(size, rounds),
        "pool" => pool::measure(rounds),
        _ => return usage(),
    };
    let values: serde_json::Map<_, _> = values.into_iter().map(|(what, values)| (what, values.into())).collect();
    match std::fs::write(raw, format!("{}\n", serde_json::Value::Object(values))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {raw}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: migrate-rivals [--small] gap|rate|kept|copy|pool ROUNDS FILE-FOR-THE-VALUES");
    ExitCode::from(2)
}

/// A server for the next measurement, with a time limit of its own: all rounds together may take longer than any test.
fn cluster() -> Cluster {
    stillpoint_testing::test_timeout::start();
    Cluster::start(&SETTINGS)
}

/// Line below each table.
fn of_rounds(rounds: usize) -> String {
    format!("Median (smallest to largest) of {rounds}, in turns")
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Median, smallest and largest, as text.
fn spread(values: &[f64]) -> String {
    if values.is_empty() {
        return "-".into();
    }
    let digits = if median(values) < 100.0 { 1 } else { 0 };
    let (least, most) = values.iter().fold((f64::INFINITY, 0.0_f64), |(a, b), value| (a.min(*value), b.max(*value)));
    format!("{:.digits$} ({least:.digits$} to {most:.digits$})", median(values))
}

/// Ratio of the product's values to the rival's, round by round, as text.
fn against(ours: &[f64], theirs: &[f64]) -> String {
    let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect();
    if ratios.is_empty() {
        return "-".into();
    }
    let (least, most) = ratios.iter().fold((f64::INFINITY, 0.0_f64), |(a, b), ratio| (a.min(*ratio), b.max(*ratio)));
    format!("{:.2} ({least:.2} to {most:.2})", median(&ratios))
}
