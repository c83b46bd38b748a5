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
    Progress(String),
    /// Choice of an older version, as the newest is listed and not served.
    VersionChosen {
        /// Source package.
        package: String,
        /// Version that is taken.
        taken: String,
        /// Newer versions.
        withheld: Vec<Withheld>,
    },
    /// Versions of binary packages that are listed and not served; a clean root is made without them.
    DependenciesLeftOut(Vec<String>),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Progress(text) => f.write_str(text),
            Event::VersionChosen { package, taken, withheld } => {
                for Withheld { version, missing } in withheld {
                    write!(f, "{package} {version} is listed and not served ({missing}); ")?;
                }
                write!(f, "taking {taken}")
            }
            Event::DependenciesLeftOut(packages) => {
                write!(f, "listed and not served, left out of the clean root: {}", packages.join(", "))
            }
        }
    }
}
