//! `stillpoint patch apply`: puts patches into running processes.

use super::processes::{Files, How, Processes, duration, observer};
use super::wave::{Pace, Step};
use crate::output::{Failure, Output};
use std::time::Duration;
use stillpoint_patch_engine::{Options, Outcome, apply};

/// Arguments of `stillpoint patch apply`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::PATCH_APPLY)]
pub(crate) struct Args {
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    processes: Processes,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    how: How,
    /// After this time without every thread on the new code, all go back.
    #[arg(long, value_parser = duration, default_value = "10s")]
    timeout: Duration,
    /// The patch supersedes all older ones, in one transition.
    #[arg(long)]
    replace: bool,
    /// Do everything short of touching.
    #[arg(long)]
    dry_run: bool,
}

/// Runs `stillpoint patch apply`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    for (signed, signer) in args.files.read()? {
        let options = Options {
            quiescence: args.how.quiescence,
            view: args.how.view(),
            allow_suspended_frames: args.how.allow_suspended_frames,
            timeout: args.timeout,
            replace: args.replace,
            dry_run: args.dry_run,
            signer,
            ..Options::default()
        };
        let name = &signed.patch.name;
        args.processes.wave(&args.pace, output, |pid| {
            Ok(match apply(pid, &signed, &options, &mut observer(output))? {
                Outcome::Committed { transition, threads, duration_ns, .. } => {
                    output.line(format_args!(
                        "{name}: applied to process {pid}, generation {transition}, {threads} threads in {:.1} ms",
                        duration_ns as f64 / 1e6
                    ));
                    Step::Done
                }
                Outcome::Rests { transition, threads, staying, .. } => {
                    output.line(format_args!(
                        "{name}: applied to process {pid}, generation {transition}, {threads} threads but {} that stay \
                         with the old version; apply again when they have left",
                        staying.len()
                    ));
                    Step::Done
                }
                Outcome::AlreadyThere(_) => {
                    output.line(format_args!("{name}: already applied to process {pid}"));
                    Step::Already
                }
                Outcome::DryRun(what) => {
                    output.line(format_args!("{name}: would be applied to process {pid} ({what})"));
                    Step::Already
                }
            })
        })?;
    }
    Ok(())
}
