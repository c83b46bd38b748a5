//! Faults from outside while a database is moved: no acknowledged commit is lost or doubled, and the database can still
//! be moved. Long form: 300 faults of all kinds at moments of all phases.

use std::time::Duration;
use stillpoint_migrate_tests::{Fault, LEVELS, Moment, Testbed, Trial, is_soak, random, rounds};
use stillpoint_testing::postgresql::available;

/// Injects one kind of fault on a way there and on a way back, in the phases where it hurts.
#[track_caller]
fn both_ways(fault: Fault, moments: [Moment; 2]) {
    if !available() {
        return;
    }
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    for (back, moment) in [(false, moments[0]), (true, moments[1])] {
        let isolation = LEVELS[usize::from(back) + 1];
        Trial { back, fault, moment, isolation, seed: 7 }.run(&mut testbed);
    }
}

const fn at(phase: &'static str, ms: u64) -> Moment {
    Moment { phase: Some(phase), after: Duration::from_millis(ms) }
}

#[test]
fn the_tool_is_killed() {
    both_ways(Fault::KillTool, [at("switch-over", 12), at("switch-over", 25)]);
}

#[test]
fn the_tool_is_interrupted() {
    both_ways(Fault::InterruptTool, [at("copy", 100), at("prepare", 1)]);
}

#[test]
fn the_proxy_is_killed() {
    both_ways(Fault::KillProxy, [at("switch-over", 20), at("catch-up", 50)]);
}

#[test]
fn the_source_crashes() {
    both_ways(Fault::CrashSource, [at("catch-up", 20), at("compare", 1)]);
}

#[test]
fn the_target_crashes() {
    both_ways(Fault::CrashTarget, [at("switch-over", 15), at("prepare", 5)]);
}

#[test]
fn the_network_to_the_source_is_cut() {
    both_ways(Fault::CutSource, [at("switch-over", 10), at("switch-over", 10)]);
}

#[test]
fn the_network_to_the_target_stalls() {
    both_ways(Fault::StallTarget, [at("switch-over", 10), at("catch-up", 10)]);
}

/// Seeds of the short form: there, back, there, back. They are the same every time, so a failure points to a change in
/// the code.
const SEEDS: [u64; 4] = [
    96,  // the network to the target is cut in the copy
    196, // the tool is killed when clients are back and nothing is removed yet
    956, // the network to the source stalls in the copy
    228, // the network to the target, where clients are, is cut in the switch-over
];

/// A source whose log has no row changes: the capture ends with any failure, and the next command starts again. Long
/// form: any fault at any moment.
#[test]
fn nothing_is_lost_where_rows_are_captured_by_the_proxy() {
    if !available() {
        return;
    }
    let mut testbed = Testbed::without_logical_log();
    Trial::prepare(&testbed);
    if !is_soak() {
        for (back, fault, moment) in [
            (false, Fault::KillProxy, at("catch-up", 20)),
            (true, Fault::None, Moment { phase: None, after: Duration::ZERO }),
        ] {
            Trial { back, fault, moment, isolation: LEVELS[1], seed: 7 }.run(&mut testbed);
        }
        return;
    }
    let (rounds, first) = (rounds(0, 100), random::seed());
    for round in 0..rounds {
        println!("round {round} of {rounds}");
        Trial::any(round % 2 == 1, first.wrapping_add(round as u64)).run(&mut testbed);
    }
    println!("COUNT faults with images of rows {rounds}");
}

/// Any fault at any moment; in pieces with `STILLPOINT_SOAK_PIECES`.
#[test]
fn anything_at_any_moment() {
    if !available() {
        return;
    }
    let seeds = if is_soak() {
        let first = random::seed();
        (0..rounds(0, 300) as u64).map(|round| first.wrapping_add(round)).collect()
    } else {
        SEEDS.to_vec()
    };
    let mut testbed = Testbed::start();
    Trial::prepare(&testbed);
    let rounds = seeds.len();
    for (round, seed) in seeds.into_iter().enumerate() {
        println!("round {round} of {rounds}");
        Trial::any(round % 2 == 1, seed).run(&mut testbed);
    }
    println!("COUNT faults {rounds}");
}
