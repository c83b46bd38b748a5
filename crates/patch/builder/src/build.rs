//! Path from a request to a patch: finds the units that changed, makes three objects of each, and passes them to the
//! differ.

use crate::aliases::Search;
use crate::compile::{Compiler, Project, parallel};
use crate::debian::Diff;
use crate::elf::{self, Reproduced};
use crate::evidence::{Evidence, Readers};
use crate::includes::Includes;
use crate::keywords::Keyword;
use crate::preprocess::Text;
use crate::regenerate::{Regenerated, RegeneratedSides};
use crate::shadow_members::{Proposal, Rewriter};
use crate::statement::{Statement, check_earlier, exports, options};
use crate::tree::{self, MadeFiles, Parts, Selection, Tree, is_source, is_unit};
use crate::verdict::{Bounded, ChangedFile, Verdict};
use crate::{Builder, Error, keywords, lto};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use stillpoint_host::At;
use stillpoint_host::file::read_regular;
use stillpoint_host::untrusted::{FILE_MAX, Tree as Files};
use stillpoint_patch_differ::{Options, Outcome, Refusal, SourceObjects, TargetElf, UnitInput, diff, place};
use stillpoint_patch_format::Patch;

/// Record of the files and units that the builder examined for a patch.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// The target's file.
    pub target: PathBuf,
    /// Comparison of a build of the whole program with the target; `None` when none was built.
    pub reproduced: Option<Reproduced>,
    /// Number of units of the program.
    pub units: usize,
    /// Number of units that read a changed file and were preprocessed on both sides.
    pub preprocessed: usize,
    /// Units that were compiled: their preprocessed text differs in more than declarations that nothing uses.
    pub changed: Vec<String>,
    /// Diffs that were applied.
    pub diffs: Vec<String>,
    /// Diffs that these are based on.
    pub based_on: Vec<String>,
    /// Files that the diffs change, each with its relation to the target.
    pub files: Vec<ChangedFile>,
    /// Diffs between the versions that cannot be in the patch.
    pub left_out: Vec<LeftOut>,
    /// Warnings for the author.
    pub warnings: Vec<String>,
}

/// Diff that cannot be in a patch, and is left out of it.
#[derive(Debug, Clone, serde::Serialize)]
pub struct LeftOut {
    /// The diff.
    pub diff: String,
    /// CVE identifiers that it names.
    pub cves: Vec<String>,
    /// Kind of the first reason, for programs.
    pub code: String,
    /// Reason.
    pub reason: String,
    /// Options with which it may be in the patch.
    #[serde(skip)]
    pub proposal: Option<Proposal>,
}

/// A patch or the result "nothing to patch", with the report.
#[derive(Debug)]
pub struct Built {
    /// The patch; `None` when both sides are the same code and data.
    pub patch: Option<Patch>,
    /// Record of the files and units that were examined.
    pub report: Report,
}

/// The ELF file to patch, read once.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
}

impl Target {
    /// Reads a file that the user names.
    pub(crate) fn read(path: &Path) -> Result<Self, Error> {
        let path = path.canonicalize().at("resolving", path)?;
        let bytes = read_regular(&path, FILE_MAX)?;
        Ok(Target { path, bytes })
    }
}

/// Everything that decides one patch.
pub(crate) struct Job<'a> {
    pub(crate) project: Project,
    pub(crate) base: Vec<Diff>,
    pub(crate) diffs: Vec<Diff>,
    /// True if these are not all diffs of the request: others may gain the members that its author stated.
    pub(crate) is_part: bool,
    pub(crate) target: Target,
    /// Path prefixes of the units to examine; all units when empty.
    pub(crate) unit_filter: &'a [String],
    pub(crate) package: Option<(String, String)>,
    pub(crate) statement: &'a Statement,
    /// Both sides after the package's rules ran with the diffs, if they did.
    pub(crate) regenerated: Option<&'a RegeneratedSides>,
    pub(crate) report: Report,
}

/// A unit with different text, in its three builds.
pub(crate) struct Unit {
    pub(crate) path: String,
    pub(crate) shipped: Vec<u8>,
    pub(crate) before: Vec<u8>,
    pub(crate) after: Vec<u8>,
    /// Source units of a program that was optimised when it was linked.
    pub(crate) sources: Option<Vec<SourceObjects>>,
}

impl Unit {
    /// Returns the objects as the differ takes them.
    pub(crate) fn input(&self) -> UnitInput<'_> {
        let sources = self.sources.as_deref();
        UnitInput { path: &self.path, shipped: &self.shipped, before: &self.before, after: &self.after, sources }
    }
}

/// Limit of changed units above which the units that the diffs themselves touch are examined first.
const MANY_UNITS: usize = 16;

/// Limit of units that are compiled to check that the target was made from this source.
const PROBES_MAX: usize = 8;

type Command<'a> = &'a (String, crate::commands::CompileCommand);
/// A unit that may read a changed file, and its texts before and after.
type ComparedUnit<'a> = (Command<'a>, Text, Text);

/// The sources before and after, and the files that differ.
struct Sides {
    before: Tree,
    after: Tree,
    /// Other names of changed files, and the file of each.
    names: BTreeMap<String, String>,
    /// Changed files from which the build may have made other files.
    derived: BTreeMap<String, BTreeSet<String>>,
    /// Files that the patch's own diffs change and that no compiler reads.
    others: BTreeSet<String>,
    /// Files that the patch's own diffs change and that are left out on request.
    left_out: BTreeSet<String>,
    /// Files that the package's rules make otherwise with the patch's own diffs.
    made: BTreeSet<String>,
}

/// The units that may read a changed file.
struct Units<'a> {
    /// Units with different text.
    changed: Vec<ComparedUnit<'a>>,
    /// Units with the same text.
    same: Vec<ComparedUnit<'a>>,
    /// Units with different text, of which the target's link took nothing.
    unlinked: Vec<ComparedUnit<'a>>,
}

impl Builder<'_> {
    /// Builds the patch of a job.
    pub(crate) fn build(&self, job: Job) -> Result<Built, Error> {
        let link = job.regenerated.map(|sides| sides.link_differences()).unwrap_or_default();
        let names = job.diffs.iter().map(|diff| diff.name.as_str()).collect::<Vec<_>>().join(", ");
        let keyword = keyword_read(&job)?;
        let mut built = self.build_code(job)?;
        if let Some((keyword, by)) = keyword {
            return Err(Error::ChangesBuild { file: keyword.described(&by), name: keyword.diff });
        }
        if !link.is_empty() {
            let Some(patch) = &mut built.patch else {
                return Err(Error::ChangesBuild {
                    name: names,
                    file: format!("the target's link ({})", Bounded(&link)),
                });
            };
            let warning = format!("the target's link changes too, which is no part of the patch: {}", Bounded(&link));
            patch.warnings.push(warning.clone());
            built.report.warnings.push(warning);
        }
        Ok(built)
    }

    fn build_code(&self, mut job: Job) -> Result<Built, Error> {
        job.report.diffs = job.diffs.iter().map(|d| d.name.clone()).collect();
        job.report.target = job.target.path.clone();
        job.report.units = job.project.commands.len();
        let compiler = Compiler::new(&job.project, &self.cache, job.statement.shadow_variables)?;
        let inputs = self.recorded_inputs(&compiler);
        let sides = self.sides(&job, &inputs)?;
        job.report.based_on = self.needed(&job, &compiler, &sides, &inputs)?;
        let path = &job.target.path;
        let file_name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let target = TargetElf::parse(&job.target.bytes, &file_name).map_err(|r| Error::Refused(vec![r]))?;
        check_earlier(&job.statement.earlier, &target)?;
        let compared = self.texts(&compiler, &sides, &inputs, job.regenerated, &mut job.report)?;
        let found = self.sorted(&compiler, &target, compared)?;
        job.report.files = self.judge(&job, &compiler, &target, (&sides, &inputs), &found)?;
        let (before, after, all) = (&sides.before, &sides.after, &found.changed);
        job.report.changed = all.iter().map(|((path, _), _, _)| path.clone()).collect();
        job.report.changed.dedup();
        job.report.warnings.extend(after.warnings.iter().cloned().chain(left_out(&job.report.files, &file_name)));
        let (whole, changed) = &by_kind(&compiler, all)?;
        if job.project.account.exact && changed.len() > MANY_UNITS {
            let (touched, _): (Vec<_>, Vec<_>) =
                changed.iter().cloned().partition(|((path, _), ..)| after.touched.contains(path));
            let rewriter = Rewriter::new(&compiler, &job.statement.shadow_members, job.is_part);
            let touched = self.objects(&rewriter, before, after, &touched, job.regenerated)?;
            refuse_early(&target, &touched, job.statement)?;
        }
        let rewriter = Rewriter::new(&compiler, &job.statement.shadow_members, job.is_part);
        let mut units = self.objects(&rewriter, before, after, changed, job.regenerated)?;
        job.report.warnings.extend(rewriter.finish()?);
        if !job.project.account.exact {
            units = choose_variants(&target, units, job.project.account.is_joined)?;
        }
        if !whole.is_empty() {
            if job.project.link_put_off {
                return Err(Error::LinkPutOff(file_name));
            }
            units.push(self.link_time_unit(&compiler, before, after, whole, job.regenerated)?);
        }
        units.extend(self.extra_units(&compiler, after, all, job.statement)?);
        units.extend(self.new_units(&compiler, after, job.regenerated)?);
        if units.is_empty() {
            return Ok(Built { patch: None, report: job.report });
        }
        self.progress(&format!("comparing {} units", units.len()));
        let compiled_by = match all.first().map(|(command, ..)| *command).or(job.project.commands.first()) {
            Some((_, command)) => compiler.version(command)?,
            None => String::new(),
        };
        let root = Files::open(job.project.root.as_deref().unwrap_or(Path::new("/")))?.known_as(Path::new("/"));
        let options = options(&job, compiled_by, crate::elf::imports(&job.target.bytes, &root)?);
        match self.compare(&compiler, &target, units, &options)? {
            Outcome::NothingToPatch => {
                same_code(&mut job.report.files);
                Ok(Built { patch: None, report: job.report })
            }
            Outcome::Patch(mut patch) => {
                job.report.warnings.extend(uncertainties(&patch));
                patch.warnings.extend(job.report.warnings.iter().cloned());
                Ok(Built { patch: Some(*patch), report: job.report })
            }
        }
    }

    /// Returns the files that each unit read in the recorded build; `None` where that is not known.
    fn recorded_inputs(&self, compiler: &Compiler) -> Vec<Option<BTreeSet<String>>> {
        compiler.project.commands.iter().map(|(_, command)| compiler.shipped_files(command)).collect()
    }

    /// Returns the names of those base diffs that may be a part of the target: others need not be active.
    fn needed(
        &self,
        job: &Job,
        compiler: &Compiler,
        sides: &Sides,
        inputs: &[Option<BTreeSet<String>>],
    ) -> Result<Vec<String>, Error> {
        let mut needed = Vec::new();
        for diff in &job.base {
            let files: BTreeSet<String> = crate::diff::split(&diff.text).into_iter().map(|file| file.path).collect();
            // the build may have made other files of these
            let is_sure = files.iter().all(|file| is_source(file) && !sides.derived.contains_key(file));
            let copies = sides.names.iter().filter(|(_, of)| files.contains(*of)).map(|(name, _)| name.clone());
            let names: BTreeSet<String> = files.iter().cloned().chain(copies).collect();
            let is_known = is_sure && !files.is_empty() && job.project.account.is_complete();
            if !is_known || may_read(compiler, &names, inputs)?.contains(&true) {
                needed.push(diff.name.clone());
            }
        }
        Ok(needed)
    }

    fn sides(&self, job: &Job, inputs: &[Option<BTreeSet<String>>]) -> Result<Sides, Error> {
        self.progress("applying the diffs");
        let read: BTreeSet<&str> = inputs.iter().flatten().flatten().map(String::as_str).collect();
        let is_input = |file: &str| read.contains(file);
        let (project, all) = (&job.project, [&job.base[..], &job.diffs[..]].concat());
        let left_out = |file: &str| job.statement.leave_out.iter().any(|place| Path::new(file).starts_with(place));
        let regenerated = job.regenerated.is_some();
        let selection = Selection { is_input: &is_input, left_out: &left_out, regenerated };
        let (base, own, all) =
            (Parts::of(&job.base, &selection)?, Parts::of(&job.diffs, &selection)?, Parts::of(&all, &selection)?);
        let has = |file: &str| project.original.as_ref().is_some_and(|original| original.has(file));
        let is_original: Option<&dyn Fn(&str) -> bool> = match project.original {
            Some(_) => Some(&has),
            None => None,
        };
        let shipped = project.open(&project.shipped)?;
        let aliases = Search { tree: &shipped, is_original, touched: &all.touched }.run()?;
        let known: BTreeSet<&String> =
            all.touched.iter().chain(aliases.copies.keys()).chain(aliases.links.keys()).collect();
        let made_by = |side: Option<&Regenerated>| match side {
            Some(side) => side.made_files(&shipped, &is_input, &known),
            None => Ok(MadeFiles::new()),
        };
        let before_made = made_by(job.regenerated.and_then(|sides| sides.before.as_ref()))?;
        let after_made = made_by(job.regenerated.map(|sides| &sides.after))?;
        let tree = |parts: &Parts, made: &MadeFiles| {
            tree::patched(&project.trees, &shipped, &project.identity, parts, &aliases.copies, made)
        };
        let (before, after) = (tree(&base, &before_made)?, tree(&all, &after_made)?);
        let made = after_made.into_keys().collect();
        let mut names = after.copies.clone();
        names.extend(aliases.links);
        let (others, left_out) = (own.others, own.left_out);
        Ok(Sides { before, after, names, derived: aliases.derived, others, left_out, made })
    }

    /// Makes both preprocessed texts of each unit that may read a changed file. Only units that read a file that
    /// differs from the shipped tree, or could find a new file in place of one they read, are preprocessed.
    fn texts<'p>(
        &self,
        compiler: &Compiler<'p>,
        sides: &Sides,
        inputs: &[Option<BTreeSet<String>>],
        regenerated: Option<&RegeneratedSides>,
        report: &mut Report,
    ) -> Result<Vec<ComparedUnit<'p>>, Error> {
        let (before, after) = (&sides.before, &sides.after);
        let mut touched = differing(compiler.project, before, after);
        let aliases = sides.names.iter().filter(|(_, file)| touched.contains(*file)).map(|(name, _)| name.clone());
        let aliases: Vec<String> = aliases.collect();
        touched.extend(aliases);
        let may_read = may_read(compiler, &touched, inputs)?;
        let commands = compiler.project.commands.iter().zip(may_read);
        let is_other = |command: Command| regenerated.is_some_and(|sides| sides.after.other_command(command).is_some());
        let wanted = commands.filter(|(command, may_read)| *may_read || is_other(command));
        let candidates: Vec<Command<'p>> = wanted.map(|(command, _)| command).collect();
        report.preprocessed = candidates.len();
        self.progress(&format!("preprocessing {} of {} units", candidates.len(), report.units));
        let texts = parallel(self.jobs, &candidates, |one_of @ (unit, command)| {
            let failed = |side| {
                let unit = unit.clone();
                move |output| Error::Compile { unit, side, output }
            };
            let one = compiler.text(&before.path, unit, command)?.map_err(failed("before"))?;
            let two = compiler.text(&after.path, unit, command_after(regenerated, one_of))?.map_err(failed("after"))?;
            Ok::<_, Error>((one, two))
        });
        let together = |(command, texts): (Command<'p>, Result<(Text, Text), Error>)| {
            let (one, two) = texts?;
            Ok::<_, Error>((command, one, two))
        };
        candidates.into_iter().zip(texts).map(together).collect()
    }

    /// Sorts units by the comparison of their texts.
    fn sorted<'p>(
        &self,
        compiler: &Compiler<'p>,
        target: &TargetElf,
        compared: Vec<ComparedUnit<'p>>,
    ) -> Result<Units<'p>, Error> {
        let (differ, same): (Vec<_>, Vec<_>) = compared.into_iter().partition(|(_, one, two)| one.text != two.text);
        let (mut changed, mut unlinked) = (Vec::new(), Vec::new());
        let mut reproduces = None;
        for unit in differ {
            let (path, command) = unit.0;
            // where several commands may have made an object, some may be for other machines
            if !compiler.project.account.exact && !elf::is_for_x86_64(&compiler.shipped_object(path, command)?) {
                unlinked.push(unit);
                continue;
            }
            let is_sure = compiler.project.account.always_takes(unit.0.1.object.as_ref());
            let mut is_absent = !is_sure && functions_found(compiler, target, unit.0)? == Some(0);
            if is_absent {
                is_absent = match reproduces {
                    Some(known) => known,
                    None => *reproduces.insert(reproduces_target(compiler, target)?),
                };
            }
            if is_absent { unlinked.push(unit) } else { changed.push(unit) }
        }
        Ok(Units { changed, same, unlinked })
    }

    /// Gives the verdict on each file that the patch's own diffs change; a file that cannot be attributed refuses the
    /// patch.
    fn judge(
        &self,
        job: &Job,
        compiler: &Compiler,
        target: &TargetElf,
        (sides, inputs): (&Sides, &[Option<BTreeSet<String>>]),
        units: &Units,
    ) -> Result<Vec<ChangedFile>, Error> {
        let (before, after) = (&sides.before.path, &sides.after.path);
        let (account, name) = (&job.project.account, &target.identity().file_name);
        let differs = |file: &&String| job.project.read(before, file) != job.project.read(after, file);
        let mut files = Vec::new();
        for file in sides.after.touched.iter().filter(differs) {
            let aliases = sides.names.iter().filter(|(_, of)| *of == file).map(|(name, _)| name);
            let names: Vec<&String> = aliases.chain([file]).collect();
            let changed = readers(&units.changed, &names);
            let same = readers(&units.same, &names);
            let unlinked = readers(&units.unlinked, &names);
            let is_attributed = account.is_complete() || !changed.is_empty() || is_found(compiler, target, &same)?;
            let mut derived_file = None;
            for made in sides.derived.get(file).into_iter().flatten().filter(|_| job.regenerated.is_none()) {
                let is_read = || may_read(compiler, &BTreeSet::from([made.clone()]), inputs);
                if !job.project.is_of_others(made) || is_read()?.contains(&true) {
                    derived_file = Some(made);
                }
            }
            let evidence = Evidence {
                target: name,
                account,
                readers: Readers { changed: paths(&changed), same: paths(&same), unlinked: paths(&unlinked) },
                is_attributed,
                is_examined: job.unit_filter.is_empty() || job.unit_filter.iter().any(|f| file.starts_with(f.as_str())),
                derived_file: derived_file.map(String::as_str),
            };
            // a build makes more files that look like sources: tests of its configuration, sources of other programs
            if !(sides.made.contains(file) && changed.is_empty() && same.is_empty()) {
                files.push(evidence.verdict(file));
            }
        }
        match job.regenerated {
            Some(_) => files.extend(sides.others.iter().cloned().map(compared_by_results)),
            None => files.extend(unread(&job.project, &sides.others)?),
        }
        let left_out = sides.left_out.iter().cloned();
        files.extend(left_out.map(|path| ChangedFile {
            path,
            verdict: Verdict::LeftOut,
            reason: "as requested".into(),
        }));
        attributed(&job.project, name, files)
    }

    fn objects(
        &self,
        rewriter: &Rewriter<'_>,
        before: &Tree,
        after: &Tree,
        changed: &[ComparedUnit],
        regenerated: Option<&RegeneratedSides>,
    ) -> Result<Vec<Unit>, Error> {
        let (compiler, done) = (rewriter.compiler, std::sync::atomic::AtomicUsize::new(0));
        let made = parallel(self.jobs, changed, |(of @ (path, command), one, two)| {
            let command_after = command_after(regenerated, of);
            let unit = Unit {
                path: path.clone(),
                shipped: compiler.shipped_object(path, command)?,
                before: rewriter.object(&before.path, path, command, one, "before")?,
                after: rewriter.object(&after.path, path, command_after, two, "after")?,
                sources: None,
            };
            let done = done.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
            self.progress(&format!("compiling {done} of {} units", changed.len()));
            Ok::<_, Error>(unit)
        });
        made.into_iter().collect()
    }

    /// Makes the three builds of a program that was optimised when it was linked.
    fn link_time_unit(
        &self,
        compiler: &Compiler,
        before: &Tree,
        after: &Tree,
        changed: &[ComparedUnit],
        regenerated: Option<&RegeneratedSides>,
    ) -> Result<Unit, Error> {
        let changed: Vec<lto::ChangedUnit> = changed
            .iter()
            .map(|(of, one, two)| lto::ChangedUnit {
                path: &of.0,
                command: &of.1,
                after_command: command_after(regenerated, of),
                texts: (one, two),
            })
            .collect();
        let program = self.link_time(compiler, (&before.path, &after.path), &changed)?;
        let lto::Program { name: path, shipped, before, after, sources } = program;
        Ok(Unit { path, shipped, before, after, sources: Some(sources) })
    }

    /// Compiles units that the program gains: its rules compile and link them with the diffs.
    fn new_units(
        &self,
        compiler: &Compiler,
        after: &Tree,
        regenerated: Option<&RegeneratedSides>,
    ) -> Result<Vec<Unit>, Error> {
        use crate::commands::Job::Sections;
        let mut units = Vec::new();
        for (path, command) in regenerated.iter().flat_map(|sides| sides.after.new_units(&compiler.project.commands)) {
            let failed = |output| Error::Compile { unit: path.clone(), side: "after", output };
            let text = compiler.text(&after.path, path, command)?.map_err(failed)?;
            let after = compiler.object(&after.path, path, command, Sections, &text, "after")?;
            units.push(Unit { path: path.clone(), shipped: Vec::new(), before: Vec::new(), after, sources: None });
        }
        Ok(units)
    }

    /// Compiles units that are no part of the program.
    fn extra_units(
        &self,
        compiler: &Compiler,
        after: &Tree,
        changed: &[ComparedUnit],
        statement: &Statement,
    ) -> Result<Vec<Unit>, Error> {
        let mut sources = statement.extra_units.clone();
        let known = |function: &str| statement.earlier.iter().any(|p| exports(p).any(|name| name == function));
        if statement.shadow_variables && !known("sp_shadow_get") {
            sources.push(compiler.shadow_source());
        }
        if statement.shadow_members.needs_table(&statement.earlier) {
            sources.push(compiler.members_source());
        }
        if sources.is_empty() {
            return Ok(Vec::new());
        }
        let like = changed.first().map(|(command, ..)| *command).or(compiler.project.commands.first());
        let Some((_, like)) = like else {
            return Err(Error::Target("no unit is known whose flags an extra unit could be compiled with".into()));
        };
        let mut units = Vec::new();
        for source in sources {
            let path = source.file_name().unwrap_or(source.as_os_str()).to_string_lossy().into_owned();
            let after = compiler.extra(&after.path, &source, like)?;
            units.push(Unit { path, shipped: Vec::new(), before: Vec::new(), after, sources: None });
        }
        Ok(units)
    }
}

/// Returns the units that the target's link compiles once more, and the others.
fn by_kind<'p>(
    compiler: &Compiler,
    units: &[ComparedUnit<'p>],
) -> Result<(Vec<ComparedUnit<'p>>, Vec<ComparedUnit<'p>>), Error> {
    let (mut whole, mut alone) = (Vec::new(), Vec::new());
    for unit in units {
        let (path, command) = unit.0;
        let shipped = compiler.shipped_object(path, command)?;
        if lto::is_intermediate(&shipped) { whole.push(unit.clone()) } else { alone.push(unit.clone()) }
    }
    Ok((whole, alone))
}

/// Returns the command of a unit after the change.
fn command_after<'a>(
    regenerated: Option<&'a RegeneratedSides>,
    unit: &'a (String, crate::commands::CompileCommand),
) -> &'a crate::commands::CompileCommand {
    regenerated.and_then(|sides| sides.after.other_command(unit)).unwrap_or(&unit.1)
}

/// Reports faults of one unit that no other unit can remove, before hundreds of units are compiled.
fn refuse_early(target: &TargetElf, units: &[Unit], statement: &Statement) -> Result<(), Error> {
    let inputs: Vec<UnitInput> = units.iter().map(Unit::input).collect();
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
    let (in_place, write_data) = (statement.in_place, statement.write_data);
    let options = Options { in_place, write_data, ..Options::default() };
    let mut refusals = diff(target, &inputs, &options).err().unwrap_or_default();
    refusals.retain(is_final);
    if refusals.is_empty() { Ok(()) } else { Err(Error::Refused(refusals)) }
}

/// Returns touched files that are not the same in all three trees.
fn differing(project: &Project, before: &Tree, after: &Tree) -> BTreeSet<String> {
    let differs = |file: &&String| {
        let text = project.read(&after.path, file);
        project.read(&before.path, file) != text || project.read(&project.shipped, file) != text
    };
    after.touched.iter().filter(differs).cloned().collect()
}

/// Returns changed units that make no difference to the target: parts of other programs, tests, code left out by `#if`.
fn left_out(files: &[ChangedFile], target: &str) -> Vec<String> {
    let why = |file: &ChangedFile| match file.verdict {
        Verdict::NoDifference => Some(format!("{} changes only where {target} has no code of it: left out", file.path)),
        Verdict::NoPart => Some(format!("{} changes too and is no part of {target}: left out", file.path)),
        Verdict::LeftOut | Verdict::Compiled | Verdict::Unaccounted => None,
    };
    files.iter().filter(|file| is_unit(&file.path)).filter_map(why).collect()
}

/// Refuses files that cannot be attributed.
fn attributed(project: &Project, target: &str, files: Vec<ChangedFile>) -> Result<Vec<ChangedFile>, Error> {
    if files.iter().all(|file| file.verdict != Verdict::Unaccounted) {
        return Ok(files);
    }
    let account = &project.account;
    let missing = account.missing.iter().cloned().collect();
    Err(Error::Unaccounted { target: target.to_owned(), files, missing, inputs: account.inputs })
}

/// Finds a keyword of a changed source that the build reads from its text, unless the rules ran with the change.
fn keyword_read(job: &Job) -> Result<Option<(Keyword, String)>, Error> {
    let left_out = |file: &str| job.statement.leave_out.iter().any(|place| Path::new(file).starts_with(place));
    match job.regenerated {
        Some(_) => Ok(None),
        None => keywords::reader(job.project.unbuilt(), &job.diffs, &left_out),
    }
}

/// Gives the verdict on each file that no compiler reads: it is no part of the target if no generator may make sources
/// of it.
fn unread(project: &Project, files: &BTreeSet<String>) -> Result<Vec<ChangedFile>, Error> {
    let named = crate::generators::naming(project.unbuilt(), files)?;
    let verdict = |path: &String| {
        let (verdict, reason) = match named.get(path) {
            Some(by) => {
                (Verdict::Unaccounted, format!("no compiler reads it, and {by} names it: sources may be made of it"))
            }
            None => (Verdict::NoPart, "no compiler reads it".to_owned()),
        };
        ChangedFile { path: path.clone(), verdict, reason }
    };
    Ok(files.iter().map(verdict).collect())
}

/// Gives the verdict on a file that no compiler reads, after the rules ran with it: all that they make is compared.
fn compared_by_results(path: String) -> ChangedFile {
    let reason = "no compiler reads it; the rules ran with it, and what they make is compared".to_owned();
    ChangedFile { path, verdict: Verdict::NoDifference, reason }
}

/// Records that both sides turned out to be the same machine code.
fn same_code(files: &mut [ChangedFile]) {
    for file in files.iter_mut().filter(|file| file.verdict == Verdict::Compiled) {
        file.verdict = Verdict::NoDifference;
        file.reason = format!("the same machine code, though there is {}", file.reason);
    }
}

/// Returns the units that read a file of one of these names.
fn readers<'a>(units: &[ComparedUnit<'a>], names: &[&String]) -> Vec<Command<'a>> {
    let reads = |text: &Text| names.iter().any(|name| text.files.contains(*name));
    units.iter().filter(|(_, one, two)| reads(one) || reads(two)).map(|(command, ..)| *command).collect()
}

fn paths<'a>(commands: &[Command<'a>]) -> Vec<&'a str> {
    let mut paths: Vec<&str> = commands.iter().map(|(path, _)| path.as_str()).collect();
    paths.dedup();
    paths
}

/// Returns the number of functions of a unit, compiled as shipped, that are in the target; `None` for a unit that has
/// none.
fn functions_found(compiler: &Compiler, target: &TargetElf, (path, command): Command) -> Result<Option<u32>, Error> {
    let shipped = compiler.shipped_object(path, command)?;
    let placement = place(target, path, &shipped).ok().filter(|placement| placement.functions_total > 0);
    Ok(placement.map(|placement| placement.functions_placed))
}

/// Returns true if the target has code of one of the first units, or if these have no code that could show it.
fn is_found(compiler: &Compiler, target: &TargetElf, units: &[Command]) -> Result<bool, Error> {
    for unit in units.iter().take(PROBES_MAX) {
        if functions_found(compiler, target, unit)? != Some(0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns true if units that are certainly part of the target are found there. Then the target was made from this
/// source by this compiler, and code that is not found is absent.
fn reproduces_target(compiler: &Compiler, target: &TargetElf) -> Result<bool, Error> {
    let account = &compiler.project.account;
    let sure = compiler.project.commands.iter().filter(|(_, c)| account.always_takes(c.object.as_ref()));
    for unit in sure.take(PROBES_MAX) {
        if functions_found(compiler, target, unit)?.is_some_and(|found| found > 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Tells of each unit whether it may read one of the files, or find it in place of one that it reads; `inputs` are the files that each
/// read in the recorded build.
fn may_read(
    compiler: &Compiler,
    files: &BTreeSet<String>,
    inputs: &[Option<BTreeSet<String>>],
) -> Result<Vec<bool>, Error> {
    let name = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
    let names: BTreeSet<String> = files.iter().map(|f| name(f)).collect();
    let looks = |files: &Option<BTreeSet<String>>| {
        files.as_ref().is_none_or(|files| files.iter().any(|f| names.contains(&name(f))))
    };
    let readers = compiler.project.includes.as_ref().map(|includes| includes.readers(files));
    let shipped = compiler.project.open(&compiler.project.shipped)?;
    let could = |command: Command| {
        // a unit may be a link to another file; one that is not there any more could read any
        let real = shipped.real(&command.0).map(|path| path.to_string_lossy().into_owned());
        let names = [Some(command.0.clone()), real.ok()];
        readers.as_ref().is_none_or(|readers| {
            !shipped.has(&command.0) || names.iter().flatten().any(|unit| Includes::reads(readers, unit, &command.1))
        })
    };
    let commands = compiler.project.commands.iter().zip(inputs);
    Ok(commands.map(|(command, files)| looks(files) && could(command)).collect())
}

/// Returns units of which a part is not in the target. That is allowed: linkers drop unused functions.
fn uncertainties(patch: &Patch) -> Vec<String> {
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

/// Chooses the variant that is in the target, for a file that is compiled in several variants (for several programs).
/// With `are_rivals`, variants of which the target may have either, and of which the change makes different code, are
/// refused.
fn choose_variants(target: &TargetElf, units: Vec<Unit>, are_rivals: bool) -> Result<Vec<Unit>, Error> {
    let mut best: BTreeMap<String, (u32, Unit)> = BTreeMap::new();
    let mut refusals: BTreeMap<String, Refusal> = BTreeMap::new();
    for unit in units {
        let found = match place(target, &unit.path, &unit.shipped) {
            // a unit of data alone cannot be distinguished, and may be the right one
            Ok(at) => (at.functions_placed * 1000).checked_div(at.functions_total).unwrap_or(1000),
            Err(refusal) => {
                refusals.insert(unit.path.clone(), refusal);
                0
            }
        };
        match best.get(&unit.path) {
            Some((other, rival)) if found == *other && found > 0 && are_rivals => {
                let are_equal =
                    elf::are_equal(&unit.before, &rival.before) && elf::are_equal(&unit.after, &rival.after);
                if !are_equal {
                    return Err(Error::Ambiguous { unit: unit.path, target: target.identity().file_name.clone() });
                }
            }
            Some((other, _)) if found <= *other => {}
            _ => drop(best.insert(unit.path.clone(), (found, unit))),
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
