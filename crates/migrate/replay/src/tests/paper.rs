//! Appendix C of the paper, and Definition 3 as properties of what happens on the target.

use std::collections::HashMap;

use super::history::{Event, Profile, random_history};
use super::random::Random;
use super::target::{Happened, Setting, replay};
use crate::{Limits, Mode, Operation, Player, RunningId, Scheduler, Snapshot, Stamp, Statement, Step, Syncset, Xid};

/// A syncset of the example with its start and end stamps.
fn example(scheduler: &mut Scheduler<()>, number: u64, sts: u64, ets: u64) {
    let running = RunningId(number);
    scheduler.begins(running);
    scheduler.began(running, Snapshot::at_clock(sts));
    let statement = Some(Statement { running, xid: Xid(ets) });
    let syncset = Syncset { stamp: Stamp(ets), tokens: Vec::new(), statement, bytes: 1, payload: () };
    scheduler.push_next(syncset).expect("it is taken");
}

fn given(scheduler: &mut Scheduler<()>, player: Player) -> Option<(u64, Step)> {
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
    assert_eq!(given(&mut scheduler, i), Some((3, Step::FirstRead)));
    assert_eq!(given(&mut scheduler, j), Some((4, Step::FirstRead)));
    assert_eq!(given(&mut scheduler, k), None, "its first read saw both commits");
    scheduler.done(i).unwrap();
    assert_eq!(given(&mut scheduler, i), Some((3, Step::Writes)));
    scheduler.done(i).unwrap();
    assert_eq!(given(&mut scheduler, i), None, "the first read of T_j is not done");
    scheduler.done(j).unwrap();
    assert_eq!(given(&mut scheduler, j), Some((4, Step::Writes)));
    scheduler.done(j).unwrap();
    assert_eq!(given(&mut scheduler, i), Some((3, Step::Commit)));
    assert_eq!(given(&mut scheduler, j), Some((4, Step::Commit)), "both commits at once: group commit");
    scheduler.done(j).unwrap();
    assert_eq!(given(&mut scheduler, k), None, "T_i is not committed");
    scheduler.done(i).unwrap();
    for step in [Step::FirstRead, Step::Writes, Step::Commit] {
        assert_eq!(given(&mut scheduler, k), Some((5, step)));
        scheduler.done(k).unwrap();
    }
    assert!(scheduler.is_drained());
}

/// The same under B-CON: the commits come one after another.
#[test]
fn appendix_c_with_serial_commits() {
    let mut scheduler = Scheduler::new(Mode::BCon, 2, Limits::default());
    example(&mut scheduler, 1, 3, 3);
    example(&mut scheduler, 2, 3, 4);
    for _ in [Step::FirstRead, Step::Writes] {
        for player in [Player(0), Player(1)] {
            given(&mut scheduler, player).expect("first reads and writes run concurrently");
        }
        scheduler.done(Player(1)).unwrap();
        scheduler.done(Player(0)).unwrap();
    }
    assert_eq!(given(&mut scheduler, Player(1)), None, "T_i commits first");
    assert_eq!(given(&mut scheduler, Player(0)), Some((3, Step::Commit)));
    assert_eq!(given(&mut scheduler, Player(1)), None, "one at a time");
    scheduler.done(Player(0)).unwrap();
    assert_eq!(given(&mut scheduler, Player(1)), Some((4, Step::Commit)));
}

/// When each thing of each transaction happened on the target.
fn times(happened: &[Happened]) -> HashMap<Happened, usize> {
    let mut times = HashMap::new();
    for (at, happened) in happened.iter().enumerate() {
        // Of something that was retried the last time counts.
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
            .filter(|committed| times.contains_key(&Happened::CommitDone(committed.stamp)))
            .collect();
        for i in &committed {
            let writes: Vec<usize> = replayed
                .happened
                .iter()
                .filter_map(|happened| match happened {
                    Happened::Write(stamp, nth) if *stamp == i.stamp => Some(*nth),
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
                    (times[&Happened::CommitSent(i.stamp)], times[&Happened::CommitDone(i.stamp)]);
                let (read_sent, read_done) = (times[&Happened::ReadSent(j.stamp)], times[&Happened::ReadDone(j.stamp)]);
                if saw {
                    assert!(commit_done < read_sent, "(1-a) seed {seed}: {} before {}", i.stamp, j.stamp);
                } else {
                    assert!(read_done < commit_sent, "(1-b) seed {seed}: {} before {}", j.stamp, i.stamp);
                }
                pairs[usize::from(saw)] += 1;
            }
        }
    }
    assert!(pairs.iter().all(|pairs| *pairs > 1_000), "{pairs:?}");
}
