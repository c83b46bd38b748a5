//! What `setup/guest` makes.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use stillpoint_testing::skipped;

/// A built guest: an emulator, two kernels, a disk.
#[derive(Debug, Clone)]
pub struct Guest {
    pub(crate) dir: PathBuf,
    /// Versions of its kernels, the older one first.
    pub kernels: Vec<String>,
}

impl Guest {
    /// Builds it, or finds it built; otherwise why it cannot be, or why no machine could run it.
    pub fn build() -> Result<Guest, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("a machine's network needs root".into());
        }
        if !Path::new("/dev/net/tun").exists() {
            return Err("no /dev/net/tun: a machine has no network".into());
        }
        let root = root();
        let output = Command::new(root.join("setup/guest")).stdin(Stdio::null()).output();
        let output = output.map_err(|error| format!("setup/guest: {error}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(format!("no guest: {}", said.lines().last().unwrap_or("setup/guest failed")));
        }
        let dir = root.join(".cache/guest");
        let path = dir.join("kernels");
        let kernels = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let kernels: Vec<String> = kernels.lines().map(ToOwned::to_owned).collect();
        if kernels.len() < 2 {
            return Err(format!("{} names {} kernels", path.display(), kernels.len()));
        }
        Ok(Guest { dir, kernels })
    }

    /// The same for a test, which leaves when there is none; with `REQUIRE_ALL=1` it fails.
    #[track_caller]
    pub fn for_test() -> Option<Guest> {
        Guest::build().map_err(|why| skipped(&why)).ok()
    }
}

/// The source tree.
fn root() -> PathBuf {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    tree.canonicalize().unwrap_or(tree)
}

/// Where the files lie that are installed with the tool.
pub(crate) fn packaging() -> PathBuf {
    root().join("packaging")
}
