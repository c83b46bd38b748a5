//! `stillpoint kernel lazy-pages`: the daemon that `restore` starts.

use super::failure;
use crate::output::Failure;
use std::io::Write;
use std::path::PathBuf;
use stillpoint_kernel_checkpoint::{DAEMON_READY_LINE, LazyOptions, serve};

/// Arguments of `stillpoint kernel lazy-pages`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory of the image.
    image: PathBuf,
    /// Path of the socket for criu.
    socket: PathBuf,
    /// Rate of the background fetch in MiB a second; 0 is unlimited.
    #[arg(long, default_value_t = 512, value_name = "N")]
    fill_rate: u64,
}

/// Runs `stillpoint kernel lazy-pages`.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let rate = (args.fill_rate > 0).then(|| args.fill_rate.saturating_mul(1 << 20));
    let options = LazyOptions { image: args.image.clone(), socket: args.socket.clone(), rate };
    let ready = || {
        // the process that started this one may have ended; then criu does not connect either
        let _ = writeln!(std::io::stdout(), "{DAEMON_READY_LINE}");
    };
    serve(&options, ready).map_err(|error| failure(error, "processes whose memory could not be fetched were killed"))
}
