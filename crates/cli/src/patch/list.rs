//! `stillpoint patch list`: every process that carries patches.

use crate::output::{Failure, Output};

/// Arguments of `stillpoint patch list`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs `stillpoint patch list`.
pub(crate) fn run(_args: Args, _output: &Output) -> Result<(), Failure> {
    Err(Failure::refused(anyhow::anyhow!("`stillpoint patch list` is not part of this build")))
}
