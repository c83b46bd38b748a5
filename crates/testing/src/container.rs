//! A container of the emulated machine's system: Debian's systemd as the first process of its own namespaces, with
//! units in their sandboxes, on this machine's kernel and at its speed.

use crate::child::{Guarded, tied};
use crate::{Unavailable, recipes, wait};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;
use tempfile::TempDir;

/// Namespaces that are entered; also control groups and the root directory.
const NAMESPACES: [&str; 8] = ["--mount", "--pid", "--ipc", "--uts", "--net", "--cgroup", "--root", "--wd"];

/// A running system. All its processes end when it is dropped.
#[derive(Debug)]
pub struct Container {
    /// Fields in this order: the processes end before their control groups and their directory are removed.
    outer: Guarded,
    first: i32,
    _group: Group,
    _directory: TempDir,
}

impl Container {
    /// Starts the system of the emulated machine, and waits until its units have started.
    ///
    /// # Errors
    /// The image cannot be made or mounted here, or there is no tree of control groups of version 2.
    #[track_caller]
    pub fn start() -> Result<Container, Unavailable> {
        if !rustix::process::geteuid().is_root() {
            return Err("a container needs root".into());
        }
        let image = recipes::guest(&[])?.join("root.ext4");
        let group = Group::make()?;
        let directory = TempDir::with_prefix("stillpoint-container-").map_err(|e| format!("make a directory: {e}"))?;
        let script = directory.path().join("script");
        fs::write(&script, include_str!("container.sh")).map_err(|e| format!("write a script: {e}"))?;
        let root = directory.path().join("root");
        fs::create_dir(&root).map_err(|e| format!("make a directory: {e}"))?;
        let log = directory.path().join("log");
        let output = fs::File::create(&log).map_err(|e| format!("make a log: {e}"))?;
        let mut command = tied(Path::new("unshare"));
        command.args(["--kill-child", "--fork", "--pid", "--mount", "--ipc", "--uts", "--net", "--", "sh"]);
        command.arg(&script).arg(&image).arg(&root).arg(&group.path).stderr(output);
        let child = command.spawn().map_err(|e| format!("run unshare: {e}"))?;
        let mut outer = Guarded::from_child(child);
        let first = wait::until("systemd of a container to run", || match outer.ended() {
            Some(status) => {
                let text = fs::read_to_string(&log).unwrap_or_default();
                Some(Err(format!("no container can be started here: {status}: {}", text.trim())))
            }
            None => systemd_below(outer.pid()).map(Ok),
        })?;
        let container = Container { outer, first, _group: group, _directory: directory };
        wait::until("a container's units to start", || {
            let state = container.run(&["systemctl", "is-system-running"]);
            let state = String::from_utf8_lossy(&state.stdout).trim().to_owned();
            ["running", "degraded"].contains(&state.as_str()).then_some(())
        });
        Ok(container)
    }

    /// Returns a command in it, as its root.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.arg("--target").arg(self.first.to_string()).args(NAMESPACES).args(["--", "env", "-i"]);
        command.args(["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"]).args(words);
        command
    }

    /// Runs a command in it to its end.
    #[track_caller]
    pub fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap_or_else(|e| panic!("run {words:?}: {e}"))
    }

    /// Runs a command that must succeed, and returns its standard output.
    #[track_caller]
    pub fn succeed(&self, words: &[&str]) -> String {
        let output = self.run(words);
        let [stdout, stderr] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        assert!(output.status.success(), "{words:?} in a container: {}\n{stdout}\n{stderr}", output.status);
        stdout
    }

    /// Returns one property of a unit.
    #[track_caller]
    pub fn property(&self, unit: &str, name: &str) -> String {
        self.succeed(&["systemctl", "show", "--value", "--property", name, "--", unit]).trim().to_owned()
    }

    /// Returns a path in it, as this machine's processes reach it.
    pub fn path(&self, inside: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{inside}", self.first))
    }

    /// Writes a file into it, with that mode; missing directories are made.
    #[track_caller]
    pub fn write(&self, inside: &str, contents: impl AsRef<[u8]>, mode: u32) {
        let path = self.path(inside);
        fs::create_dir_all(path.parent().expect("a path below the root")).expect("make directories in a container");
        fs::write(&path, contents).unwrap_or_else(|e| panic!("write {inside} in a container: {e}"));
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("chmod");
    }

    /// Copies a file into it, with its mode.
    #[track_caller]
    pub fn copy(&self, from: &Path, inside: &str) {
        let to = self.path(inside);
        // a running program cannot be overwritten
        let _ = fs::remove_file(&to);
        fs::copy(from, &to).unwrap_or_else(|e| panic!("copy {} into a container: {e}", from.display()));
    }

    /// Installs a binary of the tool, with the units, generators and users of this tree, as `make install` does below `/usr/local`.
    #[track_caller]
    pub fn install(&self, tool: &Path) {
        self.copy(tool, "/usr/local/bin/stillpoint");
        for (folder, to, mode) in [
            ("systemd", "systemd/system", 0o644),
            ("generators", "systemd/system-generators", 0o755),
            ("sysusers.d", "sysusers.d", 0o644),
            ("tmpfiles.d", "tmpfiles.d", 0o644),
        ] {
            let from = crate::workspace_root().join("packaging").join(folder);
            for file in fs::read_dir(&from).expect("list the packaging").flatten() {
                let text = fs::read_to_string(file.path()).expect("read the packaging");
                let name = file.file_name().into_string().expect("a name in UTF-8");
                self.write(&format!("/usr/local/lib/{to}/{name}"), text.replace("@PREFIX@", "/usr/local"), mode);
            }
        }
        self.succeed(&["systemctl", "daemon-reload"]);
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // by `--kill-child` this ends the first process, and with it all others
        self.outer.signal(rustix::process::Signal::KILL);
        let first = Path::new("/proc").join(self.first.to_string());
        wait::within(Duration::from_secs(10), || (!first.exists()).then_some(()));
    }
}

/// Returns the child that has become systemd.
fn systemd_below(outer: i32) -> Option<i32> {
    let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children")).ok()?;
    let first = children.split_whitespace().next()?.parse().ok()?;
    let name = fs::read_to_string(format!("/proc/{first}/comm")).ok()?;
    (name.trim() == "systemd").then_some(first)
}

/// A control group of version 2, removed with those that were made in it.
#[derive(Debug)]
struct Group {
    path: PathBuf,
}

impl Group {
    fn make() -> Result<Group, String> {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|e| format!("read /proc/self/cgroup: {e}"))?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/")).ok_or("no control groups of version 2")?;
        let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
        let root = roots.into_iter().find(|root| root.join("cgroup.controllers").exists());
        let root = root.ok_or("no control groups of version 2 are mounted")?;
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = root.join(own).join(format!("stillpoint-container-{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(|e| format!("make the control group {}: {e}", path.display()))?;
        Ok(Group { path })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let removed = wait::within(Duration::from_secs(10), || remove_group(&self.path).ok());
        if removed.is_none() {
            eprintln!("{} is still in use", self.path.display());
        }
    }
}

fn remove_group(path: &Path) -> std::io::Result<()> {
    for inner in fs::read_dir(path)?.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_group(&inner.path())?;
    }
    fs::remove_dir(path)
}
