//! Reports to the caller while a builder works.

use serde::Serialize;
use std::fmt;

/// A version that the archive lists and does not serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Withheld {
    /// Version, for instance `15.20-0+deb12u1`.
    pub version: String,
    /// First file that was not served, and the server's answer.
    pub missing: String,
}

/// Reports to the caller while a builder works.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Event {
    /// Step that begins.
    Progress {
        /// Name of the step.
        text: String,
    },
    /// Choice of an older version, as the newest is listed and not served.
    VersionChosen {
        /// Source package.
        package: String,
        /// Version that is taken.
        taken: String,
        /// Newer versions.
        withheld: Vec<Withheld>,
    },
    /// Wait for another process that makes an entry of the cache, which this one needs as well.
    Waiting {
        /// Kind and name of the entry.
        entry: String,
    },
    /// Package and version that a running program came from.
    VersionFound {
        /// Number of the process; `None` for a file.
        process: Option<i32>,
        /// Path in the root file system of the process.
        path: String,
        /// Binary package.
        package: String,
        /// Its version.
        version: String,
        /// Source package.
        source: String,
        /// Version of the source package.
        source_version: String,
        /// Evidence for the version.
        evidence: String,
        /// True if the process has another root file system, as in a container.
        container: bool,
    },
    /// Versions of binary packages that are listed and not served; a clean root is made without them.
    DependenciesLeftOut {
        /// Package and version of each.
        packages: Vec<String>,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Progress { text } => f.write_str(text),
            Event::VersionChosen { package, taken, withheld } => {
                for Withheld { version, missing } in withheld {
                    write!(f, "{package} {version} is listed and not served ({missing}); ")?;
                }
                write!(f, "taking {taken}")
            }
            Event::Waiting { entry } => write!(f, "another stillpoint makes {entry}; waiting for it"),
            Event::VersionFound { process, path, package, version, source, source_version, evidence, container } => {
                let of = process.map(|pid| format!("process {pid} runs ")).unwrap_or_default();
                let root = if *container { " of a container" } else { "" };
                write!(f, "{of}{path}{root}, of {package} {version} (source {source} {source_version}): {evidence}")
            }
            Event::DependenciesLeftOut { packages } => {
                write!(f, "listed and not served, left out of the clean root: {}", packages.join(", "))
            }
        }
    }
}
