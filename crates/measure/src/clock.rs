//! Clock of all records: `CLOCK_MONOTONIC`, in nanoseconds.

use std::time::Duration;

pub use stillpoint_host::clock::now_ns;

/// Converts a duration to nanoseconds, limited to 584 years.
pub(crate) fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
