//! Source and binary packages: fetched, unpacked, built by the rules of the archive, never installed.

use crate::account::{Account, Inclusion, Place};
use crate::apt::{Apt, SourceStanza, find_with_suffix};
use crate::commands::Recording;
use crate::compile::{Original, Project};
use crate::debian::{Diff, Series};
use crate::includes::Includes;
use crate::integration::{Integrated, Integration};
use crate::recorder;
use crate::root::{self, BUILD_PATH, OWN_PATH};
use crate::sandbox::{Sandbox, run};
use crate::verdict::Bounded;
use crate::{Builder, Error, Event, Parts, Withheld};
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_host::At;
use stillpoint_host::EntryName;
use stillpoint_host::file::{list, read_regular};
use stillpoint_host::untrusted::{FILE_MAX, Tree};
use stillpoint_patch_provenance::{compare_versions, unpacked_name};

/// Size limit of a `.dsc` file, in bytes.
const DESCRIPTION_MAX: u64 = 16 << 20;

/// A source package, unpacked without its series applied.
#[derive(Debug)]
pub struct SourcePackage {
    pub(crate) stanza: SourceStanza,
    pub(crate) apt: Apt,
    /// Path of its `.dsc`.
    pub(crate) description: PathBuf,
    tree: PathBuf,
    /// Distinguishes the source of a directory of the caller from the archive's, which may have the same version; else empty.
    variant: String,
    /// Series of diffs.
    pub series: Series,
}

impl SourcePackage {
    /// Returns the name, for instance `redis`.
    pub fn name(&self) -> &str {
        &self.stanza.package
    }

    /// Returns the version, for instance `5:7.0.15-1~deb12u10`.
    pub fn version(&self) -> &str {
        &self.stanza.version
    }

    /// Returns the version without epoch and Debian revision.
    pub(crate) fn upstream(&self) -> &str {
        upstream_of(self.version())
    }

    /// Returns the directory of the unpacked package.
    pub(crate) fn tree(&self) -> &Path {
        &self.tree
    }

    /// Returns the path of the source during its build.
    pub(crate) fn build_path(&self) -> PathBuf {
        build_path_of(self.name(), self.version())
    }

    fn key(&self) -> String {
        entry_name(self.name(), self.version()) + &self.variant
    }

    /// Reads a package that was downloaded and unpacked, without access to the archive.
    fn read(apt: &Apt, entry: &Path) -> Result<Self, Error> {
        let description = find_with_suffix(entry, ".dsc")?;
        let text = read_regular(&description, FILE_MAX)?;
        let stanza = SourceStanza::of_description(&String::from_utf8_lossy(&text)).ok_or_else(|| Error::Malformed {
            what: description.display().to_string(),
            why: "it describes no source package".into(),
        })?;
        let tree = entry.join("tree");
        let series = Series::read(format!("{} {}", stanza.package, stanza.version), &tree)?;
        Ok(SourcePackage { stanza, apt: apt.clone(), description, tree, variant: String::new(), series })
    }
}

fn upstream_of(version: &str) -> &str {
    let version = version.split_once(':').map_or(version, |(_, rest)| rest);
    version.rsplit_once('-').map_or(version, |(upstream, _)| upstream)
}

/// Returns the path of the source of a version during its build.
pub(crate) fn build_path_of(name: &str, version: &str) -> PathBuf {
    Path::new(BUILD_PATH).join(format!("{name}-{}", upstream_of(version)))
}

/// Directory in which quilt notes the diffs that are applied, with the files as they were before.
pub(crate) const QUILT: &str = ".pc";

/// Returns the name of the cache entry of a version of a package.
fn entry_name(package: &str, version: &str) -> String {
    format!("{package}_{}", version.replace([':', '/'], "%"))
}

/// Selection of the diffs of its series that a binary was built with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Shipped {
    /// All diffs, as in the archive's own binaries.
    #[default]
    Full,
    /// The diffs that fix no CVE.
    WithoutCves,
    /// All diffs except these.
    Without(Vec<String>),
}

impl Shipped {
    /// Returns the active diffs, in order.
    ///
    /// # Errors
    /// [`Error::Quilt`] if the series lacks an excluded entry.
    pub fn diffs(&self, series: &Series) -> Result<Vec<Diff>, Error> {
        let left_out = match self {
            Shipped::Full => Vec::new(),
            Shipped::WithoutCves => {
                series.diffs.iter().filter(|d| !d.cves.is_empty()).map(|d| d.name.clone()).collect()
            }
            Shipped::Without(names) => series.select(names)?.into_iter().map(|d| d.name).collect::<Vec<String>>(),
        };
        Ok(series.diffs.iter().filter(|d| !left_out.contains(&d.name)).cloned().collect())
    }
}

/// A package built by its own rules in a clean root, with the work of its compilers recorded; or only configured, with
/// the work that they would do.
#[derive(Debug)]
pub struct BuiltPackage {
    /// The diffs of its series that it was built with.
    pub shipped: Vec<Diff>,
    /// The clean root; its links know it as `/`.
    pub(crate) root: Tree,
    pub(crate) source: PathBuf,
    /// The tree of the build; its links know it as `source`.
    pub(crate) tree: Tree,
    pub(crate) identity: String,
    pub(crate) recording: Recording,
    /// Includes of the source, if the package is only configured and no build recorded them.
    pub(crate) includes: Option<Includes>,
    /// False if its rules are known not to run with compilations put off.
    pub(crate) runs_deferred: bool,
    /// True if its programs are optimised when they are linked, and the links were put off.
    pub(crate) link_put_off: bool,
}

/// Part of a package's rules that is to run.
pub(crate) struct Rules<'a> {
    /// True if results of compilers may be placeholders.
    pub(crate) deferring: bool,
    /// Libraries that are linked at once: the rules load them into a running program.
    pub(crate) loaded: &'a [PathBuf],
    /// Additional edits and library of the build.
    pub(crate) integration: Option<&'a Integration>,
}

impl BuiltPackage {
    /// Opens a tree in which rules ran, and its records; nothing else is known of it.
    pub(crate) fn read(root: &Path, build_path: &Path, entry: &Path, identity: String) -> Result<Self, Error> {
        Ok(BuiltPackage {
            shipped: Vec::new(),
            root: Tree::open(root)?.known_as(Path::new("/")),
            source: build_path.to_owned(),
            tree: Tree::open(&entry.join("tree"))?.known_as(build_path),
            identity,
            recording: Recording::read(&entry.join("records"))?,
            includes: None,
            runs_deferred: true,
            link_put_off: false,
        })
    }

    /// Returns the tree of the build.
    pub fn tree(&self) -> &Path {
        self.tree.path()
    }

    /// Returns linked files that can be executed or loaded, by their path inside the build, also where the package is
    /// not built.
    pub(crate) fn outputs(&self) -> Vec<PathBuf> {
        let outputs = self.recording.images().filter(|output| output.starts_with(&self.source));
        outputs.filter(|o| crate::elf::is_loadable(&self.tree, o) || self.is_deferred(o)).map(Path::to_owned).collect()
    }

    /// Returns true if an output is a placeholder.
    fn is_deferred(&self, output: &Path) -> bool {
        let bytes = self.tree.read_existing(output).ok().flatten().unwrap_or_default();
        !recorder::records_of(&bytes).is_empty()
    }

    /// Returns the outputs of which a placeholder has this name: rules may rename what they install.
    pub(crate) fn installed_as(&self, name: &OsStr) -> Result<Vec<PathBuf>, Error> {
        let mut found = BTreeSet::new();
        for entry in self.tree.entries()?.iter().filter(|e| e.is_file() && e.name.file_name() == Some(name)) {
            let bytes = self.tree.read(&entry.name)?;
            let outputs = recorder::records_of(&bytes).into_iter().filter_map(|r| self.recording.by_record.get(r));
            found.extend(outputs.cloned());
        }
        Ok(found.into_iter().collect())
    }

    /// Finds the output of a name: its file name, the name by which programs load it, or that of an installed copy.
    pub(crate) fn output_named(&self, name: &OsStr) -> Result<PathBuf, Error> {
        let mut outputs = self.outputs();
        let is_file = |output: &PathBuf| output.file_name().is_some_and(|file| file == name);
        let found = outputs.iter().position(is_file);
        if let Some(index) = found.or_else(|| outputs.iter().position(|output| self.is_library(output, name))) {
            return Ok(outputs.swap_remove(index));
        }
        self.installed_as(name)?.into_iter().next().ok_or_else(|| {
            let names: Vec<_> = outputs.iter().filter_map(|output| output.file_name()?.to_str()).collect();
            Error::Target(format!("the build made no {}; it made {}", name.display(), names.join(", ")))
        })
    }

    /// Returns true if the link of an output gives it this `DT_SONAME`.
    pub(crate) fn is_library(&self, output: &Path, name: &OsStr) -> bool {
        self.recording.links.get(output).and_then(|link| link.soname()).is_some_and(|soname| soname == name)
    }

    /// Returns true if the link of an output gives it the `DT_SONAME` of a library.
    pub(crate) fn links_as(&self, output: &Path, library: &[u8]) -> bool {
        crate::elf::soname(library).is_some_and(|name| self.is_library(output, OsStr::new(&name)))
    }

    /// Makes the account of a target that any of some outputs may be: of all, if most units are the same.
    fn account_of_any(&self, outputs: &[PathBuf]) -> Account {
        let mut accounts = outputs.iter().map(|output| self.account(output));
        let first = accounts.next().unwrap_or_default();
        let units: Vec<BTreeSet<String>> = outputs.iter().map(|output| self.units_of(output)).collect();
        let is_common = |unit: &str| units.iter().all(|units| units.contains(unit));
        let common = units.first().map_or(0, |units| units.iter().filter(|unit| is_common(unit)).count());
        let smallest = units.iter().map(BTreeSet::len).min().unwrap_or(0);
        if 2 * common < smallest {
            let names: Vec<String> = outputs.iter().map(|output| output.display().to_string()).collect();
            let why = format!("the target could be any of {}", Bounded(&names));
            return Account { unknown: first.unknown.or(Some(why)), ..first };
        }
        let mut joined = accounts.fold(first, Account::or);
        // code that not all of them have is searched for
        for (_, object) in self.units().filter(|(unit, _)| !is_common(&unit.to_string_lossy())) {
            joined.objects.entry(object.clone()).and_modify(|inclusion| *inclusion = Inclusion::IfNeeded);
        }
        joined
    }

    /// Makes the account of an output.
    pub(crate) fn account(&self, output: &Path) -> Account {
        let place = Place { source: &self.source, tree: &self.tree, root: &self.root };
        Account::of(&self.recording, output, &place)
    }

    /// Returns the project of the units, by their path relative to the source directory, of outputs that may be the
    /// target; of all units when none is known. `original` is the unpacked package. The error in `outputs` is the reason
    /// why these are not known.
    pub(crate) fn project(
        &self,
        outputs: Result<&[PathBuf], String>,
        original: &Path,
        trees: stillpoint_host::Cache,
    ) -> Project {
        let first = outputs.as_ref().ok().and_then(|outputs| outputs.first());
        let link = first.and_then(|output| self.recording.link_calls.get(output)).cloned();
        let mut account = outputs.map_or_else(Account::unknown, |outputs| self.account_of_any(outputs));
        let is_known = !account.objects.is_empty();
        account.exact &= is_known;
        let (mut commands, mut other_units) = (Vec::new(), BTreeSet::new());
        for command in &self.recording.commands {
            let Ok(unit) = command.file.strip_prefix(&self.source) else { continue };
            let is_part = match &command.object {
                Some(object) if is_known => account.objects.contains_key(object),
                // a configuration step compiles files that it removes
                _ => self.tree.has(unit),
            };
            let unit = unit.to_string_lossy().into_owned();
            if is_part {
                commands.push((unit, command.clone()));
            } else {
                other_units.insert(unit);
            }
        }
        let created = self.shipped.iter().flat_map(|diff| crate::diff::split(&diff.text)).filter(|file| file.creates);
        let original = Original { tree: original.to_owned(), created: created.map(|file| file.path).collect() };
        Project {
            root: Some(self.root.path().to_owned()),
            source: self.source.clone(),
            shipped: self.tree.path().to_owned(),
            original: Some(original),
            identity: self.identity.clone(),
            trees,
            other_units: other_units.into_iter().filter(|unit| commands.iter().all(|(path, _)| path != unit)).collect(),
            commands,
            account,
            built: true,
            includes: self.includes.clone(),
            link,
            link_put_off: self.link_put_off,
        }
    }

    /// Returns the paths of an output's units.
    pub(crate) fn units_of(&self, output: &Path) -> BTreeSet<String> {
        let account = self.account(output);
        let units = self.units().filter(|(_, object)| account.objects.contains_key(*object));
        units.map(|(unit, _)| unit.to_string_lossy().into_owned()).collect()
    }

    /// Returns each compiled unit, by its path relative to the source directory, with its object.
    fn units(&self) -> impl Iterator<Item = (&Path, &PathBuf)> {
        let commands = self.recording.commands.iter();
        commands.filter_map(|c| Some((c.file.strip_prefix(&self.source).ok()?, c.object.as_ref()?)))
    }

    /// Returns true if any recorded command compiles the file, for this output or another.
    pub(crate) fn compiles(&self, unit: &str) -> bool {
        self.recording.commands.iter().any(|c| c.file.strip_prefix(&self.source).is_ok_and(|u| u == Path::new(unit)))
    }
}

impl Builder<'_> {
    /// Fetches and unpacks a source package, and its binary packages if `parts` includes them: exactly the requested
    /// version, or the newest of which the archive serves all these parts. Cached files count as served.
    ///
    /// # Errors
    /// [`Error::NoSuchVersion`], [`Error::Withheld`], no archive that fits ([`Error::NoSources`]), or a download or
    /// `dpkg-source` fails.
    pub fn fetch_source(&self, package: &str, version: Option<&str>, parts: Parts) -> Result<SourcePackage, Error> {
        self.fetch_source_besides(package, version, parts, None)
    }

    /// Fetches as [`Builder::fetch_source`] does; the error for a withheld version never proposes the version `taken`.
    pub(crate) fn fetch_source_besides(
        &self,
        package: &str,
        version: Option<&str>,
        parts: Parts,
        taken: Option<&str>,
    ) -> Result<SourcePackage, Error> {
        self.progress(&format!("fetching the source of {package}"));
        let apt = Apt::open(&self.cache, self.release.as_deref())?;
        let local = self.local_source(&apt, package, version)?;
        let Some(version) = version else { return newer(self.fetch_newest(&apt, package, parts), local) };
        if let Some(local) = local {
            return Ok(local);
        }
        if !self.holds(package, version, Parts::Source) {
            let listed = apt.source_versions(package)?;
            if !listed.iter().any(|v| v == version) {
                return Err(apt.no_source_version(parts, package, version, &listed));
            }
        }
        let missing = match self.fetch_version(&apt, package, version, parts) {
            Err(Error::Withheld { missing, .. }) => missing,
            other => return other,
        };
        if apt.refresh()? {
            return self.fetch_source_besides(package, Some(version), parts, taken);
        }
        apt.exclude_parts(parts, package, version, &missing)?;
        let unwanted: Vec<&str> = [version].into_iter().chain(taken).collect();
        let (served, _) = self.newest_served(&apt, package, parts, &unwanted)?;
        let served = served.map(|source| source.stanza.version);
        Err(Error::Withheld { package: package.to_owned(), version: version.to_owned(), missing, served })
    }

    /// Unpacks a source package of the caller's directories: this version, or the newest one there.
    fn local_source(&self, apt: &Apt, package: &str, version: Option<&str>) -> Result<Option<SourcePackage>, Error> {
        let mut found: Option<(PathBuf, Vec<u8>, SourceStanza)> = None;
        for directory in &self.local {
            let is_wanted = |name: &String| name.ends_with(".dsc") && name.starts_with(&format!("{package}_"));
            for name in list(directory)?.into_iter().filter(is_wanted) {
                let path = directory.join(name);
                let text = read_regular(&path, DESCRIPTION_MAX)?;
                let stanza = SourceStanza::of_description(&String::from_utf8_lossy(&text));
                let Some(stanza) = stanza.filter(|stanza| stanza.package == package) else { continue };
                let is_better = match version {
                    Some(version) => stanza.version == version,
                    None => found.as_ref().is_none_or(|(.., known)| {
                        compare_versions(&stanza.version, &known.version) == Ordering::Greater
                    }),
                };
                if is_better {
                    found = Some((path, text, stanza));
                }
            }
        }
        let Some((path, text, stanza)) = found else { return Ok(None) };
        let path = path.canonicalize().at("resolving", &path)?;
        let variant = format!("@{}", stillpoint_host::cache::key([&text[..]]));
        let name = entry_name(package, &stanza.version) + &variant;
        let entry = self.cache.entry(&EntryName::new("source", &name), |into| {
            let own = Tree::open(into)?;
            own.write(path.file_name().unwrap_or_default(), &text)?;
            let mut unpack = Command::new("dpkg-source");
            // compares the sizes and checksums of the other files with those that it states
            unpack.args(["--skip-patches", "--require-strong-checksums", "--extract"]).arg(&path).arg("tree");
            run(unpack.current_dir(into), &format!("unpacking {}", path.display())).map(drop)
        })?;
        Ok(Some(SourcePackage { variant, ..SourcePackage::read(apt, &entry)? }))
    }

    fn fetch_newest(&self, apt: &Apt, package: &str, parts: Parts) -> Result<SourcePackage, Error> {
        let (served, withheld) = self.newest_served(apt, package, parts, &[])?;
        let package = package.to_owned();
        match (served, withheld.first()) {
            (Some(source), None) => Ok(source),
            (Some(source), Some(_)) => {
                self.report(Event::VersionChosen { package, taken: source.version().to_owned(), withheld });
                Ok(source)
            }
            (None, Some(newest)) => {
                let Withheld { version, missing } = newest.clone();
                Err(Error::Withheld { package, version, missing, served: None })
            }
            (None, None) => Err(apt.no_source_version(parts, &package, "(any)", &[])),
        }
    }

    /// Finds the newest version of which all parts are served, and the newer ones that are listed but not served. Only
    /// an absent file on the server makes a version withheld; every other failure is an error.
    fn newest_served(
        &self,
        apt: &Apt,
        package: &str,
        parts: Parts,
        unwanted: &[&str],
    ) -> Result<(Option<SourcePackage>, Vec<Withheld>), Error> {
        let mut withheld = Vec::new();
        for version in apt.source_versions(package)?.into_iter().filter(|v| !unwanted.contains(&v.as_str())) {
            let known = apt.exclusions().missing(parts, package, &version).map(str::to_owned);
            let missing = match known.filter(|_| !self.holds(package, &version, parts)) {
                Some(missing) => missing,
                None => match self.fetch_version(apt, package, &version, parts) {
                    Ok(source) => return Ok((Some(source), withheld)),
                    Err(Error::Withheld { missing, .. }) => {
                        if apt.refresh()? {
                            return self.newest_served(apt, package, parts, unwanted);
                        }
                        apt.exclude_parts(parts, package, &version, &missing)?;
                        missing
                    }
                    Err(Error::NoSuchVersion { available, .. }) => available,
                    Err(other) => return Err(other),
                },
            };
            withheld.push(Withheld { version, missing });
        }
        Ok((None, withheld))
    }

    fn fetch_version(&self, apt: &Apt, package: &str, version: &str, parts: Parts) -> Result<SourcePackage, Error> {
        let entry = self.entry(&EntryName::new("source", &entry_name(package, version)), |into| {
            let description = apt.download_source(package, version, into)?;
            let mut unpack = Command::new("dpkg-source");
            unpack.args(["--skip-patches", "--no-check", "--extract"]).arg(&description).arg("tree").current_dir(into);
            run(&mut unpack, &format!("unpacking {}", description.display())).map(drop)
        })?;
        let source = SourcePackage::read(apt, &entry)?;
        if parts == Parts::SourceAndBinaries {
            self.fetch_binaries(&source)?;
        }
        Ok(source)
    }

    /// Returns true if the cache has these parts of a version.
    fn holds(&self, package: &str, version: &str, parts: Parts) -> bool {
        let name = entry_name(package, version);
        self.cache.holds("source", &name)
            && (parts == Parts::Source || self.cache.holds("binaries", &unpacked_name(package, version, "")))
    }

    /// Builds a package with a part of its series, by its own rules, in a clean root. With quiescence points, only the
    /// outputs that hold some are made, where the rules allow it. Runs once for each choice.
    ///
    /// # Errors
    /// The clean root cannot be made, a diff does not apply, or the build fails ([`Error::Command`]).
    pub fn build_package(
        &self,
        source: &SourcePackage,
        shipped: &Shipped,
        integrated: Option<&Integrated>,
    ) -> Result<BuiltPackage, Error> {
        let diffs = shipped.diffs(&source.series)?;
        let integration = integrated.map(Integrated::read).transpose()?;
        if let Some(integration) = &integration
            && let Some(outlined) = self.outline_points(source, &diffs, integration)?
        {
            return Ok(outlined);
        }
        self.build_with(source, diffs, integration.as_ref())
    }

    /// Builds a package with these diffs.
    pub(crate) fn build_with(
        &self,
        source: &SourcePackage,
        diffs: Vec<Diff>,
        integration: Option<&Integration>,
    ) -> Result<BuiltPackage, Error> {
        let mut identity = self.identity(source, &diffs);
        if let Some(integration) = integration {
            identity = format!("{identity}-{}", integration.digest());
        }
        let root = self.root_for(source)?;
        let build_path = source.build_path();
        let entry = self.entry(&EntryName::new("built", &identity), |into| {
            let tree = self.shipped_tree(source, &diffs, into)?;
            integration.map_or(Ok(()), |integration| integration.place(&tree))?;
            self.progress(&format!("building {} {}", source.name(), source.version()));
            self.run_to_links(&root, &build_path, into, &Rules { deferring: false, loaded: &[], integration })
        })?;
        Ok(BuiltPackage { shipped: diffs, ..BuiltPackage::read(&root, &build_path, &entry, identity)? })
    }

    /// Returns the clean root for the build of a package.
    pub(crate) fn root_for(&self, source: &SourcePackage) -> Result<PathBuf, Error> {
        self.progress(&format!("making a clean root for {}", source.name()));
        match self.foreign_root() {
            Some(release) => {
                let apt = Apt::open(&self.cache, Some(release))?;
                root::for_foreign(self, &apt, source)
            }
            None => root::for_package(self, &source.apt, source),
        }
    }

    /// Returns the release whose compilers build, when it is not that of the source.
    fn foreign_root(&self) -> Option<&str> {
        self.root_of.as_deref().filter(|_| self.root_of != self.release)
    }

    /// Returns an identifier of the sources that a package is built from.
    pub(crate) fn identity(&self, source: &SourcePackage, diffs: &[Diff]) -> String {
        let facts: Vec<_> = diffs.iter().map(|d| d.text.as_slice()).collect();
        let release = self.root_of.as_ref().or(self.release.as_ref()).map(|r| format!("{r}-")).unwrap_or_default();
        format!("{release}{}-{}", source.key(), stillpoint_host::cache::key(facts))
    }

    /// Makes a copy of the source with diffs of its series applied, below `into`.
    pub(crate) fn shipped_tree(&self, source: &SourcePackage, diffs: &[Diff], into: &Path) -> Result<PathBuf, Error> {
        let tree = into.join("tree");
        let mut copy = Command::new("cp");
        copy.args(["-a", "--reflink=auto", "--no-target-directory"]).arg(&source.tree).arg(&tree);
        run(&mut copy, "copying the source")?;
        for diff in diffs {
            self.apply_series_diff(&tree, diff)?;
        }
        let applied: String = diffs.iter().map(|diff| format!("{}\n", diff.name)).collect();
        let quilt = Tree::open(&tree)?;
        for (name, text) in [
            (".version", "2\n"),
            (".quilt_patches", "debian/patches\n"),
            (".quilt_series", "series\n"),
            ("applied-patches", &applied),
        ] {
            quilt.write(Path::new(QUILT).join(name), text.as_bytes())?;
        }
        Ok(tree)
    }

    fn apply_series_diff(&self, tree: &Path, diff: &Diff) -> Result<(), Error> {
        let mut file = tempfile::NamedTempFile::new().at("making", Path::new("a temporary file"))?;
        file.write_all(&diff.text).at("writing", Path::new("a temporary file"))?;
        let mut patch = Command::new("patch");
        // the rules of some packages take diffs back for a part of their work
        patch.args(["--batch", "--forward", "--backup", "--prefix"]).arg(format!("{QUILT}/{}/", diff.name));
        patch.args(["-p1", "-s", "-i"]).arg(file.path());
        patch.current_dir(tree).env("LC_ALL", "C.UTF-8");
        run(&mut patch, &format!("applying {}", diff.name)).map(drop)
    }

    /// Runs a package's rules until they have linked something: the rules of some packages compile while they install.
    pub(crate) fn run_to_links(&self, root: &Path, build_path: &Path, into: &Path, rules: &Rules) -> Result<(), Error> {
        self.run_rules(root, build_path, into, rules, "build-arch")?;
        let tree = Tree::open(&into.join("tree"))?.known_as(build_path);
        if !Recording::read(&into.join("records"))?.images().any(|image| tree.has(image)) {
            self.run_rules(root, build_path, into, rules, "binary-arch")?;
        }
        Ok(tree.remove_all(QUILT)?)
    }

    /// Returns the variables that a package's rules see; `first` stands before the other directories of programs.
    pub(crate) fn environment_of_rules(&self, first: &str, options: &str, profiles: &str) -> Vec<(String, OsString)> {
        [
            ("PATH", format!("{first}/usr/sbin:/usr/bin:/sbin:/bin")),
            ("DEB_BUILD_OPTIONS", format!("{options} parallel={}", self.jobs)),
            ("DEB_BUILD_PROFILES", profiles.to_owned()),
            ("HOME", "/nonexistent".to_owned()),
            ("LC_ALL", "C.UTF-8".to_owned()),
            // the root's own modules have none, and it must stay as it was installed
            ("PYTHONDONTWRITEBYTECODE", "1".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), OsString::from(value)))
        .to_vec()
    }

    /// Returns the view of a package's rules on the tree below `into`, with its compilers recorded, and their variables.
    pub(crate) fn recording_sandbox(
        &self,
        root: &Path,
        build_path: &Path,
        into: &Path,
        rules: &Rules,
    ) -> Result<(Sandbox, Vec<(String, OsString)>), Error> {
        let recorder = self.recorder(root, rules.deferring)?;
        let records = into.join("records");
        Tree::open(into)?.make_directory("records")?;
        if rules.deferring && !Tree::open(&records)?.has(recorder::DEFER) {
            let records = Tree::open(&records)?;
            let loaded = rules.loaded.iter().flat_map(|path| [path.as_os_str().as_encoded_bytes(), b"\0"]);
            records.write(recorder::LOADED, &loaded.collect::<Vec<_>>().concat())?;
            records.write(recorder::DEFER, b"")?;
        }
        let own = Path::new(OWN_PATH);
        let mut sandbox = Sandbox { root: Some(root.to_owned()), ..Sandbox::default() }
            .with(&into.join("tree"), build_path)
            .with(&recorder, &own.join("bin"))
            .with(&records, &own.join("records"))
            .with(&root.join("usr/bin"), &own.join("real"));
        // rules may call a compiler by its full path, or set a search path of their own
        let tools = Tree::open(root)?.known_as(Path::new("/"));
        let mut places = std::collections::BTreeSet::new();
        for name in stillpoint_host::file::list(&recorder)? {
            let place = tools.real(Path::new("usr/bin").join(&name)).unwrap_or_default();
            if place.parent() == Some(Path::new("usr/bin")) && tools.has(&place) && places.insert(place.clone()) {
                sandbox = sandbox.with(&recorder.join(&name), &Path::new("/").join(&place));
            }
        }
        let first = format!("{OWN_PATH}/bin:");
        // no target is part of another flavour: one of the installer, or one for processors of 32 bits
        let (options, profiles) = match rules.deferring {
            true => ("nocheck nodoc", "nocheck nodoc noudeb nobiarch"),
            false => ("nocheck", "nocheck noudeb nobiarch"),
        };
        let mut env = self.environment_of_rules(&first, options, profiles);
        if self.foreign_root().is_some() {
            // later levels pass options to configure that only scripts made by this release's autoconf know
            env.push(("DH_COMPAT".into(), "10".into()));
        }
        if let Some(integration) = rules.integration {
            let (outside, inside) = integration.mount();
            sandbox = sandbox.with(&outside, &inside);
            env.extend(integration.environment());
        }
        Ok((sandbox, env))
    }

    /// Runs a target of a package's rules on the tree below `into`, with its compilers recorded.
    fn run_rules(&self, root: &Path, build_path: &Path, into: &Path, rules: &Rules, target: &str) -> Result<(), Error> {
        let (sandbox, env) = self.recording_sandbox(root, build_path, into, rules)?;
        let records = into.join("records");
        let target = format!("--rules-target={target}");
        let argv = ["dpkg-buildpackage", "-B", "-d", "--no-sign", &target];
        let mut command = sandbox.command(build_path, &argv, &env);
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            // the thread that starts a process must outlive it
            scope.spawn(|| self.watch_records(&records, is_done));
            let result = run(&mut command, "building the package by its own rules").map(drop);
            drop(done);
            result
        })
    }

    /// Reports how far the rules have come, until `is_done` is closed.
    fn watch_records(&self, records: &Path, is_done: std::sync::mpsc::Receiver<()>) {
        const INTERVAL: std::time::Duration = std::time::Duration::from_secs(2);
        while is_done.recv_timeout(INTERVAL) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let names = stillpoint_host::file::list(records).unwrap_or_default();
            let count = |suffix: &str| names.iter().filter(|name| name.ends_with(suffix)).count();
            let (calls, deferred, real) = (count(".command"), count(".deferred"), count(".real"));
            self.progress(&format!(
                "running the rules: {calls} calls of compilers, {deferred} put off, {real} made up for"
            ));
        }
    }

    /// Writes the recorder under the name of every tool of the root that it stands in for.
    fn recorder(&self, root: &Path, deferring: bool) -> Result<PathBuf, Error> {
        let tools = stillpoint_host::file::list(&root.join("usr/bin"))?;
        let names = tools.iter().map(String::as_str).filter(|name| recorder::stands_in(name, deferring));
        let mut programs: Vec<(&str, &str)> =
            names.chain(deferring.then_some(recorder::REALIZE)).map(|name| (name, recorder::PROGRAM)).collect();
        // another release's autoconf may not read the package's input; its output is part of the source
        programs.extend(self.foreign_root().map(|_| ("dh_autoreconf", "#!/bin/sh\n")));
        let parts = programs.iter().flat_map(|(name, text)| [name.as_bytes(), text.as_bytes()]);
        self.entry(&EntryName::new("recorder", &stillpoint_host::cache::key(parts)), |into| {
            let own = Tree::open(into)?;
            Ok(programs.iter().try_for_each(|(name, text)| own.write_program(name, text.as_bytes()))?)
        })
    }

    /// Downloads the binary packages of a source package that can hold programs, and unpacks each into a directory of its
    /// name: several may have the same file.
    ///
    /// # Errors
    /// As [`Builder::fetch_binary`]; [`Error::NoSuchVersion`] also if the archive has no binary package of this
    /// version.
    pub fn fetch_binaries(&self, source: &SourcePackage) -> Result<PathBuf, Error> {
        self.progress(&format!("fetching the binary packages of {} {}", source.name(), source.version()));
        let unpacked = unpacked_name(source.name(), source.version(), &source.variant);
        self.entry(&EntryName::new("binaries", &unpacked), |into| {
            let packages = source.apt.programs_of(&source.stanza)?;
            let (package, version) = (source.name().to_owned(), source.version().to_owned());
            if packages.is_empty() {
                let available = "no binary package of it".into();
                return Err(Error::NoSuchVersion { package, version, available, proposed: None, source_package: None });
            }
            let together = source.apt.download_together(&packages)?;
            for binary in packages {
                let into = into.join(&binary.package);
                let unpacked = match &together {
                    Some(files) => extract(&find_with_prefix(files.path(), &binary.package)?, &into),
                    None => unpack(&source.apt, &binary.package, &binary.version, &into),
                };
                unpacked.map_err(|error| match error {
                    // part of a version of the source package
                    Error::Withheld { missing, served, .. } => {
                        Error::Withheld { package: package.clone(), version: version.clone(), missing, served }
                    }
                    other => other,
                })?;
            }
            Ok(())
        })
    }

    /// Writes an output of a built package without its debug information, as in a package.
    ///
    /// # Errors
    /// [`Error::Target`] if the build made no output of this name; otherwise `strip` fails, or a file cannot be
    /// written.
    pub fn strip(&self, built: &BuiltPackage, name: &str, into: &Path) -> Result<PathBuf, Error> {
        let inside = built.output_named(OsStr::new(name))?;
        if built.is_deferred(&inside) {
            return Err(Error::Target(format!("{name:?} has no quiescence points: it is as shipped")));
        }
        let stripped = inside.with_extension("stripped");
        let root = Some(built.root.path().to_owned());
        let sandbox = Sandbox { root, ..Sandbox::default() }.with(built.tree.path(), &built.source);
        let argv: [OsString; 6] = [
            "strip".into(),
            "--remove-section=.comment".into(),
            "--remove-section=.note".into(),
            "-o".into(),
            stripped.as_os_str().to_owned(),
            inside.into(),
        ];
        run(&mut sandbox.command(Path::new("/"), &argv, &[]), &format!("stripping {name}"))?;
        Tree::make(into)?.write_program(name, &built.tree.read(&stripped)?)?;
        built.tree.remove(&stripped)?;
        Ok(into.join(name))
    }
}

/// Returns the newer one of the archive's version and that of a directory.
fn newer(archived: Result<SourcePackage, Error>, local: Option<SourcePackage>) -> Result<SourcePackage, Error> {
    match (archived, local) {
        (Ok(archived), Some(local)) => {
            let is_newer = compare_versions(local.version(), archived.version()) == Ordering::Greater;
            Ok(if is_newer { local } else { archived })
        }
        (Err(Error::NoSuchVersion { .. } | Error::Withheld { .. }), Some(local)) => Ok(local),
        (archived, _) => archived,
    }
}

fn unpack(apt: &Apt, package: &str, version: &str, into: &Path) -> Result<(), Error> {
    let download = tempfile::tempdir().at("making", Path::new("a temporary directory"))?;
    extract(&apt.download_binary(package, version, download.path())?, into)
}

fn extract(file: &Path, into: &Path) -> Result<(), Error> {
    let mut command = Command::new("dpkg-deb");
    command.arg("--extract").arg(file).arg(into);
    run(&mut command, &format!("unpacking {}", file.display())).map(drop)
}

/// Finds the file of a package among downloaded ones.
fn find_with_prefix(directory: &Path, package: &str) -> Result<PathBuf, Error> {
    let prefix = format!("{package}_");
    let name = list(directory)?.into_iter().find(|name| name.starts_with(&prefix) && name.ends_with(".deb"));
    let absent = || Error::Malformed { what: format!("download of {package}"), why: "apt-get left no file".into() };
    Ok(directory.join(name.ok_or_else(absent)?))
}
