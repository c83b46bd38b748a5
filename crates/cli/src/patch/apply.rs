//! `stillpoint patch apply`: puts patches into running processes.

use super::processes::{Files, MigrationOptions, Processes, duration, observer};
use super::sweep::{Kind, Settled, Sweep};
use super::wave::{Pace, Step};
use crate::output::{Failure, Output};
use std::time::Duration;
use stillpoint_events::{Event, patch};
use stillpoint_host::clock::now_ns;
use stillpoint_patch_engine::fleet::{MappedFile, Search};
use stillpoint_patch_engine::{Error, Observer, Options, Outcome, apply};
use stillpoint_patch_format::Signed;
use stillpoint_patch_tracee::Pid;

/// Arguments of `stillpoint patch apply`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    processes: Processes,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    migration: MigrationOptions,
    /// Time limit for the migration of all threads; after it the transition is rolled back.
    #[arg(long, value_parser = duration, default_value = "10s")]
    timeout: Duration,
    /// Replace all older patches by this one, in one transition.
    #[arg(long)]
    replace: bool,
    /// Dry run: do all checks and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Runs `stillpoint patch apply`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    args.processes.refuse_two_selections()?;
    for (signed, signer) in args.files.read()? {
        let options = Options {
            timeout: args.timeout,
            replace: args.replace,
            dry_run: args.dry_run,
            signer,
            ..args.migration.options()
        };
        let target = Some(&signed.patch.target);
        match args.processes.search(target)? {
            None => {
                args.processes
                    .wave(&args.pace, output, |pid| apply_to(pid, &signed, &options, output, &mut observer(output)))?;
                report_others(&signed, &options, output);
            }
            Some(search) => {
                let subject = args.processes.subject(target);
                everywhere(&signed, &options, &search, subject, true, &args.pace, output).result()?;
            }
        }
    }
    Ok(())
}

/// Reports the processes of the same build that were not selected, and so run the old code.
fn report_others(signed: &Signed, options: &Options, output: &Output) {
    if options.dry_run {
        return;
    }
    let name = &signed.patch.name;
    let others = Search::new(MappedFile::OfPatch, Some(&signed.patch.target), false).unpatched(name);
    if !others.is_empty() {
        let pids = others.iter().map(|pid| pid.0).collect();
        let kind = patch::Event::OthersUnpatched { name: name.clone(), pids };
        output.event(&Event::new(now_ns(), None, kind.into()));
    }
}

/// Applies a patch to all processes that a search of the machine finds.
pub(super) fn everywhere(
    signed: &Signed,
    options: &Options,
    search: &Search,
    subject: String,
    needs_one: bool,
    pace: &Pace,
    output: &Output,
) -> Settled {
    let kind = if options.dry_run { Kind::Check } else { Kind::Change };
    let sweep = Sweep { subject, participle: "patched", needs_one, kind, find: &|| search.run() };
    sweep.run(pace, output, |found, events| {
        apply_to(found.pid, signed, options, output, &mut |event| events.push(event))
    })
}

fn apply_to(
    pid: Pid,
    signed: &Signed,
    options: &Options,
    output: &Output,
    observer: Observer<'_>,
) -> Result<Step, Error> {
    let name = &signed.patch.name;
    Ok(match apply(pid, signed, options, observer)? {
        Outcome::Committed { transition, threads, duration_ns, .. } => {
            output.line(format_args!(
                "{name}: applied to process {pid}, generation {transition}, {threads} threads in {:.1} ms",
                duration_ns as f64 / 1e6
            ));
            Step::Done
        }
        Outcome::Rests { transition, threads, staying, .. } => {
            output.line(format_args!(
                "{name}: applied to process {pid}, generation {transition}, {threads} threads but {} that stay with the \
                 old version; apply again when they have left",
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
            Step::Possible
        }
    })
}
