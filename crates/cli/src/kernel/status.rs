//! `stillpoint kernel status`: states of images, and the outcome of the last switch.

use super::untouched;
use crate::output::{Failure, Output};
use serde_json::json;
use std::path::PathBuf;
use stillpoint_kernel_checkpoint::{Error, Stage, State, Status, filling_images, guards, status};
use stillpoint_kernel_switch::{CONFIG, Config, Journal, find_interrupted};

/// Arguments of `stillpoint kernel status`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directories of images [default: those from which memory is being fetched now].
    #[arg(long = "image", value_name = "DIR")]
    images: Vec<PathBuf>,
    /// Configuration of switches, which contains the path of the journal.
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
}

/// Runs `stillpoint kernel status`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let images = if args.images.is_empty() { filling_images().into_keys().collect() } else { args.images.clone() };
    for image in &images {
        let status = status(image).map_err(untouched)?;
        output.result("kernel-status", &status);
        show(&status, output);
    }
    if images.is_empty() {
        output.line(format_args!("no memory is being fetched from an image"));
    }
    if args.images.is_empty() {
        last_switch(args, output).map_err(untouched)?;
    }
    let tables = guards().map_err(untouched)?;
    output.result("kernel-guards", &json!({ "tables": tables }));
    for table in &tables {
        output.line(format_args!("guard: table {table} of nftables keeps peers of a program waiting"));
    }
    Ok(())
}

fn last_switch(args: &Args, output: &Output) -> Result<(), Error> {
    let state = Config::read(&args.config)?.state;
    if let Some(journal) = Journal::read(&state)? {
        let summary = match find_interrupted(&state)? {
            Some(_) => "was killed and is not rolled back: stillpoint kernel switch --take-back".into(),
            None => journal.summary(),
        };
        output.result("kernel-switch", &json!({ "told": summary, "journal": journal }));
        output.line(format_args!("switch from {} to {}: {summary}", journal.from, journal.to));
        for gap in &journal.guard_gaps {
            output.line(format_args!("  warning: {}", gap.text()));
        }
    }
    Ok(())
}

fn show(status: &Status, output: &Output) {
    let what = match status.stage {
        Stage::Unsealed => "no finished image; stillpoint kernel discard removes its files".to_owned(),
        Stage::Damaged => "damaged: it is not as it was sealed".to_owned(),
        Stage::Ready => "ready to be restored".to_owned(),
        Stage::Filling => {
            format!("its program runs; processes {:?} fetch memory from it: do not change it", status.daemons)
        }
        Stage::Stale => {
            let why = status.used.as_ref().map_or("", |used| &used.why);
            format!("stale ({why}): older than its program's files; stillpoint kernel discard removes it")
        }
    };
    output.line(format_args!("{}: {what}", status.image.display()));
    if let (Some(name), Some(pid)) = (&status.name, status.pid) {
        output.line(format_args!("  {name}, process {pid}, {}", if status.runs { "runs" } else { "does not run" }));
    }
    if let Some(fill) = &status.fill {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        let how = match fill.state {
            State::Filling => "so far",
            State::Done => "done",
            State::Failed => "failed, its processes were killed",
        };
        let (came, total) = (mib(fill.total.saturating_sub(fill.left)), mib(fill.total));
        output.line(format_args!(
            "  {came:.1} of {total:.1} MiB are resident, {} pages were faulted in; {how}",
            fill.counts.faults
        ));
        if fill.counts.ended > 0 {
            output
                .line(format_args!("  {} processes ended before all of their memory was resident", fill.counts.ended));
        }
    }
    if let Some(guard) = &status.guard {
        output.line(format_args!("  its peers wait: table {guard} of nftables"));
    }
    if let Some(warning) = &status.guard_warning {
        output.line(format_args!("  warning: {warning}"));
    }
    for line in &status.journal {
        let took = line.duration_us.map_or_else(String::new, |us| format!(" {:.0} ms", us as f64 / 1e3));
        let failed = line.error.as_ref().map_or_else(String::new, |error| format!(": {error}"));
        output.line(format_args!("  {} {} {}{took}{failed}", line.at_s, line.operation, line.what));
    }
}
