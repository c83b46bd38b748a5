//! `stillpoint patch enable`: patches that are active again after each start of a service.

use super::enabled::{RootOption, show};
use super::processes::{PolicyName, Trust, unusable_file};
use crate::output::{Failure, Output};
use std::path::{Path, PathBuf};
use stillpoint_host::systemd::ServiceName;
use stillpoint_host::trusted::Directory;
use stillpoint_patch_catalog::{Addition, Candidate, Enabled, Error, PatchFile, Root, Service, drop_in};

/// Arguments of `stillpoint patch enable`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Patch files in the order to be applied, after those that are already enabled.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The systemd unit to start with the patches.
    #[arg(long, value_name = "NAME")]
    unit: String,
    #[command(flatten)]
    root: RootOption,
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

/// Runs `stillpoint patch enable`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let root = &args.root.root;
    let unit = ServiceName::parse(&args.unit).map_err(Failure::refused)?;
    let service = Service::read(root, &unit).map_err(Failure::refused)?;
    let stillpoint = match &args.stillpoint {
        Some(path) => path.clone(),
        None => std::env::current_exe().map_err(Failure::refused)?,
    };
    let request = drop_in::Request {
        stillpoint: stillpoint.display().to_string(),
        options: options(args, &unit),
        loosen_sandbox: args.loosen_sandbox,
    };
    let text = drop_in::text(&service, &request).map_err(Failure::refused)?;
    let enabled = Enabled::of(root, &unit);
    let policy = args.trust.policy();
    let mut addition = Addition::to(&enabled, root, &service, &policy).map_err(Failure::refused)?;
    let mut new = Vec::new();
    for path in &args.files {
        // read once: when it is stored, the path may lead to another file than the one whose signature was checked
        let file = PatchFile::read(path).map_err(unusable_file)?;
        match addition.add(&file).map_err(|error| refusal(error, args, &unit, path))? {
            Candidate::Enabled(name) => output.line(format_args!("{unit}: {name} is already enabled")),
            Candidate::New(name) => new.push((name, file.bytes)),
        }
    }
    if !service.confined_by.is_empty() && !args.loosen_sandbox {
        output.warn(format_args!(
            "{unit} restricts its system calls ({}): it runs unpatched unless stillpoint-exec.socket is started, whose helper \
             works outside of the sandbox, or --loosen-sandbox allows {} in the sandbox",
            service.confined_by.join(" "),
            drop_in::HELPER_SYSTEM_CALLS
        ));
    }
    if service.lacks_local_sockets() && !args.loosen_sandbox {
        output.warn(format_args!(
            "{unit} may not create sockets of AF_UNIX (RestrictAddressFamilies=): it cannot connect to the helper of \
             stillpoint-exec.socket, and a helper in its sandbox needs CAP_SYS_ADMIN; --loosen-sandbox allows AF_UNIX"
        ));
    }
    let path = drop_in::path(root, &unit);
    Directory::check(path.parent().unwrap_or(&path)).map_err(Failure::refused)?;
    if args.dry_run {
        new.iter().for_each(|(name, _)| output.line(format_args!("{unit}: would enable {name}")));
        output.lines(format_args!("{}:\n{text}", path.display()));
        return Ok(());
    }
    let write = || -> Result<(), Error> {
        for (name, bytes) in new {
            let path = enabled.add(&name, &bytes)?;
            show(&unit, &PatchFile { path, bytes }, "enabled", output);
        }
        if drop_in::is_written(&path, &text) {
            return Ok(());
        }
        drop_in::write(&path, &text)?;
        reload(root, output);
        Ok(())
    };
    write().map_err(|error| {
        Failure::failed(error, "the service starts as before, or with the patches that were enabled so far")
    })
}

/// Converts the refusal of a file, and names the patches to enable or to disable first.
fn refusal(error: Error, args: &Args, unit: &ServiceName, file: &Path) -> Failure {
    let hint = match &error {
        Error::Undoes { below, .. } => Some(format!(
            "patch build with --on-top-of the diffs of {below}; or all diffs as one patch, after stillpoint patch disable {below} --unit {unit}"
        )),
        Error::NameTaken { name, .. } => Some(format!("stillpoint patch disable {name} --unit {unit}")),
        Error::MissingBase(missing) => {
            let read = |other: &PathBuf| PatchFile::read(other).and_then(|other| other.patch());
            let brings = |other: &&PathBuf| read(other).is_ok_and(|below| missing.is_added_by(&below));
            Some(match args.files.iter().find(brings) {
                Some(base) => format!("stillpoint patch enable {} {} --unit {unit}", base.display(), file.display()),
                None => {
                    let base = missing.base();
                    format!("stillpoint patch enable FILE --unit {unit}, with the patch that adds {base}, first")
                }
            })
        }
        _ => return unusable_file(error),
    };
    Failure { hint, ..Failure::refused(error) }
}

fn options(args: &Args, unit: &ServiceName) -> Vec<String> {
    let mut words = vec!["--unit".to_owned(), unit.to_string()];
    if !args.root.root.is_machine() {
        words.extend(["--root".to_owned(), args.root.root.path().display().to_string()]);
    }
    if args.trust.policy == PolicyName::Signed {
        words.extend(["--policy", "signed", "--keys"].map(str::to_owned));
        words.push(args.trust.keys.display().to_string());
    }
    if args.strict {
        words.push("--strict".to_owned());
    }
    words
}

/// Makes systemd read its units again, or asks the operator to.
pub(super) fn reload(root: &Root, output: &Output) {
    if !drop_in::reload(root) {
        output.line("run `systemctl daemon-reload`, so that systemd reads it");
    }
}
