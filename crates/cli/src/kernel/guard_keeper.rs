//! `stillpoint kernel guard-keeper`: the process that owns a guard.

use super::failure;
use crate::output::Failure;
use std::io::Write;
use std::path::PathBuf;
use stillpoint_kernel_checkpoint::{GUARD_READY_LINE, guard_connections};
use stillpoint_kernel_switch::guard_ports;

/// Arguments of `stillpoint kernel guard-keeper`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory of the image whose connections are guarded.
    #[arg(long, value_name = "DIR", required_unless_present = "state")]
    image: Option<PathBuf>,
    /// Directory of the switch whose ports are guarded.
    #[arg(long, value_name = "DIR", conflicts_with = "image", requires = "socket")]
    state: Option<PathBuf>,
    /// Socket that receives the request to lift the guard of a switch.
    #[arg(long, value_name = "PATH", conflicts_with = "image")]
    socket: Option<PathBuf>,
}

/// Runs `stillpoint kernel guard-keeper`.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let raised = || {
        // the process that started this one may have ended
        let _ = writeln!(std::io::stdout(), "{GUARD_READY_LINE}");
    };
    let kept = match (&args.image, &args.state, &args.socket) {
        (Some(image), _, _) => guard_connections(image, raised),
        (None, Some(state), Some(socket)) => guard_ports(state, socket, raised),
        _ => return Err(Failure::usage("--image, or --state and --socket")),
    };
    kept.map_err(|error| failure(error, "the next flush of nftables removes the rest of the guard"))
}
