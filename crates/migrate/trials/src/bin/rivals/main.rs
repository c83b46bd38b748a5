//! `experiments/migrate-rivals`: what clients notice of a switch-over, and how fast a target is filled and catches up, with
//! `stillpoint migrate`, with PostgreSQL's own logical replication behind Debian's pgbouncer, and with Debian's pgcopydb, in
//! turns within one run.
//!
//! Prints a page. Both ways get the same servers with default settings (and `wal_level=logical`), the same load by pgbench
//! and the same machine; nothing is judged here.
#![forbid(unsafe_code)]

mod copy;
mod gap;
mod kept;
mod native;
mod pgbench;
mod phases;
mod rate;

use std::process::ExitCode;
use stillpoint_migrate_testbed::{Cluster, available};

/// As a server comes, but for its log; memory as the machine has it.
const SETTINGS: [&str; 4] = ["wal_level=logical", "fsync=on", "shared_buffers=256MB", "max_wal_size=2GB"];

/// Every value that was measured, by what it is.
type Raw = Vec<(String, Vec<f64>)>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [part, rounds, raw] = &arguments[..] else { return usage() };
    let Ok(rounds) = rounds.parse::<usize>() else { return usage() };
    if !available() {
        return ExitCode::from(3);
    }
    let values = match part.as_str() {
        "gap" => gap::measure(rounds),
        "rate" => rate::measure(rounds),
        "kept" => kept::measure(rounds),
        "copy" => copy::measure(rounds),
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
    eprintln!("usage: migrate-rivals gap|rate|kept|copy ROUNDS FILE-FOR-THE-VALUES");
    ExitCode::from(2)
}

fn cluster() -> Cluster {
    Cluster::start(&SETTINGS)
}

/// Median and largest, as text.
fn spread(values: &[f64]) -> String {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.last() {
        Some(largest) => format!("{:.0} (worst {largest:.0})", sorted[sorted.len() / 2]),
        None => "-".into(),
    }
}
