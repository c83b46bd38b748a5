//! `stillpoint patch upgrade`: brings every program and library of this machine that is outdated to its newest code, while it runs.
//!
//! ```text
//!   scan --> outdated files, by build --> a patch for each --> apply it in all processes --> scan again --> report
//! ```
//!
//! Nothing is kept between two calls: the processes themselves show what is done, and the builder's cache has what was compiled.

use super::apply::everywhere;
use super::building::{Workplace, hint, with_builder};
use super::outdated::File;
use super::processes::{MigrationOptions, duration};
use super::scan;
use super::upgrade_report::{Account, Effort, Kept, State};
use super::wave::Pace;
use crate::output::{Exit, Failure, Output, Success};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;
use stillpoint_patch_builder::{
    Builder, DebianRequest, Error, LeftOut, Plan, Readable, Shipped, ShippedAs, Statement, write_whole,
};
use stillpoint_patch_engine::fleet::{MappedFile, Search};
use stillpoint_patch_engine::{IdlePriority, Options};
use stillpoint_patch_format::{Patch, decode, encode};
use stillpoint_patch_provenance::Error as Unknown;
use stillpoint_patch_provenance::scan::{Reason, Report};

/// Exit codes, printed after the options.
const AFTER_HELP: &str = "Exit status: 0 everything that was outdated is fixed live, and everything was looked at, or accepted; 1 failed; 2 usage; \
     3 nothing was changed, and something is not fixed live or was not looked at; 4 processes were changed, and something is not fixed live \
     or was not looked at; 5 a transition is unfinished. With --dry-run: 0 nothing is known that prevents it; 1 or 3 otherwise";

/// Arguments of `stillpoint patch upgrade`.
#[derive(clap::Args)]
#[command(after_help = [AFTER_HELP, "\n\n", crate::examples::of("stillpoint patch upgrade")].concat())]
pub(crate) struct Args {
    /// Upgrade files of these packages only: names of source packages or of binary packages.
    #[arg(long = "package", value_name = "NAME", num_args = 1..)]
    packages: Vec<String>,
    /// File of a security tracker, which names CVEs: the JSON of Debian's security tracker, or records of OSV.
    #[arg(long, value_name = "FILE")]
    tracker: Option<PathBuf>,
    /// Reasons for not looking at something that do not change the exit status.
    #[arg(long, value_name = "REASON", value_delimiter = ',', value_parser = scan::reason)]
    accept: Vec<Reason>,
    /// Include processes in containers that map the same build of a file; they are left out otherwise.
    #[arg(long)]
    containers: bool,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    migration: MigrationOptions,
    /// Time limit for the migration of all threads of a process; after it the transition is rolled back.
    #[arg(long, value_parser = duration, default_value = "10s")]
    timeout: Duration,
    /// Directory for the patch files, for instance for `patch enable` [default: none is written].
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Dry run: fetch the sources of both versions, and predict; build and change nothing.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    workplace: Workplace,
}

/// Runs `stillpoint patch upgrade`.
pub(crate) fn run(args: Args, output: &Output) -> Result<Success, Failure> {
    let before = args.scan(output)?;
    let files = File::all(&before, &args.packages);
    let count = files.len();
    let mut efforts = Vec::new();
    for (number, file) in files.into_iter().enumerate() {
        output.note(format_args!("file {} of {count}: {file}", number + 1));
        let effort = args.upgrade(&file, output);
        efforts.push((file, effort));
    }
    let is_changed = |effort: &Effort| matches!(effort, Effort::Gone | Effort::Applied { done: 1.., .. });
    let after = if efforts.iter().any(|(_, effort)| is_changed(effort)) { args.scan(output)? } else { before };
    let account = Account::new(efforts, after, &args.packages);
    account.print(output);
    output.result("upgrade", &account.line(args.dry_run));
    account.result(&args.accept)
}

/// Result of the builder.
enum Prepared {
    /// The processes have ended.
    Gone,
    Kept(Kept),
    /// Every process has the patch of this name.
    Everywhere(Upgrade),
    Built(Upgrade, Box<Patch>),
}

/// Upgrade of a file to a version.
struct Upgrade {
    /// Name of the patch.
    name: String,
    /// Version of the source package.
    version: String,
    /// CVEs that it fixes.
    cves: Vec<String>,
    /// Diffs of the version that are no part of it.
    refused: Vec<LeftOut>,
}

impl Args {
    fn scan(&self, output: &Output) -> Result<Report, Failure> {
        output.progress("looking at all processes");
        scan::look(self.tracker.as_deref(), self.workplace.sources()).map_err(scan::failure)
    }

    /// Brings one file to its newest code in all processes.
    fn upgrade(&self, file: &File, output: &Output) -> Effort {
        let prepared = with_builder(&self.workplace, output, |builder| self.prepare(file, &builder));
        let (upgrade, patch) = match prepared {
            Ok(Prepared::Gone) => return Effort::Gone,
            Ok(Prepared::Kept(kept)) => return Effort::Kept(kept),
            Ok(Prepared::Everywhere(upgrade)) => return applied(upgrade, 0, Vec::new(), None),
            Ok(Prepared::Built(upgrade, patch)) => (upgrade, patch),
            Err(error) => return Effort::Kept(not_built(&error)),
        };
        match self.apply(file, &upgrade, &patch, output) {
            Ok((done, left, exit)) => applied(upgrade, done, left, exit),
            Err(error) => Effort::Kept(Kept::new(State::Failed, Some(upgrade.version), format!("{error:#}"))),
        }
    }

    /// Builds the patch of one file; with `--dry-run`, finds out if there is something to build.
    fn prepare(&self, file: &File, builder: &Builder<'_>) -> Result<Prepared, Error> {
        let Some(program) = file.program(&builder.seen_packages())? else { return Ok(Prepared::Gone) };
        let request = match builder.plan(&program, whole_difference())? {
            Plan::Build(request) => request,
            Plan::Newest { package, version } => {
                let why =
                    format!("{package} {version} is the newest source, and the newer package is another build of it");
                return Ok(Prepared::Kept(Kept::new(State::NeedsRestart, Some(version), why)));
            }
        };
        let version = request.version.clone().unwrap_or_default();
        let name = file.patch_name(&version);
        if let Some(cves) = file.has_everywhere(&name) {
            return Ok(Prepared::Everywhere(Upgrade { name, version, cves, refused: Vec::new() }));
        }
        let ShippedAs::Version(running) = &request.shipped else {
            let why = "the version that runs has no source of its own".to_owned();
            return Ok(Prepared::Kept(Kept::new(State::Failed, Some(version), why)));
        };
        let named = builder.cves_since(&request.package, &version, running)?;
        let cves = file.fixed_by(&version, named.unwrap_or_default());
        if self.dry_run {
            let why =
                "a build shows whether all of the change can be a live patch, and each process whether it takes it";
            let kept = Kept::new(State::Possible, Some(version), why.to_owned());
            return Ok(Prepared::Kept(Kept { cves, ..kept }));
        }
        let description = Some(format!("{} from {running} to {version}", request.package));
        let statement = Statement { name: Some(name.clone()), description, ..Statement::default() };
        let built = builder.build_debian(&request, &statement)?;
        let refused = built.report.left_out;
        let Some(mut patch) = built.patch else {
            let kept =
                Kept::new(State::SameCode, Some(version.clone()), format!("its code is that of {version} already"));
            return Ok(Prepared::Kept(Kept { cves, ..kept }));
        };
        // the CVEs of the whole difference are not those of a part of it
        match refused.is_empty() {
            true => patch.cves = patch.cves.into_iter().chain(cves).collect::<BTreeSet<_>>().into_iter().collect(),
            false => patch.name = file.patch_name(&format!("{version}-part")),
        }
        let (name, cves) = (patch.name.clone(), patch.cves.clone());
        Ok(Prepared::Built(Upgrade { name, version, cves, refused }, Box::new(patch)))
    }

    /// Applies the patch in all processes; returns the number that were changed, the processes that are left with the reasons, and the code
    /// of the worst failure.
    fn apply(
        &self,
        file: &File,
        upgrade: &Upgrade,
        patch: &Patch,
        output: &Output,
    ) -> anyhow::Result<(usize, Vec<String>, Option<Exit>)> {
        let bytes = encode(patch)?;
        if let Some(directory) = &self.output {
            let id = file.build_id.as_deref().unwrap_or_default();
            let path = directory.join(format!("{}-{}.patch", upgrade.name, &id[..id.len().min(8)]));
            write_whole(&path, &bytes, Readable::ByOthers)?;
            output.line(format_args!("wrote {}", path.display()));
        }
        patch.warnings.iter().for_each(|warning| output.warn(warning));
        let signed = decode(&bytes)?;
        let replace = file.is_covered_by(&upgrade.cves);
        let options = Options { timeout: self.timeout, replace, ..self.migration.options() };
        let search = Search::new(MappedFile::OfPatch, Some(&patch.target), self.containers);
        let subject = file.path.display().to_string();
        // the preparation of each transition must not take the processor from the programs
        let _giving_way = IdlePriority::begin();
        let settled = everywhere(&signed, &options, &search, subject, false, &self.pace, output);
        Ok((settled.done, settled.left, settled.failure.map(|failure| failure.exit)))
    }
}

fn applied(upgrade: Upgrade, done: usize, left: Vec<String>, exit: Option<Exit>) -> Effort {
    let Upgrade { name, version, cves, refused } = upgrade;
    Effort::Applied { patch: name, version, cves, refused, done, left, is_unfinished: exit == Some(Exit::Unknown) }
}

/// Request for everything that the newest version changes and that can be live.
fn whole_difference() -> DebianRequest {
    DebianRequest {
        package: String::new(),
        version: None,
        quilt: Vec::new(),
        diffs: Vec::new(),
        on_top_of: Vec::new(),
        shipped: ShippedAs::Series(Shipped::Full),
        integrated: None,
        binary: None,
        names: Vec::new(),
        is_partial: true,
    }
}

/// Describes why no patch was built.
fn not_built(error: &Error) -> Kept {
    let state = match error {
        // no live patch can help: what runs is of no package that is known, or its process could not be looked at
        Error::Provenance(Unknown::NoPackage { .. }) => State::NeedsRestart,
        error if error.is_refusal() || matches!(error, Error::Target(_)) => State::Refused,
        _ => State::Failed,
    };
    let reasons = match error {
        Error::Refused(refusals) => refusals.iter().map(ToString::to_string).collect(),
        error => vec![error.to_string()],
    };
    Kept { state, version: None, reasons, hint: hint(error, None), cves: Vec::new() }
}
