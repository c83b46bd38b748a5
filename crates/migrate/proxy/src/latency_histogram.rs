//! Durations of statements, counted by classes: four to each doubling.

use std::sync::atomic::{AtomicU64, Ordering};

/// Upper end of the first class, in microseconds; the last class has no upper end.
const FIRST_US: u64 = 16;
const CLASSES: usize = 4 * 22;

/// Counts of statements by duration. Of statements that a client sends without waiting for answers, only the first
/// counts.
#[derive(Debug)]
pub(crate) struct LatencyHistogram([AtomicU64; CLASSES]);

impl Default for LatencyHistogram {
    fn default() -> Self {
        LatencyHistogram([const { AtomicU64::new(0) }; CLASSES])
    }
}

impl LatencyHistogram {
    #[inline]
    pub(crate) fn count(&self, us: u64) {
        self.0[class(us)].fetch_add(1, Ordering::Relaxed);
    }

    /// Classes that are not empty: upper end in microseconds, and count.
    pub(crate) fn counts(&self) -> Vec<(u64, u64)> {
        let counts = self.0.iter().enumerate().map(|(class, count)| (end_us(class), count.load(Ordering::Relaxed)));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

fn class(us: u64) -> usize {
    if us < FIRST_US {
        return 0;
    }
    let doublings = us.ilog2();
    let quarter = (us >> (doublings - 2)) & 3;
    (((doublings - FIRST_US.ilog2()) * 4) as usize + quarter as usize).min(CLASSES - 1)
}

fn end_us(class: usize) -> u64 {
    ((5 + class as u64 % 4) * FIRST_US / 4) << (class / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_lies_below_the_end_of_its_class_and_not_far_below() {
        for us in (0..100_000).chain([1_000_000, 5_000_000, 60_000_000]) {
            let end = end_us(class(us));
            assert!(us < end && (end <= us * 5 / 4 + 1 || end == 20), "{us} below {end}");
        }
        assert_eq!(class(u64::MAX), CLASSES - 1);
    }

    #[test]
    fn what_was_counted_is_told() {
        let waits = LatencyHistogram::default();
        for us in [3, 100, 100, 7000] {
            waits.count(us);
        }
        assert_eq!(waits.counts(), [(20, 1), (112, 2), (7168, 1)]);
    }
}
