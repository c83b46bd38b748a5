//! Throttles the migration so that clients keep their throughput.
//!
//! ```text
//! clients' throughput / usual  <  share + cushion              =>  min(rate, what was really moved) * 0.7
//!                              >= share + margin, and held     =>  rate * 2 before the first fall, * 1.15 after it
//! ```

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use stillpoint_events::migrate;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// Distance from the share below which the rate is reduced, because the share is a minimum for clients and not an average. A
/// cushion of twice this size was tested once: the migration took 284 s instead of 156 to 223 s, and clients kept no more.
const SHARE_CUSHION: f64 = 0.02;
/// Distance above the share from which the rate may rise.
const RISE_MARGIN: f64 = 0.05;
const UNLIMITED: u64 = 4 << 30;

/// Limits of a rate.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Minimum of the rate: a migration that never ends would keep log on the source.
    pub min: u64,
    /// Rate at the beginning.
    pub initial: u64,
    /// Maximum of the rate.
    pub max: u64,
    /// Makes the event that reports a rate; its first argument is the percentage of their throughput that clients keep.
    pub make_event: fn(u64, u64) -> migrate::Event,
}

impl Bounds {
    /// Makes limits for amounts moved in a second.
    pub const fn of_rate(min: u64, initial: u64) -> Bounds {
        let make_event = |kept_percent, allowed_per_s| migrate::Event::Throttled { kept_percent, allowed_per_s };
        Bounds { min, initial, max: UNLIMITED, make_event }
    }
}

/// Limits for the copy, in bytes of rows a second.
pub const COPY_BOUNDS: Bounds = Bounds::of_rate(2 << 20, 8 << 20);
/// Limits for the comparison, in bytes of rows a second.
pub const COMPARISON_BOUNDS: Bounds = Bounds::of_rate(4 << 20, 8 << 20);

/// A rate that several workers share.
#[derive(Debug)]
pub struct Throttle {
    rate: AtomicU64,
    min: AtomicU64,
    spent: AtomicU64,
    /// True if a worker had to wait.
    had_to_wait: AtomicBool,
    has_fallen: AtomicBool,
    max: u64,
    make_event: fn(u64, u64) -> migrate::Event,
    /// Time at which everything spent so far is paid for.
    paid_until: Mutex<Option<Instant>>,
}

impl Throttle {
    /// Makes a throttle with these limits.
    pub fn new(bounds: Bounds) -> Throttle {
        Throttle {
            rate: AtomicU64::new(bounds.initial),
            min: AtomicU64::new(bounds.min),
            spent: AtomicU64::new(0),
            had_to_wait: AtomicBool::new(false),
            has_fallen: AtomicBool::new(false),
            max: bounds.max,
            make_event: bounds.make_event,
            paid_until: Mutex::new(None),
        }
    }

    /// Makes a throttle that does not probe for the highest rate clients tolerate, for work in which a window at too high a
    /// rate would be a large part.
    pub fn without_probing(bounds: Bounds) -> Throttle {
        Throttle { has_fallen: AtomicBool::new(true), ..Throttle::new(bounds) }
    }

    /// Makes a throttle without a limit.
    pub fn unlimited() -> Throttle {
        Throttle::new(Bounds::of_rate(UNLIMITED, UNLIMITED))
    }

    /// Amount that is allowed in a second now.
    pub fn rate(&self) -> u64 {
        self.rate.load(Ordering::Relaxed)
    }

    /// Removes the limit from now on; workers that already wait continue to wait.
    pub fn release(&self) {
        self.set_min(UNLIMITED);
    }

    /// Sets the minimum of the rate.
    pub fn set_min(&self, min: u64) {
        self.min.store(min.min(self.max), Ordering::Relaxed);
        self.rate.fetch_max(min.min(self.max), Ordering::Relaxed);
    }

    /// Returns true if the rate has no limit, independent of the clients.
    pub fn is_unlimited(&self) -> bool {
        self.min.load(Ordering::Relaxed) >= self.max
    }

    /// Records that work which cannot be counted continues at the allowed rate.
    pub fn record_uncounted_work(&self) {
        self.spent.store(u64::MAX, Ordering::Relaxed);
        self.had_to_wait.store(true, Ordering::Relaxed);
    }

    /// Makes the event that reports the allowed rate.
    pub fn event(&self, kept: f64, allowed: u64) -> migrate::Event {
        (self.make_event)((kept * 100.0) as u64, allowed)
    }

    /// Returns true if the rate is at its minimum.
    pub fn is_at_min(&self) -> bool {
        self.rate() <= self.min.load(Ordering::Relaxed)
    }

    /// Adjusts the rate to the clients' throughput in the last `window`: `kept` is its share of the usual throughput, and
    /// `share` the part that they must keep. Returns the new rate; `None` if nothing was moved.
    pub fn adjust(&self, kept: f64, share: f64, window: Duration) -> Option<u64> {
        let (spent, had_to_wait) =
            (self.spent.swap(0, Ordering::Relaxed), self.had_to_wait.swap(false, Ordering::Relaxed));
        if spent == 0 {
            return None;
        }
        let (rate, moved) = (self.rate() as f64, spent as f64 / window.as_secs_f64().max(0.001));
        let rate = if kept < share + SHARE_CUSHION {
            self.has_fallen.store(true, Ordering::Relaxed);
            rate.min(moved) * 0.7
        } else if kept >= share + RISE_MARGIN && had_to_wait {
            rate * if self.has_fallen.load(Ordering::Relaxed) { 1.15 } else { 2.0 }
        } else {
            rate
        };
        let rate = (rate as u64).clamp(self.min.load(Ordering::Relaxed), self.max);
        self.rate.store(rate, Ordering::Relaxed);
        Some(rate)
    }

    /// Waits until `amount` may have been moved.
    pub async fn spend(&self, amount: u64) {
        if let Some(due) = self.charge(amount).await {
            tokio::time::sleep_until(due).await;
        }
    }

    /// Records `amount`; returns the time until which the caller must wait, if it must.
    pub async fn charge(&self, amount: u64) -> Option<Instant> {
        self.spent.fetch_add(amount, Ordering::Relaxed);
        let cost = Duration::from_secs_f64(amount as f64 / self.rate().max(1) as f64);
        let now = Instant::now();
        let mut paid_until = self.paid_until.lock().await;
        // Unused rate is not saved up, because clients notice a burst.
        let due = paid_until.map_or(now, |paid_until| paid_until.max(now)) + cost;
        *paid_until = Some(due);
        if due <= now + Duration::from_millis(5) {
            return None;
        }
        self.had_to_wait.store(true, Ordering::Relaxed);
        Some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_secs(1);

    /// Adjusts the rate as if `moved` had been moved in a window.
    async fn adjust(throttle: &Throttle, moved: u64, kept: f64) -> u64 {
        throttle.spend(moved).await;
        throttle.adjust(kept, 0.85, WINDOW).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn the_rate_falls_while_clients_suffer_and_rises_while_they_do_not() {
        let throttle = Throttle::new(COPY_BOUNDS);
        let initial = COPY_BOUNDS.initial;
        assert_eq!(adjust(&throttle, initial, 1.0).await, initial * 2, "at first it looks for what clients bear");
        let low = adjust(&throttle, initial, 0.5).await;
        assert_eq!(low, (initial as f64 * 0.7) as u64, "from what was moved, not from what was allowed");
        assert_eq!(adjust(&throttle, low, 0.88).await, low, "just enough is left alone");
        let high = adjust(&throttle, low, 1.0).await;
        assert!(high > low && high < low * 5 / 4, "then it goes with care: {low}, {high}");
        for _ in 0..50 {
            adjust(&throttle, high, 0.1).await;
        }
        assert_eq!(throttle.rate(), COPY_BOUNDS.min);
        assert!(throttle.is_at_min());
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_that_holds_no_worker_does_not_rise() {
        let throttle = Throttle::new(COPY_BOUNDS);
        assert_eq!(throttle.adjust(1.0, 0.85, WINDOW), None, "nothing was moved");
        assert_eq!(adjust(&throttle, 1, 1.0).await, COPY_BOUNDS.initial);
        throttle.release();
        assert_eq!(adjust(&throttle, 1 << 20, 0.1).await, UNLIMITED, "it has been let go");
    }

    #[tokio::test(start_paused = true)]
    async fn several_spenders_share_one_rate() {
        let throttle = Throttle::new(COPY_BOUNDS);
        let begun = Instant::now();
        tokio::join!(throttle.spend(COPY_BOUNDS.initial), throttle.spend(COPY_BOUNDS.initial));
        assert_eq!(begun.elapsed().as_secs(), 2);
    }
}
