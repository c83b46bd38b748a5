//! Tests of syncsets that a player is given behind those it has.

use crate::{Limits, Mode, Player, Scheduler, Stamp, Syncset, Token};

const FIRST: Player = Player(0);
const SECOND: Player = Player(1);

fn scheduler() -> Scheduler<()> {
    Scheduler::new(Mode::Rows, 2, Limits::default())
}

fn syncset(stamp: u64, keys: &[u64]) -> Syncset<()> {
    let tokens = keys.iter().map(|key| Token::Row(1, *key)).collect();
    Syncset { stamp: Stamp(stamp), tokens, statement: None, bytes: 1, payload: () }
}

fn next_step(scheduler: &mut Scheduler<()>, player: Player) -> Option<u64> {
    scheduler.next(player).unwrap().map(|operation| operation.stamp.0)
}

#[test]
fn who_comes_later_may_still_go_behind() {
    let mut scheduler = scheduler();
    scheduler.push_next(syncset(1, &[7])).unwrap();
    assert_eq!(next_step(&mut scheduler, FIRST), Some(1));
    scheduler.push_next(syncset(2, &[7])).unwrap();
    scheduler.push_next(syncset(3, &[7])).unwrap();
    assert_eq!(next_step(&mut scheduler, SECOND), None);
    assert_eq!(next_step(&mut scheduler, FIRST), Some(2));
    scheduler.done(FIRST).unwrap();
    assert_eq!(next_step(&mut scheduler, FIRST), Some(3), "also when the first of them is done");
}

#[test]
fn no_syncset_goes_behind_two_players() {
    let mut scheduler = scheduler();
    scheduler.push_next(syncset(1, &[7])).unwrap();
    scheduler.push_next(syncset(2, &[8])).unwrap();
    assert_eq!((next_step(&mut scheduler, FIRST), next_step(&mut scheduler, SECOND)), (Some(1), Some(2)));
    scheduler.push_next(syncset(3, &[7, 8])).unwrap();
    assert_eq!((next_step(&mut scheduler, FIRST), next_step(&mut scheduler, SECOND)), (None, None));
    scheduler.done(FIRST).unwrap();
    scheduler.done(SECOND).unwrap();
    assert_eq!(next_step(&mut scheduler, FIRST), Some(3));
}

#[test]
fn what_was_behind_a_failure_is_given_again_in_order() {
    let mut scheduler = scheduler();
    for stamp in 1..=6 {
        scheduler.push_next(syncset(stamp, &[7])).unwrap();
    }
    for stamp in 1..=4 {
        assert_eq!(next_step(&mut scheduler, FIRST), Some(stamp));
    }
    scheduler.done(FIRST).unwrap();
    let retry = scheduler.failed(FIRST).unwrap();
    assert_eq!((retry.stamp, retry.given_back), (Stamp(2), 2));
    for stamp in 2..=6 {
        assert_eq!(next_step(&mut scheduler, SECOND), Some(stamp), "the first player that asks");
    }
    for _ in 2..=6 {
        scheduler.done(SECOND).unwrap();
    }
    assert!(scheduler.is_drained());
}

/// Each of many syncsets on one row examines the one before it, not all of them.
#[test]
fn a_batch_on_one_row_is_given_at_once() {
    const MANY: u64 = 100_000;
    let mut scheduler = scheduler();
    for stamp in 1..=MANY {
        scheduler.push_next(syncset(stamp, &[7])).unwrap();
    }
    for stamp in 1..=MANY {
        assert_eq!(next_step(&mut scheduler, FIRST), Some(stamp));
    }
    for _ in 1..=MANY {
        scheduler.done(FIRST).unwrap();
    }
    assert!(scheduler.is_drained());
}
