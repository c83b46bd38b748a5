//! `stillpoint kernel check`: reasons that prevent a checkpoint of a program.

use super::program::{Program, WithCriu};
use super::{rehearse, untouched};
use crate::output::{Failure, Output};
use std::path::PathBuf;
use stillpoint_kernel_checkpoint::{Guard, Report, Severity, check};

/// Arguments of `stillpoint kernel check`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    program: Program,
    #[command(flatten)]
    criu: WithCriu,
    /// Make a checkpoint too, let the program continue, and remove the image. Prints for how long the program was stopped,
    /// and the size of the image.
    #[arg(long)]
    rehearse: bool,
    /// Directory for the image of a rehearsal, on the file system on which the later image will be located.
    #[arg(long, value_name = "DIR", default_value = "/dev/shm", requires = "rehearse")]
    scratch: PathBuf,
    /// Guard that makes peers of its connections wait while the program is stopped in a rehearsal.
    #[arg(long, value_enum, default_value = "nftables", value_name = "HOW", requires = "rehearse")]
    guard: Guard,
}

/// Runs `stillpoint kernel check`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let (pid, criu) = (args.program.root()?, args.criu.criu());
    let report = check(pid, &criu).map_err(untouched)?;
    show(&report, output);
    report.require_no_refusal().map_err(Failure::refused)?;
    if args.rehearse { rehearse::run(pid, criu, &args.scratch, args.guard, output) } else { Ok(()) }
}

/// Prints all findings.
pub(super) fn show(report: &Report, output: &Output) {
    output.result("kernel-check", report);
    output.line(format_args!("{} processes", report.pids.len()));
    for finding in &report.findings {
        let weight = match finding.weight {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Refusal => "refused",
        };
        let who = finding.pid.map_or_else(String::new, |pid| format!("process {pid} "));
        output.line(format_args!("{weight}: {who}{}", finding.text));
    }
}
