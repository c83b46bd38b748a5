//! Patches for programs exactly as Debian ships them: older binaries of the archive, patched to its newest source.

use crate::Unavailable;
use crate::cli::{Run, Stillpoint};
use crate::packages::{self, Binary};
use std::path::PathBuf;
use stillpoint_measure::load::{Load, Plan, Protocol, Target};
use tempfile::TempDir;

/// A program of the archive, older than the newest source of its package, and patches for it.
#[derive(Debug)]
pub struct ShippedProgram {
    /// The program, unmodified.
    pub binary: Binary,
    /// Patches that were built for it, in the order of the series.
    pub patches: Vec<PathBuf>,
    _dir: TempDir,
}

/// Takes the file `path` of the oldest version of `packages` in the archive, and builds each of the diffs `quilt` that
/// their source package has gained since (all when empty) on top of those before. Refused diffs are left out. An error
/// means that the archive does not offer a needed file.
///
/// # Errors
/// The archive does not offer a needed file.
pub fn older(source: &str, packages: &[&str], path: &str, quilt: &[&str]) -> Result<ShippedProgram, Unavailable> {
    let versions = packages::versions_with_source(packages)?;
    let [newest, .., oldest] = &versions[..] else {
        return Err(packages::too_few(packages[0], &versions));
    };
    let binary = packages::binary(packages, Some(oldest), path)?;
    let names = match quilt {
        [] => missing(source, newest, oldest)?,
        names => names.iter().map(|name| (*name).to_owned()).collect(),
    };
    let dir = TempDir::with_prefix("stillpoint-shipped-").map_err(|e| format!("make a directory: {e}"))?;
    let mut patches: Vec<PathBuf> = Vec::new();
    let mut applied: Vec<String> = Vec::new();
    for name in names {
        let output = dir.path().join(format!("{}-{name}", patches.len()));
        let mut build = Stillpoint::new()
            .args(["patch", "build", "--shipped", oldest, "--quilt", &name])
            .debian(&format!("{source}={newest}"))
            .arg("--cache")
            .arg(builder_cache())
            .arg("--target")
            .arg(&binary.path)
            .arg("--output")
            .arg(&output);
        if !applied.is_empty() {
            build = build.arg("--on-top-of").args(&applied).arg("--earlier").args(&patches);
        }
        let run = build.run();
        match run.code {
            Some(0) if output.exists() => {
                patches.push(output);
                applied.push(name);
            }
            Some(3 | 6) => println!("left out: {run}"),
            // The archive has all packages: a failure here is no reason to skip.
            _ => panic!("{run}"),
        }
    }
    assert!(!patches.is_empty(), "no diff of {source} between {oldest} and {newest} makes a patch for {path}");
    Ok(ShippedProgram { binary, patches, _dir: dir })
}

/// Takes a memcached of the archive, and builds a patch by us that changes its answer to `version` to `VERSION
/// stillpoint`: the package's own series only fixes units that Debian does not compile.
///
/// # Errors
/// The archive does not offer a needed file.
pub fn memcached() -> Result<ShippedProgram, Unavailable> {
    let versions = packages::versions_with_source(&["memcached"])?;
    let version = &versions[0];
    let binary = packages::memcached(Some(version))?;
    let diff = version_diff(version)?;
    let dir = TempDir::with_prefix("stillpoint-shipped-").map_err(|e| format!("make a directory: {e}"))?;
    let (diff_path, output) = (dir.path().join("version.diff"), dir.path().join("version.patch"));
    std::fs::write(&diff_path, diff).map_err(|e| format!("write the diff: {e}"))?;
    let build = Stillpoint::new()
        .args(["patch", "build"])
        .debian(&format!("memcached={version}"))
        .arg("--diff")
        .arg(&diff_path)
        .arg("--target")
        .arg(&binary.path)
        .arg("--output")
        .arg(&output)
        .arg("--cache")
        .arg(builder_cache());
    let run = build.run();
    // A failed build is no reason to skip: the archive has all packages.
    assert_eq!(run.code, Some(0), "{run}");
    Ok(ShippedProgram { binary, patches: vec![output], _dir: dir })
}

/// Returns the diff of that patch, for the memcached of this version.
pub(crate) fn version_diff(version: &str) -> Result<String, String> {
    target("memcached", version)?;
    let unit = builder_cache().join(format!("source/memcached_{version}/tree/proto_text.c"));
    let text = std::fs::read_to_string(&unit).map_err(|e| format!("read {}: {e}", unit.display()))?;
    let opens = |line: &str| line.starts_with("static void process_version_command(") && line.ends_with('{');
    let at = text.lines().position(opens).ok_or_else(|| format!("{} has no such function", unit.display()))?;
    let (number, line) = (at + 1, text.lines().nth(at).unwrap_or_default());
    Ok(format!(
        "--- a/proto_text.c\n+++ b/proto_text.c\n@@ -{number} +{number},2 @@\n {line}\n\
         +    if (c != NULL) {{ out_string(c, \"VERSION stillpoint\"); return; }}\n"
    ))
}

/// Returns the builder's default directory of sources and clean roots.
pub(crate) fn builder_cache() -> PathBuf {
    crate::cache_dir()
}

/// Runs `stillpoint patch target`, which fetches the source and lists its series.
pub(crate) fn target(package: &str, version: &str) -> Result<Run, String> {
    let run = Stillpoint::new()
        .args(["patch", "target"])
        .debian(&format!("{package}={version}"))
        .arg("--cache")
        .arg(builder_cache())
        .json()
        .run();
    if run.code == Some(0) { Ok(run) } else { Err(run.to_string()) }
}

/// Returns the diffs that the newer version's series has and the older one's has not.
fn missing(package: &str, newer: &str, older: &str) -> Result<Vec<String>, String> {
    let series = |version: &str| -> Result<Vec<String>, String> {
        let lines = target(package, version)?.json();
        let entries = lines.iter().find_map(|line| line["series"].as_array().cloned()).unwrap_or_default();
        Ok(entries.iter().filter_map(|entry| entry["name"].as_str().map(str::to_owned)).collect())
    };
    let there = series(older)?;
    Ok(series(newer)?.into_iter().filter(|name| !there.contains(name)).collect())
}

/// Load that a patch must not disturb.
#[derive(Debug)]
pub struct MonitoredLoad {
    load: Load,
}

impl MonitoredLoad {
    /// Starts it: 24 busy connections, and some idle ones.
    pub fn redis(port: u16) -> MonitoredLoad {
        let plan = Plan::redis(Target::Tcp(format!("127.0.0.1:{port}")));
        MonitoredLoad::start(Plan { blocking: 8, ..plan })
    }

    /// Starts such a load for a memcached.
    pub fn memcached(port: u16) -> MonitoredLoad {
        let mix = "get=70,set=30".parse().expect("a mix");
        let protocol = Protocol::Memcached { mix, keys: 10_000, value_bytes: 64 };
        MonitoredLoad::start(Plan::new(Target::Tcp(format!("127.0.0.1:{port}")), protocol))
    }

    fn start(plan: Plan) -> MonitoredLoad {
        MonitoredLoad::of(Plan { connections: 24, idle: 16, rate: 2000.0, ..plan })
    }

    /// Starts the load of a plan, until its end is requested.
    pub fn of(plan: Plan) -> MonitoredLoad {
        // We end the load: the duration is only the limit of a test that hangs.
        let duration = std::time::Duration::from_secs(7200);
        let timeout = std::time::Duration::from_secs(60);
        let plan = Plan { duration, timeout, ..plan };
        MonitoredLoad { load: Load::start(plan).expect("start the load") }
    }

    /// Waits until `count` more requests have been answered.
    #[track_caller]
    pub fn answered(&self, count: u64) {
        let before = self.load.counters().snapshot().counts.ok;
        crate::wait::until("requests to be answered", || {
            (self.load.counters().snapshot().counts.ok >= before + count).then_some(())
        });
    }

    /// Ends it, also if requests failed.
    #[track_caller]
    pub fn end(self) {
        self.load.stop();
        self.load.wait().expect("the load ends in order");
    }

    /// Ends it, and panics unless each request had the right answer and no connection was lost; returns the number of
    /// answers.
    #[track_caller]
    pub fn assert_clean(self) -> u64 {
        self.load.stop();
        let finished = self.load.wait().expect("the load ends in order");
        assert!(finished.summary.counts.ok > 0, "{finished:#?}");
        assert!(finished.is_clean(), "{:#?}\n{:#?}", finished.complaints, finished.summary.counts);
        finished.summary.counts.ok
    }
}
