//! Every decoder of outside bytes under libFuzzer, on a stable compiler.
//!
//! The obvious way is `cargo fuzz`; it needs a nightly compiler, which a fresh machine lacks. The instrumentation is a pass of LLVM that
//! every stable compiler contains, so this module names it and builds `fuzz/` with it. The address sanitizer is missing; it finds little in
//! decoders that forbid unsafe code.

use crate::process::{self, Counts};
use crate::programs::{cargo, target_dir};
use crate::runner::report;
use crate::soak::number;
use crate::summary::Summary;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Flags of cargo-fuzz, without a sanitizer; overflows and failed debug assertions are findings too.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions -Coverflow-checks";

/// Seconds for each target, from `STILLPOINT_FUZZ_SECONDS`.
fn seconds() -> Result<u64> {
    number("STILLPOINT_FUZZ_SECONDS", 12)
}

/// Names of the targets: the files of `fuzz/targets`.
fn targets(root: &Path) -> Result<Vec<String>> {
    let dir = root.join("fuzz/targets");
    let mut names: Vec<String> = std::fs::read_dir(&dir)
        .with_context(|| format!("list {}", dir.display()))?
        .flatten()
        .filter_map(|entry| entry.path().file_stem().map(|stem| stem.to_string_lossy().into_owned()))
        .collect();
    names.sort();
    Ok(names)
}

/// Builds every target and runs two at a time, since each keeps one processor busy; each is one test.
///
/// # Errors
/// There is no target, or a step cannot be started.
pub(crate) fn test(root: &Path, logs: &Path, summary: &mut Summary) -> Result<()> {
    let target_dir = target_dir(root).join("fuzz");
    let mut build = cargo();
    build.args(["build", "--release", "--target", TRIPLE, "--manifest-path"]);
    build.arg(root.join("fuzz/Cargo.toml")).arg("--target-dir").arg(&target_dir).env("RUSTFLAGS", FLAGS);
    let outcome = process::run("fuzz build", &mut build, &logs.join("fuzz-build.log"), process::LIMIT)?;
    // a build is not a test, unless it fails
    let counts = if outcome.succeeded { Counts::default() } else { Counts::one(false) };
    report("fuzz build", &outcome, counts);
    summary.add("fuzz build", MANUAL_COMMAND, &outcome, counts);
    if !outcome.succeeded {
        return Ok(());
    }
    let names = targets(root)?;
    if names.is_empty() {
        bail!("fuzz/targets contains no target");
    }
    let mut steps = Vec::new();
    for name in &names {
        steps.push((format!("fuzz {name}"), command(root, &target_dir, name)?, logs.join(format!("fuzz-{name}.log"))));
    }
    let limit = Duration::from_secs(seconds()? + 120);
    process::run_beside(steps, 2, limit, |number, outcome| {
        let counts = Counts::one(outcome.succeeded);
        let name = &names[number];
        report(&format!("fuzz {name} ({} inputs)", executed(&outcome.output)), outcome, counts);
        summary.add(&format!("fuzz {name}"), MANUAL_COMMAND, outcome, counts);
        Ok(())
    })
}

/// Command that runs all targets by hand.
const MANUAL_COMMAND: &str = "make fuzz";

/// Command that runs one target with the corpus that earlier runs have left.
fn command(root: &Path, target_dir: &Path, name: &str) -> Result<Command> {
    // The corpus of earlier runs comes first, since libFuzzer writes new finds to the first directory.
    let corpus = stillpoint_testing::recipes::directory("fuzz", name).map_err(anyhow::Error::msg)?;
    let findings = root.join("fuzz/findings");
    std::fs::create_dir_all(&findings).with_context(|| format!("make {}", findings.display()))?;
    let program: PathBuf = target_dir.join(TRIPLE).join("release").join(name);
    seed(&program, &corpus)?;
    let mut command = Command::new(&program);
    command.arg(&corpus);
    command
        .arg(format!("-max_total_time={}", seconds()?))
        .arg(format!("-artifact_prefix={}/{name}-", findings.display()));
    // Limits of memory and time for a decoder that allocates a length from hostile input, or loops.
    command.args(["-rss_limit_mb=2048", "-malloc_limit_mb=512", "-timeout=10", "-print_final_stats=1"]);
    Ok(command)
}

/// Lets a target write its first inputs, made from real files, into its corpus.
fn seed(program: &Path, corpus: &Path) -> Result<()> {
    let status = Command::new(program)
        .arg("-runs=0")
        .env("STILLPOINT_FUZZ_SEED", corpus)
        .output()
        .with_context(|| format!("start {}", program.display()))?
        .status;
    if !status.success() {
        bail!("{} cannot write its first inputs ({status})", program.display());
    }
    Ok(())
}

fn executed(output: &str) -> &str {
    output.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:")).map_or("?", str::trim)
}
