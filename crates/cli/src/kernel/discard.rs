//! `stillpoint kernel discard`: removes an image, and the network rules of its checkpoint.

use super::{failure, untouched};
use crate::output::{Failure, Output};
use std::path::PathBuf;
use stillpoint_kernel_checkpoint::{Finding, check_discard, discard};

/// Arguments of `stillpoint kernel discard`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory of the image.
    #[arg(long, value_name = "DIR")]
    image: PathBuf,
    /// Only check; change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Runs `stillpoint kernel discard`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    if args.dry_run {
        let findings = check_discard(&args.image).map_err(untouched)?;
        return Finding::require_no_refusal(findings).map(drop).map_err(Failure::refused);
    }
    let done = discard(&args.image).map_err(|error| failure(error, "the image may be there in part"))?;
    match &done.guard {
        Some(guard) => output.line(format_args!("{}: removed, with table {guard} of nftables", args.image.display())),
        None => output.line(format_args!("{}: removed", args.image.display())),
    }
    if done.connections > 0 {
        output.line(format_args!(
            "{} connections continue that a killed checkpoint had left in repair mode",
            done.connections
        ));
    }
    output.result("discarded", &done);
    Ok(())
}
