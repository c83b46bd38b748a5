//! `stillpoint kernel restore`: restores a program from its image.

use super::program::{WithCriu, machine_key};
use super::{failure, untouched};
use crate::output::{Failure, Output};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;
use stillpoint_kernel_checkpoint::{
    ADDRESS_TIMEOUT, Finding, Guard, Image, RestoreMode, RestoreOptions, Severity, StaleMark, check_restore, restore,
};
use stillpoint_operation::Faults;

/// Arguments of `stillpoint kernel restore`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory of the image.
    #[arg(long, value_name = "DIR")]
    image: PathBuf,
    #[command(flatten)]
    criu: WithCriu,
    /// Time at which memory is restored.
    #[arg(long, value_enum, default_value = "on-demand", value_name = "WHEN")]
    restore: RestoreMode,
    /// Compare pages with their checksums when they are fetched, not all of them before; a damaged page then ends the program.
    #[arg(long)]
    verify_on_demand: bool,
    /// Rate in MiB a second of the background fetch, and then of making huge pages; 0 is unlimited.
    #[arg(long, default_value_t = 512, value_name = "N")]
    fill_rate: u64,
    /// Guard that the checkpoint was made with.
    #[arg(long, value_enum, default_value = "nftables", value_name = "HOW")]
    guard: Guard,
    /// Seconds for which the restore waits for the addresses that its sockets are bound to. An IPv6 address is not usable
    /// while the kernel checks it for duplicates.
    #[arg(long, default_value_t = ADDRESS_TIMEOUT.as_secs(), value_name = "N")]
    address_limit: u64,
    /// Restore a stale image: its program has run since, so its files are newer than the image.
    #[arg(long)]
    again: bool,
    /// Restore an image that this machine did not seal, or that was changed since. Its programs run with the rights that the
    /// image records, also with those of root: trust the maker of the image like root.
    #[arg(long)]
    trust_image: bool,
    /// Only check and verify; change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Runs `stillpoint kernel restore`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let options = RestoreOptions {
        image: args.image.clone(),
        criu: args.criu.criu(),
        restore: args.restore,
        verify: !args.verify_on_demand,
        guard: args.guard,
        allow_stale: args.again,
        key: machine_key(),
        trust_image: args.trust_image,
        fill_rate: args.fill_rate,
        address_limit: Duration::from_secs(args.address_limit),
        unit: None,
        faults: Faults::none(),
    };
    if args.dry_run {
        let image = Image::open(&args.image).map_err(untouched)?;
        image.verify_criu_files().and_then(|()| image.verify_pages()).map_err(untouched)?;
        let findings = check_restore(&image, &options).map_err(untouched)?;
        let warnings = findings.iter().filter(|found| found.weight != Severity::Refusal);
        warnings.for_each(|found| output.warn(&found.text));
        Finding::require_no_refusal(findings).map_err(Failure::refused)?;
        output.line(format_args!("{}: can be restored", args.image.display()));
        return Ok(());
    }
    let done = restore(&options, &|event| output.event(event))
        .map_err(|error| failure(error, state_after_failure(&args.image)))?;
    let duration_us = done.duration_ns / 1000;
    let (pid, keeper) = (done.pid, done.keeper);
    output.result("restored", &json!({ "pid": pid, "keeper": keeper, "duration_us": duration_us }));
    let rest = keeper.map_or_else(String::new, |keeper| format!("; process {keeper} fetches the rest of its memory"));
    output.line(format_args!("process {pid} runs again after {:.0} ms{rest}", duration_us as f64 / 1e3));
    Ok(())
}

/// State after a failed restore. As soon as programs may run, the image counts as used.
fn state_after_failure(image: &Path) -> &'static str {
    match StaleMark::of(image) {
        Ok(None) => {
            "no process runs; the image is unchanged and can be restored again; peers of its connections wait until \
             then"
        }
        _ => {
            "no process runs; files of the program may be newer than the image, so start the program from its files, \
             or restore the image with --again; peers of its connections wait until stillpoint kernel discard removes \
             the guard"
        }
    }
}
