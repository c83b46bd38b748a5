//! Holding the copy back so that clients keep their throughput.
//!
//! ```text
//! clients' throughput / before  <  share           =>  rate * 0.7
//!                               >= share + margin  =>  rate * 1.15
//! ```
//!
//! The throughput is the source's own count of commits: it needs no proxy, and closed-loop clients show in it that they
//! are made to wait.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// Where the rate begins, and does not fall below: a copy that never ends keeps log on the source.
const RATE_MIN: u64 = 2 << 20;
const RATE_START: u64 = 64 << 20;
const RATE_MAX: u64 = 4 << 30;
/// Above the share by so much, the copy may go faster.
const MARGIN: f64 = 0.03;

/// A rate that several copies share.
#[derive(Debug)]
pub(crate) struct Throttle {
    rate: AtomicU64,
    /// When what has been spent so far is paid for.
    paid: Mutex<Option<Instant>>,
}

impl Throttle {
    pub(crate) fn new() -> Throttle {
        Throttle { rate: AtomicU64::new(RATE_START), paid: Mutex::new(None) }
    }

    /// Bytes a second that are allowed now.
    pub(crate) fn rate(&self) -> u64 {
        self.rate.load(Ordering::Relaxed)
    }

    /// As fast as it goes.
    pub(crate) fn free(&self) {
        self.rate.store(RATE_MAX, Ordering::Relaxed);
    }

    /// Takes in how clients fare: their throughput as a part of what it was before, and the part that they must keep.
    pub(crate) fn heed(&self, kept: f64, share: f64) {
        let rate = self.rate();
        let rate = if kept < share {
            (rate as f64 * 0.7) as u64
        } else if kept >= share + MARGIN {
            (rate as f64 * 1.15) as u64
        } else {
            rate
        };
        self.rate.store(rate.clamp(RATE_MIN, RATE_MAX), Ordering::Relaxed);
    }

    /// Waits until so many bytes may have been moved.
    pub(crate) async fn spend(&self, bytes: u64) {
        let cost = Duration::from_secs_f64(bytes as f64 / self.rate() as f64);
        let due = {
            let mut paid = self.paid.lock().await;
            let now = Instant::now();
            // What was not used is not saved up: a burst is what clients notice.
            let due = paid.map_or(now, |paid| paid.max(now)) + cost;
            *paid = Some(due);
            due
        };
        if due > Instant::now() + Duration::from_millis(5) {
            tokio::time::sleep_until(due).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_falls_while_clients_suffer_and_rises_while_they_do_not() {
        let throttle = Throttle::new();
        throttle.heed(0.5, 0.85);
        assert!(throttle.rate() < RATE_START);
        let low = throttle.rate();
        throttle.heed(0.86, 0.85);
        assert_eq!(throttle.rate(), low, "just enough is left alone");
        throttle.heed(1.0, 0.85);
        assert!(throttle.rate() > low);
        (0..200).for_each(|_| throttle.heed(0.1, 0.85));
        assert_eq!(throttle.rate(), RATE_MIN);
        (0..200).for_each(|_| throttle.heed(1.0, 0.85));
        assert_eq!(throttle.rate(), RATE_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn several_spenders_share_one_rate() {
        let throttle = Throttle::new();
        let begun = Instant::now();
        tokio::join!(throttle.spend(RATE_START), throttle.spend(RATE_START));
        assert_eq!(begun.elapsed().as_secs(), 2);
    }
}
