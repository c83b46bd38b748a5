//! The rows of OSDI'20 Table 1 for PostgreSQL: the number of changes that can be built and applied to a running
//! cluster.
//!
//! `postgres changes` uses changes of our own to Debian 12's unmodified PostgreSQL 15; `postgres fixes` the upstream
//! fixes of Debian 11's PostgreSQL 13.23, each on top of those before; `postgres build-fixes` only builds their
//! patches, and an interrupted run continues with the results so far. All print a table; `experiments/postgres.sh`
//! keeps it.

mod changes;
mod effects;
mod fixes;

use std::process::ExitCode;

fn main() -> ExitCode {
    let outcome = match std::env::args().nth(1).as_deref() {
        Some("changes") => changes::run(),
        Some("fixes") => fixes::run(false),
        Some("build-fixes") => fixes::run(true),
        _ => Err("which: changes, fixes or build-fixes".to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}
