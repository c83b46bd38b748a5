//! Command of a long run: output into a log, a time limit, and the counts of its tests.

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Time limit that only a hanging step reaches: the longest step first builds MariaDB, which takes ten minutes on two busy cores.
pub(crate) const LIMIT: Duration = Duration::from_secs(25 * 60);

/// Interval between two checks of a running command.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Numbers of tests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Tests that cannot run on this machine.
    pub(crate) skipped: u64,
    /// Tests that need a version of a package which the archive lists and does not serve.
    pub(crate) withheld: u64,
    /// Tests that belong to the full tier.
    pub(crate) full_tier: u64,
}

impl Counts {
    /// Counts one test that passed or failed.
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
        self.full_tier += other.full_tier;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Result of a step.
pub(crate) struct Outcome {
    pub(crate) succeeded: bool,
    pub(crate) ended: String,
    pub(crate) output: String,
    pub(crate) elapsed: Duration,
    /// Processor time of the command and of the children that it has waited for.
    pub(crate) processor: Duration,
}

/// Running command, with its output in a log and a time limit.
pub(crate) struct Running {
    child: Child,
    log: PathBuf,
    start: Instant,
    limit: Duration,
}

impl Running {
    /// Starts `command`.
    ///
    /// # Errors
    /// The log cannot be created, or the command does not start.
    pub(crate) fn start(command: &mut Command, log: &Path, limit: Duration) -> Result<Running> {
        let file = File::create(log).with_context(|| format!("create {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("start {command:?}"))?;
        Ok(Running { child, log: log.to_owned(), start: Instant::now(), limit })
    }

    /// Returns the result once the command has ended; kills it at its limit.
    ///
    /// # Errors
    /// The log cannot be read.
    pub(crate) fn poll(&mut self) -> Result<Option<Outcome>> {
        let late = self.start.elapsed() > self.limit;
        if late {
            end(self.child.id());
        } else if !self.has_ended()? {
            return Ok(None);
        }
        let processor = processor_time(self.child.id());
        let status = self.child.wait()?;
        let status = (!late).then_some(status);
        let output = String::from_utf8_lossy(&std::fs::read(&self.log)?).into_owned();
        let limit = self.limit.as_secs();
        let ended = status.map_or_else(|| format!("was ended after {limit} s"), |status| status.to_string());
        let succeeded = status.is_some_and(|s: ExitStatus| s.success());
        Ok(Some(Outcome { succeeded, ended, output, elapsed: self.start.elapsed(), processor }))
    }

    /// Returns true once the command has ended; it stays a zombie, whose times can be read.
    fn has_ended(&self) -> Result<bool> {
        let pid = Pid::from_raw(self.child.id().cast_signed()).context("a child has a process id")?;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        Ok(waitid(WaitId::Pid(pid), options)?.is_some())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            end(self.child.id());
            // it was killed
            let _ = self.child.wait();
        }
    }
}

/// Processor time of a process that has ended and of the children that it has waited for (proc_pid_stat(5), fields 14 to 17).
fn processor_time(pid: u32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = text.rsplit(')').next().unwrap_or_default();
    let ticks: u64 = after_name.split_whitespace().skip(11).take(4).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// Runs `command` with its output in `log`, and ends it at `limit`.
///
/// # Errors
/// The command does not start, or its log cannot be written or read.
pub(crate) fn run(name: &str, command: &mut Command, log: &Path, limit: Duration) -> Result<Outcome> {
    let mut running = Running::start(command, log, limit)?;
    loop {
        if let Some(outcome) = running.poll()? {
            clear_progress();
            return Ok(outcome);
        }
        show_progress(name, running.start.elapsed());
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Runs commands in their order, up to `at_once` at a time; `ended` gets the number and the result of each.
///
/// # Errors
/// A command does not start, its log cannot be written or read, or `ended` fails.
pub(crate) fn run_beside(
    commands: Vec<(String, Command, PathBuf)>,
    at_once: usize,
    limit: Duration,
    mut ended: impl FnMut(usize, &Outcome) -> Result<()>,
) -> Result<()> {
    let mut waiting = commands.into_iter().enumerate();
    let mut running: Vec<(usize, String, Running)> = Vec::new();
    loop {
        for (number, (name, mut command, log)) in waiting.by_ref().take(at_once - running.len()) {
            running.push((number, name, Running::start(&mut command, &log, limit)?));
        }
        if running.is_empty() {
            return Ok(());
        }
        let mut still = Vec::new();
        for (number, name, mut step) in running {
            match step.poll()? {
                Some(outcome) => {
                    clear_progress();
                    ended(number, &outcome)?;
                }
                None => still.push((number, name, step)),
            }
        }
        running = still;
        if let Some((_, name, oldest)) = running.first() {
            show_progress(&format!("{name} and {} beside it", running.len() - 1), oldest.start.elapsed());
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Ends a process and all its descendants: programs that a shell has started would continue.
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
        // an error means that it has ended already
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

/// Counts tests by the output of test programs. A program without counts is one test; one that fails without a counted failure (a crash,
/// the time limit) is one failed test. Tests that skip themselves pass for libtest.
pub(crate) fn counts(outcome: &Outcome) -> Counts {
    let mut counts = Counts::default();
    let mut counted = false;
    for line in outcome.output.lines() {
        if let Some(result) = line.strip_prefix("test result: ") {
            counted = true;
            counts += result_line(result);
        }
    }
    let beginning_with = |word: &str| outcome.output.lines().filter(|line| line.starts_with(word)).count() as u64;
    counts.skipped += beginning_with(SKIPPED);
    counts.withheld += beginning_with(WITHHELD);
    counts.passed = counts.passed.saturating_sub(counts.skipped + counts.withheld);
    if !counted || (!outcome.succeeded && counts.failed == 0) {
        counts += Counts::one(outcome.succeeded);
    }
    counts
}

/// Prefix of the line of a test that cannot run on this machine.
const SKIPPED: &str = "SKIPPED ";

/// Prefix of the line of a test that needs a package which the archive withholds.
const WITHHELD: &str = "WITHHELD ";

/// Returns true if a line of output reports that a test skipped itself, with the reason.
pub(crate) fn is_left_out(line: &str) -> bool {
    line.starts_with(SKIPPED) || line.starts_with(WITHHELD)
}

/// Parses `ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s`.
fn result_line(result: &str) -> Counts {
    let number = |what: &str| {
        let words: Vec<&str> = result.split([' ', ';']).collect();
        words.windows(2).find(|pair| pair[1] == what).and_then(|pair| pair[0].parse().ok()).unwrap_or(0)
    };
    let (passed, failed, full_tier) = (number("passed"), number("failed"), number("ignored"));
    Counts { passed, failed, full_tier, ..Counts::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(succeeded: bool, output: &str) -> Outcome {
        let (ended, output, elapsed) = (String::new(), output.into(), Duration::ZERO);
        Outcome { succeeded, ended, output, elapsed, processor: Duration::ZERO }
    }

    #[test]
    fn a_step_that_reaches_its_limit_leaves_no_process() {
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

    fn passed_failed(passed: u64, failed: u64) -> Counts {
        Counts { passed, failed, ..Counts::default() }
    }

    #[test]
    fn processor_time_of_children_counts() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'"]);
        let outcome = run("counts", &mut command, &dir.path().join("log"), Duration::from_secs(60)).unwrap();
        assert!(outcome.succeeded && outcome.processor > Duration::from_millis(10), "{:?}", outcome.processor);
    }

    #[test]
    fn commands_run_side_by_side_up_to_a_limit_and_each_ends_once() {
        let dir = tempfile::tempdir().unwrap();
        // each waits for the file of the other: one after the other they would never end
        let command = |own: &str, others: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("touch {own}; until [ -e {others} ]; do sleep 0.01; done")]);
            command.current_dir(dir.path());
            (own.to_owned(), command, dir.path().join(format!("{own}.log")))
        };
        let mut ended = Vec::new();
        let commands = vec![command("a", "b"), command("b", "a"), command("c", "b")];
        run_beside(commands, 2, Duration::from_secs(60), |number, outcome| {
            ended.push((number, outcome.succeeded));
            Ok(())
        })
        .unwrap();
        ended.sort_unstable();
        assert_eq!(ended, [(0, true), (1, true), (2, true)]);
    }

    #[test]
    fn results_add_up_over_all_programs() {
        let text = "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured\nx\ntest result: FAILED. 2 passed; 3 failed; 0 ignored\n";
        assert_eq!(counts(&outcome(false, text)), Counts { full_tier: 1, ..passed_failed(7, 3) });
    }

    #[test]
    fn tests_that_leave_themselves_out_have_not_passed() {
        let text = "SKIPPED a: no redis\nWITHHELD b: 404\nSKIPPED c: no redis\ntest result: ok. 5 passed; 0 failed; 0 ignored\n";
        let expected = Counts { skipped: 2, withheld: 1, ..passed_failed(2, 0) };
        assert_eq!(counts(&outcome(true, text)), expected);
    }

    #[test]
    fn a_crash_is_a_failure_even_when_nothing_was_counted() {
        assert_eq!(counts(&outcome(false, "running 3 tests\n")), Counts::one(false));
        let text = "test result: ok. 5 passed; 0 failed; 0 ignored\n";
        assert_eq!(counts(&outcome(false, text)), passed_failed(5, 1));
        assert_eq!(counts(&outcome(true, "")), Counts::one(true));
    }

    #[test]
    fn the_last_line_reads_as_promised() {
        assert_eq!(Counts { skipped: 3, ..passed_failed(12, 0) }.to_string(), "12 passed, 0 failed, 3 skipped");
    }
}
