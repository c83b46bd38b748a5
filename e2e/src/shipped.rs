//! Patches for programs exactly as Debian ships them: older binaries of the archive, brought up to its newest source.

use crate::cli::Stillpoint;
use crate::packages::{self, Binary};
use std::path::PathBuf;
use stillpoint_measure::load::{Load, Plan, Protocol, Target};
use tempfile::TempDir;

/// A program of the archive, older than the newest source of its package, and patches for it.
#[derive(Debug)]
pub struct Shipped {
    /// The program, unmodified.
    pub binary: Binary,
    /// Patches that were built for it, in the order of the series.
    pub patches: Vec<PathBuf>,
    _dir: TempDir,
}

/// Takes the file `path` of the oldest version of `packages` in the archive, and builds each of the diffs `quilt` that
/// their source package has gained since (all when empty) on top of those before. Those that are refused are left out;
/// none left is an error.
pub fn older(source: &str, packages: &[&str], path: &str, quilt: &[&str]) -> Result<Shipped, String> {
    let versions = packages::versions(packages[0])?;
    let [newest, .., oldest] = &versions[..] else {
        return Err(format!("the archive offers one version of {} only: {versions:?}", packages[0]));
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
            .args(["patch", "build", "--debian", &format!("{source}={newest}"), "--shipped", oldest, "--quilt", &name])
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
            Some(0 | 3) => println!("left out: {run}"),
            _ => return Err(run.to_string()),
        }
    }
    if patches.is_empty() {
        return Err(format!("no diff of {source} between {oldest} and {newest} makes a patch for {path}"));
    }
    Ok(Shipped { binary, patches, _dir: dir })
}

/// Diffs that the newer version's series has and the older one's has not.
fn missing(package: &str, newer: &str, older: &str) -> Result<Vec<String>, String> {
    let series = |version: &str| {
        let run = Stillpoint::new().args(["patch", "target", "--debian", &format!("{package}={version}")]).json().run();
        if run.code != Some(0) {
            return Err(run.to_string());
        }
        let lines = run.json();
        let entries = lines.iter().find_map(|line| line["series"].as_array().cloned()).unwrap_or_default();
        Ok(entries.iter().filter_map(|entry| entry["name"].as_str().map(str::to_owned)).collect::<Vec<_>>())
    };
    let there = series(older)?;
    Ok(series(newer)?.into_iter().filter(|name| !there.contains(name)).collect())
}

/// Load that must not notice anything.
#[derive(Debug)]
pub struct Watched {
    load: Load,
}

impl Watched {
    /// Starts it: 24 busy connections, and some that only wait.
    pub fn redis(port: u16) -> Watched {
        let plan = Plan::redis(Target::Tcp(format!("127.0.0.1:{port}")));
        Watched::start(Plan { blocking: 8, ..plan })
    }

    /// The same for a memcached.
    pub fn memcached(port: u16) -> Watched {
        let mix = "get=70,set=30".parse().expect("a mix");
        let protocol = Protocol::Memcached { mix, keys: 10_000, value_bytes: 64 };
        Watched::start(Plan::new(Target::Tcp(format!("127.0.0.1:{port}")), protocol))
    }

    fn start(plan: Plan) -> Watched {
        // It is stopped by us: the duration is only the limit of a test that hangs.
        let duration = std::time::Duration::from_secs(1800);
        let timeout = std::time::Duration::from_secs(60);
        let plan = Plan { connections: 24, idle: 16, rate: 2000.0, duration, timeout, ..plan };
        Watched { load: Load::start(plan).expect("start the load") }
    }

    /// Waits until `count` more requests have been answered.
    #[track_caller]
    pub fn answered(&self, count: u64) {
        let before = self.load.counters().snapshot().counts.ok;
        crate::wait::until("requests to be answered", || {
            (self.load.counters().snapshot().counts.ok >= before + count).then_some(())
        });
    }

    /// Ends it, and panics unless each request was answered rightly and no connection was lost.
    #[track_caller]
    pub fn assert_clean(self) {
        self.load.stop();
        let finished = self.load.wait().expect("the load ends in order");
        assert!(finished.summary.counts.ok > 0, "{finished:#?}");
        assert!(finished.is_clean(), "{:#?}\n{:#?}", finished.complaints, finished.summary.counts);
    }
}
