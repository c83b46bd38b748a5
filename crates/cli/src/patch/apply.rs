//! `stillpoint patch apply`: put patches into running processes.

use crate::output::{Failure, Output};

/// Arguments of `stillpoint patch apply`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs `stillpoint patch apply`.
pub(crate) fn run(_args: Args, _output: &Output) -> Result<(), Failure> {
    Err(Failure::refused(anyhow::anyhow!("`stillpoint patch apply` is not part of this build")))
}
