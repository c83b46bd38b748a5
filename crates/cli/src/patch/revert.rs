//! `stillpoint patch revert`: reverts patches.

use super::processes::{MigrationOptions, Processes, duration, observer};
use super::wave::{Pace, Step};
use crate::output::{Failure, Output};
use std::time::Duration;
use stillpoint_patch_engine::{Options, Outcome, PatchSelection, revert};

/// Arguments of `stillpoint patch revert`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The patch to revert; it must be the newest one. Default: the newest one.
    #[arg(conflicts_with = "all")]
    name: Option<String>,
    /// Revert all patches.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    processes: Processes,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    migration: MigrationOptions,
    /// Time limit for the migration of all threads to the old code; after it all stay on the patched code.
    #[arg(long, value_parser = duration, default_value = "10s")]
    timeout: Duration,
    /// Dry run: do all checks and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Runs `stillpoint patch revert`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    let which = match (&args.name, args.all) {
        (_, true) => PatchSelection::All,
        (Some(name), _) => PatchSelection::Named(name.clone()),
        (None, false) => PatchSelection::Newest,
    };
    let options = Options { timeout: args.timeout, dry_run: args.dry_run, ..args.migration.options() };
    args.processes.wave(&args.pace, output, |pid| {
        Ok(match revert(pid, &which, &options, &mut observer(output))? {
            Outcome::Committed { transition, active, threads, duration_ns } => {
                output.line(format_args!(
                    "reverted in process {pid}, generation {transition}, {threads} threads in {:.1} ms; active: {}",
                    duration_ns as f64 / 1e6,
                    if active.is_empty() { "none".to_owned() } else { active.join(", ") }
                ));
                Step::Done
            }
            Outcome::Rests { transition, threads, staying, .. } => {
                output.line(format_args!(
                    "reverted in process {pid}, generation {transition}, {threads} threads but {} that stay with the \
                     patched version; revert again when they have left",
                    staying.len()
                ));
                Step::Done
            }
            Outcome::AlreadyThere(what) | Outcome::DryRun(what) => {
                output.line(format_args!("process {pid}: {what}"));
                Step::Already
            }
        })
    })
}
