//! The long form of the end-to-end tests, round after round, for hours.
//!
//! Every step is one line in `experiments/soak.jsonl`, written when it ends. A run that is stopped goes on with the
//! round it was in: what counts is what stands in the file for the commit that is checked out.

use crate::runner::{self, TestProgram};
use crate::step::{self, Counts};
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The long form of one test program takes this long at most.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

/// One line of the file.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct Line {
    commit: String,
    round: u32,
    step: String,
    seconds: f64,
    passed: u64,
    failed: u64,
    skipped: u64,
}

/// Runs rounds until the hours are full; true when no step failed, in this run or before.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let text = std::env::var("SOAK_HOURS").unwrap_or_else(|_| "8".into());
    let hours: f64 = text.parse().with_context(|| format!("SOAK_HOURS is {text:?}, not a number"))?;
    let path = root.join("experiments/soak.jsonl");
    let commit = commit(root)?;
    let mut lines = read(&path)?;
    lines.retain(|line| line.commit == commit);
    let programs: Vec<TestProgram> =
        runner::build_tests(root, true)?.into_iter().filter(TestProgram::is_end_to_end).collect();
    if programs.is_empty() {
        bail!("there are no end-to-end tests to run");
    }
    let names: Vec<String> = programs.iter().map(TestProgram::name).collect();
    let logs = root.join("target/test-logs");
    fs::create_dir_all(&logs)?;
    while seconds(&lines) < hours * 3600.0 {
        let (round, at) = next(&lines, &names);
        let program = &programs[at];
        let mut command = program.command(root);
        command.env("STILLPOINT_SOAK", "1");
        let log = logs.join(format!("soak-{}.log", names[at].replace(' ', "-")));
        let outcome = step::run(&names[at], &mut command, &log, LIMIT)?;
        let counts = step::counts(&outcome);
        runner::report(&format!("round {round}: {}", names[at]), &outcome, counts);
        let Counts { passed, failed, skipped } = counts;
        let step = names[at].clone();
        let line = Line {
            commit: commit.clone(),
            round,
            step,
            seconds: outcome.elapsed.as_secs_f64(),
            passed,
            failed,
            skipped,
        };
        append(&path, &line)?;
        lines.push(line);
        if failed > 0 {
            fs::copy(&log, logs.join(format!("soak-failed-{round}-{at}.log")))?;
        }
    }
    let mut total = Counts::default();
    lines.iter().for_each(|l| total += Counts { passed: l.passed, failed: l.failed, skipped: l.skipped });
    println!("{:.1} hours at {commit}", seconds(&lines) / 3600.0);
    println!("{total}");
    Ok(total.failed == 0)
}

fn seconds(lines: &[Line]) -> f64 {
    lines.iter().map(|line| line.seconds).sum()
}

/// Round and step that come after those that were done.
fn next(done: &[Line], names: &[String]) -> (u32, usize) {
    let round = done.iter().map(|line| line.round).max().unwrap_or(1);
    let has = |name: &String| done.iter().any(|line| line.round == round && line.step == *name);
    match names.iter().position(|name| !has(name)) {
        Some(at) => (round, at),
        None => (round + 1, 0),
    }
}

fn read(path: &Path) -> Result<Vec<Line>> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        // The last line may be cut off by whatever stopped the run: that step is done once more.
        text => Ok(text?.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()),
    }
}

fn append(path: &Path, line: &Line) -> Result<()> {
    fs::create_dir_all(path.parent().context("the file lies in a directory")?)?;
    let mut file = File::options().create(true).append(true).open(path)?;
    Ok(writeln!(file, "{}", serde_json::to_string(line)?)?)
}

fn commit(root: &Path) -> Result<String> {
    let output = Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(root).output();
    let output = output.context("run git")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(round: u32, step: &str) -> Line {
        Line { commit: "c".into(), round, step: step.into(), seconds: 1.0, passed: 1, failed: 0, skipped: 0 }
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
    fn a_line_that_was_cut_off_does_not_count() {
        let dir = std::env::temp_dir().join(format!("stillpoint-soak-{}", std::process::id()));
        let path = dir.join("soak.jsonl");
        append(&path, &line(1, "a")).unwrap();
        File::options().append(true).open(&path).unwrap().write_all(b"{\"commit\":\"c\",\"rou").unwrap();
        assert_eq!(read(&path).unwrap(), [line(1, "a")]);
        fs::remove_dir_all(dir).unwrap();
    }
}
