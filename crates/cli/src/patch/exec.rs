//! `stillpoint patch exec`: runs a program that is patched before its first instruction.
//!
//! The process becomes the program: pid, parent and all else stay the same. A helper process holds it at its entry point meanwhile (see
//! `stillpoint_patch_tracee::launch`). All messages go to standard error: standard output belongs to the program.

use super::enabled::RootOption;
use super::processes::{Trust, duration, unusable_file};
use crate::output::{Failure, Output};
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stillpoint_host::kernel_files;
use stillpoint_host::systemd::ServiceName;
use stillpoint_host::trusted::Directory;
use stillpoint_patch_catalog::{Enabled, Error, Executables, PatchFile, drop_in};
use stillpoint_patch_engine::{self as engine, Options, Outcome, Quiescence, ServiceState};
use stillpoint_patch_format::Signed;
use stillpoint_patch_tracee::launch::{self, Gate, Launch, LaunchState, Program, Side, Waiting};
use stillpoint_patch_tracee::{Module, Pid, Process};

/// Arguments of `stillpoint patch exec`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Patch files in the order to be applied; for a directory, its `*.patch` files in the order of their names.
    #[arg(long, value_name = "FILE|DIR")]
    patches: Vec<PathBuf>,
    /// Apply the patches that are enabled for this systemd unit, before those of --patches.
    #[arg(long, value_name = "NAME")]
    unit: Option<String>,
    /// With --unit alone: socket of the helper to use; without a helper there, the command forks its own.
    #[arg(long, value_name = "SOCKET", default_value = "/run/stillpoint/exec.sock")]
    helper: PathBuf,
    #[command(flatten)]
    root: RootOption,
    #[command(flatten)]
    pub(super) trust: Trust,
    /// Do not run the program unless every patch is active.
    #[arg(long)]
    pub(super) strict: bool,
    /// Time limit for a wrapper (a script) to execute the program that the patches are for.
    #[arg(long, value_parser = duration, default_value = "30s")]
    wait: Duration,
    /// Value of argv[0] for the program (as with `@` in a unit's ExecStart).
    #[arg(long, value_name = "NAME")]
    argv0: Option<OsString>,
    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(super) type Patches = Vec<(Signed, Option<String>)>;

impl Args {
    /// Parses options that `patch enable` recorded.
    ///
    /// # Errors
    /// They are not options of this command.
    pub(super) fn recorded(options: &[String]) -> anyhow::Result<Args> {
        let words = ["exec"].into_iter().chain(options.iter().map(String::as_str)).chain(["--", "program"]);
        let command = <Args as clap::Args>::augment_args(clap::Command::new("exec"));
        Ok(<Args as clap::FromArgMatches>::from_arg_matches(&command.try_get_matches_from(words)?)?)
    }
}

/// Runs `stillpoint patch exec`; returns only when the program could not be executed.
pub(crate) fn run(args: Args, _output: &Output) -> Result<(), Failure> {
    check_unit(&args)?;
    let patches = read(&args)?;
    let mut words = args.command.clone();
    let program = words[0].clone();
    words[0] = args.argv0.clone().unwrap_or_else(|| program.clone());
    if !patches.is_empty() {
        start_helper(&args, &program, patches)?;
    }
    let error = launch::become_program(&program, &words);
    let what = format!("execute {}", program.display());
    Err(Failure::failed(anyhow::Error::new(error).context(what), "nothing was started"))
}

/// Prints one line of this command among the program's.
pub(super) fn report(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "stillpoint: {text}");
}

/// Warns of a unit that has changed since the calling drop-in was made, or refuses with `--strict`.
fn check_unit(args: &Args) -> Result<(), Failure> {
    let Some(unit) = args.unit.as_deref().and_then(|unit| ServiceName::parse(unit).ok()) else { return Ok(()) };
    let hint = format!("stillpoint patch refresh --unit {unit}");
    match drop_in::change(&args.root.root, &unit) {
        Ok(None) => {}
        Ok(Some(change)) if args.strict => {
            let error = anyhow::anyhow!("{unit} was changed after its patches were enabled: {change}");
            return Err(Failure::refused(error).hint(hint));
        }
        Ok(Some(change)) => report(format_args!(
            "warning: {unit} was changed after its patches were enabled: {change}; it starts without these changes; try: {hint}"
        )),
        // a sandbox may hide the files; that must not prevent the start of the service
        Err(error) => {
            report(format_args!("warning: changes of {unit} cannot be detected: {:#}", anyhow::Error::from(error)))
        }
    }
    Ok(())
}

/// Reads the patches; names those that cannot be read, or refuses with `--strict`.
fn read(args: &Args) -> Result<Patches, Failure> {
    let mut patches = Patches::new();
    let drop = |error: Error| match args.strict {
        true => Err(unusable_file(error)),
        false => {
            report(format_args!("warning: dropped: {:#}", anyhow::Error::from(error)));
            Ok(())
        }
    };
    let mut files = Vec::new();
    if let Some(unit) = &args.unit {
        let unit = ServiceName::parse(unit).map_err(Error::from);
        match unit.and_then(|unit| Enabled::of(&args.root.root, &unit).patches()) {
            Ok(enabled) => files.extend(enabled),
            Err(error) => drop(error)?,
        }
    }
    for path in &args.patches {
        match expand(path) {
            Ok(found) => files.extend(found),
            Err(error) => drop(error)?,
        }
    }
    let policy = args.trust.policy();
    for file in files {
        match policy.check(&file) {
            Ok(read) => patches.push(read),
            Err(error) => drop(error)?,
        }
    }
    Ok(patches)
}

fn expand(path: &Path) -> Result<Vec<PatchFile>, Error> {
    if path.is_dir() { PatchFile::all_in(&Directory::open_of_root(path)?) } else { Ok(vec![PatchFile::read(path)?]) }
}

/// Forks the helper; returns in the process that becomes the program.
fn start_helper(args: &Args, program: &OsString, patches: Patches) -> Result<(), Failure> {
    let unpatched = |why: String| match args.strict {
        true => Err(Failure::refused(anyhow::anyhow!("{why}"))),
        false => {
            report(format_args!("warning: {} runs unpatched: {why}", program.display()));
            Ok(())
        }
    };
    if find(program).is_some_and(|path| launch::gains_privileges(&path)) {
        return unpatched("it gains privileges when it is executed, so only root may trace it".into());
    }
    if args.unit.is_some() && args.patches.is_empty() && request_helper(&args.helper, args.strict) {
        return Ok(());
    }
    match launch::split() {
        Err(error) => unpatched(format!("the helper could not be started: {error}")),
        Ok(Side::Program(mut waiting)) => {
            if waiting.ready() {
                waiting.keep();
                return Ok(());
            }
            unpatched("its helper cannot trace it".into())
        }
        Ok(Side::Helper(program)) => {
            let helper = LaunchHelper { patches, strict: args.strict, wait: args.wait, executables: None };
            helper.run(program);
            std::process::exit(0);
        }
    }
}

/// Asks a helper outside of this process's sandbox; returns true if one is ready to patch it.
fn request_helper(helper: &Path, strict: bool) -> bool {
    let Ok(connection) = UnixStream::connect(helper) else { return false };
    let Ok(mut waiting) = Waiting::on(connection) else { return false };
    let follows = waiting.introduce(strict).is_ok() && waiting.ready();
    if follows {
        waiting.keep();
    }
    follows
}

/// Returns the path at which `execvp` would find a program.
fn find(program: &OsString) -> Option<PathBuf> {
    let path = Path::new(program);
    if path.components().count() > 1 {
        return Some(path.to_owned());
    }
    let directories = std::env::var_os("PATH")?;
    std::env::split_paths(&directories).map(|directory| directory.join(path)).find(|path| path.is_file())
}

/// Process that holds the program at its gate, patches it, and ends.
pub(super) struct LaunchHelper {
    pub(super) patches: Patches,
    pub(super) strict: bool,
    pub(super) wait: Duration,
    /// The only programs to be patched; none for a program of the caller's own.
    pub(super) executables: Option<Executables>,
}

/// Relation between a patch and the program at its gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    /// The patch is for a file that is mapped.
    Fits,
    /// The patch is for another build of a file that is mapped.
    OtherBuild,
    /// No file of that name is mapped.
    Foreign,
}

impl LaunchHelper {
    pub(super) fn run(&self, program: Program) {
        let pid = program.pid();
        if let Err(error) = self.follow(program) {
            report(format_args!("warning: process {pid}: {:#}", anyhow::Error::new(error)));
        }
    }

    fn follow(&self, program: Program) -> Result<(), engine::Error> {
        let pid = program.pid();
        let mut launch = Launch::follow(program)?;
        if launch.ready().is_err() {
            return Ok(());
        }
        let deadline = Instant::now() + self.wait;
        let mut ungated = None;
        loop {
            let (reached, following) = launch.next(deadline)?;
            match (reached, following) {
                (LaunchState::Gate(gate), _) => match self.at_gate(gate)? {
                    Some(following) => launch = following,
                    None => return Ok(()),
                },
                (LaunchState::WithoutGate(why), Some(following)) if self.strict => {
                    report(format_args!("{} is not started: {why}", name_of(pid)));
                    following.kill();
                    return Ok(());
                }
                (LaunchState::WithoutGate(why), Some(following)) => {
                    report(format_args!("warning: {} runs unpatched: {why}", name_of(pid)));
                    ungated = Some(why);
                    launch = following;
                }
                (LaunchState::TimedOut, _) if ungated.is_none() => {
                    let names = self.names();
                    report(format_args!(
                        "warning: {} is not the program that {names} is for; it runs unpatched",
                        name_of(pid)
                    ));
                    return Ok(());
                }
                _ => return Ok(()),
            }
        }
    }

    fn names(&self) -> String {
        self.patches.iter().map(|(signed, _)| signed.patch.name.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// Patches the program and releases it, or follows it further if it is another program.
    fn at_gate(&self, mut gate: Gate) -> Result<Option<Launch>, engine::Error> {
        let pid = gate.pid();
        let process = gate.process()?;
        let modules = process.modules()?;
        let fits: Vec<Fit> = self.patches.iter().map(|(signed, _)| fit(signed, &modules)).collect();
        if !self.is_meant(&process, &modules) || fits.iter().all(|fit| *fit == Fit::Foreign) {
            return Ok(Some(gate.open_and_follow(&process)?));
        }
        if let Err(error) = self.patch(&fits, &mut gate, &process) {
            report(format_args!("{} is not started: {error}", name_of(pid)));
            gate.refuse()?;
        } else {
            gate.open(&process)?;
        }
        Ok(None)
    }

    /// Returns true for a program that the unit names or a patch is for, in a file that only root can change.
    fn is_meant(&self, process: &Process, modules: &[Module]) -> bool {
        let Some(executables) = &self.executables else { return true };
        let Some(file) = process.open_exe().ok().and_then(|exe| exe.metadata().ok()) else { return false };
        let build_id = modules.iter().find(|module| module.executable).and_then(|module| module.build_id.as_ref());
        let is_target = |id| self.patches.iter().any(|(signed, _)| &signed.patch.target.build_id == id);
        executables.include(&file, build_id.is_some_and(is_target)).unwrap_or_else(|error| {
            report(format_args!("warning: process {}: {error}", process.pid()));
            false
        })
    }

    /// Applies the patches that fit; an error means that the program must not run.
    fn patch(&self, fits: &[Fit], gate: &mut Gate, process: &Process) -> Result<(), String> {
        let mut touched = false;
        for ((signed, signer), fit) in self.patches.iter().zip(fits) {
            let outcome = match fit {
                Fit::OtherBuild => Err((ServiceState::Untouched, other_build(signed))),
                Fit::Foreign => Err((ServiceState::Untouched, "the file that it is for is not mapped".into())),
                Fit::Fits => {
                    if !touched && gate.touch(process).is_err() {
                        return Err("its memory cannot be written".into());
                    }
                    touched = true;
                    apply(process, signed, signer.clone())
                }
            };
            let name = &signed.patch.name;
            match outcome {
                Ok(what) => report(format_args!("{name}: {what}")),
                Err((_, why)) if self.strict => return Err(format!("{name}: {why}")),
                Err((ServiceState::Unfinished | ServiceState::Ended, why)) => return Err(format!("{name}: {why}")),
                Err((_, why)) => report(format_args!("warning: {name} dropped: {why}")),
            }
        }
        Ok(())
    }
}

/// Applies a patch. The process has one thread, before its first instruction: stopping all threads satisfies every scope.
fn apply(process: &Process, signed: &Signed, signer: Option<String>) -> Result<String, (ServiceState, String)> {
    let pid = process.pid();
    let options = Options {
        quiescence: Quiescence::Stop,
        signer,
        process: Some(process.clone()),
        // the program has not begun: it has no suspended frames
        allow_suspended_frames: true,
        ..Options::default()
    };
    let outcome = engine::apply(pid, signed, &options, &mut |_| {});
    match outcome {
        Ok(Outcome::Committed { duration_ns, .. }) => {
            Ok(format!("applied to {} before its start, in {:.1} ms", name_of(pid), duration_ns as f64 / 1e6))
        }
        Ok(Outcome::Rests { .. }) => Ok(format!("applied to {}, except threads that stay in old code", name_of(pid))),
        Ok(Outcome::AlreadyThere(what) | Outcome::DryRun(what)) => Ok(what),
        Err(error) => Err((error.service_state(), format!("{:#}", anyhow::Error::new(error)))),
    }
}

fn fit(signed: &Signed, modules: &[Module]) -> Fit {
    let target = &signed.patch.target;
    let base = |module: &&Module| module.path.rsplit('/').next() == Some(target.file_name.as_str());
    let same = |module: &Module| module.build_id.as_ref() == Some(&target.build_id);
    // A target without a build-id is recognized by its name here, and by its text when it is patched.
    match (modules.iter().any(same), modules.iter().find(base)) {
        (true, _) => Fit::Fits,
        (false, Some(module)) if target.build_id.0.is_empty() && module.build_id.is_none() => Fit::Fits,
        (false, Some(_)) => Fit::OtherBuild,
        (false, None) => Fit::Foreign,
    }
}

fn other_build(signed: &Signed) -> String {
    let target = &signed.patch.target;
    format!(
        "it is for another build of {} (build-id {}): the package was upgraded; run `stillpoint patch disable {}`",
        target.file_name, target.build_id, signed.patch.name
    )
}

fn name_of(pid: Pid) -> String {
    let name = kernel_files::text(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("{} (process {pid})", name.trim_end())
}
