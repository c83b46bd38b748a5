//! Sums over statements and bytes.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one session or of all.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) statements: AtomicU64,
    pub(crate) bytes_up: AtomicU64,
    pub(crate) bytes_down: AtomicU64,
}

impl Counters {
    /// Adds to a counter that only one thread writes.
    #[inline]
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
    }

    pub(crate) fn absorb(&self, other: &Counters) {
        for (mine, theirs) in [
            (&self.statements, &other.statements),
            (&self.bytes_up, &other.bytes_up),
            (&self.bytes_down, &other.bytes_down),
        ] {
            mine.fetch_add(theirs.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}
