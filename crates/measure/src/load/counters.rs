//! Counters that other threads read while a load runs.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

use crate::record::{Outcome, Sample};
use crate::summary::Counts;

/// Live counters of a load; any thread may read them at any time.
#[derive(Debug, Default)]
pub struct Counters {
    outcomes: [AtomicU64; Outcome::ALL.len()],
    dropped: AtomicU64,
    reconnect_failures: AtomicU64,
    open: AtomicU64,
    last_ok_ns: AtomicU64,
    latency_max_ns: AtomicU64,
    late: AtomicU64,
    pub(crate) stop: AtomicBool,
}

/// Counters at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Outcomes of the requests so far.
    pub counts: Counts,
    /// Number of connections that ended although the client did not end them.
    pub dropped: u64,
    /// Number of failed attempts to open a dropped connection again.
    pub reconnect_failures: u64,
    /// Number of connections open now, of all roles.
    pub open: u64,
    /// Time of the last right answer (`CLOCK_MONOTONIC`), in nanoseconds.
    pub last_ok_ns: u64,
    /// Longest latency in nanoseconds.
    pub latency_max_ns: u64,
    /// Lateness of the most recent request, in nanoseconds.
    pub late_ns: u64,
}

impl Counters {
    /// Reads all counters, one after the other: a request that ends meanwhile may be in only some of them.
    pub fn snapshot(&self) -> Snapshot {
        let [ok, errors, wrong, timeouts, lost] = self.outcomes.each_ref().map(|count| count.load(Relaxed));
        let requests = ok + errors + wrong + timeouts + lost;
        Snapshot {
            counts: Counts { requests, ok, errors, wrong, timeouts, lost },
            dropped: self.dropped.load(Relaxed),
            reconnect_failures: self.reconnect_failures.load(Relaxed),
            open: self.open.load(Relaxed),
            last_ok_ns: self.last_ok_ns.load(Relaxed),
            latency_max_ns: self.latency_max_ns.load(Relaxed),
            late_ns: self.late.load(Relaxed),
        }
    }

    // Only the load writes, so a load and a store have the same effect as an atomic addition.
    fn bump(counter: &AtomicU64) {
        counter.store(counter.load(Relaxed) + 1, Relaxed);
    }

    pub(crate) fn sample(&self, sample: &Sample) {
        Self::bump(&self.outcomes[sample.outcome as usize]);
        if sample.outcome == Outcome::Ok {
            self.last_ok_ns.store(sample.ended_ns(), Relaxed);
        }
        if sample.latency_ns > self.latency_max_ns.load(Relaxed) {
            self.latency_max_ns.store(sample.latency_ns, Relaxed);
        }
        self.late.store(u64::from(sample.late_us) * 1000, Relaxed);
    }

    pub(crate) fn opened(&self) {
        Self::bump(&self.open);
    }

    pub(crate) fn dropped(&self) {
        Self::bump(&self.dropped);
        self.open.store(self.open.load(Relaxed).saturating_sub(1), Relaxed);
    }

    pub(crate) fn reconnect_failed(&self) {
        Self::bump(&self.reconnect_failures);
    }
}
