//! `stillpoint patch refresh`: makes drop-ins of `patch enable` again from the current units.
//!
//! A generator of systemd calls this command at boot and at each daemon-reload, when systemd reads units, and replaces the
//! drop-in of each changed unit; `patch exec` compares, too.

use super::enable::reload;
use super::enabled::RootOption;
use crate::output::{Failure, Output};
use std::path::PathBuf;
use stillpoint_host::systemd::ServiceName;
use stillpoint_patch_catalog::{Error, drop_in};

/// Arguments of `stillpoint patch refresh`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Update only this unit.
    #[arg(long, value_name = "NAME")]
    unit: Option<String>,
    /// Do not change the drop-ins; write their replacements below this directory (of a systemd generator).
    #[arg(long, value_name = "DIR")]
    into: Option<PathBuf>,
    #[command(flatten)]
    root: RootOption,
    /// Dry run: print the files that would be written.
    #[arg(long)]
    dry_run: bool,
}

/// Runs `stillpoint patch refresh`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let units = match &args.unit {
        Some(unit) => vec![ServiceName::parse(unit).map_err(Failure::refused)?],
        None => drop_in::units(&args.root.root).map_err(Failure::refused)?,
    };
    let (mut written, mut failed) = (0, 0);
    for unit in &units {
        match refresh(args, unit, output) {
            Ok(changed) => written += usize::from(changed),
            Err(error) => {
                failed += 1;
                output.warn(format_args!("{unit}: {:#}", anyhow::Error::from(error)));
            }
        }
    }
    // a generator must not reload: systemd waits for it
    if written > 0 && args.into.is_none() && !args.dry_run {
        reload(&args.root.root, output);
    }
    if failed > 0 {
        let error = anyhow::anyhow!("{failed} of {} drop-ins could not be updated", units.len());
        return Err(Failure::failed(error, "these services start according to their present drop-ins"));
    }
    Ok(())
}

/// Returns true if the drop-in had to be made again.
fn refresh(args: &Args, unit: &ServiceName, output: &Output) -> Result<bool, Error> {
    let Some(drop_in::Replacement { text, change }) = drop_in::replacement(&args.root.root, unit)? else {
        return Ok(false);
    };
    let to = match &args.into {
        Some(into) => drop_in::path_below(into, unit),
        None => drop_in::path(&args.root.root, unit),
    };
    if args.dry_run {
        output.line(format_args!("{unit}: {change}\n{}:\n{text}", to.display()));
        return Ok(true);
    }
    drop_in::write(&to, &text)?;
    output.line(format_args!("{unit}: {change}: updated {}", to.display()));
    Ok(true)
}
