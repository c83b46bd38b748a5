//! `stillpoint patch gdb`: files that let gdb and perf see the patched code.

use super::processes::failure;
use crate::output::{Failure, Output};
use serde_json::json;
use std::path::PathBuf;
use stillpoint_patch_engine::debugger_files;
use stillpoint_patch_tracee::Pid;

/// Arguments of `stillpoint patch gdb`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of the process.
    #[arg(long, value_name = "N")]
    pid: i32,
    /// Directory for the files; created if it does not exist.
    #[arg(long, value_name = "DIR", default_value = "stillpoint-gdb")]
    output: PathBuf,
}

/// Runs `stillpoint patch gdb`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    let files = debugger_files(Pid(args.pid), &args.output).map_err(failure)?;
    output.line(format_args!("gdb -p {} -x {}", args.pid, files.script.display()));
    output.line(format_args!("perf finds names in {}", files.perf_map.display()));
    let images: Vec<String> = files.images.iter().map(|image| image.display().to_string()).collect();
    let (script, map) = (files.script.display().to_string(), files.perf_map.display().to_string());
    let line = json!({"pid": args.pid, "script": script, "images": images, "perf_map": map});
    output.result("debugger-files", &line);
    Ok(())
}
