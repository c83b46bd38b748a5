//! Time since the proxy began.

use std::sync::LazyLock;
use std::time::Instant;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Microseconds since the proxy began.
pub(crate) fn now_us() -> u64 {
    START.elapsed().as_micros() as u64
}
