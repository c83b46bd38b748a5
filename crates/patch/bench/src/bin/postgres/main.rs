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
use stillpoint_patch_tests::cli::Run;

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

/// Returns the reason why a call of the builder made no patch, in a few words.
fn why(run: &Run) -> String {
    if run.code == Some(6) {
        return "makes no difference to its code".into();
    }
    let refusal = run.json().into_iter().find(|line| line["event"] == "refused");
    let reasons = refusal.and_then(|line| line["refusals"].as_array().cloned()).unwrap_or_default();
    let first = reasons.first().map(|r| format!("{}: {}", r["code"].as_str().unwrap_or("?"), r["text"]));
    let line = first.unwrap_or_else(|| run.stderr.lines().next().unwrap_or("no reason given").to_owned());
    let more = if reasons.len() > 1 { format!(" (and {} more)", reasons.len() - 1) } else { String::new() };
    let short: String = line.chars().filter(|c| *c != '|').take(200).collect();
    short + &more
}

/// Returns the number of functions that a patch replaces.
fn functions(run: &Run) -> usize {
    let built = run.json().into_iter().find(|line| line["event"] == "built");
    built.and_then(|line| line["functions"].as_array().map(Vec::len)).unwrap_or_default()
}
