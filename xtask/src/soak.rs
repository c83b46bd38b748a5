//! Long form of the end-to-end tests, round after round, for hours.
//!
//! Every test is a step, and every step writes one line to `experiments/soak.jsonl` when it ends. A stopped run resumes its round from the
//! lines in that file for the commit that is checked out. `SOAK_HOURS` is the duration (8). `SOAK_PACKAGE` and `SOAK_ONLY` select one
//! package and some modules (default: all that have a long form), `SOAK_TESTS` words that the names of tests contain (default: all),
//! `SOAK_PROFILE=dev` the build that the tests use. `SOAK_PIECES=N` divides each test into N steps, for tests that can run an Nth of their
//! rounds at a time; `SOAK_STEPS=N` ends the run after so many steps. A test reports its counts by lines `COUNT what number`: they are
//! stored with its step.

use crate::process;
use crate::programs::{self, Unit};
use crate::record::{self, Line};
use crate::runner;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Time limit for the long form of one test.
pub(crate) const LIMIT: Duration = Duration::from_secs(3 * 3600);

/// Modules that a round begins with: they test the promises of the product. The others follow in the order of `make test`.
const FIRST: [&str; 4] = ["crash", "victims", "storm", "exceptions_live"];

/// Package of the end-to-end tests, all of which have a long form.
const END_TO_END: &str = "stillpoint-patch-tests";

/// Other modules with a long form.
const LONG_FORMS: [(&str, &str); 9] = [
    ("stillpoint-patch-tests", "differ::programs_cxx"),
    ("stillpoint-kernel-tests", "faults"),
    ("stillpoint-kernel-tests", "switch"),
    ("stillpoint-migrate-replay", "unit"),
    ("stillpoint-migrate-tests", "engine::regress"),
    ("stillpoint-migrate-tests", "proxy::regress"),
    ("stillpoint-migrate-tests", "faults"),
    ("stillpoint-migrate-tests", "isolation_levels"),
    ("stillpoint-migrate-tests", "tpcc"),
];

/// Test of a unit, or a piece of it.
struct Step<'u> {
    unit: &'u Unit,
    test: &'u str,
    /// Number of the piece, from 1, and the number of pieces.
    piece: (u32, u32),
}

impl Step<'_> {
    fn name(&self) -> String {
        let piece = match self.piece {
            (_, 1) => String::new(),
            (piece, pieces) => format!(" {piece}/{pieces}"),
        };
        format!("{} {}{piece}", self.unit.name(), self.test)
    }
}

/// Number in an environment variable, or `otherwise` if it is not set.
pub(crate) fn number<N: std::str::FromStr>(name: &str, otherwise: N) -> Result<N> {
    match std::env::var(name) {
        Ok(text) => text.parse().ok().with_context(|| format!("{name} is {text:?}, not a number")),
        Err(_) => Ok(otherwise),
    }
}

fn has_long_form(unit: &Unit) -> bool {
    let listed = LONG_FORMS.iter().any(|(package, module)| unit.package() == *package && unit.is_called(module));
    listed || (unit.package() == END_TO_END && !unit.is_unit() && !unit.label().contains("::"))
}

/// Runs rounds until the hours are over; returns true if no step failed, in this run or before.
///
/// # Errors
/// The tree does not compile, a variable is not a number, or the file of results cannot be written.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let hours: f64 = number("SOAK_HOURS", 8.0)?;
    let path = root.join("experiments/soak.jsonl");
    let commit = record::commit(root)?;
    let mut lines = record::read(&path)?;
    lines.retain(|line| line.commit == commit);
    let release = std::env::var("SOAK_PROFILE").map_or(true, |profile| profile != "dev");
    let only = std::env::var("SOAK_ONLY").unwrap_or_default();
    let package = std::env::var("SOAK_PACKAGE").ok();
    let wanted = |unit: &Unit| {
        package.as_deref().is_none_or(|package| unit.package() == package)
            && (only.is_empty() || only.split(',').any(|name| unit.is_called(name)))
    };
    let mut units = programs::build(root, release)?;
    units.retain(|unit| has_long_form(unit) && wanted(unit));
    units.sort_by_key(|unit| FIRST.iter().position(|name| unit.is_called(name)).unwrap_or(FIRST.len()));
    let words = std::env::var("SOAK_TESTS").unwrap_or_default();
    let mut steps = steps(&units, number("SOAK_PIECES", 1)?);
    steps.retain(|step| words.is_empty() || words.split(',').any(|word| step.test.contains(word)));
    if steps.is_empty() {
        bail!("there are no tests with a long form to run");
    }
    let names: Vec<String> = steps.iter().map(Step::name).collect();
    let logs = runner::make_logs(root)?;
    let most = number("SOAK_STEPS", usize::MAX)?;
    let earlier = lines.len();
    while record::seconds(&lines) < hours * 3600.0 && lines.len() - earlier < most {
        let (round, at) = record::next(&lines, &names);
        let step = &steps[at];
        let mut command = step.unit.long(root, step.test);
        let (piece, pieces) = step.piece;
        command.env("STILLPOINT_SOAK_PIECE", piece.to_string()).env("STILLPOINT_SOAK_PIECES", pieces.to_string());
        let log = runner::log_of(&logs, &format!("soak {}", names[at]));
        let outcome = process::run(&names[at], &mut command, &log, LIMIT)?;
        let counts = process::counts(&outcome);
        runner::report(&format!("round {round}: {}", names[at]), &outcome, counts);
        let line = Line::new(&commit, round, &names[at], outcome.elapsed.as_secs_f64(), counts, &outcome.output);
        record::append(&path, &line)?;
        lines.push(line);
        if counts.failed > 0 {
            fs::copy(&log, logs.join(format!("soak-failed-{round}-{at}.log")))?;
        }
    }
    Ok(record::end(&lines, &commit))
}

/// Steps of a round: one piece of every test, then the next piece of every test.
fn steps(units: &[Unit], pieces: u32) -> Vec<Step<'_>> {
    (1..=pieces)
        .flat_map(|piece| {
            units.iter().flat_map(move |unit| {
                unit.tests().iter().map(move |test| Step { unit, test: test.as_str(), piece: (piece, pieces) })
            })
        })
        .collect()
}
