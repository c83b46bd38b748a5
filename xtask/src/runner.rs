//! `xtask test` and `xtask check`: steps one after another, quick ones first, one line each.

use crate::background_build::{self, BackgroundBuild};
use crate::process::{self, Counts, Outcome};
use crate::programs::{self, Unit, target_dir};
use crate::result_cache::ResultCache;
use crate::schedule::{SIDE_BY_SIDE, Schedule};
use crate::summary::Summary;
use crate::{generations, tidy};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Tests that are not cargo's programs: takes the root, the directory of logs, and the summary to add to.
pub(crate) type Tests = fn(&Path, &Path, &mut Summary) -> Result<()>;

/// Tests of this kind that `make test` runs.
const OTHER_TESTS: [Tests; 3] = [runtime_tests, doc_tests, generations::short];

/// Environment variable with the file to which the cache writes a line for each lookup.
pub(crate) const CACHE_LOG: &str = "STILLPOINT_CACHE_LOG";

/// Runs every test of the tree, and returns true if none failed. The last line is the count. With `TEST_ONLY`, only units whose names
/// contain one of its words run; without it, units that passed before with the same inputs ([`crate::result_cache`]) do not run again.
///
/// # Errors
/// The tree does not compile, or a step cannot be started.
pub(crate) fn test(root: &Path) -> Result<bool> {
    let start = Instant::now();
    let compiled = built_before();
    println!("Every test of the tree, quick ones first. Servers are unpacked in the cache, nothing is installed;");
    println!("each line: time, counts, name. A failure shows its output and the command to rerun it.");
    println!("{}\n", check_room(root)?);
    let words = words();
    let everything = words.is_empty();
    let passed = ResultCache::of_tree(root, everything)?;
    println!("building the tests");
    let units = programs::build(root, false)?;
    println!("built in {} s\n", (compiled + start.elapsed()).as_secs());
    let logs = make_logs(root)?;
    let cache_log = cache_log(&logs);
    std::fs::write(&cache_log, "").with_context(|| format!("write {}", cache_log.display()))?;

    let mut summary = Summary::default();
    let units = to_run(chosen(units, &words)?, passed.as_ref(), &mut summary)?;
    let build = (everything && !units.is_empty()).then(|| background_build::start_kernel(root, &logs)).transpose()?;
    let Schedule { quick, waiting, alone } = Schedule::new(units);
    let mut run = Run { root, logs: &logs, passed: passed.as_ref(), summary };
    run.units(&quick, 1)?;
    run.units(&waiting, SIDE_BY_SIDE)?;
    run.units(&alone, 1)?;
    let Run { mut summary, .. } = run;
    build.map_or(Ok(()), BackgroundBuild::wait)?;
    for tests in OTHER_TESTS.into_iter().filter(|_| everything) {
        tests(root, &logs, &mut summary)?;
    }
    summary.print(&cache_log);
    println!("\n{} s in all; logs in {}", (compiled + start.elapsed()).as_secs(), logs.display());
    end(&summary)
}

/// Words of `TEST_ONLY`; the name of a kind must contain one of them.
pub(crate) fn words() -> Vec<String> {
    let text = std::env::var("TEST_ONLY").unwrap_or_default();
    text.split([',', ' ']).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// Time since `make test` began to compile this program and the tests, from `TEST_BEGAN` (seconds since 1970) if it is set.
fn built_before() -> Duration {
    let began = std::env::var("TEST_BEGAN").ok().and_then(|text| text.parse().ok()).map(Duration::from_secs);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    began.map_or(Duration::ZERO, |began| now.saturating_sub(began))
}

/// Prints failures and skipped tests, and the count as the last line; returns true if no test failed.
fn end(summary: &Summary) -> Result<bool> {
    for command in &summary.failed {
        println!("failed; run it alone: {command}");
    }
    let Counts { withheld, full_tier, .. } = summary.total;
    if withheld > 0 {
        println!("{withheld} tests need versions that the archive lists and does not serve: WITHHELD above");
    }
    if summary.passed_before > 0 {
        println!(
            "{} passed before with the same inputs and did not run again; FRESH=1 runs them",
            summary.passed_before
        );
    }
    if full_tier > 0 {
        println!("{full_tier} tests belong to the full tier: make test-full");
    }
    println!("{}", summary.total);
    Ok(summary.total.failed == 0)
}

/// Selects the units whose names contain one of the words; without words all units.
fn chosen(units: Vec<Unit>, words: &[String]) -> Result<Vec<Unit>> {
    let is_chosen = |unit: &Unit| words.is_empty() || words.iter().any(|word| unit.name().contains(word.as_str()));
    let chosen: Vec<Unit> = units.into_iter().filter(is_chosen).collect();
    if chosen.is_empty() {
        bail!("no tests have a name with {}", words.join(" or "));
    }
    Ok(chosen)
}

/// Removes the units that passed before with the same inputs; these are printed and counted.
fn to_run(units: Vec<Unit>, passed: Option<&ResultCache>, summary: &mut Summary) -> Result<Vec<Unit>> {
    let Some(passed) = passed else { return Ok(units) };
    let before = passed.counts(&units)?;
    let mut left = Vec::new();
    for (unit, before) in units.into_iter().zip(before) {
        match before {
            Some(counts) => {
                println!("before                     {:<36} {}", counts.to_string(), unit.name());
                summary.add_passed_before(counts);
            }
            None => left.push(unit),
        }
    }
    Ok(left)
}

/// Run of units in a tree.
struct Run<'r> {
    root: &'r Path,
    logs: &'r Path,
    passed: Option<&'r ResultCache>,
    summary: Summary,
}

impl Run<'_> {
    /// Runs units, up to `at_once` at a time, and prints a line for each.
    fn units(&mut self, units: &[Unit], at_once: usize) -> Result<()> {
        let step = |unit: &Unit| {
            let mut command = unit.command(self.root);
            command.env(CACHE_LOG, cache_log(self.logs));
            (unit.name(), command, log_of(self.logs, &unit.name()))
        };
        process::run_beside(units.iter().map(step).collect(), at_once, process::LIMIT, |number, outcome| {
            let unit = &units[number];
            let counts = process::counts(outcome);
            report(&unit.name(), outcome, counts);
            self.summary.add(&unit.name(), &unit.by_hand(), outcome, counts);
            match self.passed {
                Some(passed) if outcome.succeeded => passed.store(unit, counts),
                _ => Ok(()),
            }
        })
    }
}

/// File with a line for each lookup in the cache.
pub(crate) fn cache_log(logs: &Path) -> PathBuf {
    logs.join("cache.log")
}

/// Log of the step of this name.
pub(crate) fn log_of(logs: &Path, name: &str) -> PathBuf {
    logs.join(format!("{}.log", name.replace([' ', ':', '/'], "-")))
}

/// Makes the directory for the output of the steps.
pub(crate) fn make_logs(root: &Path) -> Result<PathBuf> {
    let logs = target_dir(root).join("test-logs");
    std::fs::create_dir_all(&logs).with_context(|| format!("make {}", logs.display()))?;
    Ok(logs)
}

/// Runs tests that are not cargo's programs; returns true if none failed.
///
/// # Errors
/// A step cannot be started.
pub(crate) fn alone(root: &Path, tests: Tests) -> Result<bool> {
    let mut summary = Summary::default();
    tests(root, &make_logs(root)?, &mut summary)?;
    end(&summary)
}

/// Free space for a first run, in GB: `target`, the cache and temporary files.
const ROOM_GB: u64 = 11;

/// Returns a line about the free space of the disk. A run that fills the disk fails with many confusing messages.
fn check_room(root: &Path) -> Result<String> {
    let disk = rustix::fs::statvfs(root).with_context(|| format!("examine {}", root.display()))?;
    let free = disk.f_bavail * disk.f_frsize / 1_000_000_000;
    let enough = if free < ROOM_GB { ": less than a first run may need" } else { "" };
    Ok(format!("{free} GB are free for target and the cache, of which a first run needs {ROOM_GB}{enough}."))
}

/// Runs the tests of the C library; its output has no counts, so they count as one test.
pub(crate) fn runtime_tests(root: &Path, logs: &Path, summary: &mut Summary) -> Result<()> {
    let mut command = Command::new("make");
    command
        .args(["-C", "crates/patch/runtime", "test"])
        .arg(format!("BUILD={}", target_dir(root).join("runtime").display()));
    single("runtime (C)", "make -C crates/patch/runtime test", command.current_dir(root), logs, summary)
}

/// Runs the examples in the documentation.
pub(crate) fn doc_tests(root: &Path, logs: &Path, summary: &mut Summary) -> Result<()> {
    let mut command = programs::cargo();
    command.args(["test", "--workspace", "--locked", "--doc"]).current_dir(root);
    single("doc examples", "cargo test --workspace --doc", &mut command, logs, summary)
}

/// Runs one step, prints its line, and adds it up.
fn single(name: &str, by_hand: &str, command: &mut Command, logs: &Path, summary: &mut Summary) -> Result<()> {
    let outcome = process::run(name, command, &log_of(logs, name), process::LIMIT)?;
    let counts = process::counts(&outcome);
    report(name, &outcome, counts);
    summary.add(name, by_hand, &outcome, counts);
    Ok(())
}

/// Prints a line for a step (seconds, processor seconds, counts), the reasons of skipped tests, and the end of the output after a failure.
pub(crate) fn report(name: &str, outcome: &Outcome, counts: Counts) {
    let failed = counts.failed > 0 || !outcome.succeeded;
    let word = if failed { "FAILED" } else { "ok" };
    let (seconds, processor) = (outcome.elapsed.as_secs_f64(), outcome.processor.as_secs_f64());
    println!("{word:>6} {seconds:>7.1} s {processor:>7.1}  {:<36} {name}", counts.to_string());
    for line in outcome.output.lines().filter(|line| process::is_left_out(line)) {
        println!("          {line}");
    }
    if failed {
        println!("          it ended with: {}", outcome.ended);
        let lines: Vec<&str> = outcome.output.lines().collect();
        // place and reason first: a test's output before the failure may be long, and a log may be truncated
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

/// Runs formatting, lints, the rules of the tree, and the search for repeated code.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut all_held = true;
    let lints = ["clippy", "--workspace", "--all-targets", "--locked", "--quiet", "--", "-D", "warnings"];
    for (name, words) in [("formatting", &["fmt", "--all", "--check"][..]), ("lints", &lints)] {
        let start = Instant::now();
        let status = programs::cargo().args(words).current_dir(root).status().context("start cargo")?;
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

/// Prints repeated code if the machine has a tool for it. A hint, not a verdict.
fn repeated_code(root: &Path) {
    if let Ok(output) = Command::new("duplicates").arg("--repo").arg(root).args(["--most", "5"]).output() {
        println!("repeated code to review:\n{}", String::from_utf8_lossy(&output.stdout).trim_end());
    }
}
