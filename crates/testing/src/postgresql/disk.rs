//! A small disk that becomes full.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system of a few megabytes in memory; unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk {
    at: PathBuf,
}

impl SmallDisk {
    /// Mounts it on a directory; the error is the reason why that is impossible here.
    ///
    /// # Errors
    /// The file system cannot be mounted, for instance without the rights of root.
    pub fn mount(at: &Path, mib: u32) -> Result<SmallDisk, String> {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "stillpoint"]).arg(at);
        run(command).map(|()| SmallDisk { at: at.into() })
    }

    /// Changes its size; its content stays.
    ///
    /// # Errors
    /// The kernel refuses the size.
    pub fn resize(&self, mib: u32) -> Result<(), String> {
        let mut command = Command::new("mount");
        command.args(["-o", &format!("remount,size={mib}m")]).arg(&self.at);
        run(command)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let mut command = Command::new("umount");
        command.arg("--lazy").arg(&self.at);
        if let Err(why) = run(command) {
            eprintln!("{why}");
        }
    }
}

fn run(mut command: Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {}", text.trim())) }
}
