//! Full tier: every test once, in its long form and in any tier, and all tests that are not cargo's programs.
//!
//! Every test is a step, and every step writes a line below `target/full` when it ends: a run that is stopped resumes there, as long as the
//! same commit is checked out. A kind (a module, or all tests of a library) gets its line in `experiments/full-tier.md` when all its steps
//! have passed: commit and date of its last full pass.

use crate::process::{self, Counts};
use crate::programs::{self, Unit, target_dir};
use crate::record::{self, Line};
use crate::runner::{self, log_of};
use crate::soak;
use crate::summary::Summary;
use crate::{fuzz, generations};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Page of the last full passes, relative to the root.
const PAGE_PATH: &str = "experiments/full-tier.md";

const PAGE_HEAD: &str = "# Full tier\n\nLast full pass of each kind of test, written by `make test-full`, which continues where it stopped. A kind without a line has not passed completely.\n\n| kind | commit | date | tests | minutes |\n|---|---|---|---|---|\n";

/// Test in its long form, or a whole kind.
struct Step<'u> {
    kind: String,
    name: String,
    run: Run<'u>,
}

/// Means to run a step.
enum Run<'u> {
    /// All tests of a library or a binary, in one process.
    Unit(&'u Unit),
    /// One test in a process of its own.
    Test(&'u Unit, &'u str),
    /// Tests that are not cargo's programs.
    Other(runner::Tests),
}

/// Runs the steps that have not run yet for this commit; returns true if none of all its steps has failed.
///
/// # Errors
/// The tree does not compile, a step cannot be started, or a file of results cannot be written.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let commit = record::commit(root)?;
    let path = target_dir(root).join("full").join(format!("{commit}.jsonl"));
    let mut lines = record::read(&path)?;
    let units = programs::build(root, false)?;
    let steps = steps(&units, &runner::words());
    if steps.is_empty() {
        bail!("no kind of test has a name with a word of TEST_ONLY");
    }
    let logs = runner::make_logs(root)?;
    println!("{} steps at {commit}, {} of them already done", steps.len(), lines.len());
    for step in &steps {
        if lines.iter().any(|line| line.step == step.name) {
            continue;
        }
        let line = run_step(root, &logs, &commit, step)?;
        record::append(&path, &line)?;
        lines.push(line);
        record_pass(root, &commit, &step.kind, &steps, &lines)?;
    }
    for line in lines.iter().filter(|line| line.failed > 0) {
        println!("failed: {}", line.step);
    }
    Ok(record::end(&lines, &commit))
}

fn steps<'u>(units: &'u [Unit], words: &[String]) -> Vec<Step<'u>> {
    let mut steps = Vec::new();
    for unit in units {
        let kind = unit.name();
        if unit.is_unit() {
            steps.push(Step { kind: kind.clone(), name: kind, run: Run::Unit(unit) });
            continue;
        }
        steps.extend(unit.tests().iter().map(|test| Step {
            kind: kind.clone(),
            name: format!("{kind} {test}"),
            run: Run::Test(unit, test),
        }));
    }
    let others: [(&str, runner::Tests); 4] = [
        ("runtime (C)", runner::runtime_tests),
        ("doc examples", runner::doc_tests),
        ("fuzz", fuzz::test),
        ("generations", generations::test),
    ];
    steps.extend(others.map(|(name, tests)| Step { kind: name.into(), name: name.into(), run: Run::Other(tests) }));
    steps.retain(|step| words.is_empty() || words.iter().any(|word| step.kind.contains(word.as_str())));
    steps
}

fn run_step(root: &Path, logs: &Path, commit: &str, step: &Step) -> Result<Line> {
    let mut command = match step.run {
        Run::Test(unit, test) => unit.long(root, test),
        Run::Unit(unit) => {
            let mut command = unit.command(root);
            command.arg("--include-ignored").env("STILLPOINT_SOAK", "1");
            command
        }
        Run::Other(tests) => {
            let mut summary = Summary::default();
            tests(root, logs, &mut summary)?;
            let counts = Counts { full_tier: 0, ..summary.total };
            return Ok(Line::new(commit, 1, &step.name, summary.seconds(), counts, ""));
        }
    };
    let outcome = process::run(&step.name, &mut command, &log_of(logs, &format!("full {}", step.name)), soak::LIMIT)?;
    let counts = process::counts(&outcome);
    runner::report(&step.name, &outcome, counts);
    Ok(Line::new(commit, 1, &step.name, outcome.elapsed.as_secs_f64(), counts, &outcome.output))
}

/// Writes the line of a kind if all its steps have run and passed.
fn record_pass(root: &Path, commit: &str, kind: &str, steps: &[Step], lines: &[Line]) -> Result<()> {
    let line = |step: &Step| lines.iter().find(|line| line.step == step.name);
    let of_kind: Option<Vec<&Line>> = steps.iter().filter(|step| step.kind == kind).map(line).collect();
    let Some(of_kind) = of_kind else { return Ok(()) };
    if of_kind.iter().any(|line| line.failed > 0 || line.skipped > 0) {
        return Ok(());
    }
    let tests: u64 = of_kind.iter().map(|line| line.passed).sum();
    let minutes = of_kind.iter().map(|line| line.seconds).sum::<f64>() / 60.0;
    let path = root.join(PAGE_PATH);
    let page = std::fs::read_to_string(&path).unwrap_or_default();
    let row = format!("| {commit} | {} | {tests} | {minutes:.1} |", today()?);
    std::fs::write(&path, with_row(&page, kind, &row)).with_context(|| format!("write {}", path.display()))
}

/// Returns the page with the row of a kind replaced or added; rows are in the order of kinds.
fn with_row(page: &str, kind: &str, row: &str) -> String {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
    let mut rows: BTreeMap<&str, String> =
        rows.filter(|(kind, _)| *kind != "kind").map(|(kind, rest)| (kind, format!("| {rest}"))).collect();
    rows.insert(kind, row.to_owned());
    let rows: String = rows.iter().map(|(kind, rest)| format!("| {kind} {rest}\n")).collect();
    format!("{PAGE_HEAD}{rows}")
}

fn today() -> Result<String> {
    let output = Command::new("date").arg("+%F").output().context("run date")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_replaces_that_of_the_same_kind_and_keeps_the_others() {
        let page = with_row("", "b x", "| c1 | 2026-11-01 | 3 | 0.5 |");
        let page = with_row(&page, "a y", "| c1 | 2026-11-01 | 4 | 1.0 |");
        let page = with_row(&page, "b x", "| c2 | 2026-11-02 | 5 | 2.0 |");
        let rows = "| a y | c1 | 2026-11-01 | 4 | 1.0 |\n| b x | c2 | 2026-11-02 | 5 | 2.0 |\n";
        assert_eq!(page, format!("{PAGE_HEAD}{rows}"));
    }
}
