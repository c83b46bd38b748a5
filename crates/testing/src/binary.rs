//! The tool under test.

use crate::{Unavailable, recipes};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

thread_local! {
    /// Binary that replaces the one under test on this thread.
    static REPLACEMENT: Cell<Option<&'static Path>> = const { Cell::new(None) };
}

/// Runs `work` with another binary in place of the one under test, on this thread alone.
pub fn with<T>(binary: &'static Path, work: impl FnOnce() -> T) -> T {
    REPLACEMENT.set(Some(binary));
    let result = work();
    REPLACEMENT.set(None);
    result
}

/// Returns the binary of an earlier version (see [`recipes::earlier_version`]).
///
/// # Errors
/// The entry cannot be made.
pub fn earlier() -> Result<&'static Path, Unavailable> {
    Ok(Box::leak(recipes::earlier_version()?.into_boxed_path()))
}

/// Returns the path of the binary under test: `$STILLPOINT_BIN`, otherwise it is built now in this test's own profile,
/// so that a test never uses a stale one.
pub fn stillpoint() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    if let Some(replacement) = REPLACEMENT.get() {
        return replacement;
    }
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
