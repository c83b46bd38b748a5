//! `stillpoint patch build`: build a live patch from source diffs.

use crate::output::{Failure, Output};

/// Arguments of `stillpoint patch build`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs `stillpoint patch build`.
pub(crate) fn run(_args: Args, _output: &Output) -> Result<(), Failure> {
    Err(Failure::refused(anyhow::anyhow!("`stillpoint patch build` is not part of this build")))
}
