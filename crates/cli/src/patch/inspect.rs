//! `stillpoint patch inspect`: show what a patch file holds.

use crate::output::{Failure, Output};

/// Arguments of `stillpoint patch inspect`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs `stillpoint patch inspect`.
pub(crate) fn run(_args: Args, _output: &Output) -> Result<(), Failure> {
    Err(Failure::refused(anyhow::anyhow!("`stillpoint patch inspect` is not part of this build")))
}
