//! `stillpoint patch enabled`: lists the patches that are active again after each start of a service.

use crate::output::{Failure, Output};
use serde_json::json;
use stillpoint_host::systemd::ServiceName;
use stillpoint_patch_catalog::{Enabled, PatchFile, Root};

/// Root directory of all paths.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct RootOption {
    /// Root directory of units and enabled patches, for example of a machine's image.
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::AnyPath, default_value = "/")]
    pub(crate) root: Root,
}

/// Arguments of `stillpoint patch enabled`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// List only the patches of this unit.
    #[arg(long, value_name = "NAME")]
    unit: Option<String>,
    #[command(flatten)]
    root: RootOption,
}

/// Prints a patch of a unit, with what happened to it.
pub(super) fn show(unit: &ServiceName, stored: &PatchFile, event: &'static str, output: &Output) {
    let file = stored.path.display().to_string();
    let patch = stored.patch();
    let error = patch.as_ref().err().map(|error| format!("{error:#}"));
    let patch = patch.ok();
    let (name, cves) = (patch.as_ref().map(|p| &p.name), patch.as_ref().map_or(&[][..], |p| &p.cves[..]));
    let build_id = patch.as_ref().map(|p| p.target.build_id.to_string());
    output.result(
        event,
        &json!({
            "unit": unit.as_str(), "file": file, "patch": name, "cves": cves, "build_id": build_id, "error": error,
        }),
    );
    let cves = if cves.is_empty() { String::new() } else { format!(" [{}]", cves.join(", ")) };
    let error = error.map(|e| format!(": {e}")).unwrap_or_default();
    output.line(format_args!("{unit}: {event} {}{cves}{error}", name.unwrap_or(&file)));
}

/// Units to work on: the named one, or all that have a patch.
pub(super) fn units(root: &Root, unit: Option<&str>) -> Result<Vec<ServiceName>, Failure> {
    match unit {
        Some(unit) => Ok(vec![ServiceName::parse(unit).map_err(Failure::refused)?]),
        None => Enabled::units(root).map_err(Failure::refused),
    }
}

/// Runs `stillpoint patch enabled`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let root = &args.root.root;
    for unit in &units(root, args.unit.as_deref())? {
        let patches = Enabled::of(root, unit).patches().map_err(Failure::refused)?;
        patches.iter().for_each(|stored| show(unit, stored, "enabled", output));
    }
    Ok(())
}
