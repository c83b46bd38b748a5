//! `stillpoint patch gdb`: files that let gdb and perf see the patched code.

use crate::output::{Failure, Output};

/// Arguments of `stillpoint patch gdb`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs `stillpoint patch gdb`.
pub(crate) fn run(_args: Args, _output: &Output) -> Result<(), Failure> {
    Err(Failure::refused(anyhow::anyhow!("`stillpoint patch gdb` is not part of this build")))
}
