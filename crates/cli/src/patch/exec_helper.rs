//! `stillpoint patch exec-helper`: the helper of `patch exec` outside of a unit's sandbox.
//!
//! A unit's sandbox holds for a helper that is forked inside of it. This one is a service of its own, run by root: the
//! program's process connects to its socket, and nothing that it says is believed. The kernel tells who it is
//! (`SO_PEERCRED`), its control group tells the unit if systemd confirms that the group is that unit's, and root's directory
//! has the patches of that unit. So a process can ask for nothing but what root has enabled for it, in itself.

use super::enabled::{Enabled, Root};
use super::exec::{Helper, tell};
use super::processes::Trust;
use crate::output::Failure;
use anyhow::Context;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use stillpoint_host::systemd::service_of_process;
use stillpoint_patch_tracee::launch;

/// A process that connects and says nothing is not waited for longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Arguments of `stillpoint patch exec-helper`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Listen here; without it, serve the connection that standard input is (a socket unit with Accept=yes).
    #[arg(long, value_name = "SOCKET")]
    listen: Option<PathBuf>,
    /// How long to wait for a wrapper (a script) to execute the program that the patches are for.
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
    let listener = UnixListener::bind(path).map_err(failed)?;
    // Whoever connects gets nothing but what root has enabled for its own unit.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).map_err(failed)?;
    let args = Arc::new(args);
    for connection in listener.incoming() {
        let (connection, args) = (connection.map_err(failed)?, Arc::clone(&args));
        std::thread::spawn(move || serve(&args, connection));
    }
    Ok(())
}

fn serve(args: &Args, connection: UnixStream) {
    if let Err(error) = follow(args, connection) {
        tell(format_args!("warning: {error:#}"));
    }
}

fn follow(args: &Args, mut connection: UnixStream) -> anyhow::Result<()> {
    let program = launch::peer(&connection).context("who connected")?;
    connection.set_read_timeout(Some(PATIENCE))?;
    let mut said = [0; 5];
    connection.read_exact(&mut said).with_context(|| format!("process {program} does not introduce itself"))?;
    connection.set_read_timeout(None)?;
    let [strict, descriptor @ ..] = said;
    let unit = service_of_process(program.0)?;
    let files = Enabled::of(&args.root, &unit).files()?;
    let mut patches = Vec::new();
    for file in files {
        match args.trust.read(&file) {
            Ok(read) => patches.push(read),
            // The program's own process names it, and refuses where it must.
            Err(error) => tell(format_args!("warning: {unit}: dropped: {error:#}")),
        }
    }
    let helper = Helper { patches, strict: strict != 0, wait: args.wait };
    helper.run(program, connection, i32::from_le_bytes(descriptor));
    Ok(())
}
