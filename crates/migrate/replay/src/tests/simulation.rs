//! Random histories, replayed in every mode: the target must reach the same state as the source.

use super::history::{Profile, random_history};
use super::target::{ReplayResult, Setting, replay};
use crate::Mode;
use stillpoint_base::Random;

/// Seeds of each test, for a short and a long run.
fn seeds(short: u64, long: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match (number("STILLPOINT_SEED"), number("STILLPOINT_SOAK")) {
        (Some(seed), _) => seed..seed + 1,
        (None, Some(1..)) => 0..long,
        _ => 0..short,
    }
}

/// Runs and replays one history.
pub(super) fn one(seed: u64, profile: Profile, setting: Setting) -> Result<ReplayResult, String> {
    let mut random = Random::new(seed);
    let history = random_history(&mut random, profile);
    replay(&history, &mut random, setting)
}

fn all(test: &str, seeds: std::ops::Range<u64>, profile: Profile, setting: impl Fn(u64) -> Setting) -> Totals {
    let mut totals = Totals::default();
    for seed in seeds {
        match one(seed, profile, setting(seed)) {
            Ok(replayed) => totals.add(&replayed),
            Err(problem) => panic!("{test}: STILLPOINT_SEED={seed}: {problem}"),
        }
    }
    println!("{test}: {totals:?}");
    totals
}

#[derive(Debug, Default)]
struct Totals {
    histories: usize,
    commits: usize,
    waits: usize,
    retries: u64,
    players_added: usize,
    told_early: usize,
    concurrent: usize,
}

impl Totals {
    fn add(&mut self, replayed: &ReplayResult) {
        self.histories += 1;
        self.commits +=
            replayed.happened.iter().filter(|at| matches!(at, super::target::TargetEvent::CommitDone(_))).count();
        self.waits += replayed.waits;
        self.retries += replayed.retries;
        self.players_added += replayed.players_added;
        self.told_early += replayed.told_early;
        self.concurrent += usize::from(replayed.concurrency > 1);
    }
}

#[test]
fn row_images_come_to_the_state_of_the_source_and_never_wait_for_a_lock() {
    let totals = all("rows", seeds(6_000, 120_000), Profile::ROWS, |seed| Setting {
        foreign_keys: seed % 2 == 0,
        logical: seed % 4 < 2,
        ..Setting::new(Mode::Rows)
    });
    assert_eq!((totals.waits, totals.retries), (0, 0), "tokens are complete, so nothing conflicts on the target");
    assert!(totals.histories == 1 || totals.concurrent * 4 > totals.histories, "{totals:?}");
}

#[test]
fn what_fails_on_the_target_is_tried_again_and_goes_through() {
    let totals =
        all("faults", seeds(3_000, 40_000), Profile::ROWS, |_| Setting { faults: 4, ..Setting::new(Mode::Rows) });
    assert!(totals.histories == 1 || totals.retries > 0);
}

#[test]
fn lsir_comes_to_the_state_of_the_source() {
    let totals = all("lsir", seeds(4_000, 60_000), Profile::SNAPSHOTS, |seed| Setting {
        foreign_keys: seed % 2 == 0,
        logical: seed % 4 < 2,
        faults: if seed % 8 == 0 { 6 } else { 0 },
        ..Setting::new(Mode::Lsir)
    });
    assert_eq!(totals.waits, 0);
    assert!(totals.histories == 1 || totals.told_early > 0, "{totals:?}");
}

#[test]
fn b_con_comes_to_the_state_of_the_source() {
    all("b-con", seeds(2_000, 30_000), Profile::SNAPSHOTS, |_| Setting::new(Mode::BCon));
}

#[test]
fn serial_modes_come_to_the_state_of_the_source_where_statements_read_only_what_they_write() {
    for mode in [Mode::BAll, Mode::BMin] {
        let totals = all(mode.name(), seeds(1_000, 20_000), Profile::SERIAL, |_| Setting::new(mode));
        assert_eq!(totals.concurrent, 0);
    }
}

/// No serial order equals a history with write skew, so the paper's first two baselines are not offered for such statements.
#[test]
fn serial_modes_diverge_under_write_skew() {
    let diverges = |seed| one(seed, Profile::SNAPSHOTS, Setting::new(Mode::BMin)).is_err();
    assert!((0..2_000).any(diverges));
}
