//! `stillpoint patch revert`: take patches back.

use crate::output::{Failure, Output};

/// Arguments of `stillpoint patch revert`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs `stillpoint patch revert`.
pub(crate) fn run(_args: Args, _output: &Output) -> Result<(), Failure> {
    Err(Failure::refused(anyhow::anyhow!("`stillpoint patch revert` is not part of this build")))
}
