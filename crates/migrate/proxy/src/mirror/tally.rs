//! Sums of a mirror.

use super::Processes;
use super::answer::Answer;
use crate::latency_histogram::LatencyHistogram;
use crate::mutex::lock;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use stillpoint_migrate_control::{DifferenceKind, MirrorDifference, MirrorReport};

/// Most differences and reasons that are kept; the sums count all.
const DIFFERENCES_MAX: usize = 100;
const REASONS_MAX: usize = 50;
/// Longest shown text, in characters.
const TEXT_CHARS_MAX: usize = 300;
/// Reason that stands for those beyond the limit.
const OTHER_REASONS: &str = "other reasons";

/// Result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Equal,
    /// The source's answer changes.
    Unsettled,
    Differs(DifferenceKind),
}

/// Sums of a mirror since it began.
#[derive(Debug, Default)]
pub(super) struct Tally {
    seen: AtomicU64,
    sums: Mutex<MirrorReport>,
    waits: [LatencyHistogram; 2],
    pub(super) source_processes: Processes,
}

/// A statement that was compared, with the last answers of the source and the target.
pub(super) struct Compared<'c> {
    /// Text without values.
    pub(super) statement: String,
    pub(super) user: &'c str,
    pub(super) answers: [&'c Answer; 2],
}

impl Tally {
    pub(super) fn see(&self) {
        self.seen.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn draw(&self) {
        lock(&self.sums).drawn += 1;
    }

    /// Counts a statement that is not compared.
    pub(super) fn leave_out(&self, why: &str) {
        let left_out = &mut lock(&self.sums).left_out;
        let has_room = left_out.contains_key(why) || left_out.len() < REASONS_MAX;
        *left_out.entry(if has_room { shorten(why) } else { OTHER_REASONS.to_owned() }).or_default() += 1;
    }

    /// Counts the durations of a statement on the source and on the target.
    pub(super) fn time(&self, answers: [&Answer; 2]) {
        for (waits, answer) in self.waits.iter().zip(answers) {
            waits.count(answer.took.as_micros() as u64);
        }
    }

    pub(super) fn count(&self, verdict: Verdict, compared: &Compared<'_>) {
        let report = &mut *lock(&self.sums);
        let kind = match verdict {
            Verdict::Equal => return report.equal += 1,
            Verdict::Unsettled => return report.unsettled += 1,
            Verdict::Differs(kind) => kind,
        };
        *match kind {
            DifferenceKind::Different => &mut report.different,
            DifferenceKind::Failed => &mut report.failed,
            DifferenceKind::Reordered => &mut report.reordered,
            DifferenceKind::Undefined => &mut report.undefined,
        } += 1;
        let statement = shorten(&compared.statement);
        let [source, target] = compared.answers.map(Answer::describe);
        let has_room = report.differences.len() < DIFFERENCES_MAX;
        let known = report.differences.iter_mut().find(|other| other.kind == kind && other.statement == statement);
        let user = shorten(compared.user);
        match known {
            Some(known) => {
                (known.count, known.user, known.source, known.target) = (known.count + 1, user, source, target)
            }
            None if has_room => {
                report.differences.push(MirrorDifference { kind, statement, user, count: 1, source, target });
            }
            None => {}
        }
    }

    pub(super) fn report(&self) -> MirrorReport {
        let mut report = lock(&self.sums).clone();
        report.seen = self.seen.load(Ordering::Relaxed);
        [report.source_waits, report.target_waits] = self.waits.each_ref().map(LatencyHistogram::counts);
        report.source_processes = self.source_processes.all();
        report
    }
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(TEXT_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_count_all_and_lists_have_limits() {
        let tally = Tally::default();
        for number in 0..1000 {
            tally.leave_out(&format!("reason {number}"));
            let answer = Answer::default();
            let statement = format!("SELECT {number} {}", "x".repeat(1000));
            let compared = Compared { statement, user: "u", answers: [&answer, &answer] };
            tally.count(Verdict::Differs(DifferenceKind::Different), &compared);
        }
        let report = tally.report();
        assert_eq!((report.different, report.differences.len()), (1000, DIFFERENCES_MAX));
        assert_eq!((report.left_out.values().sum::<u64>(), report.left_out.len()), (1000, REASONS_MAX + 1));
        assert!(report.differences[0].statement.chars().count() <= TEXT_CHARS_MAX + 3);
    }
}
