//! `stillpoint measure`: load a server, record every latency, and report.

use crate::output::{Failure, Output};

/// Arguments of `stillpoint measure`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs `stillpoint measure`.
pub(crate) fn run(_args: Args, _output: &Output) -> Result<(), Failure> {
    Err(Failure::refused(anyhow::anyhow!("`stillpoint measure` is not part of this build")))
}
