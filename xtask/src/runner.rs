//! `xtask test` and `xtask check`: steps one after another, quick ones first, one line each.

use crate::step::{self, Counts, Outcome};
use crate::{ahead, fuzz, generations, tidy};
use anyhow::{Context, Result, bail};
use cargo_metadata::{Artifact, Message, Package, TargetKind};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Packages in the order of their tests: what is quick and what others build on comes first. Any other package comes
/// before the last.
const ORDER: [&str; 12] = [
    "xtask",
    "stillpoint-events",
    "stillpoint-patch-format",
    "stillpoint-patch-insn",
    "stillpoint-patch-unwind",
    "stillpoint-measure",
    "stillpoint-patch-tracee",
    "stillpoint-patch-engine",
    "stillpoint",
    "stillpoint-patch-differ",
    "stillpoint-patch-builder",
    "stillpoint-e2e",
];

/// Test programs with a long form that are none of the end-to-end tests.
const LONG_FORMS: [(&str, &str); 9] = [
    ("stillpoint-patch-differ", "programs_cxx"),
    ("stillpoint-kernel-machine", "faults"),
    ("stillpoint-kernel-machine", "switch"),
    ("stillpoint-migrate-replay", "unit"),
    ("stillpoint-migrate-engine", "regress"),
    ("stillpoint-migrate-proxy", "regress"),
    ("stillpoint-migrate-trials", "faults"),
    ("stillpoint-migrate-trials", "levels"),
    ("stillpoint-migrate-trials", "tpcc"),
];

/// Integration tests of some packages; all of their tests where none is named.
pub(crate) struct Selection {
    pub(crate) packages: Vec<String>,
    pub(crate) tests: Vec<String>,
}

/// One test program.
pub(crate) struct TestProgram {
    package: String,
    package_dir: PathBuf,
    /// `unit` or the name of the integration test.
    target: String,
    is_unit: bool,
    executable: PathBuf,
    /// The `stillpoint` binary of the same build.
    stillpoint: PathBuf,
}

impl TestProgram {
    fn rank(&self) -> (usize, bool, &str) {
        let place = ORDER.iter().position(|name| *name == self.package).map_or(2 * ORDER.len() - 3, |i| 2 * i);
        (place, !self.is_unit, &self.target)
    }

    /// Package and target.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.package, self.target)
    }

    /// Whether its target has this name.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.target == name
    }

    /// Whether it is an integration test with real servers or programs.
    pub(crate) fn is_end_to_end(&self) -> bool {
        self.package == "stillpoint-e2e" && !self.is_unit
    }

    /// Whether `STILLPOINT_SOAK` makes it longer.
    pub(crate) fn has_long_form(&self) -> bool {
        self.is_end_to_end() || LONG_FORMS.contains(&(self.package.as_str(), self.target.as_str()))
    }

    /// Runs it as cargo does: in its package's directory.
    pub(crate) fn command(&self, root: &Path) -> Command {
        let mut command = Command::new(&self.executable);
        command.current_dir(&self.package_dir).env("CARGO_MANIFEST_DIR", &self.package_dir).env("RUST_BACKTRACE", "1");
        command.env("CARGO_TARGET_DIR", target_dir(root));
        if std::env::var_os("STILLPOINT_BIN").is_none() {
            command.env("STILLPOINT_BIN", &self.stillpoint);
        }
        command
    }

    /// How to run it alone.
    fn again(&self) -> String {
        if self.is_unit {
            format!("cargo test -p {} --lib --bins", self.package)
        } else {
            format!("cargo test -p {} --test {}", self.package, self.target)
        }
    }
}

/// Tests that are no programs of cargo's: in which tree, and where the logs go.
type Tests = fn(&Path, &Path) -> Result<Counts>;

/// The packages whose names contain a word of `TEST_ONLY`; nothing where it asks for none.
fn only(root: &Path) -> Result<Option<Selection>> {
    let words = std::env::var("TEST_ONLY").unwrap_or_default();
    let words: Vec<&str> = words.split([',', ' ']).filter(|word| !word.is_empty()).collect();
    if words.is_empty() {
        return Ok(None);
    }
    let names = crate::metadata(root)?.packages.into_iter().map(|package| package.name.to_string());
    let packages: Vec<String> = names.filter(|name| words.iter().any(|word| name.contains(word))).collect();
    if packages.is_empty() {
        bail!("no package has a name with {}", words.join(" or "));
    }
    Ok(Some(Selection { packages, tests: Vec::new() }))
}

/// Runs every test of the tree; true when none failed. The last line is the count. With `TEST_ONLY`, those of some
/// packages.
pub(crate) fn test(root: &Path) -> Result<bool> {
    let start = Instant::now();
    println!("Every test of the tree, quick ones first. Servers are downloaded to the cache, nothing is installed;");
    println!("each line: time, counts, what ran. A failure shows its output and how to run it again.");
    println!("{}\n", room(root)?);
    let only = only(root)?;
    println!("building the tests");
    let programs = build_tests(root, false, only.as_ref())?;
    println!("built in {} s\n", start.elapsed().as_secs());
    let logs = make_logs(root)?;
    let ahead = only.is_none().then(|| ahead::mariadb(root, &logs)).transpose()?;

    let mut total = Counts::default();
    let mut again: Vec<String> = Vec::new();
    let (end_to_end, before): (Vec<_>, Vec<_>) =
        programs.iter().partition(|program| program.package == "stillpoint-e2e");
    let mut run_programs = |programs: &[&TestProgram], total: &mut Counts| -> Result<()> {
        for program in programs {
            let outcome = run_program(root, program, &logs)?;
            let counts = step::counts(&outcome);
            report(&program.name(), &outcome, counts);
            if counts.failed > 0 {
                again.push(program.again());
            }
            *total += counts;
        }
        Ok(())
    };
    run_programs(&before, &mut total)?;
    run_programs(&end_to_end, &mut total)?;
    drop(ahead);
    let others: [(Tests, &str); 4] = [
        (runtime_tests, "make -C runtime test"),
        (doc_tests, "cargo test --workspace --doc"),
        (fuzz::test, "make fuzz"),
        (generations::short, "cargo run -p xtask -- generations-short"),
    ];
    for (run, command) in others.into_iter().filter(|_| only.is_none()) {
        let counts = run(root, &logs)?;
        if counts.failed > 0 {
            again.push(command.to_owned());
        }
        total += counts;
    }
    println!("\n{} s in all; logs in target/test-logs", start.elapsed().as_secs());
    for command in &again {
        println!("failed; run it alone: {command}");
    }
    println!("{total}");
    Ok(total.failed == 0)
}

/// Where what tests say is kept.
fn make_logs(root: &Path) -> Result<PathBuf> {
    let logs = root.join("target/test-logs");
    std::fs::create_dir_all(&logs).with_context(|| format!("make {}", logs.display()))?;
    Ok(logs)
}

/// Some tests that are no programs of cargo's, by themselves; true when none failed.
pub(crate) fn alone(root: &Path, tests: Tests) -> Result<bool> {
    let counts = tests(root, &make_logs(root)?)?;
    println!("{counts}");
    Ok(counts.failed == 0)
}

/// What a first run leaves in `target` and the cache, and needs in between: GB.
const ROOM: u64 = 11;

/// How much the disk still takes; a run that stops half-way for want of it says so in many confusing ways.
fn room(root: &Path) -> Result<String> {
    let disk = rustix::fs::statvfs(root).with_context(|| format!("look at {}", root.display()))?;
    let free = disk.f_bavail * disk.f_frsize / 1_000_000_000;
    let enough = if free < ROOM { ": less than a first run may need" } else { "" };
    Ok(format!("{free} GB are free for target and the cache, of which a first run takes {ROOM}{enough}."))
}

fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Builds every test program of the tree, in the order in which they run.
pub(crate) fn build_tests(root: &Path, release: bool, some: Option<&Selection>) -> Result<Vec<TestProgram>> {
    let profile: &[&str] = if release { &["--release"] } else { &[] };
    let selection = match some {
        // The binary is built with them, for a test of its package names it. By itself it would have other features, and
        // every dependency would be compiled twice.
        None => vec!["--workspace"],
        Some(Selection { packages, tests }) => {
            build_binary(root, profile)?;
            let packages = packages.iter().flat_map(|package| ["--package", package.as_str()]);
            let tests = tests.iter().flat_map(|test| ["--test", test.as_str()]);
            packages.chain(tests).collect()
        }
    };
    let stillpoint = target_dir(root).join(if release { "release" } else { "debug" }).join("stillpoint");
    let mut command = cargo();
    command.arg("test").args(selection).args(["--locked", "--no-run", "--message-format=json-render-diagnostics"]);
    command.args(profile);
    let mut child =
        command.current_dir(root).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("start cargo")?;
    let stdout = child.stdout.take().context("cargo has an output")?;
    let packages = crate::metadata(root)?.packages;
    let mut programs = Vec::new();
    for message in Message::parse_stream(BufReader::new(stdout)) {
        if let Message::CompilerArtifact(artifact) = message?
            && artifact.profile.test
        {
            programs.extend(test_program(&packages, artifact, &stillpoint)?);
        }
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("the tests do not build ({status}); mend what the compiler says above");
    }
    programs.sort_by(|a: &TestProgram, b| a.rank().cmp(&b.rank()));
    Ok(programs)
}

/// Builds the binary by itself, unless the environment names one.
fn build_binary(root: &Path, profile: &[&str]) -> Result<()> {
    let mut binary = cargo();
    binary.args(["build", "--package", "stillpoint", "--locked", "--quiet", "--bin", "stillpoint"]).args(profile);
    let named = std::env::var_os("STILLPOINT_BIN").is_some();
    if !named && !binary.current_dir(root).status().context("start cargo")?.success() {
        bail!("`stillpoint` does not build; mend what the compiler says above");
    }
    Ok(())
}

fn test_program(packages: &[Package], artifact: Artifact, stillpoint: &Path) -> Result<Option<TestProgram>> {
    let Some(executable) = artifact.executable else { return Ok(None) };
    let manifest = artifact.manifest_path.as_std_path();
    let package_dir = manifest.parent().context("a manifest lies in a directory")?.to_owned();
    let is_unit = !artifact.target.kind.contains(&TargetKind::Test);
    let package = packages.iter().find(|package| package.id == artifact.package_id);
    let package = package.context("an artifact belongs to a package")?.name.to_string();
    let is_binary = artifact.target.kind.contains(&TargetKind::Bin);
    let target = match (is_unit, is_binary) {
        (true, true) => format!("unit ({})", artifact.target.name),
        (true, false) => "unit".to_owned(),
        _ => artifact.target.name,
    };
    Ok(Some(TestProgram {
        package,
        package_dir,
        target,
        is_unit,
        executable: executable.into_std_path_buf(),
        stillpoint: stillpoint.to_owned(),
    }))
}

fn run_program(root: &Path, program: &TestProgram, logs: &Path) -> Result<Outcome> {
    let log = logs.join(format!("{}.log", program.name().replace(' ', "-")));
    step::run(&program.name(), &mut program.command(root), &log, step::LIMIT)
}

pub(crate) fn target_dir(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// The C library has tests of its own, which count nothing: together they are one.
fn runtime_tests(root: &Path, logs: &Path) -> Result<Counts> {
    let mut command = Command::new("make");
    command.args(["-C", "runtime", "test"]).arg(format!("BUILD={}", target_dir(root).join("runtime").display()));
    let outcome = step::run("runtime", command.current_dir(root), &logs.join("runtime.log"), step::LIMIT)?;
    let counts = step::counts(&outcome);
    report("runtime (C)", &outcome, counts);
    Ok(counts)
}

fn doc_tests(root: &Path, logs: &Path) -> Result<Counts> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--locked", "--doc"]).current_dir(root);
    let outcome = step::run("doc examples", &mut command, &logs.join("doc.log"), step::LIMIT)?;
    let counts = step::counts(&outcome);
    report("doc examples", &outcome, counts);
    Ok(counts)
}

/// One line for a step, the reasons of what was skipped, and the end of the output of what failed.
pub(crate) fn report(name: &str, outcome: &Outcome, counts: Counts) {
    let failed = counts.failed > 0 || !outcome.succeeded;
    let word = if failed { "FAILED" } else { "ok" };
    println!("{word:>6} {:>7.1} s  {:<36} {name}", outcome.elapsed.as_secs_f64(), counts.to_string());
    for line in outcome.output.lines().filter(|line| step::is_skip(line)) {
        println!("          {line}");
    }
    if failed {
        println!("          it ended with: {}", outcome.ended);
        let lines: Vec<&str> = outcome.output.lines().collect();
        // where and why first: what a test printed before it failed may be long, and whoever keeps a log may cut it
        let why = (0..lines.len()).filter(|&i| lines[i].starts_with("thread '") && lines[i].contains(" panicked at "));
        for line in why.flat_map(|i| lines[i..].iter().take(2)) {
            println!("          | {line}");
        }
        let from = lines.iter().position(|line| *line == "failures:").unwrap_or(lines.len().saturating_sub(60));
        for line in lines[from..].iter().take(200) {
            println!("          | {line}");
        }
    }
}

/// Formatting, lints, the rules of the tree, and a look at repeated code.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut all_held = true;
    let lints = ["clippy", "--workspace", "--all-targets", "--locked", "--quiet", "--", "-D", "warnings"];
    for (name, words) in [("formatting", &["fmt", "--all", "--check"][..]), ("lints", &lints)] {
        let start = Instant::now();
        let status = cargo().args(words).current_dir(root).status().context("start cargo")?;
        line(name, status.success(), start.elapsed());
        all_held &= status.success();
    }
    let start = Instant::now();
    let tidy = tidy::run(root)?;
    line("rules of the tree", tidy, start.elapsed());
    repeated_code(root);
    Ok(all_held && tidy)
}

fn line(name: &str, held: bool, elapsed: Duration) {
    println!("{:>6} {:>7.1} s  {name}", if held { "ok" } else { "FAILED" }, elapsed.as_secs_f64());
}

/// Shows repeated code where the machine has a tool for it. A place to look, not a verdict.
fn repeated_code(root: &Path) {
    if let Ok(output) = Command::new("duplicates").arg("--repo").arg(root).args(["--most", "5"]).output() {
        println!("repeated code, worth a look:\n{}", String::from_utf8_lossy(&output.stdout).trim_end());
    }
}
