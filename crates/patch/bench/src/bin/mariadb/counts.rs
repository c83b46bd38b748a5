//! Counts of the long form of `mariadb_counts`, from `experiments/soak.jsonl`: totals, and each test's share.

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_patch_tests::workspace_root;

/// Module of the tests that count.
const MODULE: &str = "mariadb_counts";
/// Start of a step's name in lines from the time before each module became a part of one test binary.
const EARLIER: &str = "stillpoint-e2e mariadb_counts ";

/// The fields of a line that are needed.
#[derive(Deserialize)]
struct Line {
    commit: String,
    step: String,
    seconds: f64,
    passed: u64,
    failed: u64,
    skipped: u64,
    #[serde(default)]
    machine: String,
    #[serde(default)]
    counts: BTreeMap<String, u64>,
}

#[derive(Default)]
struct Total {
    pieces: u64,
    failed: u64,
    skipped: u64,
    seconds: f64,
    counts: BTreeMap<String, u64>,
}

/// Prints the tables.
pub(crate) fn print() {
    let path = workspace_root().join("experiments/soak.jsonl");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()));
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
    print!("{}", tables(&lines.filter(|line| test_of(&line.step).is_some()).collect::<Vec<_>>()));
}

/// Returns the name of the test that a step ran, if it is one of those that count.
fn test_of(step: &str) -> Option<&str> {
    let test = step.strip_prefix(EARLIER).or_else(|| Some(step.split_once(MODULE)?.1.rsplit_once("::")?.1))?;
    test.split(' ').next()
}

fn tables(lines: &[Line]) -> String {
    let mut tests: BTreeMap<&str, Total> = BTreeMap::new();
    let mut all = Total::default();
    for line in lines {
        let name = test_of(&line.step).unwrap_or_default();
        for total in [tests.entry(name).or_default(), &mut all] {
            total.pieces += line.passed + line.failed;
            total.failed += line.failed;
            total.skipped += line.skipped;
            total.seconds += line.seconds;
            for (what, number) in &line.counts {
                *total.counts.entry(what.clone()).or_default() += number;
            }
        }
    }
    let distinct = |of: fn(&Line) -> &str| {
        let all: BTreeSet<&str> = lines.iter().map(of).collect();
        all.into_iter().collect::<Vec<_>>().join(", ")
    };
    let mut out = "# MariaDB with quiescence points under sysbench, TPC-C and CH-benCHmark\n\n".to_owned();
    out += "Printed by `experiments/mariadb-counts` from the lines that `make soak` wrote into soak.jsonl.\n";
    out += &format!("Commits {}; {}.\n\n", distinct(|l| &l.commit), distinct(|l| &l.machine));
    let of = |name: &str| all.counts.get(name).copied().unwrap_or(0);
    out += &format!(
        "**{} global patchings and {} local or probing ones under sysbench OLTP and TPC-C; {} probing and {} global ones under CH-benCHmark, of which {} global ones were given up.** {} pieces, {} failed.\n\n",
        of("global"),
        of("local") + of("probe"),
        of("ch-probe"),
        of("ch-global"),
        of("ch-global-given-up"),
        all.pieces,
        all.failed
    );
    out += "A piece fails when a patching fails or does not end within 60 s, an old or a new connection does not see its\n";
    out += "effect, a statement of any client fails, the server counts a lost connection, or a new one is refused.\n";
    out += "Transactions that a generator's own clients dead-lock among themselves (error 1213) are counted, not failures.\n";
    out += "Under CH-benCHmark a global patching may be given up after 2 s; nothing may be harmed.\n\n";
    out += "| test | pieces | failed | skipped | minutes | counted |\n|---|---|---|---|---|---|\n";
    for (name, total) in &tests {
        let counts: Vec<String> = total.counts.iter().map(|(what, number)| format!("{what} {number}")).collect();
        let minutes = total.seconds / 60.0;
        let (pieces, failed, skipped) = (total.pieces, total.failed, total.skipped);
        out += &format!("| {name} | {pieces} | {failed} | {skipped} | {minutes:.1} | {} |\n", counts.join(", "));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_one_test_add_up() {
        let line = |start: &str, piece: u32, failed| Line {
            commit: "c".into(),
            step: format!("{start}sysbench_with_a_pool {piece}/2"),
            seconds: 30.0,
            passed: 1 - failed,
            failed,
            skipped: 0,
            machine: "m".into(),
            counts: BTreeMap::from([("global".to_owned(), 10)]),
        };
        let text = tables(&[line(EARLIER, 1, 0), line("stillpoint-patch-tests it mariadb_counts::", 2, 1)]);
        assert!(text.contains("20 global patchings") && text.contains("2 pieces, 1 failed"), "{text}");
        assert!(text.contains("| sysbench_with_a_pool | 2 | 1 | 0 | 1.0 | global 20 |"), "{text}");
    }
}
