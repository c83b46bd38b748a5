//! `stillpoint patch check`: everything short of touching.

use crate::output::{Failure, Output};

/// Arguments of `stillpoint patch check`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs `stillpoint patch check`.
pub(crate) fn run(_args: Args, _output: &Output) -> Result<(), Failure> {
    Err(Failure::refused(anyhow::anyhow!("`stillpoint patch check` is not part of this build")))
}
