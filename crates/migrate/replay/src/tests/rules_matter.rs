//! Leaves out each rule in turn: the simulation must detect it, or it proves nothing.

use super::history::Profile;
use super::simulation::one;
use super::target::Setting;
use crate::Mode;
use crate::rules::Rules;

/// Number of histories that are tried before a rule is called useless.
const HISTORIES: u64 = 30_000;

/// Asserts that a history diverges with `rules`, and none does with all of them.
fn matters(name: &str, profile: Profile, setting: Setting, rules: Rules) {
    assert_ne!(rules, Rules::ALL);
    // A scheduler that panics over its own state has detected the missing rule too.
    let play = |seed| std::panic::catch_unwind(|| one(seed, profile, Setting { rules, ..setting }));
    let wrong = |seed: &u64| !matches!(play(*seed), Ok(Ok(_)));
    let Some(seed) = (0..HISTORIES).find(wrong) else {
        panic!("without the rule `{name}` no history out of {HISTORIES} goes wrong")
    };
    one(seed, profile, setting).unwrap_or_else(|problem| panic!("{name}: STILLPOINT_SEED={seed}: {problem}"));
    println!("without the rule `{name}` the history with seed {seed} goes wrong");
}

fn rows() -> Setting {
    Setting::new(Mode::Rows)
}

#[test]
fn row_tokens_matter() {
    matters("rows", Profile::ROWS, rows(), Rules { rows: false, ..Rules::ALL });
}

#[test]
fn unique_tokens_matter() {
    matters("uniques", Profile::ROWS, rows(), Rules { uniques: false, ..Rules::ALL });
    let lsir = Setting::new(Mode::Lsir);
    matters("uniques under lsir", Profile::SNAPSHOTS, lsir, Rules { uniques: false, ..Rules::ALL });
}

#[test]
fn parent_tokens_matter() {
    matters("parents", Profile::ROWS, rows(), Rules { parents: false, ..Rules::ALL });
}

#[test]
fn index_tokens_matter() {
    let logical = Setting { logical: true, ..rows() };
    matters("indexes", Profile::ROWS, logical, Rules { indexes: false, ..Rules::ALL });
}

#[test]
fn table_tokens_matter() {
    matters("tables", Profile::ROWS, rows(), Rules { tables: false, ..Rules::ALL });
}

#[test]
fn ddl_is_a_barrier() {
    matters("everything", Profile::ROWS, rows(), Rules { everything: false, ..Rules::ALL });
}

#[test]
fn conflicts_wait_for_the_commit() {
    matters("until_commit", Profile::ROWS, rows(), Rules { until_commit: false, ..Rules::ALL });
}

#[test]
fn stamps_matter() {
    matters("stamp_order", Profile::ROWS, rows(), Rules { stamp_order: false, ..Rules::ALL });
}

#[test]
fn retries_wait_for_lower_stamps() {
    let faults = Setting { faults: 2, ..rows() };
    matters("retry_after_lower", Profile::ROWS, faults, Rules { retry_after_lower: false, ..Rules::ALL });
}

#[test]
fn only_the_connection_that_runs_the_others_may_go_on_early() {
    matters("chain_on_one_player", Profile::ROWS, rows(), Rules { chain_on_one_player: false, ..Rules::ALL });
}

#[test]
fn first_reads_wait_for_the_commits_they_saw() {
    let rules = Rules { reads_after_commits: false, ..Rules::ALL };
    matters("(1-a)", Profile::SNAPSHOTS, Setting::new(Mode::Lsir), rules);
    matters("(1-a) of b-con", Profile::SNAPSHOTS, Setting::new(Mode::BCon), rules);
}

#[test]
fn commits_wait_for_the_first_reads_that_did_not_see_them() {
    let rules = Rules { commits_after_reads: false, ..Rules::ALL };
    matters("(1-b)", Profile::SNAPSHOTS, Setting::new(Mode::Lsir), rules);
}

/// The hole in Algorithm 4.
#[test]
fn transactions_that_still_run_count() {
    let rules = Rules { running_counts: false, ..Rules::ALL };
    matters("running_counts", Profile::SNAPSHOTS, Setting::new(Mode::Lsir), rules);
}

/// Tokens of whole indexes order transactions that did not conflict; without this rule the tokens and a snapshot wait for each
/// other.
#[test]
fn tokens_give_way_to_visibility() {
    let rules = Rules { visibility_first: false, ..Rules::ALL };
    let logical = Setting { logical: true, ..Setting::new(Mode::Lsir) };
    matters("visibility_first", Profile::SNAPSHOTS, logical, rules);
}
