//! Checks by counting: every acknowledged increment exactly once, and sums that do not change.

use std::collections::BTreeMap;

use super::{Anomaly, AnomalyKind, History, Level, Operation, Outcome};

pub(super) fn counters(history: &History) -> Vec<Anomaly> {
    let mut anomalies = Vec::new();
    // Transactions by counter and value; those with an unknown outcome may have happened or not.
    let mut given: BTreeMap<(u64, i64), Vec<usize>> = BTreeMap::new();
    let mut counts: BTreeMap<u64, [i64; 2]> = BTreeMap::new();
    for (number, transaction) in history.transactions.iter().enumerate() {
        for operation in &transaction.operations {
            let Operation::Increment { counter, became } = operation else { continue };
            let [known, unknown] = counts.entry(*counter).or_default();
            match transaction.outcome {
                Outcome::Committed => {
                    *known += 1;
                    given.entry((*counter, *became)).or_default().push(number);
                }
                Outcome::Unknown => *unknown += 1,
                Outcome::Aborted => {}
            }
        }
    }
    for ((counter, value), who) in given.into_iter().filter(|(_, who)| who.len() > 1) {
        let text = format!("counter {counter} became {value} {} times", who.len());
        anomalies.push(Anomaly::new(AnomalyKind::WrongCount, who, text));
    }
    let Some(last) = &history.last else { return anomalies };
    for (counter, [known, unknown]) in counts {
        let stands = last.counters.get(&counter).copied().unwrap_or(0);
        if stands < known || stands > known + unknown {
            let text = format!(
                "counter {counter} is {stands} after {known} acknowledged increments and {unknown} of unknown outcome"
            );
            anomalies.push(Anomaly::new(AnomalyKind::WrongCount, [], text));
        }
    }
    anomalies
}

pub(super) fn transfers(history: &History, level: Level) -> Vec<Anomaly> {
    let sum: i64 = history.accounts.values().sum();
    let mut anomalies = Vec::new();
    let mut expected = history.accounts.clone();
    let mut all_known = true;
    for (number, transaction) in history.transactions.iter().enumerate() {
        for operation in &transaction.operations {
            match (operation, transaction.outcome) {
                // One statement sees one state at every level; the sum of an aborted transaction does not count.
                (Operation::ReadSum { sum: read }, Outcome::Committed) if *read != sum => {
                    let text = format!("read a sum of {read} instead of {sum}");
                    anomalies.push(Anomaly::new(AnomalyKind::WrongSum, [number], text));
                }
                (Operation::Transfer { from, to, amount }, Outcome::Committed) => {
                    *expected.entry(*from).or_default() -= amount;
                    *expected.entry(*to).or_default() += amount;
                }
                (Operation::Transfer { .. }, Outcome::Unknown) => all_known = false,
                _ => {}
            }
        }
    }
    let Some(last) = history.last.as_ref().filter(|_| !history.accounts.is_empty()) else { return anomalies };
    let stands: i64 = last.accounts.values().sum();
    if stands != sum {
        anomalies.push(Anomaly::new(
            AnomalyKind::WrongSum,
            [],
            format!("the sum at the end is {stands} instead of {sum}"),
        ));
    }
    if all_known && last.accounts != expected {
        let wrong: Vec<&u64> = expected
            .iter()
            .filter(|(account, value)| last.accounts.get(account) != Some(value))
            .map(|(a, _)| a)
            .collect();
        let text = format!("accounts {wrong:?} do not contain the results of the acknowledged transfers ({level:?})");
        anomalies.push(Anomaly::new(AnomalyKind::WrongSum, [], text));
    }
    anomalies
}
