//! `stillpoint patch check`: a dry run, which also reports the threads that would block.

use super::processes::{Files, MigrationOptions, Processes, observer};
use super::sweep::{Kind, Sweep};
use super::wave::{Pace, Step};
use crate::output::{Failure, Output};
use serde::Serialize;
use stillpoint_patch_engine::{Options, Prediction, check};
use stillpoint_patch_tracee::Pid;

/// Arguments of `stillpoint patch check`.
#[derive(clap::Args)]
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
    args.processes.refuse_two_selections()?;
    let files = args.files.read()?;
    let options = Options { replace: args.replace, ..args.migration.options() };
    let mut is_everywhere = false;
    for (signed, _) in &files {
        let target = Some(&signed.patch.target);
        let Some(search) = args.processes.search(target)? else { continue };
        is_everywhere = true;
        let sweep = Sweep {
            subject: args.processes.subject(target),
            participle: "suitable",
            needs_one: true,
            kind: Kind::Check,
            find: &|| search.run(),
        };
        let settled = sweep.run(&Pace::single(), output, |found, events| {
            let prediction = check(found.pid, signed, &options, &mut |event| events.push(event))?;
            print(found.pid, &signed.patch.name, &prediction, output);
            Ok(if prediction.already { Step::Already } else { Step::Possible })
        });
        settled.result()?;
    }
    if is_everywhere {
        return Ok(());
    }
    args.processes.each(|pid| {
        for (signed, _) in &files {
            print(pid, &signed.patch.name, &check(pid, signed, &options, &mut observer(output))?, output);
        }
        Ok(())
    })
}

fn print(pid: Pid, name: &str, found: &Prediction, output: &Output) {
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
        return output.line(format_args!("{name}: already applied to process {pid}"));
    }
    output.line(format_args!(
        "{name}: fits process {pid}; {} functions, {} bytes, {} threads",
        found.functions.len(),
        found.bytes,
        found.threads
    ));
    if !found.data.is_empty() {
        output.line(format_args!("  all threads are stopped while {} change", found.data.join(", ")));
    }
    for busy in &found.busy {
        output.line(format_args!("  thread {} would have to leave {} first", busy.tid, busy.function));
    }
    output.line(format_args!("  not checked: {}", found.unchecked.join("; ")));
}
