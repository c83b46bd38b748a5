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
use crate::wanted_program::Wanted;
use crate::{Builder, Error, recorder};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_host::EntryName;
use stillpoint_host::untrusted::Tree;

/// Name, in the entry of a package, of the file that says why its rules do not run with compilations put off.
const WHY_NOT: &str = "why-not";
/// Name, in the entry of a package, of the file that says at what its rules ended after they had linked something.
const ENDED: &str = "ended";

/// Version of the steps by which rules are followed; increase it with every change of these.
const OUTLINE_VERSION: &[u8] = b"7";

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

/// A package after its rules ran with compilations put off.
enum Followed {
    /// To their end.
    Whole(BuiltPackage),
    /// To a step that failed, after they had linked something; with the output of this step.
    Part(BuiltPackage, String),
    /// They do not run so; with the reason.
    Not(String),
}

impl Builder<'_> {
    /// Runs a package's rules, and compiles only what they need themselves. A package whose rules do not work so is
    /// built. Runs once for each version.
    ///
    /// # Errors
    /// The clean root cannot be made, a diff of the series does not apply, or the build fails as well.
    pub(crate) fn outline_package(&self, source: &SourcePackage, wanted: &Wanted) -> Result<BuiltPackage, Error> {
        let is_enough = |outlined: &BuiltPackage| Ok(!self.linked(source, wanted, outlined)?.is_empty());
        match self.outline(source, &Shipped::Full.diffs(&source.series)?, &[], None, &is_enough)? {
            Ok(outlined) => {
                let link_put_off = crate::lto::is_used(&outlined.recording);
                Ok(BuiltPackage { link_put_off, ..outlined })
            }
            Err(why) => {
                tracing::info!(%why, "the rules do not run with compilations put off");
                self.progress(&format!("{} needs a whole build: its rules read what they compile", source.name()));
                let built = self.build_package(source, &Shipped::Full, None)?;
                Ok(BuiltPackage { runs_deferred: false, ..built })
            }
        }
    }

    /// Makes the wanted program of a package real whose links were put off: alone, or with the whole package where that
    /// fails.
    pub(crate) fn make_program(
        &self,
        source: &SourcePackage,
        wanted: &Wanted,
        outlined: &BuiltPackage,
    ) -> Result<BuiltPackage, Error> {
        if let Some(made) = self.make_wanted(source, wanted, outlined)? {
            return Ok(made);
        }
        self.progress(&format!("{} needs a whole build: its links optimise", source.name()));
        let mut built = self.build_package(source, &Shipped::Full, None)?;
        built.recording.loaded = outlined.recording.loaded.clone();
        Ok(built)
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
        let outlined = self.outline(source, diffs, &[], Some(integration), &|_| Ok(false))?;
        Ok(outlined.ok().filter(|outlined| !crate::lto::is_used(&outlined.recording)))
    }

    /// Runs a package's rules with these diffs; `loaded` are libraries that these are known to load. Rules that fail at a
    /// later step, as they run or load what was put off, do not run again if what they have linked `is_enough`. The inner
    /// error is the reason why they do not run with compilations put off.
    pub(crate) fn outline(
        &self,
        source: &SourcePackage,
        diffs: &[Diff],
        loaded: &[PathBuf],
        integration: Option<&Integration>,
        is_enough: &dyn Fn(&BuiltPackage) -> Result<bool, Error>,
    ) -> Result<Result<BuiltPackage, String>, Error> {
        if integration.is_some() {
            return match self.follow(source, diffs, loaded, integration)? {
                Followed::Whole(outlined) => Ok(Ok(outlined)),
                Followed::Part(_, why) | Followed::Not(why) => Ok(Err(why)),
            };
        }
        let (part, why) = match self.follow_once(source, diffs, loaded)? {
            Followed::Whole(outlined) => return Ok(Ok(outlined)),
            Followed::Part(part, why) => (part, why),
            Followed::Not(why) => return Ok(Err(why)),
        };
        if is_enough(&part)? {
            return Ok(Ok(part));
        }
        let mut more = loaded_images(&why, part.recording.images(), &part.tree);
        more.retain(|path| !loaded.contains(path));
        if more.is_empty() {
            return Ok(Err(why));
        }
        self.progress("its rules load a library that they have built: again, with this one linked at once");
        match self.follow(source, diffs, &[loaded, &more].concat(), None)? {
            Followed::Whole(outlined) => Ok(Ok(outlined)),
            Followed::Part(_, why) | Followed::Not(why) => Ok(Err(why)),
        }
    }

    fn outline_identity(&self, source: &SourcePackage, diffs: &[Diff], kind: &str) -> String {
        let recorder = stillpoint_host::cache::key([OUTLINE_VERSION, recorder::PROGRAM.as_bytes()]);
        format!("{}-{kind}-{}", self.identity(source, diffs), &recorder[..8])
    }

    /// Runs a package's rules once, and keeps what they recorded also if they fail after a link.
    fn follow_once(&self, source: &SourcePackage, diffs: &[Diff], loaded: &[PathBuf]) -> Result<Followed, Error> {
        let identity = self.outline_identity(source, diffs, "outlined");
        let root = self.root_for(source)?;
        let build_path = source.build_path();
        let entry = self.entry(&EntryName::new("built", &identity), |into| {
            let own = Tree::open(into)?;
            let why = match self.run_deferred(source, diffs, &root, into, loaded, None)? {
                Ok(()) => return Ok(()),
                Err(why) => why,
            };
            if Recording::read(&into.join("records"))?.images().next().is_some() {
                self.keep_followed(&build_path, into)?;
                return Ok(own.write(ENDED, why.as_bytes())?);
            }
            ["tree", "records"].iter().try_for_each(|name| own.remove_all(name))?;
            Ok(own.write(WHY_NOT, why.as_bytes())?)
        })?;
        self.followed(&root, &build_path, &entry, identity, diffs)
    }

    /// Runs a package's rules, and repeats that with the libraries linked at once that these could not load.
    fn follow(
        &self,
        source: &SourcePackage,
        diffs: &[Diff],
        loaded: &[PathBuf],
        integration: Option<&Integration>,
    ) -> Result<Followed, Error> {
        let points = integration.map(|integration| format!("{}-", integration.digest())).unwrap_or_default();
        let identity = self.outline_identity(source, diffs, &format!("{points}loaded"));
        let root = self.root_for(source)?;
        let build_path = source.build_path();
        let entry = self.entry(&EntryName::new("built", &identity), |into| {
            let (own, mut loaded, mut attempts) = (Tree::open(into)?, loaded.to_vec(), 0);
            loop {
                let error = match self.run_deferred(source, diffs, &root, into, &loaded, integration)? {
                    Ok(()) => return Ok(()),
                    Err(error) => error,
                };
                let images = Recording::read(&into.join("records"))?;
                let tree = Tree::open(&into.join("tree"))?.known_as(&build_path);
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
        self.followed(&root, &build_path, &entry, identity, diffs)
    }

    /// Runs a package's rules below `into`; the inner error is the output of a step that failed.
    fn run_deferred(
        &self,
        source: &SourcePackage,
        diffs: &[Diff],
        root: &Path,
        into: &Path,
        loaded: &[PathBuf],
        integration: Option<&Integration>,
    ) -> Result<Result<(), String>, Error> {
        let build_path = source.build_path();
        let tree = self.shipped_tree(source, diffs, into)?;
        integration.map_or(Ok(()), |integration| integration.place(&tree))?;
        self.progress(&format!("following the rules of {} {}", source.name(), source.version()));
        let rules = Rules { deferring: true, loaded, integration };
        let ran = self.run_to_links(root, &build_path, into, &rules);
        match ran.and_then(|()| self.make_edited(source, root, &build_path, into, &rules)) {
            Ok(()) => self.keep_followed(&build_path, into).map(Ok),
            Err(error @ Error::Command { .. }) => Ok(Err(error.to_string())),
            Err(other) => Err(other),
        }
    }

    /// Completes the tree in which rules ran, and keeps the includes of its sources.
    fn keep_followed(&self, build_path: &Path, into: &Path) -> Result<(), Error> {
        let tree = Tree::open(&into.join("tree"))?.known_as(build_path);
        restore_removed(&tree, build_path, &into.join("records"))?;
        Includes::of_tree(&tree)?.write(&Tree::open(into)?)
    }

    fn followed(
        &self,
        root: &Path,
        build_path: &Path,
        entry: &Path,
        identity: String,
        diffs: &[Diff],
    ) -> Result<Followed, Error> {
        let own = Tree::open(entry)?;
        let text = |name: &str| -> Result<Option<String>, Error> {
            Ok(own.read_existing(name)?.map(|text| String::from_utf8_lossy(&text).into_owned()))
        };
        if let Some(why) = text(WHY_NOT)? {
            return Ok(Followed::Not(why));
        }
        let includes = Some(Includes::read(&own)?);
        let outlined = BuiltPackage::read(root, build_path, entry, identity)?;
        let outlined = BuiltPackage { shipped: diffs.to_vec(), includes, ..outlined };
        Ok(match text(ENDED)? {
            Some(why) => Followed::Part(outlined, why),
            None => Followed::Whole(outlined),
        })
    }

    /// Makes the wanted program of an outlined package real, with all that its link takes, for programs that are
    /// optimised when they are linked. Returns `None` if it is not known or cannot be made so.
    fn make_wanted(
        &self,
        source: &SourcePackage,
        wanted: &Wanted,
        outlined: &BuiltPackage,
    ) -> Result<Option<BuiltPackage>, Error> {
        let outputs = self.linked(source, wanted, outlined)?;
        if outputs.is_empty() {
            return Ok(None);
        }
        let (root, build_path) = (self.root_for(source)?, source.build_path());
        let names = outputs.iter().map(|output| output.as_os_str().as_encoded_bytes());
        let identity = format!("{}-made-{}", outlined.identity, stillpoint_host::cache::key(names));
        let from = outlined.tree().parent().unwrap_or(Path::new("/")).to_owned();
        let entry = self.entry(&EntryName::new("built", &identity), |into| {
            let own = Tree::open(into)?;
            for name in ["tree", "records"] {
                let mut copy = Command::new("cp");
                copy.args(["-a", "--reflink=auto", "--no-target-directory"]).arg(from.join(name)).arg(into.join(name));
                run(&mut copy, "copying the package")?;
            }
            outlined.includes.as_ref().map_or(Ok(()), |includes| includes.write(&own))?;
            let rules = Rules { deferring: true, loaded: &[], integration: None };
            match self.make_real(source, outlined, &outputs, (&root, &build_path, into), &rules) {
                Err(error @ Error::Command { .. }) => {
                    ["tree", "records"].iter().try_for_each(|name| own.remove_all(name))?;
                    Ok(own.write(WHY_NOT, error.to_string().as_bytes())?)
                }
                other => other,
            }
        })?;
        match self.followed(&root, &build_path, &entry, identity, &outlined.shipped)? {
            Followed::Whole(made) | Followed::Part(made, _) => Ok(Some(made)),
            Followed::Not(why) => {
                tracing::info!(%why, "the program cannot be made alone");
                Ok(None)
            }
        }
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
        self.make_real(source, &outlined, &edited, (root, build_path, into), rules)
    }

    /// Makes outputs real, and links them with the archive's own libraries.
    fn make_real(
        &self,
        source: &SourcePackage,
        outlined: &BuiltPackage,
        outputs: &[PathBuf],
        (root, build_path, into): (&Path, &Path, &Path),
        rules: &Rules,
    ) -> Result<(), Error> {
        self.progress(&format!("making {} of the results of {}", outputs.len(), source.name()));
        self.use_shipped_libraries(source, outlined, outputs, into)?;
        let (sandbox, env) = self.recording_sandbox(root, build_path, into, rules)?;
        // the recorder makes real what a reader of results gets
        let reader = Path::new(OWN_PATH).join("bin/size").into_os_string();
        let argv: Vec<OsString> = std::iter::once(reader).chain(outputs.iter().cloned().map(PathBuf::into)).collect();
        run(&mut sandbox.command(build_path, &argv, &env), "making results of the package").map(drop)
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
