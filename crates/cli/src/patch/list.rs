//! `stillpoint patch list`: every process that carries patches.

use super::status::{Line, brief};
use crate::output::{Failure, Output};

/// Arguments of `stillpoint patch list`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs `stillpoint patch list`.
pub(crate) fn run(_args: Args, output: &Output) -> Result<(), Failure> {
    let (found, unseen) = stillpoint_patch_engine::fleet::carriers();
    for status in &found {
        output.json(&Line::new(status));
        output.line(brief(status));
    }
    if unseen > 0 {
        output.warn(format_args!("{unseen} processes could not be looked at: run as root to see all"));
    }
    Ok(())
}
