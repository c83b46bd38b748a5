//! Rate limit of the background fetch.

use std::time::{Duration, Instant};

/// Token bucket: bytes that may be fetched now.
#[derive(Debug)]
pub(crate) struct RateLimiter {
    rate: Option<u64>,
    level: f64,
    at: Instant,
}

/// Time for which the bucket holds tokens, so that a pause is not followed by a burst.
const BURST_DURATION: Duration = Duration::from_millis(20);

/// Least number of bytes that is worth a call.
const STEP_BYTES_MIN: u64 = 1 << 16;

impl RateLimiter {
    /// Makes a bucket of `rate` bytes a second; unlimited if `None`.
    pub(crate) fn new(rate: Option<u64>, now: Instant) -> Self {
        RateLimiter { rate: rate.map(|rate| rate.max(1)), level: 0.0, at: now }
    }

    /// Returns the bytes to fetch at once, at most `most`: what the rate gives in the bucket's time, but not less than
    /// [`STEP_BYTES_MIN`].
    pub(crate) fn step_bytes(&self, most: u64) -> u64 {
        let step_for = |rate: u64| (rate as f64 * BURST_DURATION.as_secs_f64()) as u64;
        self.rate.map_or(most, |rate| step_for(rate).clamp(STEP_BYTES_MIN.min(most), most))
    }

    /// Returns the time to wait until `bytes` may be fetched; `None` if they may be now.
    pub(crate) fn wait(&mut self, bytes: u64, now: Instant) -> Option<Duration> {
        let rate = self.rate? as f64;
        let depth = (rate * BURST_DURATION.as_secs_f64()).max(bytes as f64);
        self.level = (self.level + now.duration_since(self.at).as_secs_f64() * rate).min(depth);
        self.at = now;
        let missing = bytes as f64 - self.level;
        (missing > 0.0).then(|| Duration::from_secs_f64(missing / rate))
    }

    /// Takes fetched bytes out of the bucket.
    pub(crate) fn consume(&mut self, bytes: u64) {
        self.level -= bytes as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_kept_over_time() {
        let begun = Instant::now();
        let (mut limiter, mut now, mut step_for) = (RateLimiter::new(Some(1 << 20), begun), begun, 0u64);
        while now < begun + Duration::from_secs(4) {
            match limiter.wait(1 << 16, now) {
                Some(pause) => now += pause,
                None => {
                    limiter.consume(1 << 16);
                    step_for += 1 << 16;
                }
            }
        }
        assert!((3 << 20..=(4 << 20) + (1 << 17)).contains(&step_for), "{step_for}");
        assert_eq!(RateLimiter::new(None, begun).wait(u64::MAX, begun), None);
    }

    #[test]
    fn a_slow_rate_has_small_steps() {
        let step = |rate| RateLimiter::new(rate, Instant::now()).step_bytes(1 << 20);
        assert_eq!([step(None), step(Some(1 << 30)), step(Some(1))], [1 << 20, 1 << 20, 1 << 16]);
        assert!((1 << 19..1 << 20).contains(&step(Some(40 << 20))));
    }
}
