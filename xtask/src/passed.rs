//! Results of units that passed before with the same inputs: such a unit does not run again.
//!
//! Inputs of a unit are
//! - every file of the tree outside of `crates/` but its pages (`*.md`) and results (`experiments/`),
//! - the crates that its own crate depends on,
//! - where that crate runs the `stillpoint` binary (it depends on `stillpoint-testing`), the crates of the binary but those of
//!   pillars that the tests never call ([`CALLS`]),
//! - the machine: kernel, processor, compiler, installed packages, user, the environment of the run.
//!
//! A result counts for a day, since the archive's lists change: only whole passes are kept, where nothing was left out. Without git,
//! with `FRESH=1` or with a binary from elsewhere, every unit runs.

use crate::programs::Unit;
use crate::step::Counts;
use anyhow::{Context, Result, bail};
use cargo_metadata::{DependencyKind, Metadata, PackageId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use stillpoint_host::cache::{Cache, digest, key};
use stillpoint_testing::recipes;

/// Kind of the cache's entries.
const KIND: &str = "passed";

/// A result is used no longer than this.
const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

/// Pillars (folders of `crates/`) whose subcommands the tests of a pillar call. Those of a crate outside of the pillars call all.
const CALLS: [(&str, &[&str]); 3] =
    [("patch", &["patch", "kernel"]), ("migrate", &["migrate"]), ("kernel", &["kernel"])];

/// Beginnings of the variables that tests and their build look at.
const ENVIRONMENT: [&str; 5] = ["STILLPOINT_", "REQUIRE_ALL", "CARGO_BUILD_", "CARGO_PROFILE_", "RUSTFLAGS"];

/// Those of them that name places and change no result.
const PLACES: [&str; 3] = ["STILLPOINT_CACHE", "STILLPOINT_CACHE_GIB", "STILLPOINT_CACHE_LOG"];

type Digest = [u8; 32];

/// Results of earlier runs, and what this run's units depend on.
pub(crate) struct Passed {
    cache: &'static Cache,
    metadata: Metadata,
    /// Digest of each crate of the tree.
    crates: HashMap<PackageId, Digest>,
    /// Digest of everything else.
    common: Digest,
    /// Results are looked up, and not only kept.
    looks_up: bool,
}

impl Passed {
    /// Reads the tree; `None` where its files cannot be told from what was built in it, or another binary is tested.
    ///
    /// # Errors
    /// A file of the tree or the cache cannot be read.
    pub(crate) fn of_tree(root: &Path, looks_up: bool) -> Result<Option<Passed>> {
        let Some(files) = files(root)? else { return Ok(None) };
        if std::env::var_os("STILLPOINT_BIN").is_some() {
            return Ok(None);
        }
        let cache = recipes::cache().map_err(anyhow::Error::msg)?;
        let metadata = crate::resolved_metadata(root)?;
        let homes: BTreeMap<PathBuf, PackageId> = metadata
            .workspace_packages()
            .into_iter()
            .filter_map(|package| {
                let home = package.manifest_path.parent()?.strip_prefix(root).ok()?;
                Some((home.as_std_path().to_owned(), package.id.clone()))
            })
            .collect();
        let mut parts: HashMap<Option<&PackageId>, Vec<Vec<u8>>> = HashMap::new();
        for file in &files {
            let home = file.ancestors().find_map(|folder| homes.get(folder));
            if home.is_none() && changes_no_result(file) {
                continue;
            }
            let part = parts.entry(home).or_default();
            part.push(file.as_os_str().as_bytes().to_vec());
            part.push(contents(&root.join(file))?);
        }
        let of = |parts: Option<&Vec<Vec<u8>>>| digest(parts.into_iter().flatten().map(Vec::as_slice));
        let crates = homes.values().map(|id| (id.clone(), of(parts.get(&Some(id))))).collect();
        let common = digest([&of(parts.get(&None))[..], &machine(root)?]);
        let fresh = std::env::var_os("FRESH").is_some_and(|value| !value.is_empty() && value != "0");
        Ok(Some(Passed { cache, metadata, crates, common, looks_up: looks_up && !fresh }))
    }

    /// What the unit counted when it passed last with the same inputs.
    pub(crate) fn counts(&self, unit: &Unit) -> Option<Counts> {
        let bytes = self.cache.load(KIND, &self.key(unit)?).filter(|_| self.looks_up)?;
        let text = String::from_utf8(bytes).ok()?;
        let [at, passed, full_tier] = text.split_whitespace().collect::<Vec<_>>()[..] else { return None };
        let at = UNIX_EPOCH + Duration::from_secs(at.parse().ok()?);
        let age = SystemTime::now().duration_since(at).ok()?;
        let counts = Counts { passed: passed.parse().ok()?, full_tier: full_tier.parse().ok()?, ..Counts::default() };
        (age <= LIFETIME).then_some(counts)
    }

    /// Keeps the result of a unit that ran, if all of it passed.
    ///
    /// # Errors
    /// The cache cannot be written.
    pub(crate) fn keep(&self, unit: &Unit, counts: Counts) -> Result<()> {
        let Counts { passed, full_tier, .. } = counts;
        // those of the full tier belong to other runs
        let whole = Counts { passed, full_tier, ..Counts::default() };
        let Some(key) = self.key(unit).filter(|_| counts == whole && passed > 0) else { return Ok(()) };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        self.cache
            .store(KIND, &key, format!("{now} {passed} {full_tier}\n").as_bytes())
            .context("keep a result in the cache")
    }

    /// Name of the unit's entry: a hash of its inputs.
    fn key(&self, unit: &Unit) -> Option<String> {
        let package = self.metadata.packages.iter().find(|package| package.name.as_str() == unit.package())?;
        let mut inputs = closure(&self.metadata, &package.id, true);
        if inputs.iter().any(|id| self.name(id) == "stillpoint-testing") {
            let called = called(unit.home());
            let binary = self.metadata.packages.iter().find(|package| package.name.as_str() == "stillpoint")?;
            let parts = closure(&self.metadata, &binary.id, false);
            inputs.extend(parts.into_iter().filter(|id| called.is_none_or(|called| self.is_of(id, called))));
        }
        let mut parts: Vec<Vec<u8>> = vec![self.common.to_vec(), unit.name().into_bytes()];
        parts.extend(unit.tests().iter().map(|test| test.clone().into_bytes()));
        for id in &inputs {
            // others are named by the lock file, which is one of the common files
            if let Some(digest) = self.crates.get(id) {
                parts.push(self.name(id).as_bytes().to_vec());
                parts.push(digest.to_vec());
            }
        }
        Some(key(parts.iter().map(Vec::as_slice)))
    }

    fn name(&self, id: &PackageId) -> &str {
        self.metadata.packages.iter().find(|package| package.id == *id).map_or("", |package| package.name.as_str())
    }

    /// Returns true for a crate of one of these pillars, and for one of none.
    fn is_of(&self, id: &PackageId, pillars: &[&str]) -> bool {
        let package = self.metadata.packages.iter().find(|package| package.id == *id);
        let pillar = package.and_then(|package| pillar(package.manifest_path.parent()?.as_std_path()));
        pillar.is_none_or(|pillar| pillars.contains(&pillar))
    }
}

/// Pillar of a crate, by its folder.
fn pillar(home: &Path) -> Option<&'static str> {
    CALLS
        .iter()
        .map(|(pillar, _)| *pillar)
        .find(|pillar| home.ancestors().any(|folder| folder.ends_with(Path::new("crates").join(pillar))))
}

/// Pillars that the tests of a crate in this folder call; `None` for all.
fn called(home: &Path) -> Option<&'static [&'static str]> {
    let pillar = pillar(home)?;
    CALLS.iter().find(|(name, _)| *name == pillar).map(|(_, called)| *called)
}

/// A crate and what it depends on; `tests`: for its tests as well.
fn closure(metadata: &Metadata, id: &PackageId, tests: bool) -> BTreeSet<PackageId> {
    let mut found = BTreeSet::new();
    let mut next = vec![(id, tests)];
    while let Some((id, tests)) = next.pop() {
        if !found.insert(id.clone()) {
            continue;
        }
        let node = metadata.resolve.as_ref().and_then(|resolve| resolve.nodes.iter().find(|node| node.id == *id));
        for dependency in node.into_iter().flat_map(|node| &node.deps) {
            if tests || dependency.dep_kinds.iter().any(|info| info.kind != DependencyKind::Development) {
                next.push((&dependency.pkg, false));
            }
        }
    }
    found
}

/// Files that git keeps or would keep, relative to `root`; `None` where git does not know the tree.
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

/// Pages and results, which no test reads.
fn changes_no_result(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "md") || file.starts_with("experiments")
}

/// A file's contents, or where a link leads; nothing for one that was removed and is still listed.
fn contents(path: &Path) -> Result<Vec<u8>> {
    let Ok(found) = path.symlink_metadata() else { return Ok(Vec::new()) };
    if found.is_symlink() {
        return Ok(path
            .read_link()
            .with_context(|| format!("read {}", path.display()))?
            .into_os_string()
            .into_encoded_bytes());
    }
    std::fs::read(path).with_context(|| format!("read {}", path.display()))
}

/// Digest of what the machine and the run are like.
fn machine(root: &Path) -> Result<Digest> {
    let compiler = crate::programs::cargo().args(["version", "--verbose"]).current_dir(root).output()?;
    let name = rustix::system::uname();
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processors: Vec<&str> =
        cpuinfo.lines().filter(|line| line.starts_with("model name") || line.starts_with("flags")).collect();
    let installed = std::fs::read("/var/lib/dpkg/status").unwrap_or_default();
    let environment: BTreeMap<String, String> = std::env::vars()
        .filter(|(name, _)| ENVIRONMENT.iter().any(|start| name.starts_with(start)) && !PLACES.contains(&name.as_str()))
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

    #[test]
    fn a_crate_calls_the_pillars_of_its_folder() {
        assert_eq!(called(Path::new("/t/crates/migrate/proxy")), Some(&["migrate"][..]));
        assert_eq!(called(Path::new("/t/crates/patch/tests")), Some(&["patch", "kernel"][..]));
        assert_eq!(called(Path::new("/t/crates/cli")), None);
    }

    #[test]
    fn pages_and_results_change_no_result_and_sources_do() {
        assert!(changes_no_result(Path::new("README.md")) && changes_no_result(Path::new("experiments/soak.jsonl")));
        assert!(
            !changes_no_result(Path::new("man/stillpoint-patch.1")) && !changes_no_result(Path::new("setup/guest"))
        );
    }
}
