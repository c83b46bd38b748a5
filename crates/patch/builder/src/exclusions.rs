//! Versions that the archive lists and does not serve: a record in the directory of the package lists, and apt's
//! preferences made from it.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use stillpoint_host::untrusted::Tree;

/// Files of a version that the archive must serve together for the version to be of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parts {
    /// Source package: its `.dsc` and everything that it names.
    Source,
    /// Source package and the binary packages built from it.
    SourceAndBinaries,
}

/// One version, or a pattern of versions, of a binary package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Pin {
    pub(crate) package: String,
    pub(crate) version: String,
}

/// Versions that the archive is known to withhold, since its lists were fetched.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Exclusions {
    /// First absent file, by parts, source package and version.
    parts: BTreeMap<String, String>,
    pins: BTreeSet<Pin>,
}

impl Exclusions {
    /// Reads the record; one that is absent or damaged excludes nothing.
    pub(crate) fn read(own: &Tree, name: &str) -> Self {
        own.read(name).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
    }

    pub(crate) fn write(&self, own: &Tree, name: &str) -> Result<(), Error> {
        let bytes = serde_json::to_vec(self)
            .map_err(|error| Error::Malformed { what: name.to_owned(), why: error.to_string() })?;
        Ok(own.write(name, &bytes)?)
    }

    /// Returns the missing file of a version, if these parts of it are known not to be served together.
    pub(crate) fn missing(&self, parts: Parts, package: &str, version: &str) -> Option<&str> {
        let of = |parts| self.parts.get(&name(parts, package, version));
        of(Parts::Source).or_else(|| of(parts)).map(String::as_str)
    }

    pub(crate) fn add_parts(&mut self, parts: Parts, package: &str, version: &str, missing: &str) {
        self.parts.insert(name(parts, package, version), missing.to_owned());
    }

    /// Adds versions of binary packages; returns true if one of them is new.
    pub(crate) fn add_pins(&mut self, pins: impl IntoIterator<Item = Pin>) -> bool {
        let before = self.pins.len();
        self.pins.extend(pins);
        self.pins.len() > before
    }

    /// Returns preferences for apt that exclude these versions as candidates.
    pub(crate) fn preferences(&self) -> String {
        let mut out = String::new();
        for Pin { package, version } in &self.pins {
            let _ = writeln!(out, "Package: {package}\nPin: version {version}\nPin-Priority: -1\n");
        }
        out
    }

    /// Returns package and version of each binary package.
    pub(crate) fn packages(&self) -> Vec<String> {
        self.pins.iter().map(|pin| format!("{} {}", pin.package, pin.version)).collect()
    }
}

fn name(parts: Parts, package: &str, version: &str) -> String {
    format!("{parts:?} {package} {version}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pin(package: &str, version: &str) -> Pin {
        Pin { package: package.into(), version: version.into() }
    }

    #[test]
    fn a_record_is_read_back_and_a_damaged_one_excludes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (own, name) = (Tree::open(dir.path()).unwrap(), "withheld.json");
        let mut exclusions = Exclusions::read(&own, name);
        assert_eq!(exclusions, Exclusions::default());
        assert!(exclusions.add_pins([pin("libx1", "1:2-3")]));
        assert!(!exclusions.add_pins([pin("libx1", "1:2-3")]));
        exclusions.add_parts(Parts::Source, "x", "1:2-3", "x_2-3.dsc: 404");
        exclusions.write(&own, name).unwrap();
        let read = Exclusions::read(&own, name);
        assert_eq!(read, exclusions);
        assert_eq!(read.missing(Parts::Source, "x", "1:2-3"), Some("x_2-3.dsc: 404"));
        assert_eq!(read.missing(Parts::SourceAndBinaries, "x", "1:2-3"), Some("x_2-3.dsc: 404"));
        assert_eq!(read.missing(Parts::Source, "x", "1:2-4"), None);
        assert_eq!(read.preferences(), "Package: libx1\nPin: version 1:2-3\nPin-Priority: -1\n\n");
        own.write(name, b"{").unwrap();
        assert_eq!(Exclusions::read(&own, name), Exclusions::default());
    }
}
