//! The tool under test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Returns the path of the binary under test: `$STILLPOINT_BIN`, otherwise it is built now in this test's own profile,
/// so that a test never uses a stale one.
pub fn stillpoint() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| std::env::var_os("STILLPOINT_BIN").map_or_else(build, PathBuf::from))
}

fn build() -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--locked", "-p", "stillpoint", "--bin", "stillpoint"]);
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    if profile == "release" {
        command.arg("--release");
    }
    let root = crate::workspace_root();
    let status = command.current_dir(root).status().expect("run cargo");
    assert!(status.success(), "`cargo build -p stillpoint` ended with {status}");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    target.join(profile).join("stillpoint")
}
