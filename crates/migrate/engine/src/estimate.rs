//! Estimates the remaining time of some work by its recent speed.

use std::time::{Duration, Instant};

/// Time constant of the average: older measurements count little.
const TIME_CONSTANT: Duration = Duration::from_secs(10);

/// Measurements of the work so far.
#[derive(Debug)]
pub(crate) struct Estimate {
    at: Instant,
    done: u64,
    /// Amount of work a second.
    rate: Option<f64>,
}

impl Estimate {
    /// Begins at `now` with no work done.
    pub(crate) fn begin(now: Instant) -> Estimate {
        Estimate { at: now, done: 0, rate: None }
    }

    /// Records that `done` of `all` is done at `now`; returns the remaining seconds, once something has been measured.
    pub(crate) fn remaining_s(&mut self, now: Instant, done: u64, all: u64) -> Option<u64> {
        let seconds = now.duration_since(self.at).as_secs_f64();
        let moved = done.saturating_sub(self.done) as f64;
        if seconds > 0.0 && (moved > 0.0 || self.rate.is_some()) {
            let weight = (-seconds / TIME_CONSTANT.as_secs_f64()).exp();
            self.rate =
                Some(self.rate.map_or(moved / seconds, |rate| rate * weight + moved / seconds * (1.0 - weight)));
            (self.at, self.done) = (now, done.max(self.done));
        }
        self.rate.filter(|rate| *rate > 0.0).map(|rate| (all.saturating_sub(done) as f64 / rate).ceil() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_what_is_measured() {
        let begun = Instant::now();
        let mut estimate = Estimate::begin(begun);
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert_eq!(estimate.remaining_s(at(1), 0, 1000), None, "nothing is measured yet");
        assert_eq!(estimate.remaining_s(at(2), 100, 1000), Some(18), "50 a second, from the beginning");
        assert_eq!(estimate.remaining_s(at(4), 200, 1000), Some(16));
        let slower: Vec<u64> =
            (5..60).map(|second| estimate.remaining_s(at(second), 200 + second - 4, 1000).unwrap()).collect();
        assert!(slower[0] > 16 && slower[0] < 20, "one slow second is not taken for all: {slower:?}");
        assert!(slower[54] > 600, "a minute is: {slower:?}");
        assert_eq!(estimate.remaining_s(at(61), 1200, 1000), Some(0), "there was more than was thought");
    }
}
