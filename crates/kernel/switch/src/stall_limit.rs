//! Limit of time without progress. A slow machine is no reason to abort a working operation: one that makes progress
//! never reaches the limit, and time in which this program did not run does not count.

use std::time::{Duration, Instant};

/// Maximum that counts between two tests: a virtual machine that was paused, or got no processor, has not waited.
const COUNTED_INTERVAL_MAX: Duration = Duration::from_secs(1);
/// Minimum time between two tests, as a test costs something.
const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(500);

/// Time without progress, and its limit.
#[derive(Debug)]
pub(crate) struct StallLimit {
    limit: Duration,
    waited: Duration,
    checked_at: Instant,
    progress: Option<u64>,
}

impl StallLimit {
    pub(crate) fn new(limit: Duration, now: Instant) -> Self {
        StallLimit { limit, waited: Duration::ZERO, checked_at: now, progress: None }
    }

    /// Returns true if the limit is reached. `progress` returns any number that changes when the operation makes
    /// progress.
    pub(crate) fn is_reached(&mut self, now: Instant, progress: impl FnOnce() -> u64) -> bool {
        let elapsed = now.saturating_duration_since(self.checked_at);
        if elapsed < CHECK_INTERVAL_MIN {
            return false;
        }
        self.checked_at = now;
        let progress = Some(progress());
        if progress == self.progress {
            self.waited += elapsed.min(COUNTED_INTERVAL_MAX);
        } else {
            (self.progress, self.waited) = (progress, Duration::ZERO);
        }
        self.waited > self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the time at which a limit of 10 s is reached, tested every half second; `progress` by the time.
    fn over_at(progress: impl Fn(f64) -> u64) -> Option<f64> {
        let begun = Instant::now();
        let mut limit = StallLimit::new(Duration::from_secs(10), begun);
        let mut looks = (1..200).map(|look| f64::from(look) / 2.0);
        looks.find(|at| limit.is_reached(begun + Duration::from_secs_f64(*at), || progress(*at)))
    }

    #[test]
    fn what_goes_on_has_no_end_and_what_stands_has_its_limit() {
        // the first test only records the progress
        assert_eq!(over_at(|_| 7), Some(11.0));
        assert_eq!(over_at(|at| at as u64 / 8), None);
        // 40 s of progress, and then no more
        assert_eq!(over_at(|at| (at as u64).min(40)), Some(50.5));
    }

    #[test]
    fn a_machine_that_stood_still_has_waited_for_a_second() {
        let begun = Instant::now();
        let mut limit = StallLimit::new(Duration::from_secs(10), begun);
        let mut at = begun;
        for pause in [1, 3600, 1, 600, 1, 1, 1, 1, 1, 1] {
            at += Duration::from_secs(pause);
            assert!(!limit.is_reached(at, || 0), "after {:?}", at - begun);
        }
        assert!(!limit.is_reached(at + Duration::from_secs(1), || 0));
        assert!(limit.is_reached(at + Duration::from_secs(2), || 0));
        // tests in quick succession count no time twice
        let mut limit = StallLimit::new(Duration::from_secs(10), begun);
        let mut looks = (0..2000).map(|n| begun + Duration::from_millis(n));
        assert!(looks.all(|at| !limit.is_reached(at, || 0)));
    }
}
