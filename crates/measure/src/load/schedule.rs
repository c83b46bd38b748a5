//! Due times of requests: an open loop, which does not wait for answers. Pure.

use serde::{Deserialize, Serialize};
use stillpoint_base::Random;

/// Distribution of the times between requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Arrivals {
    /// One every 1/rate.
    Constant,
    /// Independent of each other.
    ///
    /// As for many users; 1/rate on average.
    #[default]
    Poisson,
}

/// Due times of all requests of a run, one after the other. Due requests that are not sent yet *are* the backlog: it needs no queue, also
/// in a long pause of the server.
#[derive(Debug)]
pub(crate) struct Schedule {
    arrivals: Arrivals,
    rate: f64,
    start_ns: u64,
    end_ns: u64,
    count: u64,
    /// Time of the next request since the start, in ns; it keeps the fraction so that the rate does not drift.
    offset_ns: f64,
    rng: Random,
}

impl Schedule {
    pub(crate) fn new(arrivals: Arrivals, rate: f64, start_ns: u64, end_ns: u64, seed: u64) -> Self {
        let mut schedule =
            Schedule { arrivals, rate, start_ns, end_ns, count: 0, offset_ns: 0.0, rng: Random::new(seed) };
        if arrivals == Arrivals::Poisson {
            schedule.advance();
        }
        schedule
    }

    /// Returns the due time of the next request; `None` after the end.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        let due = self.start_ns + self.offset_ns as u64;
        (due < self.end_ns).then_some(due)
    }

    /// Advances to the next request.
    pub(crate) fn advance(&mut self) {
        self.count += 1;
        match self.arrivals {
            Arrivals::Constant => self.offset_ns = self.count as f64 * 1e9 / self.rate,
            Arrivals::Poisson => self.offset_ns += -self.rng.unit().ln() * 1e9 / self.rate,
        }
    }

    /// Removes all requests that are due after `end_ns`.
    pub(crate) fn end_at(&mut self, end_ns: u64) {
        self.end_ns = self.end_ns.min(end_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(arrivals: Arrivals, rate: f64, seconds: u64) -> Vec<u64> {
        let mut schedule = Schedule::new(arrivals, rate, 1_000, 1_000 + seconds * 1_000_000_000, 7);
        let mut times = Vec::new();
        while let Some(due) = schedule.due_ns() {
            times.push(due);
            schedule.advance();
        }
        times
    }

    #[test]
    fn constant_arrivals_do_not_drift() {
        let times = all(Arrivals::Constant, 30_000.0, 10);
        assert_eq!(times.len(), 300_000);
        assert_eq!(times[0], 1_000);
        assert_eq!(times[299_970], 1_000 + 9_999_000_000);
    }

    #[test]
    fn poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() {
        let times = all(Arrivals::Poisson, 10_000.0, 20);
        let count = times.len() as f64;
        assert!((count - 200_000.0).abs() < 4.0 * 200_000f64.sqrt(), "{count} arrivals");
        assert!(times.is_sorted());
        // For exponential gaps the standard deviation equals the mean.
        let gaps: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]) as f64).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.03, "{} against {mean}", variance.sqrt());
    }

    #[test]
    fn an_end_brought_forward_ends_the_schedule() {
        let mut schedule = Schedule::new(Arrivals::Constant, 1_000.0, 0, 1_000_000_000, 1);
        schedule.advance();
        schedule.end_at(500_000);
        assert_eq!(schedule.due_ns(), None);
    }
}
