//! How fast memory is filled that nobody asks for.

use std::time::{Duration, Instant};

/// Bytes that may be brought now: a bucket that fills at a rate.
#[derive(Debug)]
pub(crate) struct Pace {
    rate: Option<u64>,
    level: f64,
    at: Instant,
}

/// The bucket holds what the rate brings in this time, so that a pause is not followed by a burst.
const DEPTH: Duration = Duration::from_millis(20);

/// The least that is worth a call.
const LEAST: u64 = 1 << 16;

impl Pace {
    /// `rate` bytes a second; as fast as it goes where there is none.
    pub(crate) fn new(rate: Option<u64>, now: Instant) -> Self {
        Pace { rate: rate.map(|rate| rate.max(1)), level: 0.0, at: now }
    }

    /// How much to bring at once, at most `most`: what the rate brings in the bucket's time, and never next to nothing.
    pub(crate) fn step(&self, most: u64) -> u64 {
        let brought = |rate: u64| (rate as f64 * DEPTH.as_secs_f64()) as u64;
        self.rate.map_or(most, |rate| brought(rate).clamp(LEAST.min(most), most))
    }

    /// How long to wait until `bytes` may be brought; nothing if they may be now.
    pub(crate) fn wait(&mut self, bytes: u64, now: Instant) -> Option<Duration> {
        let rate = self.rate? as f64;
        let depth = (rate * DEPTH.as_secs_f64()).max(bytes as f64);
        self.level = (self.level + now.duration_since(self.at).as_secs_f64() * rate).min(depth);
        self.at = now;
        let missing = bytes as f64 - self.level;
        (missing > 0.0).then(|| Duration::from_secs_f64(missing / rate))
    }

    /// So many bytes have been brought.
    pub(crate) fn took(&mut self, bytes: u64) {
        self.level -= bytes as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_kept_over_time() {
        let begun = Instant::now();
        let (mut pace, mut now, mut brought) = (Pace::new(Some(1 << 20), begun), begun, 0u64);
        while now < begun + Duration::from_secs(4) {
            match pace.wait(1 << 16, now) {
                Some(pause) => now += pause,
                None => {
                    pace.took(1 << 16);
                    brought += 1 << 16;
                }
            }
        }
        assert!((3 << 20..=(4 << 20) + (1 << 17)).contains(&brought), "{brought}");
        assert_eq!(Pace::new(None, begun).wait(u64::MAX, begun), None);
    }

    #[test]
    fn a_slow_rate_has_small_steps() {
        let step = |rate| Pace::new(rate, Instant::now()).step(1 << 20);
        assert_eq!([step(None), step(Some(1 << 30)), step(Some(1))], [1 << 20, 1 << 20, 1 << 16]);
        assert!((1 << 19..1 << 20).contains(&step(Some(40 << 20))));
    }
}
