//! Report of a mirror: reads of clients that were run again on the source and on a target, and how the answers compare.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Sums of a mirror since it began.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorReport {
    /// Statements that clients have sent.
    pub seen: u64,
    /// Statements of the share, which were run on both servers or left out.
    pub drawn: u64,
    /// Statements with the same answer on both servers. An error of the same kind is the same answer.
    pub equal: u64,
    /// Statements with the same rows in another order than the source's, although they state an order: rows that tie, or
    /// another collation.
    pub reordered: u64,
    /// Statements whose answers differ, and may, because they depend on an order of rows that they do not state.
    pub undefined: u64,
    /// Statements whose answer on the source changed each time that it was compared.
    pub unsettled: u64,
    /// Statements whose answers differ although the source's stays the same and the target has all of its commits.
    pub different: u64,
    /// Statements that only the target refuses.
    pub failed: u64,
    /// Statements that were not compared, by reason.
    pub left_out: BTreeMap<String, u64>,
    /// Histogram of durations on the source: upper ends in microseconds, and counts.
    pub source_waits: Vec<(u64, u64)>,
    /// The same on the target.
    pub target_waits: Vec<(u64, u64)>,
    /// Statements whose answers differ, without their values.
    pub differences: Vec<MirrorDifference>,
    /// Process ids of the mirror's own sessions on the source.
    #[serde(default)]
    pub source_processes: Vec<u32>,
}

impl MirrorReport {
    /// Number of statements that were run on both servers.
    pub fn compared(&self) -> u64 {
        self.equal + self.reordered + self.undefined + self.unsettled + self.different + self.failed
    }

    /// Number of statements with another answer on the target, or that only the target refuses.
    pub fn differing(&self) -> u64 {
        self.different + self.failed
    }

    /// Time in microseconds below which this share of the statements took, on the source and on the target; `None`
    /// without statements.
    pub fn quantiles_us(&self, share: f64) -> Option<(u64, u64)> {
        Some((quantile(&self.source_waits, share)?, quantile(&self.target_waits, share)?))
    }
}

/// Upper end of the class that holds the quantile.
fn quantile(classes: &[(u64, u64)], share: f64) -> Option<u64> {
    let all: u64 = classes.iter().map(|(_, count)| count).sum();
    let wanted = ((all as f64 * share).ceil() as u64).max(1);
    let mut below = 0;
    classes.iter().find_map(|(end, count)| {
        below += count;
        (below >= wanted).then_some(*end)
    })
}

/// Kind of a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DifferenceKind {
    /// Other rows, or other columns.
    Different,
    /// Only the target refuses the statement.
    Failed,
    /// The same rows in another order.
    Reordered,
    /// Other rows, of a statement that depends on an order that it does not state.
    Undefined,
}

/// A statement whose answers differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorDifference {
    /// Kind of the difference.
    pub kind: DifferenceKind,
    /// Text with `?` for each value.
    pub statement: String,
    /// User of the last session that sent it.
    pub user: String,
    /// Number of times.
    pub count: u64,
    /// The source's last answer: a number of rows, or the code of an error.
    pub source: String,
    /// The target's last answer.
    pub target: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_the_end_of_its_class() {
        let classes = [(20, 50), (40, 45), (80, 5)];
        assert_eq!(
            [0.0, 0.5, 0.51, 0.95, 0.96, 1.0].map(|share| quantile(&classes, share).unwrap()),
            [20, 20, 40, 40, 80, 80]
        );
        assert_eq!(quantile(&[], 0.5), None);
    }
}
