//! Waits between attempts.

use core::time::Duration;

/// Waits that double from a first one up to a maximum: quick results cost little time, slow ones little processor time.
#[derive(Debug, Clone)]
pub struct Backoff {
    next: Duration,
    max: Duration,
}

impl Backoff {
    /// Makes the sequence that begins with `first` and stays at `max`.
    pub const fn new(first: Duration, max: Duration) -> Backoff {
        Backoff { next: first, max }
    }

    /// Returns the wait before the next attempt.
    pub fn next_wait(&mut self) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(self.max);
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_maximum() {
        let mut backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(5));
        assert_eq!([1, 2, 4, 5, 5].map(Duration::from_millis), [(); 5].map(|()| backoff.next_wait()));
    }
}
