//! Units that lend a patch the addresses of their globals: new code may use what its own unit did not use before.

use crate::build::Unit;
use crate::compile::{Compiler, parallel};
use crate::{Builder, Error, lto};
use std::collections::BTreeSet;
use stillpoint_patch_differ::{Options, Outcome, Refusal, TargetElf, UnitInput, diff};

impl Builder<'_> {
    /// Compares the units. The new code may refer to globals of other units that its own unit did not use before. Those
    /// units are then compiled as shipped: their objects show the addresses of these globals.
    pub(crate) fn compare(
        &self,
        compiler: &Compiler,
        target: &TargetElf,
        mut units: Vec<Unit>,
        options: &Options,
    ) -> Result<Outcome, Error> {
        loop {
            let inputs: Vec<UnitInput> = units.iter().map(Unit::input).collect();
            let refusals = match diff(target, &inputs, options) {
                Ok(outcome) => return Ok(outcome),
                Err(refusals) => refusals,
            };
            let names: BTreeSet<&str> = refusals
                .iter()
                .filter_map(|r| match r {
                    Refusal::UnresolvedSymbol { name, .. } => Some(name.as_str()),
                    _ => None,
                })
                .collect();
            let lenders = self.lenders(compiler, &names, &units)?;
            if lenders.is_empty() {
                return Err(Error::Refused(refusals));
            }
            units.extend(lenders);
        }
    }

    /// Finds units, other than those in `there`, that define some of the names: first those with the name in their text,
    /// then those with a beginning of the name, as macros join names from parts, and at last all.
    fn lenders(&self, compiler: &Compiler, names: &BTreeSet<&str>, there: &[Unit]) -> Result<Vec<Unit>, Error> {
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let is_open = |(path, _): &&(String, crate::commands::CompileCommand)| !there.iter().any(|u| u.path == *path);
        let open: Vec<_> = compiler.project.commands.iter().filter(is_open).collect();
        let texts: Vec<String> = open
            .iter()
            .map(|(path, _)| compiler.project.read(&compiler.project.shipped, path).unwrap_or_default())
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .collect();
        let rank =
            |text: &String| names.iter().map(|name| name.len() - beginning(name, text)).min().unwrap_or(usize::MAX);
        let mut ranked: Vec<(usize, _)> = texts.iter().map(rank).zip(open).collect();
        ranked.sort_by_key(|(rank, _)| *rank);
        for candidates in ranked.chunk_by(|(one, _), (other, _)| one == other) {
            self.progress(&format!("searching {} units for the definition of a symbol", candidates.len()));
            let objects =
                parallel(self.jobs, candidates, |(_, (path, command))| compiler.shipped_object(path, command));
            let mut lenders = Vec::new();
            for ((_, (path, _)), object) in candidates.iter().zip(objects) {
                let shipped = object?;
                if crate::elf::defines_any(&shipped, names) && !lto::is_intermediate(&shipped) {
                    lenders.push(Unit {
                        path: path.clone(),
                        shipped,
                        before: Vec::new(),
                        after: Vec::new(),
                        sources: None,
                    });
                }
            }
            if !lenders.is_empty() {
                return Ok(lenders);
            }
        }
        Ok(Vec::new())
    }
}

/// Returns the length of the longest beginning of a name, of whole words, that a text contains.
fn beginning(name: &str, text: &str) -> usize {
    let ends = std::iter::once(name.len()).chain(name.rmatch_indices('_').map(|(at, _)| at));
    ends.filter(|end| *end > 0).find(|end| text.contains(&name[..*end])).unwrap_or(0)
}
