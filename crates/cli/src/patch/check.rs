//! `stillpoint patch check`: a dry run, which also reports the threads that would block.

use super::processes::{Files, MigrationOptions, Processes, observer};
use crate::output::{Failure, Output};
use serde::Serialize;
use stillpoint_patch_engine::{Options, check};

/// Arguments of `stillpoint patch check`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::of("stillpoint patch check"))]
pub(crate) struct Args {
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    processes: Processes,
    #[command(flatten)]
    migration: MigrationOptions,
    /// Check for a replacement of all older patches.
    #[arg(long)]
    replace: bool,
}

#[derive(Serialize)]
struct Line<'a> {
    pid: i32,
    patch: &'a str,
    already: bool,
    functions: &'a [String],
    data: &'a [String],
    bytes: u64,
    threads: u32,
    busy: Vec<BusyLine<'a>>,
    not_looked_at: &'a [String],
}

#[derive(Serialize)]
struct BusyLine<'a> {
    tid: i32,
    function: &'a str,
}

/// Runs `stillpoint patch check`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    let files = args.files.read()?;
    let options = Options { replace: args.replace, ..args.migration.options() };
    args.processes.each(|pid| {
        for (signed, _) in &files {
            let name = &signed.patch.name;
            let found = check(pid, signed, &options, &mut observer(output))?;
            output.result(
                "checked",
                &Line {
                    pid: pid.0,
                    patch: name,
                    already: found.already,
                    functions: &found.functions,
                    data: &found.data,
                    bytes: found.bytes,
                    threads: found.threads,
                    busy: found.busy.iter().map(|b| BusyLine { tid: b.tid.0, function: &b.function }).collect(),
                    not_looked_at: &found.unchecked,
                },
            );
            if found.already {
                output.line(format_args!("{name}: already applied to process {pid}"));
                continue;
            }
            output.line(format_args!(
                "{name}: fits process {pid}; {} functions, {} bytes, {} threads",
                found.functions.len(),
                found.bytes,
                found.threads
            ));
            if !found.data.is_empty() {
                output.line(format_args!("  all threads are stopped while {} are written", found.data.join(", ")));
            }
            for busy in &found.busy {
                output.line(format_args!("  thread {} would have to leave {} first", busy.tid, busy.function));
            }
            output.line(format_args!("  not checked: {}", found.unchecked.join("; ")));
        }
        Ok(())
    })
}
