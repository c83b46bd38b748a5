//! Access to the archive through apt, with directories of our own: the system's configuration and lists stay untouched.

use crate::error::NO_VERSION;
use crate::exclusions::{Exclusions, Parts, Pin};
use crate::fetch_failure::{FetchFailure, all_absent, failures, is_package};
use crate::sandbox::{output, run, tail};
use crate::sources::Archives;
use crate::{Cache, Error};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use stillpoint_host::At;
use stillpoint_host::cache::{is_sealed, seal};
use stillpoint_host::file::list;
use stillpoint_host::untrusted::Tree;
use stillpoint_patch_provenance::compare_versions;
use stillpoint_patch_provenance::deb822::Stanza;

/// Lists older than this are fetched again.
const LISTS_AGE_MAX: Duration = Duration::from_secs(6 * 3600);
/// Lists older than this are fetched again when they name an absent file: the archive may have newer versions.
const LISTS_AGE_MAX_ON_ABSENCE: Duration = Duration::from_secs(10 * 60);
/// File name of the record of withheld versions; it is located in the directory of the lists.
const EXCLUSIONS_FILE: &str = "withheld.json";
/// File name of the stamp; its time is that of the lists.
const STAMP: &str = "updated";

/// A private view of the archive.
#[derive(Debug, Clone)]
pub(crate) struct Apt {
    /// Archives of the lists.
    pub(crate) archives: Archives,
    cache: Cache,
    config: PathBuf,
    directory: PathBuf,
    /// True once lists that are young enough were found or fetched.
    current: Arc<AtomicBool>,
}

impl Apt {
    /// Prepares the directories. The first query that needs the lists fetches them.
    pub(crate) fn open(cache: &Cache, release: Option<&str>) -> Result<Self, Error> {
        let archives = Archives::of(release)?;
        let text = archives.to_text();
        let directory = cache.directory("apt", &stillpoint_host::cache::key([text.as_bytes()]))?;
        let config = directory.join("apt.conf");
        let apt = Apt { archives, cache: cache.clone(), config, directory, current: Arc::default() };
        let _lock = cache.lock("apt")?;
        apt.prepare(&text)?;
        Ok(apt)
    }

    fn prepare(&self, sources: &str) -> Result<(), Error> {
        let own = self.own()?;
        for part in ["lists/partial", "archives/partial"] {
            own.make_directory(part)?;
        }
        // apt insists on the extension for deb822, so the list is a part file and there is no main file
        own.write("parts/archive.sources", sources.as_bytes())?;
        // no package counts as installed: packages of this system are no part of the archive
        own.write("status", b"")?;
        self.write_preferences(&self.exclusions())?;
        let directory = self.directory.display();
        let config = format!(
            "Dir::State::lists \"{directory}/lists\";\nDir::State::status \"{directory}/status\";\n\
             Dir::Cache \"{directory}\";\nDir::Cache::archives \"archives\";\n\
             Dir::Etc::sourcelist \"/dev/null\";\nDir::Etc::sourceparts \"{directory}/parts\";\n\
             Dir::Etc::preferences \"{directory}/preferences\";\nDir::Etc::preferencesparts \"/dev/null\";\n\
             Acquire::Languages \"none\";\nAcquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n\
             APT::Sandbox::User \"root\";\nAPT::Get::List-Cleanup \"0\";\nAPT::Update::Post-Invoke-Success \"\";\n"
        );
        Ok(own.write("apt.conf", config.as_bytes())?)
    }

    /// Directory of the configuration, in which apt writes as well.
    fn own(&self) -> Result<Tree, Error> {
        Ok(Tree::open(&self.directory)?)
    }

    /// Fetches the lists when they are missing or old. Without a network, old lists are used.
    pub(crate) fn need_lists(&self) -> Result<(), Error> {
        if self.current.load(Ordering::Relaxed) {
            return Ok(());
        }
        let _lock = self.cache.lock("apt")?;
        let age = self.lists_age();
        if age.is_none_or(|age| age > LISTS_AGE_MAX) {
            match self.update() {
                Ok(()) => {}
                Err(error) if age.is_some() => tracing::warn!(%error, "keeping older package lists"),
                Err(error) => return Err(error),
            }
        }
        self.current.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Fetches the lists again unless they are younger than the limit; returns true if they were fetched.
    pub(crate) fn refresh(&self) -> Result<bool, Error> {
        let _lock = self.cache.lock("apt")?;
        if self.lists_age().is_some_and(|age| age <= LISTS_AGE_MAX_ON_ABSENCE) {
            return Ok(false);
        }
        self.update().map(|()| true)
    }

    fn lists(&self) -> PathBuf {
        self.directory.join("lists")
    }

    /// Returns the age of the lists; `None` if there are none, or if one of them was truncated or removed.
    fn lists_age(&self) -> Option<Duration> {
        if !is_sealed(&self.lists()) {
            return None;
        }
        let stamp = self.own().and_then(|own| Ok(own.file(STAMP)?)).ok()?;
        stamp.metadata().and_then(|m| m.modified()).ok()?.elapsed().ok()
    }

    fn update(&self) -> Result<(), Error> {
        let what = "fetching the package lists";
        if !is_sealed(&self.lists()) {
            // apt trusts the size and the time of a list that exists
            stillpoint_host::cache::remove(&self.lists())?;
            self.own()?.make_directory("lists/partial")?;
        }
        let output = run(self.command("apt-get").args(["-q", "update"]), what)?;
        // apt reports success when it cannot reach a server: it keeps the lists that it has, or has none
        if failures(&text_of(&output)).iter().any(|f| f.absent.is_none()) {
            return Err(Error::Command { what: what.into(), status: output.status, output: tail(&output) });
        }
        if self.own()?.remove(EXCLUSIONS_FILE)? {
            self.write_preferences(&Exclusions::default())?;
        }
        seal(&self.lists(), &["partial"])?;
        Ok(self.own()?.write(STAMP, b"")?)
    }

    /// Returns the versions that the archive lists and is known not to serve.
    pub(crate) fn exclusions(&self) -> Exclusions {
        self.own().map_or_else(|_| Exclusions::default(), |own| Exclusions::read(&own, EXCLUSIONS_FILE))
    }

    fn write_preferences(&self, exclusions: &Exclusions) -> Result<(), Error> {
        Ok(self.own()?.write("preferences", exclusions.preferences().as_bytes())?)
    }

    fn exclude<R>(&self, change: impl FnOnce(&mut Exclusions) -> R) -> Result<R, Error> {
        let _lock = self.cache.lock("apt")?;
        let mut exclusions = self.exclusions();
        let result = change(&mut exclusions);
        exclusions.write(&self.own()?, EXCLUSIONS_FILE)?;
        self.write_preferences(&exclusions)?;
        Ok(result)
    }

    /// Records that parts of a source package's version are not served.
    pub(crate) fn exclude_parts(&self, parts: Parts, package: &str, version: &str, missing: &str) -> Result<(), Error> {
        self.exclude(|exclusions| exclusions.add_parts(parts, package, version, missing))
    }

    /// Records that binary packages are not served, and with each all others of the same build: they depend on one
    /// another's exact version. Returns true if one of them was not recorded yet.
    pub(crate) fn exclude_binaries(&self, failures: &[FetchFailure]) -> Result<bool, Error> {
        let mut pins = Vec::new();
        for (package, version) in failures.iter().filter_map(FetchFailure::binary) {
            pins.extend(self.siblings(package, version)?);
        }
        self.exclude(|exclusions| exclusions.add_pins(pins))
    }

    /// Finds every binary package of the same build, this one included. `version` has no epoch.
    fn siblings(&self, package: &str, version: &str) -> Result<Vec<Pin>, Error> {
        let pin = |b: BinaryStanza| Pin { package: b.package, version: b.version };
        let found = self.binaries(&[package.to_owned()])?.into_iter().find(|b| without_epoch(&b.version) == version);
        let Some(found) = found else {
            // the lists have changed since: both forms of the version, as the epoch is not known
            let of = |version: String| Pin { package: package.to_owned(), version };
            return Ok(vec![of(version.to_owned()), of(format!("*:{version}"))]);
        };
        let sources = self.sources(&found.source)?;
        let names = sources.into_iter().find(|s| s.version == found.source_version).map(|s| s.binaries);
        let built = |b: &BinaryStanza| b.source == found.source && b.source_version == found.source_version;
        let mut all = self.binaries(&names.unwrap_or_default())?;
        all.retain(built);
        all.push(found);
        Ok(all.into_iter().map(pin).collect())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", &self.config).env("LC_ALL", "C.UTF-8");
        command
    }

    /// Returns every version of a binary package, newest first.
    pub(crate) fn binary_versions(&self, package: &str) -> Result<Vec<String>, Error> {
        let mut versions: Vec<String> = self.binaries(&[package.to_owned()])?.into_iter().map(|b| b.version).collect();
        versions.sort_by(|a, b| compare_versions(b, a));
        versions.dedup();
        Ok(versions)
    }

    /// Reads the stanzas of binary packages, every version of each.
    fn binaries(&self, packages: &[String]) -> Result<Vec<BinaryStanza>, Error> {
        self.need_lists()?;
        let packages: Vec<&String> = packages.iter().filter(|p| is_package(p)).collect();
        if packages.is_empty() {
            return Ok(Vec::new());
        }
        // apt-cache fails when it finds none of them: that is a valid answer
        let output = output(self.command("apt-cache").args(["show", "--all-versions"]).args(&packages))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let stanzas = text.split("\n\n").filter_map(BinaryStanza::parse);
        Ok(stanzas.filter(|b| packages.contains(&&b.package)).collect())
    }

    /// Finds the binary packages of one version of a source package that can hold programs, the newest build of each.
    pub(crate) fn programs_of(&self, stanza: &SourceStanza) -> Result<Vec<BinaryStanza>, Error> {
        let mut found = self.binaries(&stanza.binaries)?;
        found.retain(|b| b.source == stanza.package && b.source_version == stanza.version && b.architecture != "all");
        found.sort_by(|a, b| a.package.cmp(&b.package).then_with(|| compare_versions(&b.version, &a.version)));
        found.dedup_by(|a, b| a.package == b.package);
        Ok(found)
    }

    /// Returns the stanzas of a source package, newest version first.
    pub(crate) fn sources(&self, package: &str) -> Result<Vec<SourceStanza>, Error> {
        self.need_lists()?;
        if !is_package(package) {
            return Ok(Vec::new());
        }
        let output = run(
            self.command("apt-cache").args(["showsrc", "--only-source", package]),
            &format!("asking for the source of {package}"),
        )?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut stanzas: Vec<SourceStanza> = text.split("\n\n").filter_map(SourceStanza::parse).collect();
        stanzas.sort_by(|a, b| compare_versions(&b.version, &a.version));
        stanzas.dedup_by(|a, b| a.version == b.version);
        Ok(stanzas)
    }

    /// Makes the error for a version of a source package that is not among those listed.
    pub(crate) fn no_source_version(&self, parts: Parts, package: &str, version: &str, listed: &[String]) -> Error {
        let exclusions = self.exclusions();
        let proposed = listed.iter().find(|listed| exclusions.missing(parts, package, listed).is_none()).cloned();
        // without the binary package of this name the error says less, and is the same
        let binaries = if listed.is_empty() { self.binaries(&[package.to_owned()]) } else { Ok(Vec::new()) };
        let source_package = binaries.unwrap_or_default().into_iter().next().map(|binary| binary.source);
        no_version(package, version, listed, proposed, source_package)
    }

    /// Lists every version of a source package, newest first.
    pub(crate) fn source_versions(&self, package: &str) -> Result<Vec<String>, Error> {
        Ok(self.sources(package)?.into_iter().map(|stanza| stanza.version).collect())
    }

    /// Downloads a source package's files into `into`; returns the path of the `.dsc`.
    pub(crate) fn download_source(&self, package: &str, version: &str, into: &Path) -> Result<PathBuf, Error> {
        let what = format!("{package}={version}");
        let mut command = self.command("apt-get");
        command.args(["-q", "--download-only", "--only-source", "source", &what]).current_dir(into);
        fetch(&mut command, &format!("downloading the source of {what}"), package, version)?;
        find_with_suffix(into, ".dsc")
    }

    /// Downloads one version of a binary package into `into`.
    pub(crate) fn download_binary(&self, package: &str, version: &str, into: &Path) -> Result<PathBuf, Error> {
        let available = self.binary_versions(package)?;
        if !available.iter().any(|v| v == version) {
            return Err(no_version(package, version, &available, None, None));
        }
        let what = format!("{package}={version}");
        let mut command = self.command("apt-get");
        command.args(["-q", "download", &what]).current_dir(into);
        fetch(&mut command, &format!("downloading {what}"), package, version)?;
        find_with_suffix(into, ".deb")
    }

    /// Downloads binary packages with one call; returns `None` if any of them is not served.
    pub(crate) fn download_together(&self, packages: &[BinaryStanza]) -> Result<Option<tempfile::TempDir>, Error> {
        let into = tempfile::tempdir().at("making", Path::new("a temporary directory"))?;
        let mut command = self.command("apt-get");
        command.args(["-q", "download"]).current_dir(into.path());
        command.args(packages.iter().map(|package| format!("{}={}", package.package, package.version)));
        Ok(output(&mut command)?.status.success().then_some(into))
    }

    /// Returns the system's `Acquire` options that a clean root needs as well: proxies.
    pub(crate) fn proxies(&self) -> Result<String, Error> {
        let output = run(self.command("apt-config").arg("dump"), "reading apt's configuration")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let wanted = |line: &&str| line.starts_with("Acquire::") && line.to_ascii_lowercase().contains("proxy");
        Ok(text.lines().filter(wanted).map(|line| format!("{line}\n")).collect())
    }
}

/// Runs a download. Files that the server does not have give one error, every other failure gives another.
fn fetch(command: &mut Command, what: &str, package: &str, version: &str) -> Result<(), Error> {
    let output = output(command)?;
    if output.status.success() {
        return Ok(());
    }
    let absent = all_absent(&text_of(&output)).and_then(|failures| failures.into_iter().next());
    Err(match absent {
        Some(FetchFailure { file, absent }) => Error::Withheld {
            package: package.to_owned(),
            version: version.to_owned(),
            missing: format!("{file}: {}", absent.unwrap_or("absent")),
            served: None,
        },
        None => Error::Command { what: what.to_owned(), status: output.status, output: tail(&output) },
    })
}

/// Returns all text that a program printed.
pub(crate) fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], b"\n", &output.stderr[..]].concat()).into_owned()
}

fn no_version(
    package: &str,
    version: &str,
    available: &[String],
    proposed: Option<String>,
    source_package: Option<String>,
) -> Error {
    Error::NoSuchVersion {
        package: package.to_owned(),
        version: version.to_owned(),
        available: if available.is_empty() { NO_VERSION.to_owned() } else { available.join(", ") },
        proposed,
        source_package,
    }
}

fn without_epoch(version: &str) -> &str {
    version.split_once(':').map_or(version, |(_, rest)| rest)
}

pub(crate) fn find_with_suffix(directory: &Path, suffix: &str) -> Result<PathBuf, Error> {
    let name = list(directory)?.into_iter().find(|name| name.ends_with(suffix));
    name.map(|name| directory.join(name)).ok_or_else(|| Error::Malformed {
        what: directory.display().to_string(),
        why: format!("apt left no {suffix} file there"),
    })
}

/// Entry of the archive's lists for one version of a source package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceStanza {
    /// Source package, for instance `redis`.
    pub(crate) package: String,
    /// Version of the package, for instance `5:7.0.15-1~deb12u10`.
    pub(crate) version: String,
    /// Packages built from it.
    pub(crate) binaries: Vec<String>,
    /// Build dependencies of every kind: they decide the content of a clean root.
    pub(crate) build_depends: String,
}

impl SourceStanza {
    fn parse(text: &str) -> Option<Self> {
        let stanza = Stanza::parse(text);
        let depends = stanza.0.iter().filter(|(name, _)| name.starts_with("Build-"));
        Some(SourceStanza {
            package: stanza.field("Package").or_else(|| stanza.field("Source"))?.to_owned(),
            version: stanza.field("Version")?.to_owned(),
            binaries: stanza.field("Binary")?.split(',').map(|name| name.trim().to_owned()).collect(),
            build_depends: depends.map(|(name, value)| format!("{name}: {}\n", value.replace('\n', ""))).collect(),
        })
    }

    /// Reads a `.dsc`, signed or not.
    pub(crate) fn of_description(text: &str) -> Option<Self> {
        text.split("\n\n").find_map(SourceStanza::parse)
    }
}

/// One version of a binary package in the archive's lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BinaryStanza {
    pub(crate) package: String,
    pub(crate) version: String,
    architecture: String,
    source: String,
    source_version: String,
}

impl BinaryStanza {
    fn parse(text: &str) -> Option<Self> {
        let stanza = Stanza::parse(text);
        let (package, version) = (stanza.field("Package")?, stanza.field("Version")?);
        // the source is named when it differs, its version in parentheses when that differs too
        let source = stanza.field("Source").unwrap_or(package);
        let (source, source_version) = match source.split_once('(') {
            Some((name, rest)) => (name.trim(), rest.trim_end_matches(')').trim()),
            None => (source, version),
        };
        Some(BinaryStanza {
            package: package.to_owned(),
            version: version.to_owned(),
            architecture: stanza.field("Architecture")?.to_owned(),
            source: source.to_owned(),
            source_version: source_version.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_stanza_with_folded_fields() {
        let text =
            "Package: demo\nBinary: demo,\n demo-tools\nVersion: 1:2-3\nBuild-Depends: a (>= 1), b\nFiles:\n x y\n";
        let stanza = SourceStanza::parse(text).unwrap();
        assert_eq!(stanza.binaries, ["demo", "demo-tools"]);
        assert_eq!(stanza.version, "1:2-3");
        assert_eq!(stanza.build_depends, "Build-Depends: a (>= 1), b\n");
        assert_eq!(SourceStanza::parse("nothing here"), None);
        let signed = format!(
            "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA512\n\nFormat: 3.0\n{}\n-----BEGIN PGP SIGNATURE-----\n\nabc\n",
            text.replace("Package:", "Source:")
        );
        assert_eq!(SourceStanza::of_description(&signed), Some(stanza));
    }

    #[test]
    fn a_binary_names_its_source() {
        let of = |fields: &str| {
            let b = BinaryStanza::parse(&format!("Package: libx1\nVersion: 2:1-1+b1\nArchitecture: amd64\n{fields}"))
                .unwrap();
            (b.source, b.source_version)
        };
        assert_eq!(of(""), ("libx1".to_owned(), "2:1-1+b1".to_owned()));
        assert_eq!(of("Source: x\n"), ("x".to_owned(), "2:1-1+b1".to_owned()));
        assert_eq!(of("Source: x (1-1)\n"), ("x".to_owned(), "1-1".to_owned()));
        assert_eq!(without_epoch("2:1-1+b1"), "1-1+b1");
    }
}
