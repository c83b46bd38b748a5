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

use super::enabled::RootOption;
use super::exec::{self, LaunchHelper, Patches, report};
use super::processes::{PolicyName, Trust};
use crate::output::Failure;
use anyhow::Context;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use stillpoint_host::file::listen;
use stillpoint_host::systemd::{ServiceName, service_of_process};
use stillpoint_patch_catalog::{Enabled, Executables, Service, drop_in};
use stillpoint_patch_tracee::launch::introduction::{Connected, Introduced};

/// Arguments of `stillpoint patch exec-helper`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Listen here; without it, serve the connection that standard input is (a socket unit with Accept=yes).
    #[arg(long, value_name = "SOCKET")]
    listen: Option<PathBuf>,
    /// Time limit for a wrapper (a script) to execute the program that the patches are for.
    #[arg(long, value_parser = super::processes::duration, default_value = "30s")]
    wait: Duration,
    #[command(flatten)]
    root: RootOption,
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
        let root = &args.root.root;
        let request = drop_in::request(root, unit)?.context("none are enabled for it")?;
        let recorded = exec::Args::recorded(&request.options).context("the record of its drop-in")?;
        // the stricter of the two
        let trust = if args.trust.policy == PolicyName::Signed { &args.trust } else { &recorded.trust };
        let (policy, mut patches) = (trust.policy(), Patches::new());
        for file in Enabled::of(root, unit).patches()? {
            match policy.check(&file) {
                Ok(read) => patches.push(read),
                // The program's own process reports it, and refuses if it must.
                Err(error) => report(format_args!("warning: {unit}: dropped: {:#}", anyhow::Error::from(error))),
            }
        }
        anyhow::ensure!(!patches.is_empty(), "none are enabled for it");
        let executables = Executables::of(&Service::read(root, unit)?);
        Ok(Wanted { patches, strict: recorded.strict, executables })
    }
}
