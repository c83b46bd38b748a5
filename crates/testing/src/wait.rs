//! Waits for conditions, never for fixed times.

use std::time::{Duration, Instant};
use stillpoint_base::Backoff;

/// Limit of a wait, long on purpose: tests run on two busy processors. Speed is measured in benchmarks.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Calls `condition` until it returns a value; panics after [`WAIT_TIMEOUT`] and prints `what` was awaited.
#[track_caller]
pub fn until<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    match within(WAIT_TIMEOUT, condition) {
        Some(value) => value,
        None => panic!("waited {WAIT_TIMEOUT:?} without success for: {what}"),
    }
}

/// Calls `condition` until it returns a value or `limit` has passed.
pub fn within<T>(limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + limit;
    // Starts short so that quick conditions cost little, and grows so that slow ones use little processor time.
    let mut pause = Backoff::new(Duration::from_micros(200), Duration::from_millis(20));
    loop {
        if let Some(value) = condition() {
            return Some(value);
        }
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(pause.next_wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yields_the_value_once_it_is_there() {
        let mut asked = 0;
        let got = until("the third answer", || {
            asked += 1;
            (asked == 3).then_some(asked)
        });
        assert_eq!(got, 3);
    }

    #[test]
    fn gives_up_after_the_limit() {
        assert_eq!(within(Duration::from_millis(5), || None::<()>), None);
    }

    #[test]
    fn asks_at_least_once_even_without_time() {
        assert_eq!(within(Duration::ZERO, || Some(7)), Some(7));
    }
}
