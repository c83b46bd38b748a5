//! Arguments that the subcommands share: the program, the image, criu.

use super::untouched;
use crate::output::Failure;
use std::path::PathBuf;
use stillpoint_kernel_checkpoint::process_tree::unit_root_process;
use stillpoint_kernel_checkpoint::{Criu, MACHINE_KEY};

/// Default limit of passes over memory before a freeze.
pub(super) const PASSES: u32 = 4;

/// Selection of a running program.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
pub(super) struct Program {
    /// The process with this id, and all below it.
    #[arg(long, value_name = "N")]
    pid: Option<i32>,
    /// The processes of this systemd unit.
    #[arg(long, value_name = "NAME")]
    unit: Option<String>,
}

impl Program {
    /// Returns the root process.
    pub(super) fn root(&self) -> Result<i32, Failure> {
        match (&self.unit, self.pid) {
            (Some(unit), _) => unit_root_process(unit).map_err(untouched),
            (None, Some(pid)) => Ok(pid),
            (None, None) => Err(Failure::usage("--pid or --unit")),
        }
    }
}

/// Path of criu.
#[derive(clap::Args)]
pub(super) struct WithCriu {
    /// The criu to use, 4.1 or newer [default: $STILLPOINT_CRIU, or criu].
    #[arg(long, value_name = "PATH")]
    criu: Option<PathBuf>,
}

impl WithCriu {
    pub(super) fn criu(&self) -> Criu {
        let named = self.criu.clone().or_else(|| std::env::var_os("STILLPOINT_CRIU").map(PathBuf::from));
        Criu::new(named.unwrap_or_else(|| "criu".into()))
    }
}

/// File of the machine's key: `$STILLPOINT_IMAGE_KEY`, for tests, or the default path.
pub(super) fn machine_key() -> PathBuf {
    std::env::var_os("STILLPOINT_IMAGE_KEY").map_or_else(|| MACHINE_KEY.into(), PathBuf::from)
}
