//! Packages whose rules run with most compilations put off ([`crate::recorder`]): a build takes half an hour, one unit
//! two seconds.
//!
//! The package's own rules run in a clean root as for a build: they configure, and make generated sources. The target as
//! a whole is not compared with a build; the byte check of every unit that a patch touches replaces this comparison.

use crate::commands::Recording;
use crate::debian::Diff;
use crate::includes::Includes;
use crate::integration::Integration;
use crate::package::{BuiltPackage, Rules, Shipped, SourcePackage};
use crate::request::find_in;
use crate::root::OWN_PATH;
use crate::sandbox::run;
use crate::tree::is_unit;
use crate::{Builder, Error, recorder};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use stillpoint_host::EntryName;
use stillpoint_host::untrusted::Tree;

/// Name, in the entry of a package, of the file that says why its rules do not run with compilations put off.
const WHY_NOT: &str = "why-not";

/// Version of the steps by which rules are followed; increase it with every change of these.
const OUTLINE_VERSION: &[u8] = b"4";

/// Limit of runs of a package's rules with compilations put off; each finds libraries that the one before could not load.
const ATTEMPTS_MAX: usize = 4;

/// Returns the placeholders that the output of failed rules names: a program that loads one says which.
pub(crate) fn loaded_images<'a>(output: &str, images: impl Iterator<Item = &'a Path>, tree: &Tree) -> Vec<PathBuf> {
    let is_of_a_path = |c: char| c.is_ascii_alphanumeric() || "/._+-~@%,".contains(c);
    let names: BTreeSet<&str> = output
        .split(|c: char| !is_of_a_path(c))
        .filter_map(|word| word.rsplit('/').next())
        .filter(|name| name.contains(".so"))
        .collect();
    let is_named = |path: &Path| {
        let own = path.file_name().unwrap_or_default().to_string_lossy();
        // by its own name, or by that of a link to it: `libz.so.1` for `libz.so.1.2.13`
        names.iter().any(|name| own.strip_prefix(*name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
    };
    let is_placeholder = |path: &Path| {
        tree.read_existing(path).ok().flatten().is_some_and(|bytes| !recorder::records_of(&bytes).is_empty())
    };
    images.filter(|path| is_named(path) && is_placeholder(path)).map(Path::to_owned).collect()
}

/// Puts sources back that the rules made and removed: their compilation was put off, and is still to be done.
fn restore_removed(tree: &Tree, build_path: &Path, records: &Path) -> Result<(), Error> {
    let copies = Tree::open(records)?;
    for (file, copy) in Recording::read(records)?.kept {
        if file.starts_with(build_path) && !tree.has(&file) {
            tree.write(&file, &copies.read(&copy)?)?;
        }
    }
    Ok(())
}

impl Builder<'_> {
    /// Runs a package's rules, and compiles only what they need themselves. A package whose rules do not work so is
    /// built. Runs once for each version.
    ///
    /// # Errors
    /// The clean root cannot be made, a diff of the series does not apply, or the build fails as well.
    pub fn outline_package(&self, source: &SourcePackage) -> Result<BuiltPackage, Error> {
        match self.outline(source, &Shipped::Full.diffs(&source.series)?, &[], None)? {
            Ok(outlined) if crate::lto::is_used(&outlined.recording) => {
                self.progress(&format!("{} needs a whole build: its links optimise", source.name()));
                let mut built = self.build_package(source, &Shipped::Full, None)?;
                built.recording.loaded = outlined.recording.loaded;
                Ok(built)
            }
            Ok(outlined) => Ok(outlined),
            Err(why) => {
                tracing::info!(%why, "the rules do not run with compilations put off");
                self.progress(&format!("{} needs a whole build: its rules read what they compile", source.name()));
                let built = self.build_package(source, &Shipped::Full, None)?;
                Ok(BuiltPackage { runs_deferred: false, ..built })
            }
        }
    }

    /// Runs a package's rules with quiescence points in its source, and makes only the outputs that hold some: all else
    /// stays as shipped. Returns `None` if the package has to be built as a whole.
    pub(crate) fn outline_points(
        &self,
        source: &SourcePackage,
        diffs: &[Diff],
        integration: &Integration,
    ) -> Result<Option<BuiltPackage>, Error> {
        // an edited header may be part of every output
        if !integration.edited().all(is_unit) {
            return Ok(None);
        }
        let outlined = self.outline(source, diffs, &[], Some(integration))?;
        Ok(outlined.ok().filter(|outlined| !crate::lto::is_used(&outlined.recording)))
    }

    /// Runs a package's rules with these diffs; `loaded` are libraries that these are known to load. The inner error is the
    /// reason why they do not run with compilations put off.
    pub(crate) fn outline(
        &self,
        source: &SourcePackage,
        diffs: &[Diff],
        loaded: &[PathBuf],
        integration: Option<&Integration>,
    ) -> Result<Result<BuiltPackage, String>, Error> {
        let recorder = stillpoint_host::cache::key([OUTLINE_VERSION, recorder::PROGRAM.as_bytes()]);
        let points = integration.map(|integration| format!("-{}", integration.digest())).unwrap_or_default();
        let identity = format!("{}{points}-outlined-{}", self.identity(source, diffs), &recorder[..8]);
        let root = self.root_for(source)?;
        let build_path = source.build_path();
        let entry = self.entry(&EntryName::new("built", &identity), |into| {
            let (own, mut loaded, mut attempts) = (Tree::open(into)?, loaded.to_vec(), 0);
            loop {
                let tree = self.shipped_tree(source, diffs, into)?;
                integration.map_or(Ok(()), |integration| integration.place(&tree))?;
                self.progress(&format!("following the rules of {} {}", source.name(), source.version()));
                let rules = Rules { deferring: true, loaded: &loaded, integration };
                let ran = self.run_to_links(&root, &build_path, into, &rules);
                let error = match ran.and_then(|()| self.make_edited(source, &root, &build_path, into, &rules)) {
                    Ok(()) => {
                        let tree = Tree::open(&tree)?.known_as(&build_path);
                        restore_removed(&tree, &build_path, &into.join("records"))?;
                        return Includes::of_tree(&tree)?.write(&own);
                    }
                    Err(error @ Error::Command { .. }) => error.to_string(),
                    Err(other) => return Err(other),
                };
                let images = Recording::read(&into.join("records"))?;
                let tree = Tree::open(&tree)?.known_as(&build_path);
                let mut more = loaded_images(&error, images.images(), &tree);
                more.retain(|path| !loaded.contains(path));
                ["tree", "records"].iter().try_for_each(|name| own.remove_all(name))?;
                attempts += 1;
                if more.is_empty() || attempts == ATTEMPTS_MAX {
                    return Ok(own.write(WHY_NOT, error.as_bytes())?);
                }
                loaded.extend(more);
                self.progress("its rules load a library that they have built: again, with this one linked at once");
            }
        })?;
        let own = Tree::open(&entry)?;
        if let Some(why) = own.read_existing(WHY_NOT)? {
            return Ok(Err(String::from_utf8_lossy(&why).into_owned()));
        }
        let includes = Some(Includes::read(&own)?);
        let outlined = BuiltPackage::read(&root, &build_path, &entry, identity)?;
        Ok(Ok(BuiltPackage { shipped: diffs.to_vec(), includes, ..outlined }))
    }

    /// Makes the outputs real that have units with edits, and links them with the archive's own libraries.
    fn make_edited(
        &self,
        source: &SourcePackage,
        root: &Path,
        build_path: &Path,
        into: &Path,
        rules: &Rules,
    ) -> Result<(), Error> {
        let Some(integration) = rules.integration else { return Ok(()) };
        let outlined = BuiltPackage::read(root, build_path, into, String::new())?;
        let has_edits =
            |file: &Path| integration.edited().any(|unit| file.strip_prefix(build_path) == Ok(unit.as_ref()));
        let images = outlined.recording.images_with(has_edits);
        let edited: Vec<PathBuf> = outlined.outputs().into_iter().filter(|output| images.contains(output)).collect();
        self.progress(&format!("making {} of its results, which have quiescence points", edited.len()));
        self.use_shipped_libraries(source, &outlined, &edited, into)?;
        let (sandbox, env) = self.recording_sandbox(root, build_path, into, rules)?;
        // the recorder makes real what a reader of results gets
        let reader = Path::new(OWN_PATH).join("bin/size").into_os_string();
        let argv: Vec<OsString> = std::iter::once(reader).chain(edited.into_iter().map(PathBuf::into)).collect();
        run(&mut sandbox.command(build_path, &argv, &env), "making results with quiescence points").map(drop)
    }

    /// Puts the archive's libraries in place of those that links of the package put off, except for `edited` ones.
    /// Without packages of the archive, these are made as well.
    fn use_shipped_libraries(
        &self,
        source: &SourcePackage,
        outlined: &BuiltPackage,
        edited: &[PathBuf],
        into: &Path,
    ) -> Result<(), Error> {
        let binaries = match self.fetch_binaries(source) {
            Ok(binaries) => binaries,
            Err(Error::Withheld { .. } | Error::NoSuchVersion { .. }) => return Ok(()),
            Err(other) => return Err(other),
        };
        let records = Tree::open(&into.join("records"))?;
        for (record, output) in outlined.recording.by_record.iter().filter(|(_, output)| !edited.contains(output)) {
            let name = outlined.recording.links.get(output).and_then(|link| link.soname());
            if let Some(Ok(shipped)) = name.map(|name| find_in(&binaries, Path::new(name))) {
                records.write_program(format!("{record}.real"), &shipped.bytes)?;
            }
        }
        Ok(())
    }
}
