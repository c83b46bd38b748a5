//! `stillpoint migrate run`: moves a database and its clients.

use super::check;
use super::servers::run_watched;
use crate::output::{Failure, Output};
use std::time::Duration;
use stillpoint_migrate_engine::{Outcome, run as migrate};

/// Arguments of `stillpoint migrate run`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    what: check::MigrationArgs,
    #[command(flatten)]
    how: MoveArgs,
    /// Number of tables that are copied, and of indexes that are created, at the same time.
    #[arg(long, default_value_t = 2, value_name = "N")]
    copy_jobs: usize,
    /// Share of their throughput that clients keep while rows are copied, changes replayed and both sides compared; 0
    /// runs at full speed.
    #[arg(long, default_value_t = 0.85, value_name = "PART")]
    share: f64,
    /// Maximum time that the snapshot waits for older transactions to end.
    #[arg(long, value_parser = crate::patch::duration, default_value = "60s", value_name = "TIME")]
    snapshot_timeout: Duration,
    /// Only check; change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Options for moving clients from one side to the other.
#[derive(clap::Args)]
pub(super) struct MoveArgs {
    /// Number of apply workers: connections that replay at the same time.
    #[arg(long, default_value_t = 4, value_name = "N")]
    players: usize,
    /// Maximum pause of clients; after it they continue where they were, and the pause is tried again.
    #[arg(long, value_parser = crate::patch::duration, default_value = "500ms", value_name = "TIME")]
    pause_timeout: Duration,
    /// Maximum number of pauses that are tried.
    #[arg(long, default_value_t = 10, value_name = "N")]
    pause_attempts: u32,
    /// Do not compare both sides before the switch-over.
    #[arg(long)]
    no_compare: bool,
    /// Refresh materialized views inside the pause, not only before it. It must be over within the maximum pause.
    #[arg(long)]
    refresh_at_switch: bool,
}

impl MoveArgs {
    pub(super) fn apply(&self, options: &mut stillpoint_migrate_engine::Options) -> Result<(), Failure> {
        if self.players == 0 || self.players > 64 || self.pause_attempts == 0 {
            return Err(Failure::usage("--players must be 1 to 64, --pause-attempts at least 1"));
        }
        options.players = self.players;
        options.pause_limit = self.pause_timeout;
        options.pause_attempts = self.pause_attempts;
        options.compare = !self.no_compare;
        options.refresh_at_switch = self.refresh_at_switch;
        Ok(())
    }
}

/// Runs `stillpoint migrate run`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let mut options = args.what.options()?;
    args.how.apply(&mut options)?;
    if args.copy_jobs == 0 || args.copy_jobs > 64 || !(0.0..1.0).contains(&args.share) {
        return Err(Failure::usage("--copy-jobs must be 1 to 64, --share at least 0 and below 1"));
    }
    (options.copy_jobs, options.share) = (args.copy_jobs, args.share);
    options.snapshot_limit = args.snapshot_timeout;
    if args.dry_run {
        return check::examine(&args.what, false, output);
    }
    match run_watched(&args.what.servers, &options, output, |observer| migrate(&options, observer))? {
        Outcome::Switched { paused } => output.line(format_args!(
            "{}: clients are on the target, and were paused for {:.1} ms. `fallback` rolls back, `finish` ends the \
             migration",
            options.source.database,
            paused.as_secs_f64() * 1e3
        )),
        Outcome::AlreadyThere => {
            output.line(format_args!("{}: clients are already on the target", options.source.database))
        }
    }
    Ok(())
}
