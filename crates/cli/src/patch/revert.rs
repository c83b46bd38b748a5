//! `stillpoint patch revert`: reverts patches.

use super::processes::{MigrationOptions, Processes, duration, observer};
use super::sweep::{Kind, Sweep};
use super::wave::{Pace, Step};
use crate::output::{Failure, Output};
use std::time::Duration;
use stillpoint_patch_engine::fleet::{FoundProcess, Search};
use stillpoint_patch_engine::{Error, Observer, Options, Outcome, PatchSelection, revert};
use stillpoint_patch_tracee::Pid;

/// Arguments of `stillpoint patch revert`.
#[derive(clap::Args)]
#[command(mut_arg("all", |arg| arg.help(ALL_HELP)))]
pub(crate) struct Args {
    /// The patch to revert; it must be the newest one of its module. Default: the newest one, with --library the newest one of that
    /// file.
    name: Option<String>,
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

/// Help of `--all`, which has a meaning of its own here.
const ALL_HELP: &str =
    "Revert all patches of the selected processes. With NAME: revert that patch in all processes of this machine";

/// Runs `stillpoint patch revert`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    let selection = match (&args.name, args.processes.is_all()) {
        (Some(_), true) if !args.processes.is_only_all() => {
            return Err(Failure::usage("--all reverts every patch of the selected processes, and NAME only one"));
        }
        (None, true) if args.processes.is_only_all() => {
            return Err(Failure::usage(
                "--all needs processes whose patches are reverted (--pid, --exe, --unit, --library), or the NAME of a patch \
                 to revert in all processes",
            ));
        }
        (Some(name), _) => PatchSelection::Named(name.clone()),
        (None, true) => PatchSelection::All,
        (None, false) => PatchSelection::Newest,
    };
    let options = Options { timeout: args.timeout, dry_run: args.dry_run, ..args.migration.options() };
    match args.processes.search(None)? {
        None => args
            .processes
            .wave(&args.pace, output, |pid| revert_in(pid, &selection, &options, output, &mut observer(output))),
        Some(search) => everywhere(&args, &search, &selection, &options, output),
    }
}

/// Reverts patches in all processes that map a file, or that carry the patch of a name.
fn everywhere(
    args: &Args,
    search: &Search,
    selection: &PatchSelection,
    options: &Options,
    output: &Output,
) -> Result<(), Failure> {
    let of_patch = args.processes.is_only_all();
    let census = || if of_patch { search.patched(args.name.as_deref()) } else { search.run() };
    let sweep = Sweep {
        subject: args.name.clone().filter(|_| of_patch).unwrap_or_else(|| args.processes.subject(None)),
        participle: "reverted",
        needs_one: !of_patch,
        kind: Kind::Check,
        find: &census,
    };
    let settled = sweep.run(&args.pace, output, |found, events| {
        let selection = of_file(selection, found);
        match revert_in(found.pid, &selection, options, output, &mut |event| events.push(event)) {
            // this process maps the file, and has other patches
            Err(Error::NotActive { .. }) => Ok(Step::Already),
            result => result,
        }
    });
    settled.result()
}

/// Limits a selection to the patches of the file by which the process was found.
fn of_file(selection: &PatchSelection, found: &FoundProcess) -> PatchSelection {
    match (selection, &found.build_id) {
        (PatchSelection::Newest, Some(id)) => PatchSelection::NewestOf(id.clone()),
        (PatchSelection::All, Some(id)) => PatchSelection::AllOf(id.clone()),
        (selection, _) => selection.clone(),
    }
}

fn revert_in(
    pid: Pid,
    selection: &PatchSelection,
    options: &Options,
    output: &Output,
    observer: Observer<'_>,
) -> Result<Step, Error> {
    Ok(match revert(pid, selection, options, observer)? {
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
        Outcome::AlreadyThere(what) => {
            output.line(format_args!("process {pid}: {what}"));
            Step::Already
        }
        Outcome::DryRun(what) => {
            output.line(format_args!("process {pid}: {what}"));
            Step::Possible
        }
    })
}
