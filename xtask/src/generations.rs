//! Kernel with address-space generations, and its tests in an emulated machine (`crates/patch/generations/run`).

use crate::process::{self, Counts, Outcome};
use crate::programs::target_dir;
use crate::runner::{CACHE_LOG, cache_log, report};
use crate::summary::Summary;
use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Exit status of `setup/generations`, and of `crates/patch/generations/run` after it, when the archive withholds a package.
const WITHHELD_STATUS: &str = "exit status: 75";

/// Exit status when this machine cannot get a package for another reason.
const UNAVAILABLE_STATUS: &str = "exit status: 69";

/// Time limit: all tests take 22 minutes on an idle machine, after the build of a kernel; on a busy one three times as long.
const TEST_TIMEOUT: Duration = Duration::from_secs(2 * 3600);

/// Builds the kernel if necessary, and runs all tests, the stress test shortly; each counts. If such machines are available, the tests of
/// the kernel run again where the processor has PCID, and on Linux 7.2 where processors flush each other's TLB.
///
/// # Errors
/// A step cannot be started.
pub(crate) fn test(root: &Path, logs: &Path, summary: &mut Summary) -> Result<()> {
    run(root, logs, "generations", &["--seconds", "2"], TEST_TIMEOUT, summary)?;
    run(root, logs, "generations-pcid", &["--machine", "pcid", "--seconds", "2"], TEST_TIMEOUT, summary)?;
    let invlpgb = ["--kernel", "7.2", "--machine", "invlpgb", "--seconds", "2"];
    run(root, logs, "generations-invlpgb", &invlpgb, TEST_TIMEOUT, summary)
}

/// Runs those of the tests that `make test` runs: some of each kind. No other test runs meanwhile.
///
/// # Errors
/// A step cannot be started.
pub(crate) fn short(root: &Path, logs: &Path, summary: &mut Summary) -> Result<()> {
    println!("       building the kernel with generations: some minutes of two processors, unless the cache has it");
    let mut command = Command::new(BUILD[0]);
    command.args(&BUILD[1..]);
    in_tree(&mut command, root, logs)?;
    let mut built = process::run("kernel", &mut command, &logs.join("generations-kernel.log"), process::LIMIT)?;
    let name = "generations kernel";
    let counts = if built.succeeded { Counts::default() } else { counts(&mut built, required()) };
    report(name, &built, counts);
    summary.add(name, SHORT_MANUAL_COMMAND, &built, counts);
    if !built.succeeded || counts != Counts::default() {
        return Ok(());
    }
    run(root, logs, "generations", &["--short"], process::LIMIT, summary)
}

/// Builds the kernel and its tests unless the cache has them.
pub(crate) const BUILD: [&str; 2] = ["crates/patch/generations/run", "--build"];

/// Command that runs the short form by hand.
const SHORT_MANUAL_COMMAND: &str = "cargo run -p xtask -- generations-short";

/// Lets the script run in the tree, and use this program to find things in the cache.
pub(crate) fn in_tree(command: &mut Command, root: &Path, logs: &Path) -> Result<()> {
    let own = std::env::current_exe().context("find this program")?;
    command.current_dir(root).env(CACHE_LOG, cache_log(logs)).env("STILLPOINT_XTASK", own);
    Ok(())
}

fn required() -> bool {
    std::env::var_os("REQUIRE_ALL").is_some_and(|value| value == "1")
}

fn run(root: &Path, logs: &Path, name: &str, words: &[&str], limit: Duration, summary: &mut Summary) -> Result<()> {
    let mut command = Command::new("crates/patch/generations/run");
    command.args(words);
    in_tree(&mut command, root, logs)?;
    if std::env::var_os("STILLPOINT_BIN").is_none() {
        command.env("STILLPOINT_BIN", target_dir(root).join("debug/stillpoint"));
    }
    let mut outcome = process::run(name, &mut command, &logs.join(format!("{name}.log")), limit)?;
    let counts = counts(&mut outcome, required());
    report(&format!("{name} (in a machine of their own)"), &outcome, counts);
    summary.add(name, &format!("crates/patch/generations/run {}", words.join(" ")), &outcome, counts);
    Ok(())
}

/// Counts a run by its TAP output. A run that could not begin is withheld by the archive, or skipped unless everything is required.
fn counts(outcome: &mut Outcome, required: bool) -> Counts {
    let withheld = outcome.ended == WITHHELD_STATUS;
    if withheld || (outcome.ended == UNAVAILABLE_STATUS && !required) {
        let why = outcome.output.lines().last().unwrap_or_default().to_owned();
        let word = if withheld { "WITHHELD" } else { "SKIPPED" };
        outcome.output = format!("{word} generations: {why}\n");
        outcome.succeeded = true;
        return Counts { skipped: (!withheld).into(), withheld: withheld.into(), ..Counts::default() };
    }
    let of = |word: &str| outcome.output.lines().filter(|line| line.starts_with(word)).count() as u64;
    let counted = Counts { passed: of("ok "), failed: of("not ok "), ..Counts::default() };
    // a machine that ended, or never ran a test, has failed, independent of its counts
    match outcome.succeeded && counted.passed > 0 || counted.failed > 0 {
        true => counted,
        false => Counts { failed: 1, ..counted },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn counts_of(ended: &str, output: &str, required: bool) -> Counts {
        let succeeded = ended == "exit status: 0";
        let (ended, output, elapsed) = (ended.into(), output.into(), Duration::ZERO);
        counts(&mut Outcome { succeeded, ended, output, elapsed, processor: Duration::ZERO }, required)
    }

    #[test]
    fn each_test_of_the_machine_counts() {
        let output = "TAP version 13\nok 1 versions # 0.1 s\nnot ok 2 commit # 3.0 s\nok 3 fork # 0.2 s\n1..3\n";
        let expected = Counts { passed: 2, failed: 1, ..Counts::default() };
        assert_eq!(counts_of("exit status: 1", output, false), expected);
    }

    #[test]
    fn a_machine_that_ends_has_failed() {
        let output = "TAP version 13\nok 1 versions # 0.1 s\nKernel panic - not syncing\n";
        let expected = Counts { passed: 1, failed: 1, ..Counts::default() };
        assert_eq!(counts_of("exit status: 1", output, false), expected);
        assert_eq!(counts_of("exit status: 0", "", false), Counts::one(false));
    }

    #[test]
    fn what_cannot_be_had_is_skipped_unless_all_is_required() {
        let output = "setup: linux-source-6.12\nsetup: linux-source-6.12 cannot be had\n";
        let skipped = Counts { skipped: 1, ..Counts::default() };
        assert_eq!(counts_of("exit status: 69", output, false), skipped);
        assert_eq!(counts_of("exit status: 69", output, true), Counts::one(false));
    }

    #[test]
    fn what_the_archive_withholds_is_no_failure_even_when_all_is_required() {
        let output = "setup: linux-source-6.12\nsetup: linux-source-6.12 cannot be had\n";
        let withheld = Counts { withheld: 1, ..Counts::default() };
        assert_eq!([false, true].map(|required| counts_of("exit status: 75", output, required)), [withheld; 2]);
    }
}
