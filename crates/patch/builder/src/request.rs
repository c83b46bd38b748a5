//! Sources of a patch: a Debian source package, or a source directory of the user.

use crate::account::Account;
use crate::build::{Built, Job, Report, Target};
use crate::commands::{self, CompileCommand};
use crate::compile::Project;
use crate::debian::{Diff, Series};
use crate::package::{BuiltPackage, Shipped, SourcePackage};
use crate::sandbox::{Sandbox, run};
use crate::statement::Statement;
use crate::tree::is_unit;
use crate::verdict::Bounded;
use crate::version_difference::cves_gained;
use crate::wanted_program::Wanted;
use crate::{Builder, Cache, Error, Integrated, Parts, Reproduced, elf, recorder};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use stillpoint_host::At;
use stillpoint_host::file::read_regular;
use stillpoint_host::trusted::Directory;
use stillpoint_host::untrusted::{FILE_MAX, Tree};

/// Source from which the running binary was built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShippedAs {
    /// This version of the source package, with a part of its series.
    Series(Shipped),
    /// Another (older) version of the package, as the archive built it.
    Version(String),
}

/// A patch for a program of a Debian package.
#[derive(Debug, Clone)]
pub struct DebianRequest {
    /// Source package.
    pub package: String,
    /// Version of the source package; the newest when `None`.
    pub version: Option<String>,
    /// Diffs of its series that make the patch. When empty and `shipped` is another version: all diffs that this
    /// version has and that one has not.
    pub quilt: Vec<String>,
    /// Further diffs, which are no part of the series; applied last.
    pub diffs: Vec<PathBuf>,
    /// Diffs that earlier patches already made active: diffs of the series by name, others by their file.
    pub on_top_of: Vec<String>,
    /// Source from which the running binary was built.
    pub shipped: ShippedAs,
    /// Quiescence points of the running binary; such a binary is a build of this builder, never the archive's own.
    pub integrated: Option<Integrated>,
    /// The running binary: an ELF file, or the name of a program of the package.
    pub binary: Option<PathBuf>,
    /// Other names of the running binary, under one of which the package's rules may link it.
    pub names: Vec<String>,
    /// True if diffs that cannot be in a patch may be left out and reported, where another version gives the diffs.
    pub is_partial: bool,
}

impl DebianRequest {
    /// Returns the required parts of the running binary's version: its binary packages, unless the binary is a file or
    /// is built.
    fn parts(&self) -> Parts {
        let built = self.integrated.is_some() || matches!(&self.shipped, ShippedAs::Series(s) if *s != Shipped::Full);
        let file = self.binary.as_ref().is_some_and(|path| path.is_file());
        if built || file { Parts::Source } else { Parts::SourceAndBinaries }
    }
}

/// Source and target of patches that differ in their diffs only.
struct SidesOfTarget<'a> {
    /// Source of the running binary.
    source: &'a SourcePackage,
    /// Diffs that it was built with.
    shipped: &'a [Diff],
    /// Diffs that earlier patches made active.
    base: &'a [Diff],
    built: &'a BuiltPackage,
    target: Target,
    /// Outputs of which each may be the target, or the reason why none is known.
    output: Result<Vec<PathBuf>, String>,
    /// Source package and version of the patch.
    package: (String, String),
    is_integrated: bool,
    /// Number of diffs of the request.
    diffs: usize,
    statement: &'a Statement,
    report: Report,
}

/// A patch for a program that the user built.
#[derive(Debug, Clone)]
pub struct SourceRequest {
    /// The source, as it was when the program was built.
    pub directory: PathBuf,
    /// The compile commands of the program.
    pub compile_commands: PathBuf,
    /// Diffs that make the patch.
    pub diffs: Vec<PathBuf>,
    /// Diffs that are already active.
    pub on_top_of: Vec<PathBuf>,
    /// The program or library that is patched.
    pub target: PathBuf,
    /// Path prefixes of the units to examine, relative to `directory`; all units when empty.
    pub unit_filter: Vec<String>,
}

impl Builder<'_> {
    /// Builds a patch for a program of a Debian package.
    ///
    /// # Errors
    /// The package cannot be fetched or built, the target is not clear ([`Error::Target`]), a diff does not apply, or
    /// the change is refused ([`Error::is_refusal`]).
    pub fn build_debian(&self, request: &DebianRequest, statement: &Statement) -> Result<Built, Error> {
        let (package, parts) = (&request.package, request.parts());
        let source_parts = if matches!(request.shipped, ShippedAs::Version(_)) { Parts::Source } else { parts };
        let source = self.fetch_source(package, request.version.as_deref(), source_parts)?;
        let (shipped_source, shipped) = match &request.shipped {
            ShippedAs::Series(shipped) => (None, shipped.clone()),
            ShippedAs::Version(version) => {
                let shipped = self.fetch_source_besides(package, Some(version), parts, Some(source.version()))?;
                (Some(shipped), Shipped::Full)
            }
        };
        let is_other_version = shipped_source.is_some();
        let shipped_source = shipped_source.as_ref().unwrap_or(&source);
        let shipped_diffs = shipped.diffs(&shipped_source.series)?;
        let (files, names): (Vec<_>, Vec<_>) =
            request.on_top_of.iter().cloned().partition(|n| n.contains('/') && Path::new(n).is_file());
        let mut base = source.series.select(&names)?;
        base.extend(read_diffs(files.iter().map(Path::new))?);
        let mut diffs = match &request.quilt[..] {
            [] if request.diffs.is_empty() && is_other_version => {
                let between = self.diffs_between(shipped_source, &shipped_diffs, &source)?;
                between.into_iter().filter(|diff| base.iter().all(|active| active.text != diff.text)).collect()
            }
            [] if request.diffs.is_empty() => missing(&source.series, &shipped_diffs, &base),
            names => source.series.select(names)?,
        };
        diffs.extend(read_diffs(request.diffs.iter().map(PathBuf::as_path))?);
        for diff in base.iter().chain(&diffs) {
            if shipped_diffs.iter().any(|s| s.text == diff.text) {
                return Err(Error::AlreadyShipped { package: source.series.of.clone(), diff: diff.name.clone() });
            }
        }
        let wanted = Wanted::of(request)?;
        let built = match shipped {
            Shipped::Full if request.integrated.is_none() => self.outline_package(shipped_source, &wanted)?,
            _ => self.build_package(shipped_source, &shipped, request.integrated.as_ref())?,
        };
        let patch = |built: &BuiltPackage| {
            let (target, output) = self.find_target(request, shipped_source, &shipped, built, &diffs)?;
            let mut report = Report::default();
            if let Ok(output) = &output {
                // a placeholder is no result of the link
                let made = built.tree.read_existing(&output[0])?.filter(|made| recorder::records_of(made).is_empty());
                report.reproduced = made.map(|made| elf::compare(&made, &target.bytes));
            }
            let sides = SidesOfTarget {
                source: shipped_source,
                shipped: &shipped_diffs,
                base: &base,
                built,
                target,
                output,
                package: (source.name().to_owned(), source.version().to_owned()),
                is_integrated: request.integrated.is_some(),
                diffs: diffs.len(),
                statement,
                report,
            };
            match request.is_partial {
                true => self.build_partial(&diffs, |diffs| self.build_diffs(&sides, diffs)),
                false => self.build_diffs(&sides, &diffs),
            }
        };
        let mut built = match patch(&built) {
            // only now is it known that the link is needed
            Err(Error::LinkPutOff(_)) => patch(&self.make_program(shipped_source, &wanted, &built)?)?,
            other => other?,
        };
        let is_complete = is_other_version && request.quilt.is_empty() && built.report.left_out.is_empty();
        if let Some(patch) = built.patch.as_mut().filter(|_| is_complete) {
            let named = cves_gained(shipped_source, &source);
            // the running version has these, though a later entry of the changelog names them
            let is_there = |cve: &String| shipped_diffs.iter().any(|diff| diff.cves.contains(cve));
            patch.cves.extend(named.into_iter().filter(|cve| !is_there(cve)));
            patch.cves.sort();
            patch.cves.dedup();
        }
        Ok(built)
    }

    /// Builds the patch of some diffs for the target.
    fn build_diffs(&self, sides: &SidesOfTarget, diffs: &[Diff]) -> Result<Built, Error> {
        let SidesOfTarget { source, built, target, output, .. } = sides;
        let outputs = output.as_deref().map_err(Clone::clone);
        let job = |regenerated| Job {
            project: built.project(outputs.clone(), source.tree(), self.cache.clone()),
            base: sides.base.to_vec(),
            diffs: diffs.to_vec(),
            is_part: diffs.len() < sides.diffs,
            target: target.clone(),
            unit_filter: &[],
            package: Some(sides.package.clone()),
            statement: sides.statement,
            regenerated,
            report: sides.report.clone(),
        };
        match self.build(job(None)) {
            Err(why @ (Error::ChangesBuild { .. } | Error::Unaccounted { .. })) if !sides.is_integrated => {
                tracing::info!(%why, "the rules run with the diffs");
            }
            other => return other,
        }
        self.progress(&format!("running the rules of {} with the diffs: they change more than sources", source.name()));
        let regenerated = self.regenerate_sides(source, sides.shipped, sides.base, diffs, outputs.clone(), built)?;
        self.build(job(Some(&regenerated)))
    }

    /// Finds the ELF file to patch and the matching outputs of the build, or the reason why these are not known.
    fn find_target(
        &self,
        request: &DebianRequest,
        source: &SourcePackage,
        shipped: &Shipped,
        built: &BuiltPackage,
        diffs: &[Diff],
    ) -> Result<(Target, Result<Vec<PathBuf>, String>), Error> {
        let outputs = built.outputs();
        let requested = match &request.binary {
            Some(path) => path.clone(),
            None => PathBuf::from(only_program(built, &outputs, diffs)?),
        };
        let target = if requested.is_file() {
            Target::read(&requested)?
        } else if requested.components().count() > 1 && requested.is_absolute() {
            return Err(Error::Target(format!("{} is not there", requested.display())));
        } else if *shipped == Shipped::Full && request.integrated.is_none() {
            find_in(&self.fetch_binaries(source)?, &requested)?
        } else {
            let output = built.output_named(requested.file_name().unwrap_or_default())?;
            let path = built.tree().join(output.strip_prefix(&built.source).unwrap_or(&output));
            Target { path, bytes: built.tree.read(&output)? }
        };
        let names: Vec<&Path> = [requested.as_path()].into_iter().chain(request.names.iter().map(Path::new)).collect();
        let output = self.output_of(&target, &names, built, source.tree())?;
        Ok((target, output))
    }

    /// Finds the output that is the target, which may have any of some names, or the outputs of which each may be it. The
    /// inner error is the reason why none is known.
    pub(crate) fn output_of(
        &self,
        target: &Target,
        names: &[&Path],
        built: &BuiltPackage,
        original: &Path,
    ) -> Result<Result<Vec<PathBuf>, String>, Error> {
        let (found, is_named) = match Outputs::of(target, names, built)? {
            Outputs::Same(inside) => return Ok(Ok(vec![inside])),
            Outputs::Named(found) => (found, true),
            Outputs::Others(found) => (found, false),
        };
        let objects = |inside: &PathBuf| built.account(inside).objects;
        if let (true, Some(first)) = (is_named, found.first())
            && found.iter().all(|other| objects(other) == objects(first))
        {
            return Ok(Ok(vec![first.clone()]));
        }
        if let Some(inside) = self.likeliest(built, original, &found, is_named, target)? {
            return Ok(Ok(vec![inside]));
        }
        if is_named && !found.is_empty() {
            return Ok(Ok(found));
        }
        let name = names.first().map_or(target.path.as_path(), |name| name);
        Ok(Err(format!("the build step of the package's rules linked no {}", name.display())))
    }

    /// Copies a program of the archive's own binary packages, unchanged, into a directory.
    ///
    /// # Errors
    /// As [`Builder::fetch_binaries`]; [`Error::Target`] if no binary package contains the program.
    pub fn take_binary(&self, source: &SourcePackage, name: &str, into: &Path) -> Result<PathBuf, Error> {
        let found = find_in(&self.fetch_binaries(source)?, Path::new(name))?;
        let name = Path::new(name).file_name().unwrap_or_default();
        Tree::make(into)?.write_program(name, &found.bytes)?;
        Ok(into.join(name))
    }

    /// Builds a patch for a program that the user built.
    ///
    /// # Errors
    /// A file cannot be read, no command compiles the source, no mount can be made here, a diff does not apply, or the
    /// change is refused ([`Error::is_refusal`]).
    pub fn build_source(&self, request: &SourceRequest, statement: &Statement) -> Result<Built, Error> {
        let directory = request.directory.canonicalize().at("resolving", &request.directory)?;
        let base = read_diffs(request.on_top_of.iter().map(PathBuf::as_path))?;
        let diffs = read_diffs(request.diffs.iter().map(PathBuf::as_path))?;
        let text = read_regular(&request.compile_commands, FILE_MAX)?;
        let all = commands::parse_json(&text, &request.compile_commands)?;
        let commands = units_below(&directory, &all, &request.unit_filter);
        if commands.is_empty() {
            let why = format!("no command compiles a file below {}", directory.display());
            return Err(Error::Malformed { what: request.compile_commands.display().to_string(), why });
        }
        can_mount()?;
        let target = Target::read(&request.target)?;
        let linked = elf::linked_sources(&target.bytes);
        let mut report = Report::default();
        let account = account_of_source(&directory, &all, &linked, &mut report)?;
        // not cached: the user may change the source at any time
        let scratch = scratch_near(&directory)?;
        let project = Project {
            root: None,
            source: directory.clone(),
            shipped: directory,
            original: None,
            identity: String::new(),
            trees: Cache::at(scratch.path())?,
            commands,
            other_units: BTreeSet::new(),
            account,
            built: false,
            includes: None,
            link: crate::lto::link_of(&all, &target.path),
            link_put_off: false,
        };
        let unit_filter = &request.unit_filter[..];
        self.build(Job {
            project,
            base,
            diffs,
            is_part: false,
            target,
            unit_filter,
            package: None,
            statement,
            regenerated: None,
            report,
        })
    }
}

fn read_diffs<'a>(paths: impl Iterator<Item = &'a Path>) -> Result<Vec<Diff>, Error> {
    paths.map(Diff::read).collect()
}

fn units_below(directory: &Path, all: &[CompileCommand], filter: &[String]) -> Vec<(String, CompileCommand)> {
    let mut units = Vec::new();
    for command in all {
        let Ok(unit) = command.file.strip_prefix(directory) else { continue };
        let unit = unit.to_string_lossy().into_owned();
        if is_unit(&unit) && (filter.is_empty() || filter.iter().any(|f| unit.starts_with(f.as_str()))) {
            units.push((unit, command.clone()));
        }
    }
    units
}

/// Makes the account of a target that the user linked, from its symbol table.
fn account_of_source(
    directory: &Path,
    commands: &[CompileCommand],
    linked: &[String],
    report: &mut Report,
) -> Result<Account, Error> {
    if linked.is_empty() {
        return Ok(Account::unknown("the target has no symbol table that would name its sources".to_owned()));
    }
    let units = unit_names(directory)?;
    Ok(Account::by_symbols(commands, linked, |name| units.contains(name)).unwrap_or_else(|missing| {
        let names = Bounded(&missing);
        let warning = "the target has objects that no compile command makes; what changes in headers may concern them";
        report.warnings.push(format!("{warning}: {names}"));
        Account::unknown(format!("no compile command makes the target's objects of {names}"))
    }))
}

/// Makes a directory for trees in the same file system as a source directory, which saves copies. No other user may be
/// able to exchange it: a directory of the user is not used when root runs this.
fn scratch_near(directory: &Path) -> Result<tempfile::TempDir, Error> {
    let device = |path: &Path| path.metadata().map(|found| found.dev()).ok();
    let is_near = |above: &&Path| device(above) == device(directory) && Directory::open(above).is_ok();
    let near = directory.ancestors().skip(1).filter(is_near).find_map(|above| tempfile::tempdir_in(above).ok());
    Ok(near.map_or_else(tempfile::tempdir, Ok).at("making", Path::new("a temporary directory"))?)
}

/// Returns the base names of all units in a directory.
fn unit_names(directory: &Path) -> Result<BTreeSet<String>, Error> {
    let entries = Tree::open(directory)?.entries()?;
    let files = entries.iter().filter(|entry| !entry.is_directory()).filter_map(|entry| entry.name.file_name());
    Ok(files.map(|name| name.to_string_lossy().into_owned()).filter(|name| is_unit(name)).collect())
}

/// Checks for private mount namespaces: the other tree is mounted at the path of the first one while it is compiled.
fn can_mount() -> Result<(), Error> {
    let here = std::env::temp_dir();
    let sandbox = Sandbox::default().with(&here, &here);
    run(&mut sandbox.command(Path::new("/"), &["/bin/true"], &[]), "making a private mount namespace")
        .map(drop)
        .map_err(|e| Error::Environment(format!("{e}; run as root, or allow user namespaces")))
}

/// Returns diffs of a series that neither the binary nor earlier patches have.
fn missing(series: &Series, shipped: &[Diff], base: &[Diff]) -> Vec<Diff> {
    let there = |d: &Diff| shipped.iter().chain(base).any(|s| s.text == d.text);
    series.diffs.iter().filter(|d| !there(d)).cloned().collect()
}

/// Outputs of the build that may be the target.
pub(crate) enum Outputs {
    /// The content shows it.
    Same(PathBuf),
    /// These have the name of the target.
    Named(Vec<PathBuf>),
    /// None has its name: rules may rename files when they install them.
    Others(Vec<PathBuf>),
}

impl Outputs {
    /// Finds the target by its content if the build has made it, else by its name.
    pub(crate) fn of(target: &Target, names: &[&Path], built: &BuiltPackage) -> Result<Self, Error> {
        let outputs = built.outputs();
        let id = elf::build_id(&target.bytes);
        let (mut by_content, mut by_soname) = (None, Vec::new());
        for output in &outputs {
            let Some(made) = built.tree.read_existing(output)? else { continue };
            if id.is_some() && elf::build_id(&made) == id {
                return Ok(Outputs::Same(output.clone()));
            } else if by_content.is_none() && elf::compare(&made, &target.bytes) != Reproduced::Differs {
                by_content = Some(output.clone());
            } else if elf::have_one_soname(&made, &target.bytes) || built.links_as(output, &target.bytes) {
                by_soname.push(output.clone());
            }
        }
        if let Some(inside) = by_content {
            return Ok(Outputs::Same(inside));
        }
        let named =
            |name: Option<&OsStr>| outputs.iter().filter(|o| o.file_name() == name).cloned().collect::<Vec<_>>();
        let by_name = names.iter().map(|name| named(name.file_name()));
        let likely = [by_soname].into_iter().chain(by_name).chain([named(target.path.file_name())]);
        if let Some(found) = likely.into_iter().find(|found| !found.is_empty()) {
            return Ok(Outputs::Named(found));
        }
        for name in names.iter().filter_map(|name| name.file_name()).chain(target.path.file_name()) {
            let found = built.installed_as(name)?;
            if !found.is_empty() {
                return Ok(Outputs::Named(found));
            }
        }
        Ok(Outputs::Others(outputs))
    }
}

/// Finds the only linked program that has all units that the diffs change directly.
fn only_program(built: &BuiltPackage, outputs: &[PathBuf], diffs: &[Diff]) -> Result<String, Error> {
    let files: Vec<String> = diffs.iter().flat_map(|d| crate::diff::split(&d.text)).map(|f| f.path).collect();
    let wanted: Vec<&String> = files.iter().filter(|f| built.compiles(f)).collect();
    let has_all = |inside: &Path| {
        let units = built.units_of(inside);
        wanted.iter().all(|w| units.contains(*w))
    };
    let mut names: Vec<String> = outputs
        .iter()
        .filter(|output| has_all(output))
        .filter_map(|output| Some(output.file_name()?.to_str()?.to_owned()))
        .collect();
    names.dedup();
    match &names[..] {
        [one] => Ok(one.clone()),
        [] => Err(Error::Target("no program of the package has all units that change; say which with --target".into())),
        _ => Err(Error::Target(format!("it could be {}; say which with --target", names.join(", ")))),
    }
}

/// Finds a file by its path or its name in unpacked packages, each of which has a directory of its name; the path may
/// begin with that name. Follows symbolic links inside of a package, and to files of the other ones. Of several files of
/// a name without directories, the one that a shell or the dynamic linker finds is meant.
pub(crate) fn find_in(root: &Path, program: &Path) -> Result<Target, Error> {
    let mut packages = Vec::new();
    for package in stillpoint_host::file::list(root)? {
        let tree = Tree::open(&root.join(&package))?.known_as(Path::new("/"));
        packages.push((package, tree));
    }
    let mut found: BTreeMap<PathBuf, Target> = BTreeMap::new();
    let mut searched = BTreeSet::new();
    for (package, tree) in &packages {
        let relative = program.strip_prefix("/").unwrap_or(program);
        let inside = relative.strip_prefix(package).ok().filter(|inside| !inside.as_os_str().is_empty());
        let relative = inside.unwrap_or(relative);
        for entry in tree.entries()?.iter().filter(|entry| !entry.is_directory() && entry.name.ends_with(relative)) {
            let Ok(name) = tree.real(&entry.name) else { continue };
            let others = packages.iter().map(|(_, other)| other);
            let holder = [tree].into_iter().chain(others).find(|tree| tree.has(&name));
            if let Some(holder) = holder.filter(|holder| elf::is_loadable(holder, &name)) {
                let target = Target { path: holder.path().join(&name), bytes: holder.read(&name)? };
                if relative.components().count() == 1 && is_searched(&entry.name) {
                    searched.insert(target.path.clone());
                }
                found.insert(target.path.clone(), target);
            }
        }
    }
    let is_meant = |target: &Target| searched.is_empty() || searched.contains(&target.path);
    let mut found: Vec<Target> = found.into_values().filter(is_meant).collect();
    // several packages may have the same file
    found.dedup_by(|one, other| one.bytes == other.bytes);
    match &mut found[..] {
        [_] => Ok(found.remove(0)),
        [] => Err(Error::Target(format!("the packages have no program {}", program.display()))),
        more => {
            let names: Vec<String> =
                more.iter().map(|t| t.path.strip_prefix(root).unwrap_or(&t.path).display().to_string()).collect();
            Err(Error::Target(format!("{} is {}; say which", program.display(), names.join(" or "))))
        }
    }
}

/// Returns true for a file in a directory where shells look for commands or the dynamic linker for libraries.
fn is_searched(file: &Path) -> bool {
    let directory = file.parent().unwrap_or(Path::new(""));
    let directory = directory.strip_prefix("usr").unwrap_or(directory);
    let mut names = directory.iter().filter_map(|name| name.to_str());
    match (names.next(), names.next(), names.next()) {
        (Some("bin" | "sbin" | "lib" | "lib64"), None, _) => true,
        (Some("lib"), Some(triplet), None) => triplet.contains("-linux-gnu"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    #[test]
    fn trees_are_not_made_where_another_user_can_exchange_them() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("home/source");
        fs::create_dir_all(&source).unwrap();
        let home = dir.path().join("home");
        fs::set_permissions(&home, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(scratch_near(&source).unwrap().path().parent(), Some(home.as_path()));
        if rustix::process::geteuid().is_root() {
            chown(&home, Some(4711), None).unwrap();
            assert_eq!(scratch_near(&source).unwrap().path().parent(), Some(dir.path()));
        }
    }

    #[test]
    fn a_program_is_found_through_links_inside_of_the_packages_only() {
        let dir = tempfile::tempdir().unwrap();
        let packages = dir.path().join("packages");
        let root = packages.join("one");
        fs::create_dir_all(root.join("usr/sbin")).unwrap();
        fs::copy("/bin/true", root.join("usr/sbin/served-1")).unwrap();
        symlink("/usr/sbin/served-1", root.join("usr/sbin/served")).unwrap();
        symlink(dir.path().join("outside"), root.join("usr/sbin/led-out")).unwrap();
        symlink("../../../../outside", root.join("usr/sbin/led-up")).unwrap();
        fs::copy("/bin/true", dir.path().join("outside")).unwrap();
        let found = find_in(&packages, Path::new("served")).unwrap();
        assert_eq!(found.path, root.join("usr/sbin/served-1"));
        fs::copy("/bin/false", root.join("usr/sbin/one")).unwrap();
        assert_eq!(find_in(&packages, Path::new("one")).unwrap().path, root.join("usr/sbin/one"), "as its package");
        symlink("served", root.join("usr/sbin/twice-linked")).unwrap();
        fs::create_dir_all(packages.join("links/usr/bin")).unwrap();
        symlink("../sbin/served-1", packages.join("links/usr/bin/linked")).unwrap();
        for name in ["linked", "twice-linked"] {
            assert_eq!(find_in(&packages, Path::new(name)).unwrap().path, root.join("usr/sbin/served-1"), "{name}");
        }
        for name in ["led-out", "led-up"] {
            assert!(find_in(&packages, Path::new(name)).is_err(), "{name}");
        }
        // one that no shell finds
        fs::create_dir_all(root.join("usr/lib/one/debug")).unwrap();
        fs::copy("/bin/false", root.join("usr/lib/one/debug/served-1")).unwrap();
        for (name, path) in [("served-1", "usr/sbin/served-1"), ("debug/served-1", "usr/lib/one/debug/served-1")] {
            assert_eq!(find_in(&packages, Path::new(name)).unwrap().path, root.join(path));
        }
        // another package with the same file, and one with another file of that name
        let other = packages.join("other/usr/sbin");
        fs::create_dir_all(&other).unwrap();
        fs::copy("/bin/true", other.join("served-1")).unwrap();
        assert!(find_in(&packages, Path::new("/usr/sbin/served-1")).is_ok());
        fs::copy("/bin/false", other.join("served-1")).unwrap();
        let error = find_in(&packages, Path::new("served-1")).unwrap_err().to_string();
        assert!(error.contains("one/usr/sbin/served-1 or other/usr/sbin/served-1"), "{error}");
        assert_eq!(find_in(&packages, Path::new("other/usr/sbin/served-1")).unwrap().path, other.join("served-1"));
    }
}
