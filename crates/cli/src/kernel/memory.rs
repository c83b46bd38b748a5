//! `stillpoint kernel memory`: RAM whose images survive a change of the kernel.

use super::untouched;
use crate::output::{Failure, Output};
use serde_json::json;
use std::path::PathBuf;
use stillpoint_kernel_switch::{DROPIN_PATH, Reservation, ReservationRequest, regions, remove_dropin, reserve};

/// Arguments of `stillpoint kernel memory`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the region, a multiple of 2M, for instance 4G. Without this option, existing regions are listed.
    #[arg(long, value_name = "SIZE", conflicts_with = "remove")]
    size: Option<String>,
    /// Add the argument to GRUB's configuration.
    #[arg(long, requires = "size")]
    write: bool,
    /// Remove the argument from GRUB's configuration.
    #[arg(long)]
    remove: bool,
    /// Print what would be written, and write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Path of the drop-in for GRUB's configuration.
    #[arg(long, value_name = "FILE", default_value = DROPIN_PATH)]
    drop_in: PathBuf,
}

/// Runs `stillpoint kernel memory`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    if args.remove && !args.dry_run {
        let removed = remove_dropin(&args.drop_in).map_err(untouched)?;
        let path = args.drop_in.display();
        output.line(match removed {
            true => format!("removed {path}; `update-grub` and a reboot release the RAM"),
            false => format!("{path} does not exist: nothing to remove"),
        });
        return Ok(());
    }
    let there = regions().map_err(untouched)?;
    for (start, bytes) in &there {
        output.line(format_args!("there is a region of {} MiB at {start:#x}", bytes >> 20));
    }
    let writes = args.write && !args.dry_run;
    let wanted = args.size.clone().map(|size| ReservationRequest { size, write: writes.then(|| args.drop_in.clone()) });
    let chosen = wanted.as_ref().map(reserve).transpose().map_err(untouched)?;
    output.result(
        "kernel-memory",
        &json!({
            "argument": chosen.as_ref().map(|chosen| &chosen.argument),
            "start": chosen.as_ref().map(|chosen| chosen.start),
            "bytes": chosen.as_ref().map(|chosen| chosen.bytes),
            "drop_in": writes.then(|| args.drop_in.to_string_lossy()),
            "regions": there,
        }),
    );
    match &chosen {
        Some(chosen) => show(args, writes, chosen, there.len(), output),
        None if args.remove => output.line(format_args!("would remove {}", args.drop_in.display())),
        None if there.is_empty() => output.line("there is no region; --size reserves one"),
        None => {}
    }
    Ok(())
}

fn show(args: &Args, written: bool, chosen: &Reservation, others: usize, output: &Output) {
    output.line(&chosen.argument);
    let path = args.drop_in.display();
    if written {
        output.line(format_args!("written to {path}; `stillpoint kernel memory --remove` removes it"));
    } else if args.write {
        output.lines(format_args!("would write {path}:\n{}", chosen.text.trim_end()));
    }
    output.line(format_args!(
        "next: {}a reboot; then a file system on the device: mkfs.ext4 -b 4096 /dev/pmem{others}, mount -o dax \
         /dev/pmem{others} DIR; and `images = \"DIR\"` in the configuration of the switch",
        if args.write { "`update-grub` and " } else { "this argument on the kernel's command line, " }
    ));
}
