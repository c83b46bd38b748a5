//! Lines of a long run: one in a file for each step that ended, so that a stopped run can resume.

use crate::process::Counts;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;

/// Line of the file: one step that ended.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Line {
    pub(crate) commit: String,
    pub(crate) round: u32,
    pub(crate) step: String,
    pub(crate) seconds: f64,
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
    /// Machine that ran the step; empty in lines of older versions.
    #[serde(default)]
    machine: String,
    /// Counts that the test printed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    counts: BTreeMap<String, u64>,
}

impl Line {
    /// Makes the line of a step that has ended on this machine.
    pub(crate) fn new(commit: &str, round: u32, step: &str, seconds: f64, counts: Counts, output: &str) -> Line {
        Line {
            commit: commit.to_owned(),
            round,
            step: step.to_owned(),
            seconds,
            passed: counts.passed,
            failed: counts.failed,
            skipped: counts.skipped + counts.withheld + counts.full_tier,
            machine: machine(),
            counts: counted(output),
        }
    }

    /// Counts of the step's tests.
    pub(crate) fn tests(&self) -> Counts {
        Counts { passed: self.passed, failed: self.failed, skipped: self.skipped, ..Counts::default() }
    }
}

/// Reads the counts that a test prints: lines `COUNT what number`.
fn counted(output: &str) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for line in output.lines().filter_map(|line| line.strip_prefix("COUNT ")) {
        if let Some((what, number)) = line.rsplit_once(' ').and_then(|(what, n)| Some((what, n.parse::<u64>().ok()?))) {
            *all.entry(what.to_owned()).or_default() += number;
        }
    }
    all
}

/// Description of this machine: processor, memory and kernel.
fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let (cpu, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
    let value = |text: &str, key: &str| {
        let line = text.lines().find(|line| line.starts_with(key));
        line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let cores = cpu.lines().filter(|line| line.starts_with("processor")).count();
    let kib: u64 = value(&memory, "MemTotal").split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    let kernel = read("/proc/sys/kernel/osrelease");
    format!("{cores} x {}, {} GiB, Linux {}", value(&cpu, "model name"), kib.div_ceil(1 << 20), kernel.trim())
}

/// Seconds of all steps.
pub(crate) fn seconds(lines: &[Line]) -> f64 {
    lines.iter().map(|line| line.seconds).sum()
}

/// Prints the hours and the counts of all lines; returns true if no test has failed.
pub(crate) fn end(lines: &[Line], commit: &str) -> bool {
    let mut total = Counts::default();
    lines.iter().for_each(|line| total += line.tests());
    println!("{:.1} hours at {commit}", seconds(lines) / 3600.0);
    println!("{total}");
    total.failed == 0
}

/// Returns the round and the step that follow the finished ones.
pub(crate) fn next(done: &[Line], names: &[String]) -> (u32, usize) {
    let round = done.iter().map(|line| line.round).max().unwrap_or(1);
    let has = |name: &String| done.iter().any(|line| line.round == round && line.step == *name);
    match names.iter().position(|name| !has(name)) {
        Some(at) => (round, at),
        None => (round + 1, 0),
    }
}

/// Reads the lines of a file; a missing file has none.
pub(crate) fn read(path: &Path) -> Result<Vec<Line>> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        // A stopped run may have left the last line incomplete: that step is repeated.
        text => Ok(text?.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()),
    }
}

/// Appends a line to a file.
pub(crate) fn append(path: &Path, line: &Line) -> Result<()> {
    fs::create_dir_all(path.parent().context("the file lies in a directory")?)?;
    let mut file = File::options().create(true).append(true).open(path)?;
    Ok(writeln!(file, "{}", serde_json::to_string(line)?)?)
}

/// Commit that is checked out; `-dirty` if a committed file differs from it.
pub(crate) fn commit(root: &Path) -> Result<String> {
    let git = |arguments: &[&str]| -> Result<String> {
        let output = Command::new("git").args(arguments).current_dir(root).output().context("run git")?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Ok(git(&["describe", "--always"])? + if changed.is_empty() { "" } else { "-dirty" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(round: u32, step: &str) -> Line {
        let (commit, step, machine, counts) = ("c".into(), step.into(), machine(), BTreeMap::new());
        Line { commit, round, step, seconds: 1.0, passed: 1, failed: 0, skipped: 0, machine, counts }
    }

    #[test]
    fn goes_on_where_it_stopped() {
        let names = ["a".to_owned(), "b".to_owned()];
        assert_eq!(next(&[], &names), (1, 0));
        assert_eq!(next(&[line(1, "a")], &names), (1, 1));
        assert_eq!(next(&[line(1, "a"), line(1, "b")], &names), (2, 0));
        assert_eq!(next(&[line(1, "a"), line(1, "b"), line(2, "a")], &names), (2, 1));
    }

    #[test]
    fn counts_of_one_name_add_up() {
        let counts = counted("COUNT a b 3\nsomething else\nCOUNT a b 4\nCOUNT nothing\n");
        assert_eq!(counts, BTreeMap::from([("a b".to_owned(), 7)]));
    }

    #[test]
    fn a_line_that_was_cut_off_does_not_count() {
        let dir = std::env::temp_dir().join(format!("stillpoint-soak-{}", std::process::id()));
        let path = dir.join("soak.jsonl");
        append(&path, &line(1, "a")).unwrap();
        File::options().append(true).open(&path).unwrap().write_all(b"{\"commit\":\"c\",\"rou").unwrap();
        assert_eq!(read(&path).unwrap(), [line(1, "a")]);
        fs::remove_dir_all(dir).unwrap();
    }
}
