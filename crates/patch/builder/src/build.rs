//! From a request to a patch: which units changed, three objects of each, and what the differ makes of them.

use crate::compile::{Compiler, Project, parallel};
use crate::debian::Diff;
use crate::elf::Reproduced;
use crate::error::At;
use crate::includes::Includes;
use crate::preprocess::Text;
use crate::tree::{self, Tree, UNITS, Wanted};
use crate::{Builder, Error};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use stillpoint_patch_differ::{HookNames, Options, Outcome, Refusal, TargetElf, UnitInput, diff, place};
use stillpoint_patch_format::{Patch, Scope, Source, SymbolValue, Toolchain};

/// What the author states about a patch, whatever it is built from.
#[derive(Debug, Clone, Default)]
pub struct Statement {
    /// Name of the patch; the diff's name when there is one diff.
    pub name: Option<String>,
    /// One line for people; the diff's subject when there is one diff.
    pub description: Option<String>,
    /// CVE identifiers besides those that the diffs name.
    pub cves: Vec<String>,
    /// How far apart old and new code may run.
    pub scope: Option<Scope>,
    /// Functions that must be on no stack.
    pub off_stack: Vec<String>,
    /// Functions that a thread may stay in with the old version, which needs such a kernel.
    pub staying: Vec<String>,
    /// Whether constants may change where they lie, which needs a kernel with address-space generations.
    pub in_place: bool,
    /// Functions that run around the transition.
    pub hooks: HookNames,
    /// Patches that this one replaces.
    pub replaces: Vec<String>,
    /// Patches of the series that are in force already.
    pub earlier: Vec<Patch>,
    /// Sources beside the program's own: hooks, for instance.
    pub extra_units: Vec<PathBuf>,
    /// Whether to bring shadow variables along.
    pub shadow_variables: bool,
    /// Files, or directories of them, that the diffs change and that make no difference to the target: lists of tests in
    /// build files, for instance.
    pub leave_out: Vec<String>,
}

/// What was looked at on the way to a patch.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// The target's file.
    pub target: PathBuf,
    /// How a build of the whole program compares with the target; `None` when none was built.
    pub reproduced: Option<Reproduced>,
    /// Units of the program.
    pub units: usize,
    /// Units that read a changed file and were preprocessed on both sides.
    pub preprocessed: usize,
    /// Units whose preprocessed text differs in more than declarations that nothing uses: the ones that were compiled.
    pub changed: Vec<String>,
    /// Diffs that were applied.
    pub diffs: Vec<String>,
    /// Diffs that they stand on.
    pub based_on: Vec<String>,
    /// What the author should know.
    pub warnings: Vec<String>,
}

/// A patch, or nothing to patch, and what was looked at.
#[derive(Debug)]
pub struct Built {
    /// The patch; `None` when both sides are the same code and data.
    pub patch: Option<Patch>,
    /// What was looked at.
    pub report: Report,
}

/// Everything that decides one patch.
pub(crate) struct Job<'a> {
    pub(crate) project: Project,
    pub(crate) base: Vec<Diff>,
    pub(crate) diffs: Vec<Diff>,
    pub(crate) target: PathBuf,
    /// Whether `project` holds exactly the units of the target.
    pub(crate) units_known: bool,
    pub(crate) package: Option<(String, String)>,
    pub(crate) statement: &'a Statement,
    pub(crate) report: Report,
}

/// A unit whose text differs, in its three builds.
struct Unit {
    path: String,
    shipped: Vec<u8>,
    before: Vec<u8>,
    after: Vec<u8>,
}

/// Where a header changes more units than this, those that the diffs themselves touch are looked at first.
const MANY_UNITS: usize = 16;

type Command<'a> = &'a (String, crate::commands::CompileCommand);

impl Builder<'_> {
    /// Builds the patch of a job.
    pub(crate) fn build(&self, mut job: Job) -> Result<Built, Error> {
        job.report.diffs = job.diffs.iter().map(|d| d.name.clone()).collect();
        job.report.based_on = job.base.iter().map(|d| d.name.clone()).collect();
        job.report.target = job.target.clone();
        job.report.units = job.project.commands.len();
        let compiler = Compiler::new(&job.project, &self.cache, job.statement.shadow_variables)?;
        let inputs = self.recorded_inputs(&compiler);
        let (before, after) = self.trees(&job, &inputs)?;
        let mut warnings = after.warnings.clone();
        let changed = self.changed_units(&compiler, &before, &after, &inputs, &mut job.report)?;
        job.report.changed = changed.iter().map(|((path, _), _, _)| path.clone()).collect();
        job.report.changed.dedup();
        warnings.extend(left_out(&job, &before, &after, &changed));
        let bytes = fs::read(&job.target).at("reading", &job.target)?;
        let file_name = job.target.file_name().unwrap_or(job.target.as_os_str()).to_string_lossy().into_owned();
        let target = TargetElf::parse(&bytes, &file_name).map_err(|r| Error::Refused(vec![r]))?;
        check_earlier(&job.statement.earlier, &target)?;
        if job.units_known && changed.len() > MANY_UNITS {
            let (touched, _): (Vec<_>, Vec<_>) =
                changed.iter().cloned().partition(|((path, _), ..)| after.touched.contains(path));
            let touched = self.objects(&compiler, &before, &after, &touched)?;
            refuse_early(&target, &touched, job.statement.in_place)?;
        }
        let mut units = self.objects(&compiler, &before, &after, &changed)?;
        if !job.units_known {
            units = choose_variants(&target, units)?;
        }
        units.extend(self.extra_units(&compiler, &after, &changed, job.statement)?);
        job.report.warnings.extend(warnings);
        if units.is_empty() {
            return Ok(Built { patch: None, report: job.report });
        }
        self.progress(&format!("comparing {} units", units.len()));
        let compiled_by = match changed.first().map(|(command, ..)| *command).or(job.project.commands.first()) {
            Some((_, command)) => compiler.version(command)?,
            None => String::new(),
        };
        let root = job.project.root.as_deref().unwrap_or(Path::new("/"));
        let options = options(&job, compiled_by, crate::elf::imports(&bytes, root)?);
        let patch = match self.compare(&compiler, &target, units, &options)? {
            Outcome::NothingToPatch => None,
            Outcome::Patch(mut patch) => {
                job.report.warnings.extend(doubts(&patch));
                patch.warnings.extend(job.report.warnings.iter().cloned());
                Some(*patch)
            }
        };
        Ok(Built { patch, report: job.report })
    }

    /// Compares the units. When the new code refers to globals of other units that its own unit did not use before,
    /// those units lend their names: compiled as shipped, they tell where their globals are.
    fn compare(
        &self,
        compiler: &Compiler,
        target: &TargetElf,
        mut units: Vec<Unit>,
        options: &Options,
    ) -> Result<Outcome, Error> {
        loop {
            let inputs: Vec<UnitInput> = units
                .iter()
                .map(|u| UnitInput { path: &u.path, shipped: &u.shipped, before: &u.before, after: &u.after })
                .collect();
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

    /// Units, not among those already there, that define some of the names.
    fn lenders(&self, compiler: &Compiler, names: &BTreeSet<&str>, there: &[Unit]) -> Result<Vec<Unit>, Error> {
        let mentions = |(path, _): &&(String, crate::commands::CompileCommand)| {
            let text = fs::read(compiler.project.shipped.join(path)).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            !there.iter().any(|u| u.path == *path) && names.iter().any(|name| text.contains(name))
        };
        let candidates: Vec<_> = compiler.project.commands.iter().filter(mentions).collect();
        let objects = parallel(self.jobs, &candidates, |(path, command)| compiler.shipped_object(path, command));
        let mut lenders = Vec::new();
        for ((path, _), object) in candidates.into_iter().zip(objects) {
            let shipped = object?;
            if crate::elf::defines_any(&shipped, names) {
                lenders.push(Unit { path: path.clone(), shipped, before: Vec::new(), after: Vec::new() });
            }
        }
        Ok(lenders)
    }

    /// Files that each unit read in the recorded build; `None` where that is not known.
    fn recorded_inputs(&self, compiler: &Compiler) -> Vec<Option<BTreeSet<String>>> {
        compiler.project.commands.iter().map(|(_, command)| compiler.shipped_files(command)).collect()
    }

    fn trees(&self, job: &Job, inputs: &[Option<BTreeSet<String>>]) -> Result<(Tree, Tree), Error> {
        self.progress("applying the diffs");
        let read: BTreeSet<&str> = inputs.iter().flatten().flatten().map(String::as_str).collect();
        let is_input = |file: &str| read.contains(file);
        let (project, all) = (&job.project, [&job.base[..], &job.diffs[..]].concat());
        let left_out = |file: &str| job.statement.leave_out.iter().any(|place| Path::new(file).starts_with(place));
        let wanted = Wanted { is_input: &is_input, left_out: &left_out };
        let tree = |diffs: &[Diff]| tree::patched(&project.trees, &project.shipped, &project.identity, diffs, &wanted);
        Ok((tree(&job.base)?, tree(&all)?))
    }

    /// Units whose preprocessed text differs, with both texts. Only units that read a file that differs from the
    /// shipped tree, or could find a new file in place of one they read, need a look.
    fn changed_units<'p>(
        &self,
        compiler: &Compiler<'p>,
        before: &Tree,
        after: &Tree,
        inputs: &[Option<BTreeSet<String>>],
        report: &mut Report,
    ) -> Result<Vec<(Command<'p>, Text, Text)>, Error> {
        let touched = differing(&compiler.project.shipped, &before.path, &after.path, &after.touched);
        let name = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
        let names: BTreeSet<String> = touched.iter().map(|f| name(f)).collect();
        let looks = |files: &Option<BTreeSet<String>>| {
            files.as_ref().is_none_or(|files| files.iter().any(|f| names.contains(&name(f))))
        };
        let readers = compiler.project.includes.as_ref().map(|includes| includes.readers(&touched));
        let could = |command: Command| readers.as_ref().is_none_or(|r| Includes::reads(r, &command.0, &command.1));
        let commands = compiler.project.commands.iter().zip(inputs);
        let wanted = commands.filter(|(command, files)| looks(files) && could(command));
        let candidates: Vec<Command<'p>> = wanted.map(|(command, _)| command).collect();
        report.preprocessed = candidates.len();
        self.progress(&format!("preprocessing {} of {} units", candidates.len(), report.units));
        let texts = parallel(self.jobs, &candidates, |(unit, command)| {
            let failed = |side| {
                let unit = unit.clone();
                move |output| Error::Compile { unit, side, output }
            };
            let one = compiler.text(&before.path, unit, command)?.map_err(failed("before"))?;
            let two = compiler.text(&after.path, unit, command)?.map_err(failed("after"))?;
            Ok::<_, Error>((one, two))
        });
        let mut changed = Vec::new();
        for (command, texts) in candidates.into_iter().zip(texts) {
            let (one, two) = texts?;
            if one.text != two.text {
                changed.push((command, one, two));
            }
        }
        Ok(changed)
    }

    fn objects(
        &self,
        compiler: &Compiler,
        before: &Tree,
        after: &Tree,
        changed: &[(Command, Text, Text)],
    ) -> Result<Vec<Unit>, Error> {
        use crate::commands::Job::Sections;
        let done = std::sync::atomic::AtomicUsize::new(0);
        let made = parallel(self.jobs, changed, |((path, command), one, two)| {
            let unit = Unit {
                path: path.clone(),
                shipped: compiler.shipped_object(path, command)?,
                before: compiler.object(&before.path, path, command, Sections, one, "before")?,
                after: compiler.object(&after.path, path, command, Sections, two, "after")?,
            };
            let done = done.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
            self.progress(&format!("compiling {done} of {} units", changed.len()));
            Ok::<_, Error>(unit)
        });
        made.into_iter().collect()
    }

    /// Units beside the program's own.
    fn extra_units(
        &self,
        compiler: &Compiler,
        after: &Tree,
        changed: &[(Command, Text, Text)],
        statement: &Statement,
    ) -> Result<Vec<Unit>, Error> {
        let mut sources = statement.extra_units.clone();
        if sources.is_empty() && !statement.shadow_variables {
            return Ok(Vec::new());
        }
        let known = statement.earlier.iter().any(|p| exports(p).any(|name| name == "sp_shadow_get"));
        if statement.shadow_variables && !known {
            sources.push(compiler.shadow_source());
        }
        let like = changed.first().map(|(command, ..)| *command).or(compiler.project.commands.first());
        let Some((_, like)) = like else {
            return Err(Error::Target("no unit is known whose flags an extra unit could be compiled with".into()));
        };
        let mut units = Vec::new();
        for source in sources {
            let path = source.file_name().unwrap_or(source.as_os_str()).to_string_lossy().into_owned();
            let after = compiler.extra(&after.path, &source, like)?;
            units.push(Unit { path, shipped: Vec::new(), before: Vec::new(), after });
        }
        Ok(units)
    }
}

/// What one unit shows that no other unit can mend is said before hundreds are compiled.
fn refuse_early(target: &TargetElf, units: &[Unit], in_place: bool) -> Result<(), Error> {
    let inputs: Vec<UnitInput> = units
        .iter()
        .map(|u| UnitInput { path: &u.path, shipped: &u.shipped, before: &u.before, after: &u.after })
        .collect();
    let is_final = |refusal: &Refusal| {
        matches!(
            refusal,
            Refusal::DataChanged { .. }
                | Refusal::VariableChanged { .. }
                | Refusal::StaticInitialiser { .. }
                | Refusal::InitArray { .. }
                | Refusal::ClassChanged { .. }
                | Refusal::NewThreadLocal { .. }
                | Refusal::TypeLayoutChanged { .. }
        )
    };
    let mut refusals = diff(target, &inputs, &Options { in_place, ..Options::default() }).err().unwrap_or_default();
    refusals.retain(is_final);
    if refusals.is_empty() { Ok(()) } else { Err(Error::Refused(refusals)) }
}

/// Files among `touched` that are not the same in all three trees.
fn differing(shipped: &Path, before: &Path, after: &Path, touched: &BTreeSet<String>) -> BTreeSet<String> {
    let differs = |file: &&String| {
        let read = |tree: &Path| fs::read(tree.join(file)).ok();
        let after = read(after);
        read(before) != after || read(shipped) != after
    };
    touched.iter().filter(differs).cloned().collect()
}

/// Changed sources that make no difference to the target: parts of other programs, tests, code left out by `#if`.
fn left_out(job: &Job, before: &Tree, after: &Tree, changed: &[(Command, Text, Text)]) -> Vec<String> {
    let read: BTreeSet<&str> =
        changed.iter().flat_map(|(_, one, two)| one.files.iter().chain(&two.files)).map(String::as_str).collect();
    let is_unit = |file: &str| Path::new(file).extension().and_then(|e| e.to_str()).is_some_and(|e| UNITS.contains(&e));
    let differs = |file: &&String| fs::read(before.path.join(file)).ok() != fs::read(after.path.join(file)).ok();
    let target = job.target.file_name().unwrap_or_default().to_string_lossy();
    let missing = after.touched.iter().filter(differs).filter(|f| is_unit(f) && !read.contains(f.as_str()));
    let why = |file: &String| match job.project.commands.iter().any(|(unit, _)| unit == file) {
        true => format!("{file} changes only where {target} has no code of it: left out"),
        false => format!("{file} changes too and is no part of {target}: left out"),
    };
    missing.map(why).collect()
}

/// Units of which a part is not in the target. That is legal: linkers drop unused functions.
fn doubts(patch: &Patch) -> Vec<String> {
    let partly = patch.source.units.iter().filter(|u| u.functions_placed < u.functions_total);
    let tell = |u: &stillpoint_patch_format::UnitFact| {
        format!(
            "{} of the {} functions of {} are not in {} byte for byte: make sure that it was built from this source",
            u.functions_total - u.functions_placed,
            u.functions_total,
            u.path,
            patch.target.file_name
        )
    };
    partly.map(tell).collect()
}

/// Where one file is compiled in several ways (for several programs), takes the way that is in the target.
fn choose_variants(target: &TargetElf, units: Vec<Unit>) -> Result<Vec<Unit>, Error> {
    let mut best: BTreeMap<String, (u32, Unit)> = BTreeMap::new();
    let mut refusals: BTreeMap<String, Refusal> = BTreeMap::new();
    for unit in units {
        let found = match place(target, &unit.path, &unit.shipped) {
            // a unit of data alone cannot be told apart, and may be the one
            Ok(at) => (at.functions_placed * 1000).checked_div(at.functions_total).unwrap_or(1000),
            Err(refusal) => {
                refusals.insert(unit.path.clone(), refusal);
                0
            }
        };
        if best.get(&unit.path).is_none_or(|(other, _)| found > *other) {
            best.insert(unit.path.clone(), (found, unit));
        }
    }
    let mut chosen = Vec::new();
    for (found, unit) in best.into_values() {
        if found == 0 {
            if let Some(refusal) = refusals.remove(&unit.path) {
                return Err(Error::Refused(vec![refusal]));
            }
            let target = target.identity().file_name.clone();
            return Err(Error::NotInTarget { unit: unit.path, target });
        }
        chosen.push(unit);
    }
    Ok(chosen)
}

/// Names that later patches of the series may refer to.
fn exports(patch: &Patch) -> impl Iterator<Item = &str> {
    let symbols = patch.exports.iter().filter_map(|&i| patch.symbols.get(i as usize));
    symbols.filter(|s| matches!(s.value, SymbolValue::Patch { .. })).map(|s| s.name.as_str())
}

fn check_earlier(earlier: &[Patch], target: &TargetElf) -> Result<(), Error> {
    let wanted = target.identity();
    for patch in earlier {
        let fits = patch.target.build_id == wanted.build_id && patch.target.text_sha256 == wanted.text_sha256;
        if !fits {
            let (theirs, ours) = (&patch.target, wanted);
            return Err(Error::Target(format!(
                "earlier patch {} fits {} (build-id {}), this one is to fit {} (build-id {})",
                patch.name, theirs.file_name, theirs.build_id, ours.file_name, ours.build_id
            )));
        }
    }
    Ok(())
}

fn options(job: &Job, compiler: String, imports: Option<BTreeMap<String, Option<String>>>) -> Options {
    let statement = job.statement;
    let mut cves: Vec<String> =
        job.diffs.iter().flat_map(|d| d.cves.iter().cloned()).chain(statement.cves.clone()).collect();
    cves.sort();
    cves.dedup();
    let (package, version) = job.package.clone().unzip();
    let diffs = job.diffs.iter().map(Diff::fact).collect();
    Options {
        name: statement.name.clone().unwrap_or_else(|| default_name(&job.diffs)),
        description: statement.description.clone().unwrap_or_else(|| default_description(&job.diffs)),
        cves,
        replaces: statement.replaces.clone(),
        scope: statement.scope,
        off_stack: statement.off_stack.clone(),
        staying: statement.staying.clone(),
        in_place: statement.in_place,
        hooks: statement.hooks.clone(),
        based_on: job.base.iter().map(Diff::fact).collect(),
        known: statement.earlier.iter().flat_map(exports).map(str::to_owned).collect(),
        imports,
        source: Source { package, version, diffs, units: Vec::new() },
        toolchain: Toolchain { compiler, stillpoint: env!("CARGO_PKG_VERSION").to_owned() },
    }
}

/// The first diff's name as a patch may be called, and how many more there are.
fn default_name(diffs: &[Diff]) -> String {
    let first = diffs.first().map_or("patch", |d| d.short_name());
    let fits = |c: char| if c.is_ascii_alphanumeric() || "._+:~-".contains(c) { c } else { '-' };
    let mut name: String = first.chars().map(fits).take(100).collect();
    if diffs.len() > 1 {
        name += &format!("+{}", diffs.len() - 1);
    }
    name
}

fn default_description(diffs: &[Diff]) -> String {
    match diffs {
        [one] => one.subject.chars().take(500).collect(),
        _ => format!("{} diffs", diffs.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_the_patch_file() {
        let diff = |name: &str| Diff::new(name, Vec::new());
        assert_eq!(default_name(&[diff("debian/0001 fix(x).patch")]), "0001-fix-x-");
        assert_eq!(default_name(&[diff("a.diff"), diff("b.diff"), diff("c.diff")]), "a+2");
    }
}
