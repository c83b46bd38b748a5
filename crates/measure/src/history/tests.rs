//! Tests that find each anomaly in a hand-made history, and none in a correct one.

use super::*;

fn append(list: u64, value: u64) -> Operation {
    Operation::Append { list, value }
}

fn read(list: u64, values: &[u64]) -> Operation {
    Operation::ReadList { list, values: values.to_vec() }
}

/// Makes a transaction; all have the same times, so that real time gives no order.
fn transaction(outcome: Outcome, operations: Vec<Operation>) -> Transaction {
    Transaction { client: 0, began_ns: 0, ended_ns: 100, outcome, operations }
}

fn committed(operations: Vec<Operation>) -> Transaction {
    transaction(Outcome::Committed, operations)
}

fn history(transactions: Vec<Transaction>) -> History {
    History { transactions, ..History::default() }
}

fn kinds(history: &History, level: Level) -> Vec<AnomalyKind> {
    check(history, level).into_iter().map(|anomaly| anomaly.kind).collect()
}

fn snapshot(transactions: Vec<Transaction>) -> Vec<AnomalyKind> {
    kinds(&history(transactions), Level::Snapshot)
}

#[test]
fn a_fine_history_has_no_anomaly() {
    let mut history = history(vec![
        Transaction { ended_ns: 10, ..committed(vec![append(1, 1), append(2, 2)]) },
        Transaction { began_ns: 20, ended_ns: 40, ..committed(vec![read(1, &[1]), append(1, 3), read(1, &[1, 3])]) },
        Transaction { began_ns: 30, ended_ns: 60, ..committed(vec![read(1, &[1]), read(2, &[2]), append(2, 4)]) },
        transaction(Outcome::Aborted, vec![append(1, 5)]),
        transaction(Outcome::Unknown, vec![append(1, 6)]),
        committed(vec![Operation::Increment { counter: 1, became: 1 }]),
        committed(vec![Operation::Increment { counter: 1, became: 2 }]),
        committed(vec![Operation::Transfer { from: 1, to: 2, amount: 5 }]),
        committed(vec![Operation::ReadSum { sum: 20 }]),
    ]);
    history.accounts = [(1, 10), (2, 10)].into();
    history.last = Some(Final {
        lists: [(1, vec![1, 3]), (2, vec![2, 4])].into(),
        counters: [(1, 2)].into(),
        accounts: [(1, 5), (2, 15)].into(),
    });
    for level in [Level::ReadCommitted, Level::Snapshot, Level::Serializable] {
        assert_eq!(check(&history, level), [], "{level:?}");
    }
    assert_eq!(History::from_lines(&history.to_lines()), Ok(history));
}

#[test]
fn a_lost_update_is_found() {
    let bad = vec![
        committed(vec![read(1, &[]), append(1, 1)]),
        committed(vec![read(1, &[]), append(1, 2)]),
        committed(vec![read(1, &[1, 2])]),
    ];
    assert_eq!(snapshot(bad.clone()), [AnomalyKind::LostUpdate]);
    assert_eq!(kinds(&history(bad), Level::ReadCommitted), [], "READ COMMITTED allows it");
}

#[test]
fn read_skew_is_found() {
    let bad = vec![committed(vec![append(1, 1), append(2, 2)]), committed(vec![read(1, &[1]), read(2, &[])])];
    let mut bad = history(bad);
    bad.last = Some(Final { lists: [(1, vec![1]), (2, vec![2])].into(), ..Final::default() });
    assert_eq!(kinds(&bad, Level::Snapshot), [AnomalyKind::ReadSkew]);
}

#[test]
fn a_cycle_of_overwrites_is_found() {
    let bad = vec![
        committed(vec![append(1, 1), append(2, 2)]),
        committed(vec![append(1, 3), append(2, 4)]),
        committed(vec![read(1, &[1, 3])]),
        committed(vec![read(2, &[4, 2])]),
    ];
    for level in [Level::ReadCommitted, Level::Snapshot] {
        assert_eq!(kinds(&history(bad.clone()), level), [AnomalyKind::DirtyWrite]);
    }
}

#[test]
fn circular_information_is_found() {
    let bad = vec![committed(vec![append(1, 1), read(2, &[2])]), committed(vec![append(2, 2), read(1, &[1])])];
    assert_eq!(kinds(&history(bad.clone()), Level::ReadCommitted), [AnomalyKind::CircularInformation]);
    assert_eq!(snapshot(bad), [AnomalyKind::CircularInformation]);
}

/// Two readers see two writers in opposite orders: each anti-dependency is between dependencies of another kind.
#[test]
fn a_long_fork_is_found() {
    let bad = vec![
        committed(vec![append(1, 1)]),
        committed(vec![append(2, 2)]),
        committed(vec![read(1, &[1]), read(2, &[])]),
        committed(vec![read(1, &[]), read(2, &[2])]),
    ];
    let mut bad = history(bad);
    bad.last = Some(Final { lists: [(1, vec![1]), (2, vec![2])].into(), ..Final::default() });
    assert_eq!(kinds(&bad, Level::Snapshot), [AnomalyKind::SnapshotCycle]);
}

#[test]
fn write_skew_is_allowed_by_snapshots_and_found_in_serializable() {
    let skew = vec![
        committed(vec![read(1, &[]), read(2, &[]), append(1, 1)]),
        committed(vec![read(1, &[]), read(2, &[]), append(2, 2)]),
    ];
    let mut skew = history(skew);
    skew.last = Some(Final { lists: [(1, vec![1]), (2, vec![2])].into(), ..Final::default() });
    assert_eq!(kinds(&skew, Level::Snapshot), []);
    assert_eq!(kinds(&skew, Level::Serializable), [AnomalyKind::WriteSkew]);
}

#[test]
fn a_read_of_the_past_is_found() {
    let bad = vec![
        Transaction { ended_ns: 10, ..committed(vec![append(1, 1)]) },
        Transaction { began_ns: 20, ended_ns: 30, ..committed(vec![read(1, &[])]) },
    ];
    let mut bad = history(bad);
    bad.last = Some(Final { lists: [(1, vec![1])].into(), ..Final::default() });
    assert_eq!(kinds(&bad, Level::Snapshot), [AnomalyKind::StaleRead]);
    bad.transactions[1].began_ns = 5;
    assert_eq!(kinds(&bad, Level::Snapshot), [], "at the same time it may");
}

#[test]
fn a_lost_and_a_doubled_write_are_found() {
    for values in [vec![], vec![1, 1]] {
        let mut bad = history(vec![committed(vec![append(1, 1)])]);
        bad.last = Some(Final { lists: [(1, values)].into(), ..Final::default() });
        assert_eq!(kinds(&bad, Level::ReadCommitted), [AnomalyKind::LostOrDoubledWrite]);
    }
}

#[test]
fn half_a_transaction_of_unknown_end_is_found() {
    let mut bad = history(vec![transaction(Outcome::Unknown, vec![append(1, 1), append(2, 2)])]);
    bad.last = Some(Final { lists: [(1, vec![1])].into(), ..Final::default() });
    assert_eq!(kinds(&bad, Level::Snapshot), [AnomalyKind::TornTransaction]);
    bad.last = Some(Final { lists: [(1, vec![1]), (2, vec![2])].into(), ..Final::default() });
    assert_eq!(kinds(&bad, Level::Snapshot), []);
}

#[test]
fn reads_of_what_was_rolled_back_or_not_finished_are_found() {
    let aborted = vec![transaction(Outcome::Aborted, vec![append(1, 1)]), committed(vec![read(1, &[1])])];
    assert!(snapshot(aborted).contains(&AnomalyKind::AbortedRead));
    let uncommitted = vec![committed(vec![read(1, &[7])])];
    assert!(snapshot(uncommitted).contains(&AnomalyKind::AbortedRead));
    let half = vec![committed(vec![append(1, 1), append(1, 2)]), committed(vec![read(1, &[1])])];
    assert!(snapshot(half).contains(&AnomalyKind::IntermediateRead));
}

#[test]
fn orders_that_exclude_each_other_are_found() {
    let bad = vec![
        committed(vec![append(1, 1)]),
        committed(vec![append(1, 2)]),
        committed(vec![read(1, &[1, 2])]),
        committed(vec![read(1, &[2, 1])]),
    ];
    assert!(snapshot(bad).contains(&AnomalyKind::IncompatibleOrder));
}

#[test]
fn a_list_that_changes_within_a_transaction_is_found() {
    let other = committed(vec![append(1, 1)]);
    let twice = committed(vec![read(1, &[]), read(1, &[1])]);
    assert!(snapshot(vec![other.clone(), twice]).contains(&AnomalyKind::Internal));
    let blind = committed(vec![append(1, 2), read(1, &[1])]);
    assert!(snapshot(vec![other, blind]).contains(&AnomalyKind::Internal));
}

#[test]
fn wrong_counts_and_sums_are_found() {
    let increment = |became| committed(vec![Operation::Increment { counter: 1, became }]);
    let twice = history(vec![increment(1), increment(1)]);
    assert_eq!(kinds(&twice, Level::ReadCommitted), [AnomalyKind::WrongCount]);
    let mut lost = history(vec![increment(1), increment(2)]);
    lost.last = Some(Final { counters: [(1, 1)].into(), ..Final::default() });
    assert_eq!(kinds(&lost, Level::ReadCommitted), [AnomalyKind::WrongCount]);

    let mut sums = history(vec![
        committed(vec![Operation::Transfer { from: 1, to: 2, amount: 5 }]),
        committed(vec![Operation::ReadSum { sum: 15 }]),
    ]);
    sums.accounts = [(1, 10), (2, 10)].into();
    assert_eq!(kinds(&sums, Level::ReadCommitted), [AnomalyKind::WrongSum]);
    sums.transactions[1].operations = vec![Operation::ReadSum { sum: 20 }];
    sums.last = Some(Final { accounts: [(1, 10), (2, 10)].into(), ..Final::default() });
    assert_eq!(kinds(&sums, Level::ReadCommitted), [AnomalyKind::WrongSum], "the transfer was acknowledged");
}

/// A long serial history has no anomaly, and the time of its check grows with its length.
#[test]
fn long_histories_are_checked() {
    let mut lists: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    let mut transactions = Vec::new();
    for number in 0..20_000 {
        let list = number % 64;
        let values = lists.entry(list).or_default();
        if values.len() > 40 {
            continue;
        }
        let operations = vec![read(list, values), append(list, number)];
        values.push(number);
        let (began_ns, ended_ns) = (10 * number, 10 * number + 5);
        transactions.push(Transaction { began_ns, ended_ns, ..committed(operations) });
    }
    let mut long = history(transactions);
    long.last = Some(Final { lists, ..Final::default() });
    assert_eq!(check(&long, Level::Serializable), []);
}

#[test]
fn damaged_lines_are_named() {
    let error = History::from_lines("{\"accounts\":{}}\n{\"transaction\":1}\n").unwrap_err();
    assert!(error.starts_with("line 2"), "{error}");
}
