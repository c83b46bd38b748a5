//! `stillpoint patch exec-helper`: the helper of `patch exec` outside of a unit's sandbox.
//!
//! A unit's sandbox also applies to a helper that is forked inside of it. This one is a service of its own, run by root: the program's
//! process connects to its socket and introduces itself ([`introduction`]). Any local process can connect, so the helper does only what
//! root has requested, and trusts only the kernel, systemd and root's own files:
//!
//! - The process is held by its pidfd. It is in the control group of a system service, as systemd confirms.
//! - Root has enabled patches for that service, and has recorded the policy and the keys.
//! - The patched program is the one that the unit's `ExecStart=` names or the one that a patch is for, in a file that only root can
//!   change. A program on the way to it, such as a script's shell, continues and is followed.
//! - A program that gains privileges in exec is released at once.

use super::enabled::{Enabled, Root};
use super::exec::{self, LaunchHelper, Patches, report};
use super::processes::{Policy, Trust};
use super::refresh;
use super::unit_file::{self, Service};
use crate::output::Failure;
use anyhow::Context;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use stillpoint_host::file::listen;
use stillpoint_host::systemd::{ServiceName, service_of_process};
use stillpoint_patch_tracee::launch::introduction::{Connected, Introduced};
use stillpoint_patch_tracee::{Module, Process};

/// Arguments of `stillpoint patch exec-helper`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::of("stillpoint patch exec-helper"))]
pub(crate) struct Args {
    /// Listen here; without it, serve the connection that standard input is (a socket unit with Accept=yes).
    #[arg(long, value_name = "SOCKET")]
    listen: Option<PathBuf>,
    /// Time limit for a wrapper (a script) to execute the program that the patches are for.
    #[arg(long, value_parser = super::processes::duration, default_value = "30s")]
    wait: Duration,
    #[command(flatten)]
    root: Root,
    #[command(flatten)]
    trust: Trust,
}

/// Runs `stillpoint patch exec-helper`.
pub(crate) fn run(args: Args) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::failed(error, "programs run unpatched");
    let Some(path) = &args.listen else {
        let connection = std::io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
        serve(&args, connection.into());
        return Ok(());
    };
    // A process that connects gets only the patches that root has enabled for its own unit.
    let listener = listen(path, 0o666).map_err(|error| Failure::failed(error, "programs run unpatched"))?;
    let args = Arc::new(args);
    for connection in listener.incoming() {
        let (connection, args) = (connection.map_err(failed)?, Arc::clone(&args));
        std::thread::spawn(move || serve(&args, connection));
    }
    Ok(())
}

fn serve(args: &Args, connection: UnixStream) {
    if let Err(error) = follow(args, connection) {
        report(format_args!("warning: {error:#}"));
    }
}

fn follow(args: &Args, connection: UnixStream) -> anyhow::Result<()> {
    let process = Connected::accept(connection).context("the process of the connection is not visible")?;
    let pid = process.pid();
    // Checked before the process is read from: other processes are refused without a wait.
    let unit = service_of_process(pid.0)?;
    anyhow::ensure!(process.is_alive(), "process {pid} has ended");
    let wanted = Wanted::of(args, &unit).with_context(|| format!("process {pid} of {unit} gets no patches"))?;
    let introduced = process.challenge().and_then(|asked| asked.answer());
    let Introduced { program, strict } =
        introduced.with_context(|| format!("process {pid} of {unit} does not send its handshake"))?;
    let helper = LaunchHelper {
        patches: wanted.patches,
        strict: strict || wanted.strict,
        wait: args.wait,
        executables: Some(wanted.executables),
    };
    helper.run(program);
    Ok(())
}

/// Patches that root has enabled for a unit.
struct Wanted {
    patches: Patches,
    strict: bool,
    executables: Executables,
}

impl Wanted {
    /// Reads the patches of a unit.
    ///
    /// # Errors
    /// Nothing is enabled for the unit, or the policy accepts none of its patches.
    fn of(args: &Args, unit: &ServiceName) -> anyhow::Result<Wanted> {
        let request = refresh::request(&args.root, unit)?.context("none are enabled for it")?;
        let recorded = exec::Args::recorded(&request.options).context("the record of its drop-in")?;
        // the stricter of the two
        let trust = if args.trust.policy == Policy::Signed { &args.trust } else { &recorded.trust };
        let mut patches = Patches::new();
        for file in Enabled::of(&args.root, unit).patches()? {
            match trust.check(&file.bytes, &file.path) {
                Ok(read) => patches.push(read),
                // The program's own process reports it, and refuses if it must.
                Err(error) => report(format_args!("warning: {unit}: dropped: {error:#}")),
            }
        }
        anyhow::ensure!(!patches.is_empty(), "none are enabled for it");
        let executables = Executables::of(&Service::read(&args.root, unit)?);
        Ok(Wanted { patches, strict: recorded.strict, executables })
    }
}

/// Programs that a unit starts.
#[derive(Debug)]
pub(super) struct Executables {
    /// Device and inode of each.
    files: Vec<(u64, u64)>,
}

impl Executables {
    fn of(service: &Service) -> Executables {
        let programs = service.exec_start.iter().filter_map(|line| unit_file::program(line));
        let files = programs.filter_map(|program| program.metadata().ok()).map(|file| (file.dev(), file.ino()));
        Executables { files: files.collect() }
    }

    /// Returns true if a process executes one of them, or the program that a patch is for, and only root can change that file.
    pub(super) fn include(&self, process: &Process, modules: &[Module], patches: &Patches) -> bool {
        let Ok(file) = process.open_exe().map_err(anyhow::Error::new).and_then(|exe| Ok(exe.metadata()?)) else {
            return false;
        };
        let build_id = modules.iter().find(|module| module.executable).and_then(|module| module.build_id.as_ref());
        let is_target = |id| patches.iter().any(|(signed, _)| &signed.patch.target.build_id == id);
        let is_meant = self.files.contains(&(file.dev(), file.ino())) || build_id.is_some_and(is_target);
        let is_roots = file.uid() == 0 && file.mode() & 0o022 == 0;
        if is_meant && !is_roots {
            report(format_args!(
                "warning: process {}: users other than root can change its program's file",
                process.pid()
            ));
        }
        is_meant && is_roots
    }
}
