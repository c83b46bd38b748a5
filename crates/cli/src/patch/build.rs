//! `stillpoint patch build`: builds a live patch from source diffs.

use super::building::{Integration, Workplace, hint, with_builder};
use super::processes::unusable_file;
use super::running::{RunningTarget, SELECTING, Selected};
use super::shadow_members::ShadowOptions;
use crate::output::{Failure, Output, Success};
use anyhow::Context;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use stillpoint_patch_builder::{
    Builder, Built, DebianRequest, Error, HookNames, LeftOut, Plan, Readable, Report, Reproduced, Shipped, ShippedAs,
    SourceRequest, Statement, read_secret_key, write_whole,
};
use stillpoint_patch_catalog::PatchFile;
use stillpoint_patch_engine::ThreadView;
use stillpoint_patch_format::{Patch, Scope, decode, encode, encode_signed};

/// Exit codes, printed after the options.
const AFTER_HELP: &str = "Exit status: 0 built; 1 failed; 2 usage; 3 refused; 6 nothing to patch: the change is provably not part of the \
     target, or the program runs the newest version that the archive serves";

/// Arguments of `stillpoint patch build`.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("origin").required(true).args(["debian", "source"]).args(SELECTING))]
#[command(after_help = [AFTER_HELP, "\n\n", crate::examples::of("stillpoint patch build")].concat())]
pub(crate) struct Args {
    #[command(flatten)]
    running: RunningTarget,
    /// Refuse the patch if a diff between the version that runs and the newest one cannot be in it. Otherwise such diffs are left out and named.
    #[arg(long, requires = "running", help_heading = "From a running program")]
    complete: bool,

    /// Build for a program of this Debian source package. Default version: the newest one that the archive serves.
    #[arg(long, value_name = "PACKAGE[=VERSION]", help_heading = "From a Debian source package")]
    debian: Option<String>,
    /// Diffs of the package's series that make the patch: names, with or without `.patch`, or CVE numbers.
    #[arg(long, value_name = "NAME", num_args = 1.., conflicts_with = "source", help_heading = "From a Debian source package")]
    quilt: Vec<String>,
    /// Source that the running binary was built from: the `full` series, `without-cves`, `without:NAME[,NAME...]`, or
    /// another version of the package (then the patch is the diffs that the series gained, or those of --quilt).
    #[arg(
        long,
        value_name = "WHAT",
        default_value = "full",
        requires = "debian",
        help_heading = "From a Debian source package"
    )]
    shipped: String,
    #[command(flatten)]
    integration: Integration,

    /// Build for a program that was built from this directory.
    #[arg(long, value_name = "DIR", requires_all = ["diff", "compile_commands", "target"],
          help_heading = "From a source directory")]
    source: Option<PathBuf>,
    /// Diffs that make the patch; with --debian, in addition to those of the series.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    diff: Vec<PathBuf>,
    /// Compiler calls of the program: a `compile_commands.json`.
    #[arg(long, value_name = "JSON", requires = "source", help_heading = "From a source directory")]
    compile_commands: Option<PathBuf>,
    /// Compare only units whose path begins with PATH.
    #[arg(long, value_name = "PATH", num_args = 1.., requires = "source", help_heading = "From a source directory")]
    unit_filter: Vec<String>,

    /// The running executable or shared library: a file, or with --debian the name of a program of the package.
    #[arg(long, visible_alias = "binary", value_name = "ELF", conflicts_with = "running")]
    target: Option<PathBuf>,
    /// Diffs that earlier patches have activated: names of the series, or files.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    on_top_of: Vec<String>,
    /// Files or directories to ignore: the diffs change them without an effect on the target, such as build files that
    /// list tests. Relative to the source.
    #[arg(long, value_name = "PATH", num_args = 1..)]
    leave_out: Vec<String>,
    /// Active patch files of the series: the new patch may refer to the functions and variables that they added.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    earlier: Vec<PathBuf>,
    /// Name of the patch.
    #[arg(long)]
    name: Option<String>,
    /// Description in one line.
    #[arg(long, value_name = "TEXT")]
    description: Option<String>,
    /// CVE numbers in addition to those that the diffs name.
    #[arg(long, value_name = "CVE", num_args = 1..)]
    cve: Vec<String>,
    /// Names of older patches that this one replaces.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    replaces: Vec<String>,
    /// Threads that must run the same version at the same time.
    #[arg(long, value_enum)]
    scope: Option<ScopeName>,
    /// Functions that must not be on the stack of a thread that migrates, in addition to the changed ones.
    #[arg(long, value_name = "FUNCTION", num_args = 1..)]
    off_stack: Vec<String>,
    /// Mechanism by which each thread sees its version of the code. With `generation`, constants that other units use and
    /// functions that are too short for a jump may change in place; only `--view generation` can apply such a patch.
    #[arg(long, value_enum, default_value_t = ThreadView::Trampoline)]
    view: ThreadView,
    /// Write the new initial value of variables and constants that changed, while all threads are stopped. The program must not have changed
    /// them since its start; copies that it made of their values do not change. The patch has the scope `process`.
    #[arg(long, conflicts_with = "may_stay")]
    write_data: bool,
    #[command(flatten)]
    shadow_members: ShadowOptions,
    /// Changed functions that a thread may never leave: such a thread keeps the old version while all others migrate.
    #[arg(long, value_name = "FUNCTION", num_args = 1..)]
    may_stay: Vec<String>,

    /// Function `int f(void)` of the new code to run before the first thread migrates.
    #[arg(long, value_name = "FUNCTION", num_args = 1.., help_heading = "Hooks, see stillpoint-patch-hooks(7)")]
    pre_apply: Vec<String>,
    /// Function to run after all threads have migrated.
    #[arg(long, value_name = "FUNCTION", num_args = 1.., help_heading = "Hooks, see stillpoint-patch-hooks(7)")]
    post_apply: Vec<String>,
    /// Function to run before the first thread is moved back by a revert.
    #[arg(long, value_name = "FUNCTION", num_args = 1.., help_heading = "Hooks, see stillpoint-patch-hooks(7)")]
    pre_revert: Vec<String>,
    /// Function to run after all threads have been moved back.
    #[arg(long, value_name = "FUNCTION", num_args = 1.., help_heading = "Hooks, see stillpoint-patch-hooks(7)")]
    post_revert: Vec<String>,
    /// Source files to add to those of the program, compiled with the flags of the first changed unit.
    #[arg(long, value_name = "FILE", num_args = 1.., help_heading = "Hooks, see stillpoint-patch-hooks(7)")]
    extra_unit: Vec<PathBuf>,
    /// Add support for shadow variables (`stillpoint-shadow.h`).
    #[arg(long, help_heading = "Hooks, see stillpoint-patch-hooks(7)")]
    shadow_variables: bool,

    /// Patch file to write [default: NAME.patch].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Sign with this secret key.
    #[arg(long, value_name = "KEYFILE")]
    sign: Option<PathBuf>,
    /// Dry run: do everything but write the patch.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    workplace: Workplace,
}

/// [`Scope`] on the command line.
#[derive(Clone, Copy, clap::ValueEnum)]
enum ScopeName {
    /// None: threads may run different versions at the same time.
    ThreadLocal,
    /// The threads of a group, which migrate together.
    ThreadGroup,
    /// All threads of the process, which migrate together.
    Process,
}

/// Limit of files that are listed for people when there is nothing to patch.
const LISTED_FILES_MAX: usize = 20;

/// Parses the value of `--shipped`.
pub(super) fn parse_shipped(text: &str) -> ShippedAs {
    match text {
        "full" => ShippedAs::Series(Shipped::Full),
        "without-cves" => ShippedAs::Series(Shipped::WithoutCves),
        _ => match text.strip_prefix("without:") {
            Some(names) => ShippedAs::Series(Shipped::Without(names.split(',').map(|n| n.trim().to_owned()).collect())),
            None => ShippedAs::Version(text.to_owned()),
        },
    }
}

/// Parses `PACKAGE[=VERSION]`.
pub(super) fn parse_package(text: &str) -> (String, Option<String>) {
    match text.split_once('=') {
        Some((package, version)) => (package.to_owned(), Some(version.to_owned())),
        None => (text.to_owned(), None),
    }
}

/// Runs `stillpoint patch build`.
pub(crate) fn run(args: Args, output: &Output) -> Result<Success, Failure> {
    let statement = statement(&args).map_err(unusable_file)?;
    let key = args.sign.as_deref().map(read_secret_key).transpose();
    let key = key.map_err(|error| {
        Failure::refused(error).hint("stillpoint patch key generate, and --sign with its stillpoint-ID.key")
    })?;
    let shipped = parse_shipped(&args.shipped);
    let named = !args.quilt.is_empty() || !args.diff.is_empty();
    if args.debian.is_some() && !named && !matches!(shipped, ShippedAs::Version(_)) {
        return Err(Failure::usage(
            "--debian needs --quilt NAME..., --diff FILE..., or --shipped VERSION to compare two versions",
        ));
    }
    let selected = args.running.selected()?;
    let work = |builder: Builder<'_>| match (&args.debian, &args.source, &selected) {
        (_, _, Some(selected)) => build_running(&args, selected, builder, &statement),
        (Some(package), ..) => {
            let (package, version) = parse_package(package);
            let request = debian_request(&args, package, version, shipped.clone());
            builder.build_debian(&request, &statement).map(|built| Outcome::Built(Box::new(built)))
        }
        (None, source, None) => {
            let request = SourceRequest {
                directory: source.clone().unwrap_or_default(),
                compile_commands: args.compile_commands.clone().unwrap_or_default(),
                diffs: args.diff.clone(),
                on_top_of: args.on_top_of.iter().map(PathBuf::from).collect(),
                target: args.target.clone().unwrap_or_default(),
                unit_filter: args.unit_filter.clone(),
            };
            builder.build_source(&request, &statement).map(|built| Outcome::Built(Box::new(built)))
        }
    };
    let outcome = with_builder(&args.workplace, output, work).map_err(|error| failure(error, &shipped, output))?;
    match outcome {
        Outcome::Built(built) => finish(&args, &built, key.as_ref(), output),
        Outcome::Newest { package, version } => {
            output.line(format_args!(
                "nothing to patch: it runs {package} {version}, the newest source version that the archive serves"
            ));
            output.result("newest-version", &json!({"package": package, "version": version}));
            Ok(Success::Nothing)
        }
    }
}

/// Result of the builder.
enum Outcome {
    Built(Box<Built>),
    /// The program runs the newest version of its source package.
    Newest {
        package: String,
        version: String,
    },
}

fn build_running(
    args: &Args,
    selected: &Selected,
    builder: Builder<'_>,
    statement: &Statement,
) -> Result<Outcome, Error> {
    let program = args.running.program(selected, &builder)?;
    let builder = builder.of_program(&program)?;
    let request = debian_request(args, String::new(), None, ShippedAs::Series(Shipped::Full));
    match builder.plan(&program, DebianRequest { is_partial: !args.complete, ..request })? {
        Plan::Newest { package, version } => Ok(Outcome::Newest { package, version }),
        Plan::Build(request) => builder.build_debian(&request, statement).map(|built| Outcome::Built(Box::new(built))),
    }
}

fn debian_request(args: &Args, package: String, version: Option<String>, shipped: ShippedAs) -> DebianRequest {
    DebianRequest {
        package,
        version,
        quilt: args.quilt.clone(),
        diffs: args.diff.clone(),
        on_top_of: args.on_top_of.clone(),
        shipped,
        integrated: args.integration.integrated(),
        binary: args.target.clone(),
        names: Vec::new(),
        is_partial: false,
    }
}

fn statement(args: &Args) -> anyhow::Result<Statement> {
    let mut earlier = Vec::new();
    for path in &args.earlier {
        let bytes = PatchFile::read(path)?.bytes;
        earlier.push(decode(&bytes).with_context(|| format!("patch file {}", path.display()))?.patch);
    }
    let by_generations = matches!(args.view, ThreadView::Generation);
    anyhow::ensure!(by_generations || args.may_stay.is_empty(), "--may-stay needs --view generation");
    anyhow::ensure!(!(by_generations && args.write_data), "--write-data needs --view trampoline");
    let narrower = matches!(args.scope, Some(ScopeName::ThreadLocal | ScopeName::ThreadGroup));
    anyhow::ensure!(!(narrower && args.write_data), "--write-data needs the scope process");
    let shadow_members = args.shadow_members.statement()?;
    let moves_members = !shadow_members.members.is_empty();
    anyhow::ensure!(!(narrower && moves_members), "--shadow-member needs the scope process");
    anyhow::ensure!(!(by_generations && moves_members), "--shadow-member needs --view trampoline");
    let hooks = HookNames {
        pre_apply: args.pre_apply.clone(),
        post_apply: args.post_apply.clone(),
        pre_revert: args.pre_revert.clone(),
        post_revert: args.post_revert.clone(),
    };
    Ok(Statement {
        name: args.name.clone(),
        description: args.description.clone(),
        cves: args.cve.clone(),
        scope: args.scope.map(|scope| match scope {
            ScopeName::ThreadLocal => Scope::ThreadLocal,
            ScopeName::ThreadGroup => Scope::ThreadGroup,
            ScopeName::Process => Scope::Process,
        }),
        off_stack: args.off_stack.clone(),
        staying: args.may_stay.clone(),
        in_place: by_generations,
        write_data: args.write_data,
        hooks,
        replaces: args.replaces.clone(),
        earlier,
        extra_units: args.extra_unit.clone(),
        shadow_variables: args.shadow_variables,
        shadow_members,
        leave_out: args.leave_out.clone(),
    })
}

/// Converts an error of the builder, which has changed no process.
fn failure(error: Error, shipped: &ShippedAs, output: &Output) -> Failure {
    if error.is_refusal() {
        let reasons: Vec<_> = match &error {
            Error::Refused(refusals) => refusals.iter().map(|r| (r.code(), r.to_string())).collect(),
            Error::ShadowMembers(refusals) => refusals.iter().map(|r| (r.code().to_owned(), r.to_string())).collect(),
            other => other.codes().into_iter().map(|code| (code, other.to_string())).collect(),
        };
        let reasons: Vec<_> = reasons.iter().map(|(code, text)| json!({"code": code, "text": text})).collect();
        let files = match &error {
            Error::Unaccounted { files, .. } => &files[..],
            _ => &[],
        };
        output.result("refused", &json!({"refusals": reasons, "files": files}));
    }
    let state = "no patch was written";
    let shipped = match shipped {
        ShippedAs::Version(version) => Some(version.as_str()),
        ShippedAs::Series(_) => None,
    };
    let hint = hint(&error, shipped);
    let mut failure = if error.is_refusal() { Failure::refused(error) } else { Failure::failed(error, state) };
    failure.state = state.to_owned();
    failure.hint = hint;
    failure
}

fn finish(
    args: &Args,
    built: &Built,
    key: Option<&stillpoint_patch_format::SecretKey>,
    output: &Output,
) -> Result<Success, Failure> {
    let Some(patch) = &built.patch else {
        built.report.warnings.iter().for_each(|w| output.warn(w));
        output.line(format_args!("nothing to patch in {}", built.report.target.display()));
        let files = &built.report.files;
        files.iter().take(LISTED_FILES_MAX).for_each(|f| output.line(format_args!("  {}: {}", f.path, f.reason)));
        if files.len() > LISTED_FILES_MAX {
            output.line(format_args!("  and {} more files, see --json", files.len() - LISTED_FILES_MAX));
        }
        output.result("nothing-to-patch", &line(&built.report, None, None, &[]));
        return Ok(Success::Nothing);
    };
    let bytes = match key {
        Some(key) => encode_signed(patch, key),
        None => encode(patch),
    }
    .map_err(Failure::refused)?;
    patch.warnings.iter().for_each(|w| output.warn(w));
    let path = args.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}.patch", patch.name)));
    let written = (!args.dry_run).then_some(path.as_path());
    if let Some(path) = written {
        write_whole(path, &bytes, Readable::ByOthers).map_err(|e| Failure::failed(e, "no patch was written"))?;
    }
    describe(patch, &built.report, written, bytes.len(), output);
    output.result("built", &line(&built.report, Some(patch), written, &bytes));
    Ok(Success::Done)
}

fn describe(patch: &Patch, report: &Report, path: Option<&Path>, bytes: usize, output: &Output) {
    let names: Vec<&str> = patch.functions.iter().map(|f| f.name.as_str()).collect();
    output.line(format_args!(
        "{}: {} functions changed in {} of {} units: {}",
        patch.name,
        names.len(),
        report.changed.len(),
        report.units,
        names.join(", ")
    ));
    if !patch.constants.is_empty() {
        let names: Vec<&str> = patch.constants.iter().map(|c| c.name.as_str()).collect();
        output.line(format_args!(
            "only --view generation can apply it: {} constants or functions change in place: {}",
            names.len(),
            names.join(", ")
        ));
    }
    for (is_copied, what) in
        [(false, "are written while all threads are stopped"), (true, "have a copy in the new code")]
    {
        let of_kind = patch.data.iter().filter(|c| c.is_copied() == is_copied);
        let names: Vec<&str> = of_kind.map(|c| c.name.as_str()).collect();
        if !names.is_empty() {
            let (count, names) = (names.len(), names.join(", "));
            output.line(format_args!("{count} variables {what}: {names}; apply it with --quiescence stop or global"));
        }
    }
    if !patch.staying.is_empty() {
        let names = patch.staying.join(", ");
        output.line(format_args!("only --view generation can apply it: a thread may stay in {names}"));
    }
    if !patch.cves.is_empty() {
        output.line(format_args!("fixes {}", patch.cves.join(", ")));
    }
    let reproduced = match report.reproduced {
        Some(Reproduced::BitForBit) => ", which a build of the whole package reproduces bit for bit",
        Some(Reproduced::CodeAndData) => ", whose code and data a build of the whole package reproduces",
        Some(Reproduced::Differs) => ", which a build of the whole package does not reproduce as a whole",
        None => "",
    };
    output.line(format_args!("fits {} (build-id {}){reproduced}", report.target.display(), patch.target.build_id));
    for diff in &report.left_out {
        output.line(format_args!("left out: {} {}: {}", diff.diff, diff.cves.join(", "), first_line(&diff.reason)));
        if let Some(proposal) = &diff.proposal {
            output.line(format_args!("try: {}", super::shadow_members::described(proposal)));
        }
    }
    match path {
        Some(path) => output.line(format_args!("wrote {} ({bytes} bytes)", path.display())),
        None => output.line("dry run: nothing was written"),
    }
}

/// Diff that is not in the patch, with the options that may bring it in.
#[derive(Serialize)]
struct LeftOutLine<'a> {
    #[serde(flatten)]
    diff: &'a LeftOut,
    r#try: Option<String>,
}

impl LeftOutLine<'_> {
    fn of(diff: &LeftOut) -> LeftOutLine<'_> {
        LeftOutLine { diff, r#try: diff.proposal.as_ref().map(super::shadow_members::described) }
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn line(report: &Report, patch: Option<&Patch>, path: Option<&Path>, bytes: &[u8]) -> Value {
    let digest = decode(bytes).ok().map(|signed| hex::encode(signed.digest));
    let functions: Vec<&String> = patch.iter().flat_map(|p| &p.functions).map(|f| &f.name).collect();
    let data: Vec<&String> = patch.iter().flat_map(|p| &p.data).map(|change| &change.name).collect();
    let left_out: Vec<LeftOutLine<'_>> = report.left_out.iter().map(LeftOutLine::of).collect();
    let (text, warnings) = (|path: &Path| path.display().to_string(), patch.map_or(&report.warnings, |p| &p.warnings));
    json!({
        "name": patch.map(|p| &p.name), "output": path.map(text), "digest": digest, "bytes": patch.map(|_| bytes.len()),
        "target": text(&report.target), "build_id": patch.map(|p| p.target.build_id.to_string()),
        "reproduced": report.reproduced, "units": report.units, "units_preprocessed": report.preprocessed,
        "units_compiled": report.changed, "diffs": report.diffs, "left_out": left_out, "based_on": report.based_on,
        "files": report.files,
        "cves": patch.map_or(&[][..], |p| &p.cves[..]), "functions": functions, "data": data, "warnings": warnings,
    })
}
