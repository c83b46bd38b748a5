//! `stillpoint patch key`: make keys, and sign patch files.

use crate::output::{Failure, Output};

/// Arguments of `stillpoint patch key`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs `stillpoint patch key`.
pub(crate) fn run(_args: Args, _output: &Output) -> Result<(), Failure> {
    Err(Failure::refused(anyhow::anyhow!("`stillpoint patch key` is not part of this build")))
}
