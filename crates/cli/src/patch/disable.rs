//! `stillpoint patch disable`: removes patches of units, and the drop-in with the last one.

use super::enable::reload;
use super::enabled::{RootOption, show, units};
use crate::output::{Failure, Output};
use stillpoint_patch_catalog::{Enabled, PatchFile, drop_in, lost_base};

/// Arguments of `stillpoint patch disable`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Names of patches; without names, all patches of the unit.
    names: Vec<String>,
    /// The systemd unit; without it, all units for which a patch of that name is enabled.
    #[arg(long, value_name = "NAME", required_unless_present = "names")]
    unit: Option<String>,
    #[command(flatten)]
    root: RootOption,
    /// Dry run: print the files that would be removed.
    #[arg(long)]
    dry_run: bool,
}

/// Runs `stillpoint patch disable`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let root = &args.root.root;
    let units = units(root, args.unit.as_deref())?;
    let wanted = |stored: &PatchFile| {
        args.names.is_empty() || stored.patch().is_ok_and(|patch| args.names.contains(&patch.name))
    };
    let mut plan = Vec::new();
    for unit in &units {
        let enabled = Enabled::of(root, unit);
        let (go, stay): (Vec<PatchFile>, Vec<PatchFile>) =
            enabled.patches().map_err(Failure::refused)?.into_iter().partition(wanted);
        if let Some(missing) = lost_base(&go, &stay) {
            let (name, names) = (&missing.patch.name, args.names.join(" "));
            let hint = format!("stillpoint patch disable {name} {names} --unit {unit}");
            return Err(Failure::refused(anyhow::anyhow!("{unit}: {missing} then")).hint(hint));
        }
        plan.push((unit, enabled, go, stay));
    }
    let mut removed = 0;
    for (unit, enabled, go, stay) in &plan {
        removed += go.len();
        let failed = |error| Failure::failed(error, "patches that were not removed stay enabled");
        for file in go {
            show(unit, file, if args.dry_run { "would be disabled" } else { "disabled" }, output);
            if !args.dry_run {
                enabled.remove(file).map_err(failed)?;
            }
        }
        if stay.is_empty() && !args.dry_run && drop_in::remove(root, unit).map_err(failed)? {
            reload(root, output);
        }
    }
    if removed == 0 {
        output.line("no patch of that name is enabled");
    }
    Ok(())
}
