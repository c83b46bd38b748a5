//! Results of units that passed before with the same inputs: such a unit does not run again.
//!
//! Inputs of a unit are
//! - every file of the tree outside of `crates/`, except its pages (`*.md`), results (`experiments/`) and fuzzers (`fuzz/`), which
//!   only the rules of the tree read: for crates outside of `crates/` every file is an input,
//! - the crates that its own crate depends on,
//! - where that crate runs the `stillpoint` binary (it depends on `stillpoint-testing`), the crates of the binary except those of
//!   other pillars: tests of a pillar call its own subcommands, and those of another pillar only in modules whose names begin with
//!   that pillar's name, as `kernel_live`,
//! - the machine: kernel, processor, compiler, installed packages, user, the environment of the run.
//!
//! A result is valid for a day, since the archive's lists change. Only complete passes are stored, without skipped tests, and only if no
//! file of the tree has changed since before its build. Without git, with `FRESH=1` or with a binary from elsewhere, every unit runs.

use crate::process::Counts;
use crate::programs::Unit;
use anyhow::{Context, Result, bail};
use cargo_metadata::{DependencyKind, Metadata, PackageId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use stillpoint_host::cache::{Cache, digest, key};
use stillpoint_testing::recipes;

/// Kind of the cache's entries.
const CACHE_KIND: &str = "passed";

/// Maximum age of a result.
const RESULT_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

/// Pillars: folders of `crates/`, and subcommands of the binary.
const PILLARS: [&str; 3] = ["patch", "migrate", "kernel"];

/// Prefixes of the variables that tests and their build read.
const VARIABLE_PREFIXES: [&str; 5] = ["STILLPOINT_", "REQUIRE_ALL", "CARGO_BUILD_", "CARGO_PROFILE_", "RUSTFLAGS"];

/// Variables with these prefixes that only name paths and change no result.
const PATH_VARIABLES: [&str; 3] = ["STILLPOINT_CACHE", "STILLPOINT_CACHE_GIB", "STILLPOINT_CACHE_LOG"];

type Digest = [u8; 32];

/// Results of earlier runs.
pub(crate) struct ResultCache {
    cache: &'static Cache,
    inputs: Inputs,
    machine: Digest,
    /// True if results are looked up, and not only stored.
    looks_up: bool,
}

impl ResultCache {
    /// Reads the tree before it is built; `None` if its source files cannot be separated from build results, or another binary is tested.
    ///
    /// # Errors
    /// A file of the tree or the cache cannot be read.
    pub(crate) fn of_tree(root: &Path, looks_up: bool) -> Result<Option<ResultCache>> {
        if std::env::var_os("STILLPOINT_BIN").is_some() {
            return Ok(None);
        }
        let Some(inputs) = Inputs::read(root)? else { return Ok(None) };
        let cache = recipes::cache().map_err(anyhow::Error::msg)?;
        let fresh = std::env::var_os("FRESH").is_some_and(|value| !value.is_empty() && value != "0");
        Ok(Some(ResultCache { cache, inputs, machine: machine(root)?, looks_up: looks_up && !fresh }))
    }

    /// Counts of the last pass of each of these units with the same inputs.
    ///
    /// # Errors
    /// The tree cannot be read.
    pub(crate) fn counts(&self, units: &[Unit]) -> Result<Vec<Option<Counts>>> {
        let looks_up = self.looks_up && self.inputs.are_unchanged()?;
        Ok(units.iter().map(|unit| self.load(unit).filter(|_| looks_up)).collect())
    }

    fn load(&self, unit: &Unit) -> Option<Counts> {
        let text = String::from_utf8(self.cache.load(CACHE_KIND, &self.key(unit)?)?).ok()?;
        let [at, passed, full_tier] = text.split_whitespace().collect::<Vec<_>>()[..] else { return None };
        let at = UNIX_EPOCH + Duration::from_secs(at.parse().ok()?);
        let age = SystemTime::now().duration_since(at).ok()?;
        let counts = Counts { passed: passed.parse().ok()?, full_tier: full_tier.parse().ok()?, ..Counts::default() };
        (age <= RESULT_LIFETIME).then_some(counts)
    }

    /// Stores the result of a unit if all its tests passed and the tree has not changed.
    ///
    /// # Errors
    /// The tree cannot be read, or the cache cannot be written.
    pub(crate) fn store(&self, unit: &Unit, counts: Counts) -> Result<()> {
        let Counts { passed, full_tier, .. } = counts;
        // tests of the full tier belong to other runs
        let whole = Counts { passed, full_tier, ..Counts::default() };
        let Some(key) = self.key(unit).filter(|_| counts == whole && passed > 0) else { return Ok(()) };
        if !self.inputs.are_unchanged()? {
            return Ok(());
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let text = format!("{now} {passed} {full_tier}\n");
        self.cache.store(CACHE_KIND, &key, text.as_bytes()).context("store a result in the cache")
    }

    /// Name of the unit's entry.
    fn key(&self, unit: &Unit) -> Option<String> {
        let inputs = self.inputs.of(unit.package(), unit.label())?;
        let name = unit.name();
        let parts = [&inputs[..], &self.machine, name.as_bytes()];
        Some(key(parts.into_iter().chain(unit.tests().iter().map(String::as_bytes))))
    }
}

/// Inputs of a tree's tests.
struct Inputs {
    root: PathBuf,
    metadata: Metadata,
    /// Digest of each crate.
    crates: HashMap<PackageId, Digest>,
    /// Digest of the files that the tests of every crate may read.
    common: Digest,
    /// Digest of all files.
    whole: Digest,
    /// Digest of the files' attributes before they were read.
    stamp: Digest,
}

impl Inputs {
    /// Reads a tree; `None` if it is not in git.
    fn read(root: &Path) -> Result<Option<Inputs>> {
        let Some(files) = files(root)? else { return Ok(None) };
        let stamp = attributes_digest(root, &files)?;
        let metadata = crate::resolved_metadata(root)?;
        let mut homes = BTreeMap::new();
        for package in metadata.workspace_packages() {
            let home = package.manifest_path.parent().context("a manifest lies in a directory")?;
            homes
                .insert(home.as_std_path().strip_prefix(root).context("a crate lies in the tree")?, package.id.clone());
        }
        let mut crates: HashMap<PackageId, Vec<Vec<u8>>> = homes.values().map(|id| (id.clone(), Vec::new())).collect();
        let (mut common, mut whole) = (Vec::new(), Vec::new());
        for file in &files {
            let part = [file.as_os_str().as_bytes().to_vec(), contents(&root.join(file))?];
            let home = file.ancestors().find_map(|folder| homes.get(folder));
            match home.and_then(|home| crates.get_mut(home)) {
                Some(parts) => parts.extend(part.clone()),
                None if is_for_rules_only(file) => {}
                None => common.extend(part.clone()),
            }
            whole.extend(part);
        }
        let of = |parts: &Vec<Vec<u8>>| digest(parts.iter().map(Vec::as_slice));
        let crates = crates.iter().map(|(id, parts)| (id.clone(), of(parts))).collect();
        let (common, whole) = (of(&common), of(&whole));
        Ok(Some(Inputs { root: root.to_owned(), metadata, crates, common, whole, stamp }))
    }

    /// Returns true if no file was changed, added or removed since the tree was read.
    fn are_unchanged(&self) -> Result<bool> {
        Ok(files(&self.root)?
            .is_some_and(|files| attributes_digest(&self.root, &files).is_ok_and(|stamp| stamp == self.stamp)))
    }

    /// Digest of the inputs of a package's tests in a module; `None` for a package that the tree does not have.
    fn of(&self, package: &str, module: &str) -> Option<Digest> {
        let own = self.named(package)?;
        if folder_of_crates(&self.folder(own)).is_none() {
            return Some(self.whole);
        }
        let mut inputs = self.closure(own, true);
        if inputs.iter().any(|id| self.metadata[*id].name.as_str() == "stillpoint-testing") {
            let home = self.folder(own);
            let binary = self.closure(self.named("stillpoint")?, false);
            let is_called =
                |id: &&PackageId| pillar(&self.folder(id)).is_none_or(|other| may_call(&home, module, other));
            inputs.extend(binary.into_iter().filter(is_called));
        }
        // the lock file, one of the common files, names crates from outside
        let crates = inputs.iter().flat_map(|id| [self.metadata[*id].name.as_bytes(), &self.crates[*id][..]]);
        Some(digest(std::iter::once(&self.common[..]).chain(crates)))
    }

    fn named(&self, package: &str) -> Option<&PackageId> {
        self.crates.keys().find(|id| self.metadata[*id].name.as_str() == package)
    }

    /// Folder of a crate of the tree, relative to its root.
    fn folder(&self, id: &PackageId) -> PathBuf {
        let manifest = self.metadata[id].manifest_path.as_std_path();
        manifest.parent().and_then(|home| home.strip_prefix(&self.root).ok()).unwrap_or(manifest).to_owned()
    }

    /// Returns a crate and the crates of the tree that it depends on; with `tests` also those that its tests depend on.
    fn closure<'i>(&'i self, id: &'i PackageId, tests: bool) -> BTreeSet<&'i PackageId> {
        let mut found = BTreeSet::new();
        let mut next = vec![(id, tests)];
        let nodes = self.metadata.resolve.as_ref().map_or(&[][..], |resolve| &resolve.nodes);
        while let Some((id, tests)) = next.pop() {
            if !found.insert(id) {
                continue;
            }
            for dependency in nodes.iter().filter(|node| node.id == *id).flat_map(|node| &node.deps) {
                let counts = tests || dependency.dep_kinds.iter().any(|info| info.kind != DependencyKind::Development);
                if counts && self.crates.contains_key(&dependency.pkg) {
                    next.push((&dependency.pkg, false));
                }
            }
        }
        found
    }
}

/// Folder of `crates/` that a crate is located in; `None` for one outside.
fn folder_of_crates(home: &Path) -> Option<&str> {
    home.strip_prefix("crates").ok()?.components().next()?.as_os_str().to_str()
}

/// Pillar of a crate, by its folder.
fn pillar(home: &Path) -> Option<&'static str> {
    let folder = folder_of_crates(home)?;
    PILLARS.into_iter().find(|pillar| *pillar == folder)
}

/// Returns true if tests in this module of a crate may call subcommands of `other`; crates outside of the pillars may call all.
fn may_call(home: &Path, module: &str, other: &str) -> bool {
    pillar(home).is_none_or(|own| own == other) || module.starts_with(other)
}

/// Files that git tracks or would track, relative to `root`; `None` if the tree is not in git.
fn files(root: &Path) -> Result<Option<Vec<PathBuf>>> {
    let words = ["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"];
    let Ok(output) = Command::new("git").args(words).current_dir(root).output() else { return Ok(None) };
    if !output.status.success() {
        return Ok(None);
    }
    let text = String::from_utf8(output.stdout).context("names of files are UTF-8")?;
    let files: Vec<PathBuf> = text.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect();
    if files.is_empty() {
        bail!("git lists no file in {}", root.display());
    }
    Ok(Some(files))
}

/// Digest of the attributes that change when a file is written: its name, inode, size and times.
fn attributes_digest(root: &Path, files: &[PathBuf]) -> Result<Digest> {
    let mut parts = Vec::new();
    for file in files {
        let path = root.join(file);
        let looks = match path.symlink_metadata() {
            Ok(found) => {
                format!("{} {} {} {} {}", found.ino(), found.size(), found.mode(), found.ctime(), found.ctime_nsec())
            }
            // it was removed and is still listed
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).with_context(|| format!("examine {}", path.display())),
        };
        parts.extend([file.as_os_str().as_bytes().to_vec(), looks.into_bytes()]);
    }
    Ok(digest(parts.iter().map(Vec::as_slice)))
}

/// Returns true for pages, results and fuzzers, which only the rules of the tree read.
fn is_for_rules_only(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "md")
        || ["experiments", "fuzz"].iter().any(|folder| file.starts_with(folder))
}

/// Mode and contents of a file, or the target of a link; nothing for a file that was removed and is still listed.
fn contents(path: &Path) -> Result<Vec<u8>> {
    let Ok(found) = path.symlink_metadata() else { return Ok(Vec::new()) };
    let bytes = match found.is_symlink() {
        true => path.read_link().map(|target| target.into_os_string().into_encoded_bytes()),
        false => std::fs::read(path),
    };
    let bytes = bytes.with_context(|| format!("read {}", path.display()))?;
    // the permission to execute a script is an input, too
    Ok([&[u8::from(found.mode() & 0o111 != 0)][..], &bytes].concat())
}

/// Digest of the machine and of the run's environment.
fn machine(root: &Path) -> Result<Digest> {
    let compiler = crate::programs::cargo().args(["version", "--verbose"]).current_dir(root).output()?;
    let name = rustix::system::uname();
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processors: Vec<&str> =
        cpuinfo.lines().filter(|line| line.starts_with("model name") || line.starts_with("flags")).collect();
    let installed = std::fs::read("/var/lib/dpkg/status").unwrap_or_default();
    let environment: BTreeMap<String, String> = std::env::vars()
        .filter(|(name, _)| {
            VARIABLE_PREFIXES.iter().any(|start| name.starts_with(start)) && !PATH_VARIABLES.contains(&name.as_str())
        })
        .collect();
    Ok(digest([
        &compiler.stdout[..],
        name.release().to_bytes(),
        name.version().to_bytes(),
        processors.join("\n").as_bytes(),
        &installed,
        format!("{environment:?}").as_bytes(),
        rustix::process::geteuid().as_raw().to_string().as_bytes(),
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::TempDir;

    /// Tree with a binary of two pillars, tests of both that run it, and a crate of the tree's rules.
    fn tree() -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let package = |folder: &str, name: &str, dependencies: &[(&str, &str)]| {
            let home = root.join(folder);
            fs::create_dir_all(home.join("src")).unwrap();
            fs::write(home.join("src/lib.rs"), "").unwrap();
            let up = "../".repeat(folder.split('/').count());
            let lines: String =
                dependencies.iter().map(|(name, to)| format!("{name} = {{ path = \"{up}{to}\" }}\n")).collect();
            let text = format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\n[dependencies]\n{lines}");
            fs::write(home.join("Cargo.toml"), text).unwrap();
        };
        package("crates/patch/engine", "p", &[]);
        package("crates/migrate/engine", "m", &[]);
        package("crates/cli", "stillpoint", &[("p", "crates/patch/engine"), ("m", "crates/migrate/engine")]);
        package("crates/testing", "stillpoint-testing", &[]);
        package("crates/patch/tests", "p-tests", &[("stillpoint-testing", "crates/testing")]);
        package("crates/migrate/tests", "m-tests", &[("stillpoint-testing", "crates/testing")]);
        package("xtask", "xtask", &[]);
        fs::write(root.join("Cargo.toml"), "[workspace]\nresolver = \"3\"\nmembers = [\"crates/*/engine\", \"crates/cli\", \"crates/testing\", \"crates/*/tests\", \"xtask\"]\n").unwrap();
        fs::write(root.join("README.md"), "").unwrap();
        fs::write(root.join("script"), "").unwrap();
        fs::create_dir(root.join("fuzz")).unwrap();
        let run = |program: &str, words: &[&str]| {
            let output = Command::new(program).args(words).current_dir(root).output().unwrap();
            assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
        };
        run("git", &["init", "--quiet"]);
        run(&crate::programs::cargo().get_program().to_string_lossy(), &["generate-lockfile", "--offline"]);
        dir
    }

    const PACKAGES: [&str; 6] = ["p", "m", "stillpoint", "p-tests", "m-tests", "xtask"];

    /// Packages whose inputs change with this file.
    fn changed_by(dir: &TempDir, file: &str) -> Vec<&'static str> {
        let inputs = || Inputs::read(dir.path()).unwrap().expect("git knows the tree");
        let before = inputs();
        assert!(before.are_unchanged().unwrap());
        fs::write(dir.path().join(file), "// changed\n").unwrap();
        assert!(!before.are_unchanged().unwrap(), "{file}");
        let after = inputs();
        PACKAGES.into_iter().filter(|package| before.of(package, "run") != after.of(package, "run")).collect()
    }

    #[test]
    fn tests_run_again_when_what_they_depend_on_changes() {
        let dir = tree();
        assert_eq!(changed_by(&dir, "crates/patch/engine/src/lib.rs"), ["p", "stillpoint", "p-tests", "xtask"]);
        assert_eq!(changed_by(&dir, "crates/migrate/engine/src/lib.rs"), ["m", "stillpoint", "m-tests", "xtask"]);
        assert_eq!(changed_by(&dir, "crates/testing/src/lib.rs"), ["p-tests", "m-tests", "xtask"]);
        assert_eq!(changed_by(&dir, "crates/patch/tests/new.c"), ["p-tests", "xtask"]);
        assert_eq!(changed_by(&dir, "script"), PACKAGES);
        assert_eq!(changed_by(&dir, "README.md"), ["xtask"]);
        assert_eq!(changed_by(&dir, "fuzz/Cargo.lock"), ["xtask"]);
    }

    #[test]
    fn a_tree_that_git_does_not_know_has_no_inputs() {
        assert!(Inputs::read(tempfile::tempdir().unwrap().path()).unwrap().is_none());
    }

    #[test]
    fn tests_call_their_own_pillar_and_the_one_that_their_module_is_named_by() {
        let (patch, cli) = (Path::new("crates/patch/tests"), Path::new("crates/cli"));
        assert!(may_call(patch, "crash", "patch") && !may_call(patch, "crash", "kernel"));
        assert!(may_call(patch, "kernel_live", "kernel") && !may_call(patch, "kernel_live", "migrate"));
        assert!(PILLARS.into_iter().all(|pillar| may_call(cli, "help", pillar)));
    }
}
