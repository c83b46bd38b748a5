//! Diffs of build files and of inputs of generators: the package's rules run again with them, with compilations put off.
//!
//! A diff of a makefile mostly adds a test; one of a grammar makes other sources. Neither is visible in the text of the
//! diff. So the builder compares what the rules make on both sides: the commands of the target's units, and every file
//! that a compiler reads.

use crate::commands::{CompileCommand, is_linked};
use crate::debian::Diff;
use crate::link::Input;
use crate::package::{BuiltPackage, SourcePackage};
use crate::tree::{MadeFiles, is_source};
use crate::{Builder, Error, recorder};
use std::collections::BTreeSet;
use std::path::PathBuf;
use stillpoint_host::untrusted::Tree;

type UnitCommand = (String, CompileCommand);

/// The package with some diffs, after its rules ran.
#[derive(Debug)]
pub(crate) struct Regenerated {
    /// The tree, known by the path of the build.
    pub(crate) tree: Tree,
    /// Commands of the target's units.
    pub(crate) commands: Vec<UnitCommand>,
    /// Link of the target.
    pub(crate) link: TargetLink,
}

/// The parts of a target's link that are no code: a running program keeps those it was linked with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TargetLink {
    options: BTreeSet<String>,
    libraries: BTreeSet<String>,
    /// Scripts of the linker, and their texts.
    scripts: BTreeSet<(String, Vec<u8>)>,
}

/// Both sides of a patch, each after the package's rules ran.
#[derive(Debug)]
pub(crate) struct RegeneratedSides {
    /// `None` where the side before has only the shipped diffs.
    pub(crate) before: Option<Regenerated>,
    pub(crate) after: Regenerated,
    /// Link of the target before.
    pub(crate) shipped_link: TargetLink,
}

impl Builder<'_> {
    /// Runs a package's rules with the diffs of both sides. `outputs` are those of the build of which each may be the target.
    pub(crate) fn regenerate_sides(
        &self,
        source: &SourcePackage,
        shipped: &[Diff],
        base: &[Diff],
        diffs: &[Diff],
        outputs: Result<&[PathBuf], String>,
        built: &BuiltPackage,
    ) -> Result<RegeneratedSides, Error> {
        let shipped_link = TargetLink::of(built, outputs.clone());
        let before = [shipped, base].concat();
        let after = [&before[..], diffs].concat();
        let before = match base {
            [] => None,
            _ => Some(self.regenerate(source, &before, outputs.clone(), built)?),
        };
        let after = self.regenerate(source, &after, outputs, built)?;
        Ok(RegeneratedSides { before, after, shipped_link })
    }

    /// Runs a package's rules with these diffs; as a whole build where they do not run with compilations put off.
    fn regenerate(
        &self,
        source: &SourcePackage,
        diffs: &[Diff],
        outputs: Result<&[PathBuf], String>,
        built: &BuiltPackage,
    ) -> Result<Regenerated, Error> {
        let has_links = |made: &BuiltPackage| {
            let is_linked = |output| made.recording.links.contains_key(output);
            Ok(outputs.as_ref().is_ok_and(|outputs| !outputs.is_empty() && outputs.iter().all(is_linked)))
        };
        let outlined = match built.runs_deferred {
            true => self.outline(source, diffs, &built.recording.loaded, None, &has_links)?.ok(),
            false => None,
        };
        let made = outlined.map_or_else(|| self.build_with(source, diffs.to_vec(), None), Ok)?;
        let BuiltPackage { tree, .. } = &made;
        let tree = Tree::open(tree.path())?.known_as(tree.own_name());
        let link = TargetLink::of(&made, outputs.clone());
        let commands = made.project(outputs, source.tree(), self.cache.clone()).commands;
        Ok(Regenerated { tree, commands, link })
    }
}

impl TargetLink {
    /// Joins the links of outputs.
    pub(crate) fn of(built: &BuiltPackage, outputs: Result<&[PathBuf], String>) -> Self {
        let mut found = TargetLink::default();
        let links: Vec<_> =
            outputs.iter().flat_map(|all| all.iter()).filter_map(|output| built.recording.links.get(output)).collect();
        found.options = links.iter().flat_map(|link| &link.options).cloned().collect();
        for input in links.iter().flat_map(|link| &link.inputs) {
            match input {
                Input::Library { name, .. } => drop(found.libraries.insert(name.clone())),
                Input::File { path, .. } if !is_linked(path) => {
                    let is_script =
                        |text: &Vec<u8>| str::from_utf8(text).is_ok() && recorder::records_of(text).is_empty();
                    let text = built.tree.read(path).ok().filter(is_script);
                    found.scripts.extend(text.map(|text| (path.display().to_string(), text)));
                }
                _ => {}
            }
        }
        found
    }

    /// Returns the differences, for people; empty if there are none.
    pub(crate) fn differences(&self, other: &TargetLink) -> Vec<String> {
        let lists = [(&self.options, &other.options), (&self.libraries, &other.libraries)];
        let words = lists.iter().flat_map(|(one, two)| one.symmetric_difference(two)).cloned();
        words.chain(self.scripts.symmetric_difference(&other.scripts).map(|(path, _)| path.clone())).collect()
    }
}

impl RegeneratedSides {
    /// Returns the parts of the target's link that the patch's own diffs change, for people.
    pub(crate) fn link_differences(&self) -> Vec<String> {
        self.before.as_ref().map_or(&self.shipped_link, |before| &before.link).differences(&self.after.link)
    }
}

impl Regenerated {
    /// Returns the files, of those that compilers read, that differ from the shipped tree and are not in `known`.
    pub(crate) fn made_files(
        &self,
        shipped: &Tree,
        is_input: &dyn Fn(&str) -> bool,
        known: &BTreeSet<&String>,
    ) -> Result<MadeFiles, Error> {
        let files = |tree: &Tree| -> Result<BTreeSet<String>, Error> {
            let entries = tree.entries()?;
            let files = entries.iter().filter(|entry| entry.is_file());
            let names = files.map(|entry| entry.name.to_string_lossy().into_owned());
            Ok(names.filter(|name| (is_source(name) || is_input(name)) && !known.contains(name)).collect())
        };
        let (old, new) = (files(shipped)?, files(&self.tree)?);
        let mut found = MadeFiles::new();
        for file in old.union(&new) {
            let text = self.tree.read_existing(file)?;
            if text != shipped.read_existing(file)? {
                found.insert(file.clone(), text);
            }
        }
        Ok(found)
    }

    /// Returns the command of a unit on this side, if it is another one than as shipped.
    pub(crate) fn other_command(&self, (unit, command): &UnitCommand) -> Option<&CompileCommand> {
        let here = self.commands.iter().filter(|(path, there)| path == unit && there.object == command.object);
        let mut here = here.map(|(_, there)| there).peekable();
        let first = *here.peek()?;
        (!here.any(|there| there.identity() == command.identity())).then_some(first)
    }

    /// Returns the units that are new on this side.
    pub(crate) fn new_units<'a>(&'a self, shipped: &'a [UnitCommand]) -> impl Iterator<Item = &'a UnitCommand> {
        let known: BTreeSet<(&String, Option<&PathBuf>)> =
            shipped.iter().map(|(path, command)| (path, command.object.as_ref())).collect();
        self.commands.iter().filter(move |(path, command)| !known.contains(&(path, command.object.as_ref())))
    }
}
