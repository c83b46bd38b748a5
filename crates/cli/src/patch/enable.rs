//! `stillpoint patch enable`, `disable`, `enabled`: patches that are active again after each start of a service.

use super::bases::{MissingBase, Stack};
use super::enabled::{self, Enabled, PatchFile, Root};
use super::processes::{Policy, Trust, unusable_file};
use super::refresh::Request;
use super::unit_file::{self, Service, UNIT_FILE_LEN_MAX};
use crate::output::{Failure, Output};
use anyhow::Context;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_host::file::{read_regular, read_regular_text};
use stillpoint_host::systemd::ServiceName;
use stillpoint_host::trusted::Directory;
use stillpoint_patch_format::Patch;

/// Size limit of a program whose build-id is read: the service's own user may have made the file.
const PROGRAM_LEN_MAX: u64 = 2 << 30;

/// Arguments of `stillpoint patch enable`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::of("stillpoint patch enable"))]
pub(crate) struct EnableArgs {
    /// Patch files in the order to be applied, after those that are already enabled.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The systemd unit to start with the patches.
    #[arg(long, value_name = "NAME")]
    unit: String,
    #[command(flatten)]
    root: Root,
    #[command(flatten)]
    trust: Trust,
    /// Do not start the service unless every patch is active.
    #[arg(long)]
    strict: bool,
    /// If the unit restricts its system calls or sockets, allow those that the helper needs.
    #[arg(long)]
    loosen_sandbox: bool,
    /// Path of `stillpoint` for the unit's command line.
    #[arg(long, value_name = "PATH")]
    stillpoint: Option<PathBuf>,
    /// Dry run: print the files that would be written.
    #[arg(long)]
    dry_run: bool,
}

/// Arguments of `stillpoint patch disable`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::of("stillpoint patch disable"))]
pub(crate) struct DisableArgs {
    /// Names of patches; without names, all patches of the unit.
    names: Vec<String>,
    /// The systemd unit; without it, all units for which a patch of that name is enabled.
    #[arg(long, value_name = "NAME", required_unless_present = "names")]
    unit: Option<String>,
    #[command(flatten)]
    root: Root,
    /// Dry run: print the files that would be removed.
    #[arg(long)]
    dry_run: bool,
}

/// Arguments of `stillpoint patch enabled`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::of("stillpoint patch enabled"))]
pub(crate) struct ListArgs {
    /// List only the patches of this unit.
    #[arg(long, value_name = "NAME")]
    unit: Option<String>,
    #[command(flatten)]
    root: Root,
}

#[derive(Serialize)]
struct Line<'a> {
    unit: &'a str,
    file: String,
    patch: Option<String>,
    cves: Vec<String>,
    build_id: Option<String>,
    error: Option<String>,
}

impl<'a> Line<'a> {
    fn new(unit: &'a ServiceName, stored: &PatchFile) -> Self {
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

    fn show(&self, event: &'static str, output: &Output) {
        output.result(event, self);
        let name = self.patch.clone().unwrap_or_else(|| self.file.clone());
        let cves = if self.cves.is_empty() { String::new() } else { format!(" [{}]", self.cves.join(", ")) };
        let error = self.error.as_ref().map(|e| format!(": {e}")).unwrap_or_default();
        output.line(format_args!("{}: {event} {name}{cves}{error}", self.unit));
    }
}

/// Runs `stillpoint patch enable`.
pub(crate) fn enable(args: EnableArgs, output: &Output) -> Result<(), Failure> {
    let unit = ServiceName::parse(&args.unit).map_err(Failure::refused)?;
    let service = Service::read(&args.root, &unit).map_err(Failure::refused)?;
    let stillpoint = match &args.stillpoint {
        Some(path) => path.clone(),
        None => std::env::current_exe().map_err(Failure::refused)?,
    };
    let request = Request {
        stillpoint: stillpoint.display().to_string(),
        options: options(&args, &unit),
        loosen_sandbox: args.loosen_sandbox,
    };
    let text = unit_file::text(&service, &request).map_err(Failure::refused)?;
    let enabled = Enabled::of(&args.root, &unit);
    let there = enabled.patches().map_err(Failure::refused)?;
    let active = |stored: &PatchFile| Some(args.trust.check(&stored.bytes, &stored.path).ok()?.0.patch);
    let mut stack = Stack::of(there.iter().filter_map(active));
    let mut new = Vec::new();
    for path in &args.files {
        // read once: when it is stored, the path may lead to another file than the one whose signature was checked
        let file = PatchFile::read(path).map_err(unusable_file)?;
        let (signed, _) = args.trust.check(&file.bytes, path).map_err(unusable_file)?;
        let patch = signed.patch;
        check_program(&args.root, &service, &patch).map_err(Failure::refused)?;
        let known = there.iter().any(|stored| stored.bytes == file.bytes);
        let taken = there.iter().find(|stored| stored.patch().is_ok_and(|other| other.name == patch.name));
        match (known, taken) {
            (true, _) => output.line(format_args!("{unit}: {} is already enabled", patch.name)),
            (false, Some(stored)) => {
                let (name, path) = (&patch.name, stored.path.display());
                let error = anyhow::anyhow!("another patch with the name {name} is enabled: {path}");
                return Err(Failure::refused(error).hint(format!("stillpoint patch disable {name} --unit {unit}")));
            }
            (false, None) => {
                stack.push(patch.clone()).map_err(|missing| check_base(&args, &unit, (path, &patch), &missing))?;
                new.push((patch.name, file.bytes));
            }
        }
    }
    if !service.confined_by.is_empty() && !args.loosen_sandbox {
        output.warn(format_args!(
            "{unit} restricts its system calls ({}): it runs unpatched unless stillpoint-exec.socket is started, whose helper \
             works outside of the sandbox, or --loosen-sandbox allows {} in the sandbox",
            service.confined_by.join(" "),
            unit_file::HELPER_SYSTEM_CALLS
        ));
    }
    if service.lacks_local_sockets() && !args.loosen_sandbox {
        output.warn(format_args!(
            "{unit} may not create sockets of AF_UNIX (RestrictAddressFamilies=): it cannot connect to the helper of \
             stillpoint-exec.socket, and a helper in its sandbox needs CAP_SYS_ADMIN; --loosen-sandbox allows AF_UNIX"
        ));
    }
    let drop_in = unit_file::drop_in(&args.root, &unit);
    Directory::check(drop_in.parent().unwrap_or(&drop_in)).map_err(Failure::refused)?;
    if args.dry_run {
        new.iter().for_each(|(name, _)| output.line(format_args!("{unit}: would enable {name}")));
        output.lines(format_args!("{}:\n{text}", drop_in.display()));
        return Ok(());
    }
    let write = || -> anyhow::Result<()> {
        for (name, bytes) in new {
            let path = enabled.add(&name, &bytes)?;
            Line::new(&unit, &PatchFile { path, bytes }).show("enabled", output);
        }
        if read_regular_text(&drop_in, UNIT_FILE_LEN_MAX).is_ok_and(|there| there == text) {
            return Ok(());
        }
        enabled::write(&drop_in, text.as_bytes())?;
        reload(&args.root, output);
        Ok(())
    };
    write().map_err(|error| {
        Failure::failed(error, "the service starts as before, or with the patches that were enabled so far")
    })
}

/// Refuses a patch whose base would not be active at a start, and names the patches to enable first.
fn check_base(args: &EnableArgs, unit: &ServiceName, (file, above): (&Path, &Patch), missing: &MissingBase) -> Failure {
    let read = |other: &PathBuf| PatchFile::read(other).and_then(|other| other.patch());
    let brings = |other: &&PathBuf| read(other).is_ok_and(|below| missing.is_added_by(&below, above));
    let hint = match args.files.iter().find(brings) {
        Some(base) => format!("stillpoint patch enable {} {} --unit {unit}", base.display(), file.display()),
        None => {
            format!("stillpoint patch enable FILE --unit {unit}, with the patch that adds {}, first", missing.base())
        }
    };
    Failure::refused(anyhow::anyhow!("{missing}")).hint(hint)
}

fn options(args: &EnableArgs, unit: &ServiceName) -> Vec<String> {
    let mut words = vec!["--unit".to_owned(), unit.to_string()];
    if !args.root.is_machine() {
        words.extend(["--root".to_owned(), args.root.root.display().to_string()]);
    }
    if args.trust.policy == Policy::Signed {
        words.extend(["--policy", "signed", "--keys"].map(str::to_owned));
        words.push(args.trust.keys.display().to_string());
    }
    if args.strict {
        words.push("--strict".to_owned());
    }
    words
}

/// Refuses a patch for another build of the program that the unit starts.
fn check_program(root: &Root, service: &Service, patch: &Patch) -> anyhow::Result<()> {
    let programs = service.exec_start.iter().filter_map(|line| unit_file::program(line));
    for program in programs.filter(|p| p.file_name().is_some_and(|name| name == patch.target.file_name.as_str())) {
        let path = root.at(&program.display().to_string());
        let found = build_id(&path).with_context(|| path.display().to_string())?;
        anyhow::ensure!(
            patch.target.build_id.0.is_empty() || found.is_none_or(|id| id == patch.target.build_id.0),
            "patch {} is for another build of {} (build-id {})",
            patch.name,
            path.display(),
            patch.target.build_id
        );
    }
    Ok(())
}

fn build_id(path: &Path) -> anyhow::Result<Option<Vec<u8>>> {
    use object::Object;
    let bytes = match read_regular(path, PROGRAM_LEN_MAX) {
        // The service reports this itself when it starts.
        Err(error) if error.is_not_found() => return Ok(None),
        bytes => bytes?,
    };
    // A script starts another program: nothing is known about that.
    Ok(object::File::parse(&*bytes).ok().and_then(|file| file.build_id().ok().flatten().map(<[u8]>::to_vec)))
}

/// Lets systemd read its units again, if it runs.
pub(super) fn reload(root: &Root, output: &Output) {
    let runs = root.is_machine() && Path::new("/run/systemd/system").is_dir();
    let reloaded = runs && Command::new("systemctl").arg("daemon-reload").status().is_ok_and(|s| s.success());
    if !reloaded {
        output.line("run `systemctl daemon-reload`, so that systemd reads it");
    }
}

/// Runs `stillpoint patch disable`.
pub(crate) fn disable(args: DisableArgs, output: &Output) -> Result<(), Failure> {
    let units = match &args.unit {
        Some(unit) => vec![ServiceName::parse(unit).map_err(Failure::refused)?],
        None => Enabled::units(&args.root).map_err(Failure::refused)?,
    };
    let wanted = |stored: &PatchFile| {
        args.names.is_empty() || stored.patch().is_ok_and(|patch| args.names.contains(&patch.name))
    };
    let mut plan = Vec::new();
    for unit in &units {
        let enabled = Enabled::of(&args.root, unit);
        let (go, stay): (Vec<PatchFile>, Vec<PatchFile>) =
            enabled.patches().map_err(Failure::refused)?.into_iter().partition(wanted);
        if let Some(missing) = lost_base(&go, &stay) {
            let hint = format!("stillpoint patch disable {} {} --unit {unit}", missing.patch, args.names.join(" "));
            return Err(Failure::refused(anyhow::anyhow!("{unit}: {missing} then")).hint(hint));
        }
        plan.push((unit, enabled, go, stay));
    }
    let mut removed = 0;
    for (unit, enabled, go, stay) in &plan {
        removed += go.len();
        let failed = |error| Failure::failed(error, "patches that were not removed stay enabled");
        for file in go {
            Line::new(unit, file).show(if args.dry_run { "would be disabled" } else { "disabled" }, output);
            if !args.dry_run {
                enabled.remove(file).map_err(failed)?;
            }
        }
        if stay.is_empty() && !args.dry_run {
            remove_drop_in(&args.root, unit, output).map_err(failed)?;
        }
    }
    if removed == 0 {
        output.line("no patch of that name is enabled");
    }
    Ok(())
}

/// Returns the first base that a remaining patch loses with the removed ones.
fn lost_base(go: &[PatchFile], stay: &[PatchFile]) -> Option<MissingBase> {
    let mut all: Vec<&PatchFile> = go.iter().chain(stay).collect();
    all.sort();
    let before = Stack::of(all.into_iter().filter_map(|stored| stored.patch().ok()));
    let mut after = Stack::default();
    let mut missing = stay.iter().filter_map(|stored| after.push(stored.patch().ok()?).err());
    missing.find(|missing| before.holds(&missing.patch))
}

fn remove_drop_in(root: &Root, unit: &ServiceName, output: &Output) -> anyhow::Result<()> {
    let path = unit_file::drop_in(root, unit);
    let (directory, name) = match Directory::of_file(&path) {
        Err(error) if error.is_not_found() => return Ok(()),
        opened => opened?,
    };
    match directory.remove(name) {
        Err(error) if error.is_not_found() => return Ok(()),
        removed => removed?,
    }
    // The directory may contain other drop-ins.
    let _ = directory.remove_if_empty();
    reload(root, output);
    Ok(())
}

/// Runs `stillpoint patch enabled`.
pub(crate) fn list(args: ListArgs, output: &Output) -> Result<(), Failure> {
    let units = match &args.unit {
        Some(unit) => vec![ServiceName::parse(unit).map_err(Failure::refused)?],
        None => Enabled::units(&args.root).map_err(Failure::refused)?,
    };
    for unit in &units {
        let patches = Enabled::of(&args.root, unit).patches().map_err(Failure::refused)?;
        patches.iter().for_each(|stored| Line::new(unit, stored).show("enabled", output));
    }
    Ok(())
}
