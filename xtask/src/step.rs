//! One command of a long run: output into a log, a limit on its time, and what its tests counted.

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Only a step that hangs meets it: the longest one builds MariaDB first, which takes ten minutes on two busy cores.
pub(crate) const LIMIT: Duration = Duration::from_secs(25 * 60);

/// Tests counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
    /// Tests that could not run because the archive withholds what they need.
    pub(crate) withheld: u64,
}

impl Counts {
    /// One thing that passed or failed.
    pub(crate) fn one(passed: bool) -> Counts {
        Counts { passed: passed.into(), failed: (!passed).into(), ..Counts::default() }
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.withheld += other.withheld;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// How a step went.
pub(crate) struct Outcome {
    pub(crate) succeeded: bool,
    pub(crate) ended: String,
    pub(crate) output: String,
    pub(crate) elapsed: Duration,
}

/// Runs `command` with its output in `log`, and ends it at `limit`.
pub(crate) fn run(name: &str, command: &mut Command, log: &Path, limit: Duration) -> Result<Outcome> {
    let start = Instant::now();
    let file = File::create(log).with_context(|| format!("create {}", log.display()))?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let mut child = command.spawn().with_context(|| format!("start {command:?}"))?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if start.elapsed() > limit {
            end(child.id());
            child.wait()?;
            break None;
        }
        show_progress(name, start.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    };
    clear_progress();
    let output = String::from_utf8_lossy(&std::fs::read(log)?).into_owned();
    let ended = status.map_or_else(|| format!("was ended after {} s", limit.as_secs()), |status| status.to_string());
    Ok(Outcome { succeeded: status.is_some_and(|s: ExitStatus| s.success()), ended, output, elapsed: start.elapsed() })
}

/// Ends a process and all below it: what a shell has started would run on.
pub(crate) fn end(root: u32) {
    let mut found = vec![root];
    let mut at = 0;
    while let Some(pid) = found.get(at) {
        for thread in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let children = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        at += 1;
    }
    for pid in found.into_iter().filter_map(|pid| Pid::from_raw(pid.cast_signed())) {
        // one that has ended meanwhile is what is wanted
        let _ = kill_process(pid, Signal::KILL);
    }
}

fn show_progress(name: &str, elapsed: Duration) {
    if std::io::stdout().is_terminal() {
        print!("\r\x1b[K   ... {:>4} s  {name}", elapsed.as_secs());
        let _ = std::io::stdout().flush();
    }
}

fn clear_progress() {
    if std::io::stdout().is_terminal() {
        print!("\r\x1b[K");
    }
}

/// What the output of test programs adds up to. A program that counts nothing is one test; one that fails without
/// having counted a failure (a crash, the limit) is one failed test. Tests that skip themselves pass for libtest.
pub(crate) fn counts(outcome: &Outcome) -> Counts {
    let mut counts = Counts::default();
    let mut counted = false;
    for line in outcome.output.lines() {
        if let Some(result) = line.strip_prefix("test result: ") {
            counted = true;
            counts += result_line(result);
        }
    }
    let skipped_themselves = outcome.output.lines().filter(|line| is_skip(line)).count() as u64;
    let withheld = outcome.output.lines().filter(|line| is_withheld(line)).count() as u64;
    counts.passed = counts.passed.saturating_sub(skipped_themselves + withheld);
    counts.skipped += skipped_themselves;
    counts.withheld += withheld;
    if !counted || (!outcome.succeeded && counts.failed == 0) {
        counts += Counts::one(outcome.succeeded);
    }
    counts
}

/// Whether a line of output is a test's word that it skipped itself.
pub(crate) fn is_skip(line: &str) -> bool {
    line.starts_with("SKIPPED ")
}

/// Returns true for the line of a test that could not run because the archive withholds what it needs.
pub(crate) fn is_withheld(line: &str) -> bool {
    line.starts_with("WITHHELD ")
}

/// `ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s`
fn result_line(result: &str) -> Counts {
    let number = |what: &str| {
        let words: Vec<&str> = result.split([' ', ';']).collect();
        words.windows(2).find(|pair| pair[1] == what).and_then(|pair| pair[0].parse().ok()).unwrap_or(0)
    };
    Counts { passed: number("passed"), failed: number("failed"), skipped: number("ignored"), withheld: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(succeeded: bool, output: &str) -> Outcome {
        Outcome { succeeded, ended: String::new(), output: output.into(), elapsed: Duration::ZERO }
    }

    #[test]
    fn a_step_that_meets_its_limit_leaves_nobody_behind() {
        let dir = tempfile::tempdir().unwrap();
        let child = dir.path().join("child");
        let script = format!("sleep 1000 & echo $! >{}; wait", child.display());
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        let outcome = run("sleeps", &mut command, &dir.path().join("log"), Duration::from_secs(2)).unwrap();
        assert_eq!((outcome.succeeded, &*outcome.ended), (false, "was ended after 2 s"));
        let pid = std::fs::read_to_string(child).unwrap();
        let runs = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
            !stat.is_empty() && !stat.contains(") Z ")
        };
        let begun = Instant::now();
        while runs() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{pid} runs on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn results_add_up_over_all_programs() {
        let text = "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured\nx\ntest result: FAILED. 2 passed; 3 failed; 0 ignored\n";
        assert_eq!(counts(&outcome(false, text)), Counts { passed: 7, failed: 3, skipped: 1, withheld: 0 });
    }

    #[test]
    fn tests_that_skip_themselves_have_not_passed() {
        let text = "SKIPPED a: no redis\nSKIPPED b: no redis\ntest result: ok. 5 passed; 0 failed; 0 ignored\n";
        assert_eq!(counts(&outcome(true, text)), Counts { passed: 3, failed: 0, skipped: 2, withheld: 0 });
    }

    #[test]
    fn what_the_archive_withholds_is_counted_apart() {
        let text = "WITHHELD a: no source\nSKIPPED b: no redis\ntest result: ok. 5 passed; 0 failed; 0 ignored\n";
        assert_eq!(counts(&outcome(true, text)), Counts { passed: 3, failed: 0, skipped: 1, withheld: 1 });
    }

    #[test]
    fn a_crash_is_a_failure_even_when_nothing_was_counted() {
        assert_eq!(counts(&outcome(false, "running 3 tests\n")), Counts::one(false));
        let text = "test result: ok. 5 passed; 0 failed; 0 ignored\n";
        assert_eq!(counts(&outcome(false, text)), Counts { passed: 5, failed: 1, skipped: 0, withheld: 0 });
        assert_eq!(counts(&outcome(true, "")), Counts::one(true));
    }

    #[test]
    fn the_last_line_reads_as_promised() {
        let counts = Counts { passed: 12, failed: 0, skipped: 3, withheld: 1 };
        assert_eq!(counts.to_string(), "12 passed, 0 failed, 3 skipped");
    }
}
