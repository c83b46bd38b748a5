//! Search for the output of a build that is the target, where several have its name or none has.
//!
//! Rules build a program in several flavours, or rename files when they install them. The code of the target shows which
//! one it is: units whose text differs between the outputs are compiled and looked for.

use crate::build::Target;
use crate::compile::{Compiler, Project};
use crate::package::BuiltPackage;
use crate::{Builder, Error};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use stillpoint_patch_differ::{TargetElf, place};

/// Limit of outputs.
const OUTPUTS_MAX: usize = 24;
/// Limit of units of each output that are preprocessed, the longest ones.
const TEXTS_MAX: usize = 64;
/// Limit of units of an output up to which all are preprocessed, also those that may be no part of it.
const WHOLE_MAX: usize = 160;
/// Limit of units of each output that are compiled.
const OBJECTS_MAX: usize = 4;

/// One output, with units that are part of it.
struct Candidate<'a> {
    output: &'a PathBuf,
    project: Project,
    /// Indices of commands and hashes of texts, by the base name of the unit.
    texts: BTreeMap<String, (usize, String)>,
    /// True if these are all units that may be part of it.
    is_whole: bool,
}

impl Builder<'_> {
    /// Finds the output whose code the target has; `None` if no one is better than all others. If the outputs have not
    /// the target's name (`are_named`), most of the code must be there.
    pub(crate) fn likeliest(
        &self,
        built: &BuiltPackage,
        original: &Path,
        outputs: &[PathBuf],
        are_named: bool,
        target: &Target,
    ) -> Result<Option<PathBuf>, Error> {
        if outputs.is_empty() || outputs.len() > OUTPUTS_MAX {
            return Ok(None);
        }
        let name = target.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let elf = TargetElf::parse(&target.bytes, &name).map_err(|refusal| Error::Refused(vec![refusal]))?;
        self.progress(&format!("searching {name} among {} outputs of the build", outputs.len()));
        let candidates = outputs.iter().map(|output| self.candidate(built, original, output));
        let candidates = candidates.collect::<Result<Vec<_>, _>>()?;
        let mut different = different_units(&candidates);
        if are_named && different.is_empty() {
            // outputs of which only a part was compared are not known to be the same
            let are_whole = candidates.iter().all(|candidate| candidate.is_whole);
            return Ok(outputs.first().filter(|_| are_whole).cloned());
        }
        if different.is_empty() || !are_named {
            different = candidates.iter().flat_map(|candidate| candidate.texts.keys()).collect();
        }
        let scores =
            candidates.iter().map(|candidate| Ok((self.score(candidate, &different, &elf)?, candidate.output)));
        let mut scores = scores.collect::<Result<Vec<_>, Error>>()?;
        scores.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        let is_clear = scores.get(1).is_none_or(|(second, _)| scores[0].0 > *second);
        let needed = if are_named { UNDECIDED } else { MOST };
        Ok((is_clear && scores[0].0 >= needed).then(|| scores[0].1.clone()))
    }

    fn candidate<'a>(
        &self,
        built: &BuiltPackage,
        original: &Path,
        output: &'a PathBuf,
    ) -> Result<Candidate<'a>, Error> {
        let project = built.project(Ok(std::slice::from_ref(output)), original, self.cache.clone());
        let compiler = Compiler::new(&project, &self.cache, false)?;
        let length = |unit: &String| project.read(&project.shipped, unit).map(|text| text.len());
        let are_all = project.commands.len() <= WHOLE_MAX;
        let commands = project.commands.iter().enumerate();
        let taken =
            commands.filter(|(_, (_, command))| are_all || project.account.always_takes(command.object.as_ref()));
        let mut units: Vec<_> = taken.filter_map(|(index, (unit, _))| Some((length(unit)?, index))).collect();
        units.sort_by(|one, other| other.cmp(one));
        let count = units.len();
        units.truncate(if are_all { WHOLE_MAX } else { TEXTS_MAX });
        let mut texts = BTreeMap::new();
        for (_, index) in units {
            let (unit, command) = &project.commands[index];
            // a unit that cannot be preprocessed tells nothing
            if let Ok(text) = compiler.text(&project.shipped, unit, command)? {
                let base = unit.rsplit('/').next().unwrap_or(unit).to_owned();
                texts.insert(base, (index, text.text));
            }
        }
        drop(compiler);
        let is_whole = texts.len() == count && count == project.commands.len();
        Ok(Candidate { output, project, texts, is_whole })
    }

    /// Returns the share of functions, of units that distinguish the output, that the target has.
    fn score(&self, candidate: &Candidate, different: &BTreeSet<&String>, elf: &TargetElf) -> Result<f64, Error> {
        let project = &candidate.project;
        let compiler = Compiler::new(project, &self.cache, false)?;
        let own = candidate.texts.iter().filter(|(base, _)| different.contains(base)).map(|(_, (index, _))| *index);
        let (mut found, mut all) = (0, 0);
        for (unit, command) in own.take(OBJECTS_MAX).map(|index| &project.commands[index]) {
            let shipped = compiler.shipped_object(unit, command)?;
            if let Ok(placement) = place(elf, unit, &shipped) {
                found += placement.functions_placed;
                all += placement.functions_total;
            }
        }
        Ok(if all == 0 { UNDECIDED } else { f64::from(found) / f64::from(all) })
    }
}

/// Share of the functions that an output of another name must have in the target.
const MOST: f64 = 0.9;
/// Score of an output without a unit that distinguishes it.
const UNDECIDED: f64 = 0.5;

/// Returns the base names of units that are not the same in all outputs.
fn different_units<'a>(candidates: &'a [Candidate]) -> BTreeSet<&'a String> {
    let names: BTreeSet<&String> = candidates.iter().flat_map(|candidate| candidate.texts.keys()).collect();
    let text = |candidate: &'a Candidate, name: &String| candidate.texts.get(name).map(|(_, text)| text);
    let differs = |name: &&String| {
        let first = candidates.first().and_then(|candidate| text(candidate, name));
        candidates.iter().any(|candidate| text(candidate, name) != first)
    };
    names.into_iter().filter(differs).collect()
}
