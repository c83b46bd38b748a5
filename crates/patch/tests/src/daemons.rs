//! Servers of the distribution that have no client of ours: small changes to their sources, and commands whose output
//! shows that a change is active.

/// Makes a [`Change`] from its fields in order.
macro_rules! change {
    ($name:literal, $target:expr, $file:literal, $function:literal, $code:literal, $ask:literal, $before:literal => $after:literal) => {
        Change {
            name: $name,
            target: $target,
            file: $file,
            function: $function,
            code: $code,
            ask: $ask,
            before: $before,
            after: $after,
        }
    };
}

pub mod apache;
pub mod node;
pub mod samba;
pub mod slapd;

use crate::Unavailable;
use crate::annotation;
use crate::cli::{Run, Stillpoint};
use crate::edited_source;
use crate::packages::{self, Binary};
use crate::server::Server;
use crate::shipped_program::{MonitoredLoad, builder_cache, target};
use crate::victim::residue;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_testing::recipes;
use tempfile::TempDir;

/// One change: a line of ours at the start of a function.
#[derive(Debug, Clone, Copy)]
pub struct Change {
    /// Name of its patch.
    pub name: &'static str,
    /// Executable or library that contains it, a path below the root.
    pub target: &'static str,
    /// Path of the unit in the source.
    pub file: &'static str,
    /// The function.
    pub function: &'static str,
    /// First statement of the changed function.
    pub code: &'static str,
    /// Shell command that shows the effect; [`Package::shell`] states its environment.
    pub ask: &'static str,
    /// Text in its output as shipped.
    pub before: &'static str,
    /// Text in its output when the change is active.
    pub after: &'static str,
}

/// A package of the distribution, unpacked and never installed, and its source.
#[derive(Debug, Clone)]
pub struct Package {
    /// Name of the source package.
    pub name: &'static str,
    /// Version of the programs and of the source.
    pub version: String,
    /// Directory with the unpacked packages.
    pub root: PathBuf,
    /// Directories of its libraries.
    pub libraries: Vec<PathBuf>,
    /// The source, with the distribution's own diffs.
    pub source: PathBuf,
}

impl Package {
    /// Returns the newest version of which the archive serves the packages and the source.
    ///
    /// # Errors
    /// The packages or their source cannot be fetched.
    pub fn fetch(name: &'static str, binaries: &[&str]) -> Result<Package, Unavailable> {
        let version = packages::versions_with_source(binaries)?.swap_remove(0);
        target(name, &version)?;
        let Binary { path, libraries } = packages::binary(binaries, Some(&version), "")?;
        let source = format!("source/{name}_{}/tree", version.replace([':', '/'], "%"));
        Ok(Package { name, version, root: path, libraries, source: builder_cache().join(source) })
    }

    /// Returns a program below the root.
    pub fn program(&self, path: &str) -> Binary {
        Binary { path: self.root.join(path), libraries: self.libraries.clone() }
    }

    /// Returns the package with these of its files (paths below the root) built again by its rules, with the quiescence
    /// points of an integration; all else is as shipped.
    ///
    /// # Errors
    /// The build fails, or libstillpoint cannot be built.
    pub fn with_points(&self, integration: &str, files: &[&str]) -> Result<Package, Unavailable> {
        let dir = recipes::directory("series", &format!("{integration}-points"))?;
        let root = dir.join("root");
        let _ = std::fs::remove_dir_all(&root);
        let copied =
            Command::new("cp").arg("-a").arg(&self.root).arg(&root).status().map_err(|e| format!("cp: {e}"))?;
        if !copied.success() {
            return Err(format!("copy {}: {copied}", self.root.display()).into());
        }
        for file in files {
            let path = root.join(file).canonicalize().map_err(|e| format!("{file}: {e}"))?;
            let name = path.file_name().unwrap_or_default();
            let build = self.call("target").args(annotation::options(integration)?).arg("--program").arg(name);
            let run = build.arg("--output").arg(&dir).json().run();
            let built = match (run.code, run.json().last()) {
                (Some(0), Some(line)) => PathBuf::from(line["program"].as_str().unwrap_or_default()),
                _ => return Err(run.to_string().into()),
            };
            std::fs::remove_file(&path)
                .and_then(|()| std::fs::copy(&built, &path))
                .map_err(|e| format!("copy {}: {e}", built.display()))?;
        }
        let inside = |path: &PathBuf| path.strip_prefix(&self.root).map_or(path.clone(), |rest| root.join(rest));
        let libraries = std::iter::once(annotation::libstillpoint()?.to_owned());
        let libraries = libraries.chain(self.libraries.iter().map(inside)).collect();
        Ok(Package { root, libraries, ..self.clone() })
    }

    /// Makes a call of `stillpoint patch COMMAND` for this version of the source.
    pub fn call(&self, command: &str) -> Stillpoint {
        let call = Stillpoint::new().args(["patch", command]).debian(&format!("{}={}", self.name, self.version));
        call.arg("--cache").arg(builder_cache())
    }

    /// Builds a patch of these changes, all of one target, as `NAME.patch` in a directory; `options` are further ones
    /// of the builder.
    ///
    /// # Errors
    /// The source does not have a function that changes, or a file cannot be written.
    pub fn build(
        &self,
        changes: &[Change],
        name: &str,
        into: &Path,
        options: &[OsString],
    ) -> Result<(PathBuf, Run), String> {
        let (diff, patch) = (into.join(format!("{name}.diff")), into.join(format!("{name}.patch")));
        let edit = |c: &Change| format!("file {}\nin {}\n  begin\n    | {}\n", c.file, c.function, c.code);
        let edits: String = changes.iter().map(edit).collect();
        let text = edited_source::diff(name, &edits, &self.source)?;
        std::fs::write(&diff, text).map_err(|e| format!("write {}: {e}", diff.display()))?;
        let target = changes.first().map(|change| self.root.join(change.target)).unwrap_or_default();
        let build = self.call("build").arg("--diff").arg(&diff).arg("--target").arg(&target);
        let build = build.args(options.iter().map(OsString::as_os_str));
        Ok((patch.clone(), build.arg("--name").arg(name).arg("--output").arg(&patch).json().run()))
    }

    /// Returns the output of a shell command, errors included; the programs of the root are in its path.
    pub fn shell(&self, script: &str, variables: &[(&str, OsString)]) -> String {
        let places = ["usr/bin", "usr/sbin"].map(|place| self.root.join(place));
        let path =
            std::env::join_paths(places.iter().map(PathBuf::as_path).chain([Path::new("/usr/bin"), Path::new("/bin")]));
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &format!("exec 2>&1\n{script}")]).env("PATH", path.expect("no path has a colon"));
        shell.envs(self.program("").environment()).envs(variables.iter().map(|(name, value)| (name, value)));
        let output = shell.output().expect("run /bin/sh");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

/// A running server whose processes are patched together.
pub trait Daemon {
    /// Returns the options of `stillpoint patch` that mean all its processes.
    fn selection(&self) -> [OsString; 2];

    /// Returns its first process.
    fn server(&mut self) -> &mut Server;

    /// Returns the ids of its processes.
    fn processes(&self) -> Vec<i32>;

    /// Returns the output of the command that shows a change.
    fn show(&self, change: &Change) -> String;

    /// Panics if one of its processes has crashed.
    fn assert_unharmed(&mut self);

    /// Makes a call of `stillpoint patch COMMAND` for all its processes.
    fn call(&self, command: &str) -> Stillpoint {
        Stillpoint::new().args(["patch", command]).args(self.selection())
    }

    /// Panics unless all these changes are in this state.
    #[track_caller]
    fn assert_shows(&self, changes: &[Change], active: bool) {
        let wrong = |change: &Change| match change.is_in(&self.show(change)) {
            Ok(state) if state == active => None,
            Ok(state) => Some(format!("{}: active is {state}", change.name)),
            Err(why) => Some(why),
        };
        let wrong: Vec<String> = changes.iter().filter_map(wrong).collect();
        assert!(wrong.is_empty(), "expected active to be {active}: {wrong:#?}");
    }

    /// Applies a patch and reverts it, with these options; the changes are seen to be active between, and not
    /// afterwards. `meanwhile` runs in both states.
    #[track_caller]
    fn there_and_back(&mut self, patch: &Path, changes: &[Change], options: &[&str], meanwhile: &dyn Fn()) {
        self.call("apply").arg(patch).args(options.iter().copied()).succeed();
        meanwhile();
        self.assert_shows(changes, true);
        self.call("revert").args(options.iter().copied()).succeed();
        meanwhile();
        self.assert_unharmed();
        self.assert_shows(changes, false);
        // a process that ends has nothing left
        let left = |pid: i32| residue(pid).into_iter().filter(|what| !what.ends_with("is gone")).collect::<Vec<_>>();
        let left: Vec<String> = self.processes().into_iter().flat_map(left).collect();
        assert!(left.is_empty(), "{left:#?}");
    }
}

/// Returns the ids of a process and of its children.
fn with_children(first: i32) -> Vec<i32> {
    let children = std::fs::read_to_string(format!("/proc/{first}/task/{first}/children")).unwrap_or_default();
    std::iter::once(first).chain(children.split_whitespace().filter_map(|pid| pid.parse().ok())).collect()
}

/// Load on a server, which a patch must not disturb.
pub trait DaemonLoad {
    /// Waits until `count` more requests have been answered.
    fn answered(&self, count: u64);

    /// Ends it, and panics unless each request had the right answer and no connection was lost; returns the number of
    /// answers.
    fn assert_clean(self: Box<Self>) -> u64;
}

impl DaemonLoad for MonitoredLoad {
    #[track_caller]
    fn answered(&self, count: u64) {
        MonitoredLoad::answered(self, count);
    }

    #[track_caller]
    fn assert_clean(self: Box<Self>) -> u64 {
        MonitoredLoad::assert_clean(*self)
    }
}

/// Patches of all changes, one for each target.
#[derive(Debug)]
pub struct BuiltChanges {
    /// Each patch and its changes.
    pub patches: Vec<(PathBuf, Vec<Change>)>,
    _dir: TempDir,
}

impl BuiltChanges {
    /// Builds them; `options` are further ones of the builder.
    ///
    /// # Errors
    /// A directory or a diff cannot be made. A build that fails panics: the archive has all packages.
    pub fn of(package: &Package, changes: &[Change], options: &[OsString]) -> Result<BuiltChanges, String> {
        let dir = TempDir::with_prefix("stillpoint-changes-").map_err(|e| e.to_string())?;
        let mut patches: Vec<(PathBuf, Vec<Change>)> = Vec::new();
        for change in changes {
            match patches.iter_mut().find(|(_, others)| others[0].target == change.target) {
                Some((_, others)) => others.push(*change),
                None => patches.push((PathBuf::new(), vec![*change])),
            }
        }
        for (index, (patch, changes)) in patches.iter_mut().enumerate() {
            let built = package.build(changes, &format!("changes-{index}"), dir.path(), options)?;
            assert_eq!(built.1.code, Some(0), "{}", built.1);
            *patch = built.0;
        }
        Ok(BuiltChanges { patches, _dir: dir })
    }
}

impl Change {
    /// Returns true if the output of its command shows that it is active; an output that shows neither is an error.
    ///
    /// # Errors
    /// The output shows neither state.
    pub fn is_in(&self, shown: &str) -> Result<bool, String> {
        match (shown.contains(self.after), shown.contains(self.before)) {
            (true, _) => Ok(true),
            (false, true) => Ok(false),
            _ => Err(format!("{}: `{}` prints {shown:?}", self.name, self.ask)),
        }
    }
}
