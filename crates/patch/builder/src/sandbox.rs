//! Execution of programs with the sources mounted at the path at which they were built: a private mount namespace, and
//! for packages a clean root.

use crate::Error;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Mounts, then changes the root. The mount namespace ends with the process, and with it every mount. In a root of ours
/// a missing mount point is created; outside of one, directories belong to the user.
const ENTER: &str = include_str!("sandbox_enter.sh");

/// Proxy variables of the network access.
const PROXIES: [&str; 3] = ["http_proxy", "https_proxy", "no_proxy"];

/// A view of the file system.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sandbox {
    /// Root directory to change to.
    pub(crate) root: Option<PathBuf>,
    /// Pairs of a directory outside and its path inside the root.
    pub(crate) mounts: Vec<(PathBuf, PathBuf)>,
    /// True if the network is reachable.
    pub(crate) network: bool,
}

impl Sandbox {
    /// Adds a mount.
    pub(crate) fn with(mut self, outside: &Path, inside: &Path) -> Self {
        self.mounts.push((outside.to_owned(), inside.to_owned()));
        self
    }

    fn outside(&self, inside: &Path) -> PathBuf {
        match &self.root {
            Some(root) => root.join(inside.strip_prefix("/").unwrap_or(inside)),
            None => inside.to_owned(),
        }
    }

    /// Makes a command that runs `argv` in `directory` (a path inside). If there is a root, its environment is `env`
    /// alone.
    pub(crate) fn command<S: AsRef<OsStr>>(&self, directory: &Path, argv: &[S], env: &[(String, OsString)]) -> Command {
        let plain = self.root.is_none() && self.mounts.is_empty();
        if plain {
            let mut command = Command::new(&argv[0]);
            command.args(&argv[1..]).current_dir(directory).envs(env.iter().map(|(k, v)| (k, v)));
            command.stdin(Stdio::null());
            return command;
        }
        // every process of the sandbox ends when its first one does, and this one when ours does
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", "unshare", "--pid", "--fork", "--kill-child"]);
        if !rustix::process::geteuid().is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["--mount", "--propagation", "private"]);
        if self.root.is_some() && !self.network {
            command.arg("--net");
        }
        command.args(["--", "/bin/sh", "-c", ENTER, "sh"]).arg(self.root.as_deref().unwrap_or(Path::new("")));
        command.arg(directory).arg(self.mounts.len().to_string());
        for (outside, inside) in &self.mounts {
            command.arg(outside).arg(self.outside(inside));
        }
        command.args(argv);
        if self.root.is_some() {
            command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C.UTF-8");
            if self.network {
                command.envs(PROXIES.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
            }
        }
        command.envs(env.iter().map(|(k, v)| (k, v))).stdin(Stdio::null());
        command
    }
}

/// Runs a command to its end; the error of a failure carries the end of its output.
pub(crate) fn run(command: &mut Command, what: &str) -> Result<Output, Error> {
    let output = output(command)?;
    if output.status.success() {
        return Ok(output);
    }
    Err(Error::Command { what: what.to_owned(), status: output.status, output: failure(&output) })
}

/// Returns the first error of a compiler in the output of a failed command, if it has one, and the last lines.
fn failure(output: &Output) -> String {
    let (text, last) = (String::from_utf8_lossy(&output.stderr), tail(output));
    let first = text.lines().find(|line| line.contains(": error: ")).filter(|line| !last.contains(line));
    first.map_or(last.clone(), |line| format!("{line}\n...\n{last}"))
}

/// Runs a command to its end, also if it fails.
pub(crate) fn output(command: &mut Command) -> Result<Output, Error> {
    tracing::debug!(?command, "running");
    command.stdin(Stdio::null()).output().map_err(|source| {
        let program = command.get_program().to_string_lossy().into_owned();
        let package = match program.as_str() {
            "dpkg-source" => "dpkg-dev",
            "setpriv" => "util-linux",
            other => other,
        };
        let hint = format!("apt-get install {package}");
        Error::Spawn { program, source, hint }
    })
}

/// Returns the first error in the output of a compiler, with the lines that show its place; the last lines if there is
/// none.
pub(crate) fn first_error(output: &Output) -> String {
    /// Number of lines: the message, the source, and the mark below it.
    const SHOWN: usize = 3;
    let text = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = text.lines().skip_while(|line| !line.contains("error:")).take(SHOWN).collect();
    if lines.is_empty() { tail(output) } else { lines.join("\n") }
}

/// Returns the last lines of a program's output.
pub(crate) fn tail(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Uses a root of links and mounts: the system's own programs, seen from inside.
    #[test]
    fn a_mount_point_that_is_missing_is_made_in_a_root() {
        let dir = tempfile::tempdir().unwrap();
        let (root, tree) = (dir.path().join("root"), dir.path().join("tree"));
        for path in [root.join("dev"), root.join("usr"), tree.clone()] {
            fs::create_dir_all(path).unwrap();
        }
        for name in ["bin", "lib", "lib64"] {
            std::os::unix::fs::symlink(Path::new("usr").join(name), root.join(name)).unwrap();
        }
        fs::write(tree.join("unit.c"), "int main;").unwrap();
        let sandbox = Sandbox { root: Some(root.clone()), ..Sandbox::default() }
            .with(Path::new("/usr"), Path::new("/usr"))
            .with(&tree, Path::new("/build/removed/tree"));
        let mut command = sandbox.command(Path::new("/build/removed/tree"), &["cat", "unit.c"], &[]);
        let result = output(&mut command).unwrap();
        if String::from_utf8_lossy(&result.stderr).contains("unshare failed") {
            stillpoint_testing::skip!("no private mount namespace can be made");
        }
        assert!(result.status.success(), "{}", tail(&result));
        assert_eq!(result.stdout, b"int main;");
        fs::remove_dir_all(root.join("build")).unwrap();
        assert!(output(&mut command).unwrap().status.success(), "it is made each time");
    }

    #[test]
    fn the_first_error_of_a_failed_command_is_shown() {
        let script = "echo 'unit.c:1:2: error: no such member' >&2; seq 100 >&2; exit 2";
        let failed = run(Command::new("sh").args(["-c", script]), "building").unwrap_err();
        let Error::Command { output, .. } = failed else { panic!("{failed}") };
        assert!(output.starts_with("unit.c:1:2: error: no such member\n...\n71\n"), "{output}");
        assert!(output.ends_with("\n100"), "{output}");
    }

    #[test]
    fn a_mount_point_outside_of_a_root_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone");
        let sandbox = Sandbox::default().with(dir.path(), &gone);
        assert!(!output(&mut sandbox.command(Path::new("/"), &["true"], &[])).unwrap().status.success());
        assert!(!gone.exists());
    }
}
