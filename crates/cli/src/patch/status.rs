//! `stillpoint patch status`: what a process carries.

use crate::output::{Failure, Output};

/// Arguments of `stillpoint patch status`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs `stillpoint patch status`.
pub(crate) fn run(_args: Args, _output: &Output) -> Result<(), Failure> {
    Err(Failure::refused(anyhow::anyhow!("`stillpoint patch status` is not part of this build")))
}
