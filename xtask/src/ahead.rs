//! What a late test needs and takes long to make, made beside the tests before it, by what they leave of the processors.

use crate::programs::target_dir;
use crate::runner::{CACHE_LOG, cache_log};
use crate::step;
use anyhow::{Context, Result};
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// After all tests, within their session and against those of others; it ends with whoever started it.
const AFTER_OTHERS: &str = "echo 19 2>/dev/null >/proc/self/autogroup || :; exec nice -n 19 \"$@\"";

/// A build in the background. Dropping it ends it; the tests that want it make what is missing, and tell what went wrong.
pub(crate) struct Ahead(Child);

/// Builds MariaDB with quiescence points: ten minutes of two processors.
pub(crate) fn mariadb(root: &Path, logs: &Path) -> Result<Ahead> {
    let builder = target_dir(root).join("debug/annotated");
    let log = logs.join("ahead.log");
    let file = File::create(&log).with_context(|| format!("create {}", log.display()))?;
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--", "setsid", "sh", "-c", AFTER_OTHERS, "ahead"])
        .arg(builder)
        .arg("mariadb");
    command
        .env(CACHE_LOG, cache_log(logs))
        .env("STILLPOINT_BIN", target_dir(root).join("debug/stillpoint"))
        .env("CARGO_TARGET_DIR", target_dir(root))
        .current_dir(root.join("crates/patch/tests"));
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    Ok(Ahead(command.spawn().context("start setpriv (util-linux)")?))
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            step::end(self.0.id());
        }
        // it has ended, or was killed
        let _ = self.0.wait();
    }
}
