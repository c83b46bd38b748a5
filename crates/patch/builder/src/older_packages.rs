//! Packages with a part of their series at a version below the archive's: for machines that are to run a program without some fixes.
//!
//! ```text
//!   source of version V, its series without X ----- changelog: V~HASH -----> .dsc, .deb      in a clean root, by the package's own rules
//! ```
//!
//! A directory with these files is a place of packages like any other ([`Builder::with_sources`]): the version that runs, its source, and
//! its build-ids are found there. The number says which diffs are there, so two choices are two versions.

use crate::debian::Diff;
use crate::package::{SourcePackage, build_path_of};
use crate::root::BUILD_PATH;
use crate::sandbox::{Sandbox, run};
use crate::{Builder, Error, Shipped};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_host::EntryName;
use stillpoint_host::file::{list, read_regular};
use stillpoint_host::untrusted::{FILE_MAX, Tree};

/// Number of digits of the hash in a version.
const DIGITS: usize = 8;
/// Directory of a cache entry in which the package is built.
const WORK: &str = "work";
/// Source package, then the binary packages for this machine.
const MAKE: &str = "dpkg-source --build \"$1\" && cd \"$1\" && exec dpkg-buildpackage -B -d --no-sign";

/// Files of a source package, relative to its tree.
const SERIES: &str = "debian/patches/series";
/// See [`SERIES`].
const CHANGELOG: &str = "debian/changelog";

/// Packages of a lower version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OlderPackages {
    /// Version of the packages.
    pub version: String,
    /// Source and binary packages.
    pub files: Vec<PathBuf>,
}

impl Builder<'_> {
    /// Builds the source and binary packages of a version with a part of its series, at a lower version, and writes them to a directory.
    /// Runs once for each choice.
    ///
    /// # Errors
    /// [`Error::Quilt`] if the series lacks an excluded entry; [`Error::Malformed`] if the changelog has no entry; the build fails
    /// ([`Error::Command`]); or a file cannot be written.
    pub fn write_older_packages(
        &self,
        source: &SourcePackage,
        shipped: &Shipped,
        into: &Path,
    ) -> Result<OlderPackages, Error> {
        let diffs = shipped.diffs(&source.series)?;
        let version = older_version(source.version(), &diffs);
        let root = self.root_for(source)?;
        let identity = format!("{}-older", self.identity(source, &diffs));
        let entry = self.entry(&EntryName::new("built", &identity), |entry| {
            self.lay_out(source, &diffs, &version, entry)?;
            self.progress(&format!("building packages of {} {version}", source.name()));
            self.make_packages(&root, source.name(), &version, &entry.join(WORK))?;
            keep_packages(entry)
        })?;
        let (made, into) = (Tree::open(&entry)?, Tree::make(into)?);
        let mut files = Vec::new();
        for name in list(&entry)? {
            into.write(&name, &made.read(&name)?)?;
            files.push(into.path().join(name));
        }
        Ok(OlderPackages { version, files })
    }

    /// Lays out the source of the lower version: a tree without the other diffs, and the archives of the upstream version.
    fn lay_out(&self, source: &SourcePackage, diffs: &[Diff], version: &str, entry: &Path) -> Result<(), Error> {
        let directory = entry.join(WORK).join(tree_name(source.name(), version));
        Tree::open(entry)?.make_directory(WORK)?;
        let mut copy = Command::new("cp");
        copy.args(["-a", "--reflink=auto", "--no-target-directory"]).arg(source.tree()).arg(&directory);
        run(&mut copy, "copying the source")?;
        let tree = Tree::open(&directory)?;
        let left_out: Vec<&str> = source.series.diffs.iter().filter(|d| !diffs.contains(d)).map(|d| &*d.name).collect();
        if !left_out.is_empty() {
            let text = tree.read_text(SERIES)?;
            tree.write(SERIES, series_without(&text, &left_out).as_bytes())?;
        }
        let log = tree.read(CHANGELOG)?;
        let new = new_entry(&String::from_utf8_lossy(&log), source.name(), version, &left_out).ok_or_else(|| {
            let what = format!("{CHANGELOG} of {} {}", source.name(), source.version());
            Error::Malformed { what, why: "its first entry has no author and date".into() }
        })?;
        tree.write(CHANGELOG, &[new.as_bytes(), &log].concat())?;
        let work = Tree::open(&entry.join(WORK))?;
        let prefix = format!("{}_{}.orig", source.name(), source.upstream());
        for place in source.description.parent().into_iter().chain(self.local.iter().map(PathBuf::as_path)) {
            for name in list(place)?.into_iter().filter(|name| name.starts_with(&prefix)) {
                work.write(&name, &read_regular(&place.join(&name), FILE_MAX)?)?;
            }
        }
        Ok(())
    }

    /// Runs the rules of the package.
    fn make_packages(&self, root: &Path, name: &str, version: &str, work: &Path) -> Result<(), Error> {
        let env = self.environment_of_rules("", "nocheck noautodbgsym", "nocheck");
        let inside = Path::new(BUILD_PATH);
        let sandbox = Sandbox { root: Some(root.to_owned()), ..Sandbox::default() }.with(work, inside);
        let argv = ["/bin/sh".into(), "-c".into(), MAKE.into(), "sh".into(), tree_name(name, version)];
        run(&mut sandbox.command(inside, &argv, &env), "building packages by their own rules").map(drop)
    }
}

/// Moves the packages to the top of a cache entry, and removes the rest.
fn keep_packages(entry: &Path) -> Result<(), Error> {
    let (own, work) = (Tree::open(entry)?, Tree::open(&entry.join(WORK))?);
    for name in list(&entry.join(WORK))?.into_iter().filter(|name| is_package_file(name)) {
        own.write(&name, &work.read(&name)?)?;
    }
    Ok(own.remove_all(WORK)?)
}

/// Returns true for the files of source packages, and for binary packages.
fn is_package_file(name: &str) -> bool {
    let parts: Vec<&str> = name.rsplit('.').take(3).collect();
    matches!(parts[0], "dsc" | "deb") || (parts.contains(&"tar") && name.contains('_')) || name.ends_with(".diff.gz")
}

/// Returns the version of packages that lack diffs of `version`.
fn older_version(version: &str, diffs: &[Diff]) -> String {
    let hash = stillpoint_host::cache::key(diffs.iter().map(|diff| diff.text.as_slice()));
    format!("{version}~{}", hash.get(..DIGITS).unwrap_or(&hash))
}

/// Returns the name of the directory in which a version is built.
fn tree_name(name: &str, version: &str) -> OsString {
    build_path_of(name, version).file_name().unwrap_or_default().to_owned()
}

/// Returns the text of a series without some entries.
fn series_without(text: &str, left_out: &[&str]) -> String {
    let is_kept = |line: &&str| line.split_whitespace().next().is_none_or(|name| !left_out.contains(&name));
    text.lines().filter(is_kept).map(|line| format!("{line}\n")).collect()
}

/// Makes an entry of a changelog with the distribution, author and date of its first one; `None` if it has none.
fn new_entry(log: &str, name: &str, version: &str, left_out: &[&str]) -> Option<String> {
    let distribution = log.lines().next()?.split_once(") ")?.1.split(';').next()?;
    let trailer = log.lines().find(|line| line.starts_with(" -- "))?;
    let left_out = if left_out.is_empty() { "nothing".to_owned() } else { left_out.join(", ") };
    Some(format!(
        "{name} ({version}) {distribution}; urgency=medium\n\n  * Built without: {left_out}.\n\n{trailer}\n\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Ordering;
    use stillpoint_patch_provenance::{Changelog, compare_versions, is_version};

    #[test]
    fn the_version_is_lower_and_tells_which_diffs_are_there() {
        let diff = |text: &str| Diff::new("a.patch", text.into());
        let versions = [older_version("1:2-3+deb12u4", &[]), older_version("1:2-3+deb12u4", &[diff("x")])];
        assert_ne!(versions[0], versions[1]);
        for version in &versions {
            assert!(is_version(version));
            assert_eq!(compare_versions(version, "1:2-3+deb12u4"), Ordering::Less);
            assert_eq!(compare_versions(version, "1:2-3+deb12u3"), Ordering::Greater);
            assert_eq!(tree_name("demo", version), "demo-2");
        }
    }

    #[test]
    fn a_changelog_gains_an_entry_and_a_series_loses_some() {
        let log = "demo (1-2) bookworm-security; urgency=high\n\n  * CVE-2026-1\n\n -- A <a@b.invalid>  Fri, 03 Apr 2026 14:29:32 +0200\n";
        let new = new_entry(log, "demo", "1-2~0a", &["fix/a.patch", "b.patch"]).unwrap();
        assert!(new.starts_with("demo (1-2~0a) bookworm-security; urgency=medium\n"));
        let versions: Vec<String> = Changelog::parse(&(new + log)).0.into_iter().map(|entry| entry.version).collect();
        assert_eq!(versions, ["1-2~0a", "1-2"]);
        assert_eq!(new_entry("", "demo", "1", &[]), None);
        assert_eq!(
            series_without("# a\nfix/a.patch\n\nb.patch -p1\nc.patch\n", &["b.patch"]),
            "# a\nfix/a.patch\n\nc.patch\n"
        );
    }

    #[test]
    fn only_packages_are_kept() {
        let kept = [
            "a_1-2.dsc",
            "a_1.orig.tar.xz",
            "a_1-2.debian.tar.xz",
            "a_1.orig.tar.gz.asc",
            "a_1-2_amd64.deb",
            "a_1-2.diff.gz",
        ];
        assert!(kept.iter().all(|name| is_package_file(name)));
        let others = ["a_1-2_amd64.changes", "a_1-2_amd64.buildinfo", "a_1-2_amd64.udeb", "a-1", "tar"];
        assert!(!others.iter().any(|name| is_package_file(name)));
    }
}
