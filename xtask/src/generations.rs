//! The kernel with address-space generations, and its tests in an emulated machine (`generations/run`).

use crate::runner::{report, target_dir};
use crate::step::{self, Counts, Outcome};
use anyhow::Result;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The exit code of `setup/generations`, and of `generations/run` behind it, for what this machine cannot get.
const CANNOT_BE_HAD: &str = "exit status: 75";

/// All tests take 22 minutes of a free machine, and a kernel is built before; on a busy one that is three times as long.
const LIMIT: Duration = Duration::from_secs(2 * 3600);

/// Builds the kernel where that was not done yet, and runs all tests, the stress test shortly; each counts. Those of the kernel
/// once more where the processor has PCID, and on Linux 7.2 where processors flush each other's TLB, if such machines can be had.
pub(crate) fn test(root: &Path, logs: &Path) -> Result<Counts> {
    let mut all = run(root, logs, "generations", &["--seconds", "2"], LIMIT)?;
    all += run(root, logs, "generations-pcid", &["--machine", "pcid", "--seconds", "2"], LIMIT)?;
    let invlpgb = ["--kernel", "7.2", "--machine", "invlpgb", "--seconds", "2"];
    all += run(root, logs, "generations-invlpgb", &invlpgb, LIMIT)?;
    Ok(all)
}

/// The same with those tests that `make test` runs: some of each kind. Nothing else runs meanwhile.
pub(crate) fn short(root: &Path, logs: &Path) -> Result<Counts> {
    println!("       building the kernel with generations: some minutes of two processors, unless the cache has it");
    let mut command = Command::new("generations/run");
    command.arg("--build").current_dir(root).env("JOBS", "2");
    let mut built = step::run("kernel", &mut command, &logs.join("generations-kernel.log"), step::LIMIT)?;
    if !built.succeeded {
        let counts = counts(&mut built, required());
        report("kernel with generations", &built, counts);
        return Ok(counts);
    }
    report("kernel with generations", &built, Counts::default());
    run(root, logs, "generations", &["--short"], step::LIMIT)
}

fn required() -> bool {
    std::env::var_os("REQUIRE_ALL").is_some_and(|value| value == "1")
}

fn run(root: &Path, logs: &Path, name: &str, words: &[&str], limit: Duration) -> Result<Counts> {
    let mut command = Command::new("generations/run");
    command.args(words).current_dir(root);
    if std::env::var_os("STILLPOINT_BIN").is_none() {
        command.env("STILLPOINT_BIN", target_dir(root).join("debug/stillpoint"));
    }
    let mut outcome = step::run(name, &mut command, &logs.join(format!("{name}.log")), limit)?;
    let counts = counts(&mut outcome, required());
    report(&format!("{name} (in a machine of their own)"), &outcome, counts);
    Ok(counts)
}

/// What a run by TAP adds up to. One that could not begin is skipped, unless all is required.
fn counts(outcome: &mut Outcome, required: bool) -> Counts {
    if outcome.ended == CANNOT_BE_HAD && !required {
        let why = outcome.output.lines().last().unwrap_or_default().to_owned();
        outcome.output = format!("SKIPPED generations: {why}\n");
        outcome.succeeded = true;
        return Counts { skipped: 1, ..Counts::default() };
    }
    let of = |word: &str| outcome.output.lines().filter(|line| line.starts_with(word)).count() as u64;
    let counted = Counts { passed: of("ok "), failed: of("not ok "), skipped: 0 };
    // a machine that ended, or never ran a test, has failed, whatever it counted
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
        let mut outcome = Outcome { succeeded, ended: ended.into(), output: output.into(), elapsed: Duration::ZERO };
        counts(&mut outcome, required)
    }

    #[test]
    fn each_test_of_the_machine_counts() {
        let output = "TAP version 13\nok 1 versions # 0.1 s\nnot ok 2 commit # 3.0 s\nok 3 fork # 0.2 s\n1..3\n";
        assert_eq!(counts_of("exit status: 1", output, false), Counts { passed: 2, failed: 1, skipped: 0 });
    }

    #[test]
    fn a_machine_that_ends_has_failed() {
        let output = "TAP version 13\nok 1 versions # 0.1 s\nKernel panic - not syncing\n";
        assert_eq!(counts_of("exit status: 1", output, false), Counts { passed: 1, failed: 1, skipped: 0 });
        assert_eq!(counts_of("exit status: 0", "", false), Counts::one(false));
    }

    #[test]
    fn what_cannot_be_had_is_skipped_unless_all_is_required() {
        let output = "setup: linux-source-6.12\nsetup: linux-source-6.12 cannot be had\n";
        let skipped = Counts { passed: 0, failed: 0, skipped: 1 };
        assert_eq!(counts_of("exit status: 75", output, false), skipped);
        assert_eq!(counts_of("exit status: 75", output, true), Counts::one(false));
    }
}
