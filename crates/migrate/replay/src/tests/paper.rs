//! Appendix C of the paper, and Definition 3 as properties of the events on the target.

use std::collections::HashMap;

use super::history::{Event, Profile, random_history};
use super::target::{Setting, TargetEvent, replay};
use crate::{
    Error, Limits, Mode, Operation, Part, Player, RunningId, Scheduler, Snapshot, Stamp, Statement, Step, Syncset,
    Token, Xid,
};
use stillpoint_base::Random;

const FIRST_READ: Step = Step { first: Part::FirstRead, last: Part::FirstRead };
const UP_TO_WRITES: Step = Step { first: Part::FirstRead, last: Part::Writes };
const FROM_WRITES: Step = Step { first: Part::Writes, last: Part::Commit };
const COMMIT: Step = Step { first: Part::Commit, last: Part::Commit };

/// A syncset of the example with its start and end stamps.
fn example(scheduler: &mut Scheduler<()>, number: u64, sts: u64, ets: u64) {
    let running = RunningId(number);
    scheduler.begins(running);
    scheduler.record_snapshot(running, Snapshot::at_clock(sts));
    let statement = Some(Statement { running, xid: Xid(ets) });
    let syncset = Syncset { stamp: Stamp(ets), tokens: Vec::new(), statement, bytes: 1, payload: () };
    scheduler.push_next(syncset).expect("it is taken");
}

fn next_step(scheduler: &mut Scheduler<()>, player: Player) -> Option<(u64, Step)> {
    let operation: Option<Operation> = scheduler.next(player).expect("there is such a player");
    operation.map(|operation| (operation.stamp.0, operation.step))
}

/// T_i and T_j (STS 3, ETS 3 and 4) run concurrently, commits included; T_k (STS 5) begins after both.
#[test]
fn appendix_c() {
    let mut scheduler = Scheduler::new(Mode::Lsir, 3, Limits::default());
    example(&mut scheduler, 1, 3, 3);
    example(&mut scheduler, 2, 3, 4);
    example(&mut scheduler, 3, 5, 5);
    let (i, j, k) = (Player(0), Player(1), Player(2));
    assert_eq!(next_step(&mut scheduler, i), Some((3, UP_TO_WRITES)), "its commit waits for the first read of T_j");
    assert_eq!(next_step(&mut scheduler, j), Some((4, UP_TO_WRITES)), "its commit waits for the first read of T_i");
    assert_eq!(next_step(&mut scheduler, k), None, "its first read saw both commits");
    scheduler.read_done(i).unwrap();
    scheduler.done(i).unwrap();
    assert_eq!(next_step(&mut scheduler, i), None, "the first read of T_j is not done");
    scheduler.read_done(j).unwrap();
    assert_eq!(next_step(&mut scheduler, i), Some((3, COMMIT)), "with any write of T_j meanwhile");
    scheduler.done(j).unwrap();
    assert_eq!(next_step(&mut scheduler, j), Some((4, COMMIT)), "both commits at once: group commit");
    scheduler.done(j).unwrap();
    assert_eq!(next_step(&mut scheduler, k), None, "T_i is not committed");
    scheduler.done(i).unwrap();
    let whole = scheduler.next(k).unwrap().expect("nothing is left to be waited for");
    assert_eq!((whole.stamp, whole.step, whole.awaited), (Stamp(5), Step::WHOLE, false));
    scheduler.done(k).unwrap();
    assert!(scheduler.is_drained());
}

/// A transaction whose tokens are not free is sent in parts. Its commit is sent with its writes if no first read is left that
/// the commit would come too early for.
#[test]
fn what_has_to_wait_for_nothing_goes_out_together() {
    let mut scheduler = Scheduler::new(Mode::Lsir, 2, Limits::default());
    for (number, sts) in [(1, 1), (2, 1)] {
        let running = RunningId(number);
        scheduler.begins(running);
        scheduler.record_snapshot(running, Snapshot::at_clock(sts));
        let statement = Some(Statement { running, xid: Xid(number) });
        let tokens = vec![Token::Row(1, 1)];
        let syncset = Syncset { stamp: Stamp(number), tokens, statement, bytes: 1, payload: () };
        scheduler.push_next(syncset).expect("it is taken");
    }
    let (i, j) = (Player(0), Player(1));
    let (first, second) = (scheduler.next(i).unwrap().unwrap(), scheduler.next(j).unwrap().unwrap());
    assert_eq!((first.step, first.awaited), (UP_TO_WRITES, true));
    assert_eq!((second.step, second.awaited), (FIRST_READ, false), "what it writes waits for the other's commit");
    scheduler.done(j).unwrap();
    scheduler.done(i).unwrap();
    assert_eq!(next_step(&mut scheduler, i), Some((1, COMMIT)));
    assert_eq!(next_step(&mut scheduler, j), None);
    scheduler.done(i).unwrap();
    assert_eq!(next_step(&mut scheduler, j), Some((2, FROM_WRITES)));
}

/// A failed transaction is retried, unless a commit that it does not see is done; that is possible only after its first read
/// was reported.
#[test]
fn what_fails_after_its_first_read_was_told_may_have_lost_its_snapshot() {
    for overtaken in [false, true] {
        let mut scheduler = Scheduler::new(Mode::Lsir, 2, Limits::default());
        example(&mut scheduler, 1, 1, 1);
        example(&mut scheduler, 2, 1, 2);
        let (i, j) = (Player(0), Player(1));
        for player in [i, j] {
            assert_eq!(next_step(&mut scheduler, player).map(|(_, step)| step), Some(UP_TO_WRITES));
        }
        scheduler.done(i).unwrap();
        if overtaken {
            scheduler.read_done(j).unwrap();
            assert_eq!(next_step(&mut scheduler, i), Some((1, COMMIT)));
            scheduler.done(i).unwrap();
            assert_eq!(scheduler.failed(j), Err(Error::SnapshotGone(Stamp(2))));
        } else {
            assert_eq!(next_step(&mut scheduler, i), None);
            assert_eq!(scheduler.failed(j).map(|retry| retry.stamp), Ok(Stamp(2)));
            assert_eq!(next_step(&mut scheduler, j), Some((2, Step::WHOLE)));
            assert_eq!(scheduler.read_done(i), Err(Error::NothingUnderWay(i)));
        }
    }
}

/// Appendix C under B-CON: the commits happen one after another.
#[test]
fn appendix_c_with_serial_commits() {
    let mut scheduler = Scheduler::new(Mode::BCon, 2, Limits::default());
    example(&mut scheduler, 1, 3, 3);
    example(&mut scheduler, 2, 3, 4);
    for player in [Player(0), Player(1)] {
        assert_eq!(
            next_step(&mut scheduler, player).map(|(_, step)| step),
            Some(UP_TO_WRITES),
            "they run concurrently"
        );
    }
    scheduler.done(Player(1)).unwrap();
    scheduler.done(Player(0)).unwrap();
    assert_eq!(next_step(&mut scheduler, Player(1)), None, "T_i commits first");
    assert_eq!(next_step(&mut scheduler, Player(0)), Some((3, COMMIT)));
    assert_eq!(next_step(&mut scheduler, Player(1)), None, "one at a time");
    scheduler.done(Player(0)).unwrap();
    assert_eq!(next_step(&mut scheduler, Player(1)), Some((4, COMMIT)));
}

/// Time at which each event of each transaction happened on the target.
fn times(happened: &[TargetEvent]) -> HashMap<TargetEvent, usize> {
    let mut times = HashMap::new();
    for (at, happened) in happened.iter().enumerate() {
        // If an event was retried, the last time counts.
        times.insert(*happened, at);
    }
    times
}

#[test]
fn definition_3_holds_for_every_pair() {
    let mut pairs = [0; 2];
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let history = random_history(&mut random, Profile::SNAPSHOTS);
        let replayed = replay(&history, &mut random, Setting::new(Mode::Lsir)).expect("states are equal");
        let times = times(&replayed.happened);
        let snapshots: HashMap<RunningId, &Snapshot> = history.events.iter().filter_map(Event::snapshot).collect();
        let committed: Vec<_> = history
            .events
            .iter()
            .filter_map(Event::committed)
            .filter(|committed| times.contains_key(&TargetEvent::CommitDone(committed.stamp)))
            .collect();
        for i in &committed {
            let writes: Vec<usize> = replayed
                .happened
                .iter()
                .filter_map(|happened| match happened {
                    TargetEvent::Write(stamp, nth) if *stamp == i.stamp => Some(*nth),
                    _ => None,
                })
                .collect();
            assert!(writes.iter().copied().eq(0..writes.len()), "(2) seed {seed}: {writes:?}");
            for j in &committed {
                let saw = snapshots[&j.running].sees(i.xid.expect("it wrote"));
                if i.stamp == j.stamp {
                    continue;
                }
                let (commit_sent, commit_done) =
                    (times[&TargetEvent::CommitSent(i.stamp)], times[&TargetEvent::CommitDone(i.stamp)]);
                let (read_sent, read_done) =
                    (times[&TargetEvent::ReadSent(j.stamp)], times[&TargetEvent::ReadDone(j.stamp)]);
                if saw {
                    assert!(commit_done < read_sent, "(1-a) seed {seed}: {} before {}", i.stamp.0, j.stamp.0);
                } else {
                    assert!(read_done < commit_sent, "(1-b) seed {seed}: {} before {}", j.stamp.0, i.stamp.0);
                }
                pairs[usize::from(saw)] += 1;
            }
        }
    }
    assert!(pairs.iter().all(|pairs| *pairs > 1_000), "{pairs:?}");
}
