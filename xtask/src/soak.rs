//! The long form of the end-to-end tests, round after round, for hours.
//!
//! Every test is a step, and every step one line in `experiments/soak.jsonl`, written when it ends. A run that is stopped
//! goes on with the round it was in: what counts is what stands in the file for the commit that is checked out.
//! `SOAK_HOURS` says for how long (8), `SOAK_ONLY` names the test programs (all), `SOAK_TESTS` words that the names of
//! tests contain (all), `SOAK_PROFILE=dev` takes the build that the tests use. `SOAK_PIECES=N` makes N steps of each test,
//! for tests that can do an Nth of their rounds at a time; `SOAK_STEPS=N` ends the run after so many steps, and
//! `SOAK_PACKAGE` builds those of one package only. A test says what it counted by lines `COUNT what number`: they are
//! kept with its step.

use crate::runner::{self, TestProgram};
use crate::step::{self, Counts};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The long form of one test program takes this long at most.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

/// What a round begins with: the counts that the product promises. The others follow in the order of `make test`.
const FIRST: [&str; 4] = ["crash", "victims", "storm", "exceptions_live"];

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
    /// Where it ran; lines of before there was one have none.
    #[serde(default)]
    machine: String,
    /// What the test counted.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    counts: BTreeMap<String, u64>,
}

/// One test of one program.
#[derive(Clone)]
struct Step<'p> {
    program: &'p TestProgram,
    test: String,
    /// Which piece of it, of how many.
    piece: (u32, u32),
}

impl Step<'_> {
    fn name(&self) -> String {
        let piece = match self.piece {
            (_, 1) => String::new(),
            (piece, pieces) => format!(" {piece}/{pieces}"),
        };
        format!("{} {}{piece}", self.program.name(), self.test)
    }
}

/// Runs rounds until the hours are full; true when no step failed, in this run or before.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let text = std::env::var("SOAK_HOURS").unwrap_or_else(|_| "8".into());
    let hours: f64 = text.parse().with_context(|| format!("SOAK_HOURS is {text:?}, not a number"))?;
    let path = root.join("experiments/soak.jsonl");
    let commit = commit(root)?;
    let mut lines = read(&path)?;
    lines.retain(|line| line.commit == commit);
    let release = std::env::var("SOAK_PROFILE").map_or(true, |profile| profile != "dev");
    let only = std::env::var("SOAK_ONLY").unwrap_or_default();
    let named = only.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    let package = std::env::var("SOAK_PACKAGE").ok();
    let some = package.map(|package| runner::Selection { packages: vec![package], tests: named });
    let wanted = |program: &TestProgram| only.is_empty() || only.split(',').any(|name| program.is_called(name));
    let mut programs: Vec<TestProgram> = runner::build_tests(root, release, some.as_ref())?;
    programs.retain(|program| program.has_long_form() && wanted(program));
    programs.sort_by_key(|program| FIRST.iter().position(|name| program.is_called(name)).unwrap_or(FIRST.len()));
    let pieces = std::env::var("SOAK_PIECES").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let words = std::env::var("SOAK_TESTS").unwrap_or_default();
    let mut steps = steps(root, &programs, pieces)?;
    steps.retain(|step| words.is_empty() || words.split(',').any(|word| step.test.contains(word)));
    if steps.is_empty() {
        bail!("there are no end-to-end tests to run");
    }
    let names: Vec<String> = steps.iter().map(Step::name).collect();
    let logs = root.join("target/test-logs");
    fs::create_dir_all(&logs)?;
    let most = std::env::var("SOAK_STEPS").ok().and_then(|n| n.parse().ok()).unwrap_or(usize::MAX);
    let earlier = lines.len();
    while seconds(&lines) < hours * 3600.0 && lines.len() - earlier < most {
        let (round, at) = next(&lines, &names);
        let mut command = steps[at].program.command(root);
        let (piece, pieces) = steps[at].piece;
        command.env("STILLPOINT_SOAK_PIECE", piece.to_string()).env("STILLPOINT_SOAK_PIECES", pieces.to_string());
        command.env("STILLPOINT_SOAK", "1").args(["--exact", &steps[at].test, "--include-ignored", "--nocapture"]);
        let log = logs.join(format!("soak-{}.log", names[at].replace([' ', ':', '/'], "-")));
        let outcome = step::run(&names[at], &mut command, &log, LIMIT)?;
        let counts = step::counts(&outcome);
        runner::report(&format!("round {round}: {}", names[at]), &outcome, counts);
        let Counts { passed, failed, skipped, .. } = counts;
        let line = Line {
            commit: commit.clone(),
            round,
            step: names[at].clone(),
            seconds: outcome.elapsed.as_secs_f64(),
            passed,
            failed,
            skipped,
            machine: machine(),
            counts: counted(&outcome.output),
        };
        append(&path, &line)?;
        lines.push(line);
        if failed > 0 {
            fs::copy(&log, logs.join(format!("soak-failed-{round}-{at}.log")))?;
        }
    }
    let mut total = Counts::default();
    lines
        .iter()
        .for_each(|l| total += Counts { passed: l.passed, failed: l.failed, skipped: l.skipped, ..Counts::default() });
    println!("{:.1} hours at {commit}", seconds(&lines) / 3600.0);
    println!("{total}");
    Ok(total.failed == 0)
}

fn steps<'p>(root: &Path, programs: &'p [TestProgram], pieces: u32) -> Result<Vec<Step<'p>>> {
    let mut steps = Vec::new();
    for program in programs {
        let output = program.command(root).args(["--list", "--format", "terse"]).output();
        let output = output.with_context(|| format!("list the tests of {}", program.name()))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let tests = text.lines().filter_map(|line| line.strip_suffix(": test"));
        for test in tests {
            let piece = |piece| Step { program, test: test.to_owned(), piece: (piece, pieces) };
            steps.extend((1..=pieces).map(piece));
        }
    }
    // a piece of each before the next of any
    steps.sort_by_key(|step| step.piece.0);
    Ok(steps)
}

/// What a test says that it counted.
fn counted(output: &str) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for line in output.lines().filter_map(|line| line.strip_prefix("COUNT ")) {
        if let Some((what, number)) = line.rsplit_once(' ').and_then(|(what, n)| Some((what, n.parse::<u64>().ok()?))) {
            *all.entry(what.to_owned()).or_default() += number;
        }
    }
    all
}

/// Processor, memory and kernel.
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

/// The commit that is checked out; `-dirty` when anything differs from it but the file that this run writes.
fn commit(root: &Path) -> Result<String> {
    let git = |arguments: &[&str]| -> Result<String> {
        let output = Command::new("git").args(arguments).current_dir(root).output().context("run git")?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let changed =
        git(&["status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)experiments/soak.jsonl"])?;
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
