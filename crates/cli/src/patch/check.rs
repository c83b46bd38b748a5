//! `stillpoint patch check`: a dry run, which also reports the threads that would block.

use super::processes::{Files, MigrationOptions, Processes, observer};
use crate::output::{Failure, Output};
use serde_json::json;
use stillpoint_patch_engine::{Options, check};

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

/// Runs `stillpoint patch check`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    let files = args.files.read()?;
    let options = Options { replace: args.replace, ..args.migration.options() };
    args.processes.each(|pid| {
        for (signed, _) in &files {
            let name = &signed.patch.name;
            let found = check(pid, signed, &options, &mut observer(output))?;
            let busy: Vec<_> = found.busy.iter().map(|b| json!({"tid": b.tid.0, "function": b.function})).collect();
            let (functions, bytes, threads) = (&found.functions, found.bytes, found.threads);
            output.result(
                "checked",
                &json!({
                    "pid": pid.0, "patch": name, "already": found.already, "functions": functions, "bytes": bytes,
                    "threads": threads, "busy": busy, "not_looked_at": found.unchecked,
                }),
            );
            if found.already {
                output.line(format_args!("{name}: already applied to process {pid}"));
                continue;
            }
            output.line(format_args!(
                "{name}: fits process {pid}; {} functions, {bytes} bytes, {threads} threads",
                functions.len()
            ));
            for busy in &found.busy {
                output.line(format_args!("  thread {} would have to leave {} first", busy.tid, busy.function));
            }
            output.line(format_args!("  not checked: {}", found.unchecked.join("; ")));
        }
        Ok(())
    })
}
