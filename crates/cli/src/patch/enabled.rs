//! `stillpoint patch enabled`: lists the patches that are active again after each start of a service.

use crate::output::{Failure, Output};
use serde::Serialize;
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
#[command(after_help = crate::examples::of("stillpoint patch enabled"))]
pub(crate) struct Args {
    /// List only the patches of this unit.
    #[arg(long, value_name = "NAME")]
    unit: Option<String>,
    #[command(flatten)]
    root: RootOption,
}

/// Enabled patch, for people or as JSON.
#[derive(Serialize)]
pub(super) struct Line<'a> {
    unit: &'a str,
    file: String,
    patch: Option<String>,
    cves: Vec<String>,
    build_id: Option<String>,
    error: Option<String>,
}

impl<'a> Line<'a> {
    /// Reads the patch.
    pub(super) fn new(unit: &'a ServiceName, stored: &PatchFile) -> Self {
        let read = stored.patch();
        let (patch, error) = match &read {
            Ok(patch) => (Some(patch), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        Line {
            unit: unit.as_str(),
            file: stored.path.display().to_string(),
            patch: patch.map(|p| p.name.clone()),
            cves: patch.map(|p| p.cves.clone()).unwrap_or_default(),
            build_id: patch.map(|p| p.target.build_id.to_string()),
            error,
        }
    }

    /// Prints it with what happened to it.
    pub(super) fn show(&self, event: &'static str, output: &Output) {
        output.result(event, self);
        let name = self.patch.clone().unwrap_or_else(|| self.file.clone());
        let cves = if self.cves.is_empty() { String::new() } else { format!(" [{}]", self.cves.join(", ")) };
        let error = self.error.as_ref().map(|e| format!(": {e}")).unwrap_or_default();
        output.line(format_args!("{}: {event} {name}{cves}{error}", self.unit));
    }
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
        patches.iter().for_each(|stored| Line::new(unit, stored).show("enabled", output));
    }
    Ok(())
}
