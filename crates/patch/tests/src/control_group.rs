//! Control groups that a test makes in place of systemd or a user.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use stillpoint_testing::child::bound_command;
use stillpoint_testing::wait;

/// Systemd's own hierarchies: version 2 alone, beside version 1, version 1.
const ROOTS: [&str; 3] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"];

/// A control group, removed when dropped, together with the parents made for it.
#[derive(Debug)]
pub struct ControlGroup {
    path: PathBuf,
    made: Vec<PathBuf>,
}

impl ControlGroup {
    /// Makes one by its path, for instance `system.slice/x.service`; `None` where groups cannot be made, or systemd
    /// makes them.
    pub fn make(path: &str) -> Option<ControlGroup> {
        if Path::new("/run/systemd/system").exists() {
            return None;
        }
        let is_mounted = |root: &&str| Path::new(root).join("cgroup.procs").exists();
        let root = Path::new(ROOTS.iter().find(|root| is_mounted(root))?);
        let mut group = ControlGroup { path: root.join(path), made: Vec::new() };
        // in between, another test may remove a slice that both need
        (0..10).any(|_| group.make_all(root, path)).then_some(group)
    }

    fn make_all(&mut self, root: &Path, path: &str) -> bool {
        let mut folder = root.to_owned();
        for name in path.split('/') {
            folder.push(name);
            if fs::create_dir(&folder).is_ok() {
                self.made.push(folder.clone());
            }
        }
        folder.is_dir()
    }

    /// Returns its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A command that runs a program in it; the program dies with the calling thread.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = bound_command(Path::new("sh"));
        command.args(["-c", &format!("{} exec \"$@\"", self.enter()), "sh"]).arg(program);
        command
    }

    /// Returns the beginning of a shell line that moves the shell into the group.
    pub fn enter(&self) -> String {
        format!("echo $$ >'{}' &&", self.path.join("cgroup.procs").display())
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        self.made.sort();
        self.made.dedup();
        for folder in self.made.iter().rev() {
            // its processes are ending; a slice may be in use by another test
            let patience = if *folder == self.path { Duration::from_secs(10) } else { Duration::ZERO };
            let removed = wait::within(patience, || fs::remove_dir(folder).ok());
            if removed.is_none() && *folder == self.path {
                eprintln!("{} is still in use", folder.display());
            }
        }
    }
}
