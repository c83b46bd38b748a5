//! Inference from reads of lists: the order of their writers, and dependencies between transactions.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Anomaly, AnomalyKind, History, Level, Operation, Outcome, Transaction};

/// Reason for which one transaction must come before another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum DependencyKind {
    /// It wrote a value that the other overwrote.
    Overwritten,
    /// It wrote a value that the other read.
    Read,
    /// It read a value that the other overwrote.
    ReadBefore,
    /// It had ended before the other began.
    Earlier,
}

/// Edge between two transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Dependency {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) kind: DependencyKind,
    pub(super) list: u64,
}

/// Facts that follow from the lists.
#[derive(Debug, Default)]
pub(super) struct Inference {
    pub(super) dependencies: Vec<Dependency>,
    /// Transactions that happened.
    pub(super) happened: BTreeSet<usize>,
}

/// Transaction that appended a number, by list and number.
type Writers = HashMap<(u64, u64), usize>;

fn appends(transaction: &Transaction) -> impl Iterator<Item = (u64, u64)> {
    transaction.operations.iter().filter_map(|operation| match operation {
        Operation::Append { list, value } => Some((*list, *value)),
        _ => None,
    })
}

fn reads(transaction: &Transaction) -> impl Iterator<Item = (u64, &[u64])> {
    transaction.operations.iter().filter_map(|operation| match operation {
        Operation::ReadList { list, values } => Some((*list, values.as_slice())),
        _ => None,
    })
}

pub(super) fn infer(history: &History, level: Level) -> (Inference, Vec<Anomaly>) {
    let all = &history.transactions;
    let mut writers = Writers::new();
    for (number, transaction) in all.iter().enumerate() {
        writers.extend(appends(transaction).map(|append| (append, number)));
    }
    let happened = find_happened(history, &writers);
    let mut anomalies = Vec::new();
    for &number in &happened {
        anomalies.extend(judge_reads(all, number, &writers));
        if level != Level::ReadCommitted {
            anomalies.extend(internal(number, &all[number]));
        }
    }
    let (orders, disputes) = orders(history, &happened);
    anomalies.extend(disputes);
    if let Some(last) = &history.last {
        anomalies.extend(lost_or_doubled(history, &happened, &last.lists));
    }
    let mut dependencies: Vec<Dependency> = Vec::new();
    overwrites(&orders, &writers, &mut dependencies);
    for &number in &happened {
        read_dependencies(number, &all[number], &orders, &writers, &mut dependencies);
    }
    dependencies.retain(|edge| edge.from != edge.to && happened.contains(&edge.from) && happened.contains(&edge.to));
    dependencies.sort_unstable();
    dependencies.dedup();
    (Inference { dependencies, happened }, anomalies)
}

/// Returns the committed transactions, and those of unknown outcome of which another transaction or the end saw a write.
fn find_happened(history: &History, writers: &Writers) -> BTreeSet<usize> {
    let all = &history.transactions;
    let committed = |number: &usize| all[*number].outcome == Outcome::Committed;
    let mut happened: BTreeSet<usize> = (0..all.len()).filter(committed).collect();
    let seen_by_clients = all.iter().filter(|by| by.outcome == Outcome::Committed).flat_map(reads);
    let last = history.last.iter().flat_map(|last| last.lists.iter().map(|(list, values)| (*list, values.as_slice())));
    for (list, values) in seen_by_clients.chain(last) {
        let observed = values.iter().filter_map(|value| writers.get(&(list, *value)));
        happened.extend(observed.filter(|number| all[**number].outcome == Outcome::Unknown));
    }
    happened
}

/// Checks G1a and G1b: a value that was read must be committed, and be the last one of its writer.
fn judge_reads(all: &[Transaction], number: usize, writers: &Writers) -> Vec<Anomaly> {
    let mut anomalies = Vec::new();
    for (list, values) in reads(&all[number]) {
        for value in values {
            match writers.get(&(list, *value)).map(|writer| (*writer, all[*writer].outcome)) {
                Some((writer, Outcome::Aborted)) => {
                    let text = format!("read {value} in list {list}, which was rolled back");
                    anomalies.push(Anomaly::new(AnomalyKind::AbortedRead, [number, writer], text));
                }
                None => {
                    let text = format!("read {value} in list {list}, which no transaction appended");
                    anomalies.push(Anomaly::new(AnomalyKind::AbortedRead, [number], text));
                }
                Some(_) => {}
            }
        }
        let Some((last, writer)) = values.last().and_then(|value| Some((*value, *writers.get(&(list, *value))?)))
        else {
            continue;
        };
        let left = appends(&all[writer]).filter(|(of, _)| *of == list).last();
        if writer != number && left.is_some_and(|(_, value)| value != last) {
            let text = format!("read list {list} up to {last}, and its writer had not finished");
            anomalies.push(Anomaly::new(AnomalyKind::IntermediateRead, [number, writer], text));
        }
    }
    anomalies
}

/// Checks that a list changes under one snapshot by the transaction's own appends alone.
fn internal(number: usize, transaction: &Transaction) -> Option<Anomaly> {
    let mut known: HashMap<u64, Vec<u64>> = HashMap::new();
    let mut unread: HashMap<u64, Vec<u64>> = HashMap::new();
    for operation in &transaction.operations {
        match operation {
            Operation::Append { list, value } => match known.get_mut(list) {
                Some(values) => values.push(*value),
                None => unread.entry(*list).or_default().push(*value),
            },
            Operation::ReadList { list, values } => {
                let own = unread.remove(list).unwrap_or_default();
                let expected = known.get(list);
                if expected.is_some_and(|expected| expected != values) || !values.ends_with(&own) {
                    let text = format!("list {list} reads {values:?} after {expected:?} and own appends {own:?}");
                    return Some(Anomaly::new(AnomalyKind::Internal, [number], text));
                }
                known.insert(*list, values.clone());
            }
            _ => {}
        }
    }
    None
}

/// Returns the longest read of each list; every other read must be its prefix.
fn orders(history: &History, happened: &BTreeSet<usize>) -> (BTreeMap<u64, Vec<u64>>, Vec<Anomaly>) {
    let mut orders: BTreeMap<u64, (Vec<u64>, Option<usize>)> = BTreeMap::new();
    let mut anomalies = Vec::new();
    let last = history.last.iter().flat_map(|last| last.lists.iter().map(|(list, values)| (*list, &values[..], None)));
    let of_clients = happened.iter().flat_map(|number| {
        reads(&history.transactions[*number]).map(move |(list, values)| (list, values, Some(*number)))
    });
    for (list, values, number) in last.chain(of_clients) {
        let (longest, by) = orders.entry(list).or_default();
        let common = longest.len().min(values.len());
        if longest[..common] != values[..common] {
            let who: Vec<usize> = [*by, number].into_iter().flatten().collect();
            let text = format!("list {list} was read as {longest:?} and as {values:?}");
            anomalies.push(Anomaly::new(AnomalyKind::IncompatibleOrder, who, text));
        } else if values.len() > longest.len() {
            (*longest, *by) = (values.to_vec(), number);
        }
    }
    (orders.into_iter().map(|(list, (values, _))| (list, values)).collect(), anomalies)
}

/// Checks that every acknowledged append is there once at the end, and a transaction of unknown outcome completely or not at all.
fn lost_or_doubled(history: &History, happened: &BTreeSet<usize>, lists: &BTreeMap<u64, Vec<u64>>) -> Vec<Anomaly> {
    let mut count: HashMap<(u64, u64), usize> = HashMap::new();
    for (list, values) in lists {
        values.iter().for_each(|value| *count.entry((*list, *value)).or_default() += 1);
    }
    let mut anomalies = Vec::new();
    for &number in happened {
        let transaction = &history.transactions[number];
        for (list, value) in appends(transaction) {
            let times = count.get(&(list, value)).copied().unwrap_or(0);
            let kind = match (times, transaction.outcome) {
                (1, _) => continue,
                (0, Outcome::Unknown) => AnomalyKind::TornTransaction,
                _ => AnomalyKind::LostOrDoubledWrite,
            };
            let text = format!("{value} is {times} times in list {list} at the end");
            anomalies.push(Anomaly::new(kind, [number], text));
        }
    }
    anomalies
}

fn overwrites(orders: &BTreeMap<u64, Vec<u64>>, writers: &Writers, edges: &mut Vec<Dependency>) {
    for (&list, values) in orders {
        for pair in values.windows(2) {
            let writer = |value| writers.get(&(list, value)).copied();
            if let (Some(from), Some(to)) = (writer(pair[0]), writer(pair[1])) {
                edges.push(Dependency { from, to, kind: DependencyKind::Overwritten, list });
            }
        }
    }
}

fn read_dependencies(
    number: usize,
    transaction: &Transaction,
    orders: &BTreeMap<u64, Vec<u64>>,
    writers: &Writers,
    edges: &mut Vec<Dependency>,
) {
    for (list, values) in reads(transaction) {
        // Own appends at the end are not a state that others made.
        let foreign = |value: &&u64| writers.get(&(list, **value)) != Some(&number);
        let observed = values.iter().rev().skip_while(|value| !foreign(value)).count();
        if let Some(from) = observed.checked_sub(1).and_then(|last| writers.get(&(list, values[last]))) {
            edges.push(Dependency { from: *from, to: number, kind: DependencyKind::Read, list });
        }
        let next = orders.get(&list).into_iter().flat_map(|order| order.iter().skip(observed));
        let next = next.filter_map(|value| writers.get(&(list, *value))).find(|writer| **writer != number);
        if let Some(&to) = next {
            edges.push(Dependency { from: number, to, kind: DependencyKind::ReadBefore, list });
        }
    }
}
