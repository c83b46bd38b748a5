//! Build that the last tests need and that takes long. It runs beside the earlier tests, in the processor time that they leave.

use crate::generations;
use crate::process;
use anyhow::{Context, Result};
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Runs a command at the lowest priority: within its session, and against other sessions.
const LOWEST_PRIORITY: &str = "echo 19 2>/dev/null >/proc/self/autogroup || :; exec nice -n 19 \"$@\"";

/// Build in the background. Dropping it ends it.
pub(crate) struct BackgroundBuild(Child);

/// Builds the kernel with generations unless the cache has it: eight minutes of two processors.
///
/// # Errors
/// The build cannot be started.
pub(crate) fn start_kernel(root: &Path, logs: &Path) -> Result<BackgroundBuild> {
    let log = logs.join("ahead.log");
    let file = File::create(&log).with_context(|| format!("create {}", log.display()))?;
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", "setsid", "sh", "-c", LOWEST_PRIORITY, "ahead"]);
    command.args(generations::BUILD);
    generations::in_tree(&mut command, root, logs)?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    Ok(BackgroundBuild(command.spawn().context("start setpriv (util-linux)")?))
}

impl BackgroundBuild {
    /// Waits for the end of the build. A test that needs its result finds it in the cache, or reports the failure.
    ///
    /// # Errors
    /// The system does not report its end.
    pub(crate) fn wait(mut self) -> Result<()> {
        self.0.wait().context("wait for a build in the background")?;
        Ok(())
    }
}

impl Drop for BackgroundBuild {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            process::end(self.0.id());
        }
        // it has ended, or was killed
        let _ = self.0.wait();
    }
}
