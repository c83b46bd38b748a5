//! Limit on the time of a whole test: a test that hangs ends by itself and prints its name.
//!
//! The obvious way is a limit around the operations of a test. Tests wait in threads, in futures and in destructors,
//! and a waiting thread cannot be ended from outside; so the process ends, and with it all that the kernel ends after
//! it.

use std::cell::RefCell;
use std::io::Write;
use std::sync::{Mutex, Once, PoisonError};
use std::time::Duration;

/// Limit in seconds in which the process ran, not of a clock: time in which the process is stopped does not count.
pub const LIMIT_S: u32 = 900;

#[derive(Debug)]
struct TestClock {
    test: String,
    seconds: u32,
}

static TEST_CLOCKS: Mutex<Vec<TestClock>> = Mutex::new(Vec::new());

thread_local! {
    static CURRENT_TEST: RefCell<Option<CurrentTest>> = const { RefCell::new(None) };
}

/// The test of this thread; it ends with the thread, or when the thread begins another one.
struct CurrentTest(String);

impl Drop for CurrentTest {
    fn drop(&mut self) {
        TEST_CLOCKS.lock().unwrap_or_else(PoisonError::into_inner).retain(|clock| clock.test != self.0);
    }
}

/// Starts the limit: from here on the calling test has [`LIMIT_S`] to end. In the long form (`make soak`) there is no
/// limit.
pub fn start() {
    if crate::soak::is_soak() {
        return;
    }
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    // The previous test of this thread ends first.
    CURRENT_TEST.with_borrow_mut(|own| {
        drop(own.take());
        TEST_CLOCKS.lock().unwrap_or_else(PoisonError::into_inner).push(TestClock { test: test.clone(), seconds: 0 });
        *own = Some(CurrentTest(test));
    });
    static WATCH_STARTED: Once = Once::new();
    WATCH_STARTED.call_once(|| drop(std::thread::spawn(watch)));
}

fn watch() {
    loop {
        std::thread::sleep(Duration::from_secs(1));
        if let Some(test) = tick(&mut TEST_CLOCKS.lock().unwrap_or_else(PoisonError::into_inner), LIMIT_S) {
            // Past libtest's capture, which would be lost with the process.
            let _ = writeln!(std::io::stderr().lock(), "test {test} hangs: it has run for {LIMIT_S} seconds. FAILED");
            std::process::exit(101);
        }
    }
}

/// Adds a second; returns the test whose time is over.
fn tick(clocks: &mut [TestClock], limit: u32) -> Option<String> {
    clocks.iter_mut().for_each(|clock| clock.seconds += 1);
    clocks.iter().find(|clock| clock.seconds >= limit).map(|clock| clock.test.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_too_long_is_named() {
        let clock = |test: &str, seconds| TestClock { test: test.into(), seconds };
        let mut all = [clock("a", 0), clock("b", 8)];
        assert_eq!(tick(&mut all, 10), None);
        assert_eq!(tick(&mut all, 10).as_deref(), Some("b"));
    }

    #[test]
    fn a_test_that_has_ended_is_not_watched() {
        let there = |name: &str| TEST_CLOCKS.lock().unwrap().iter().filter(|clock| clock.test == name).count();
        let thread = std::thread::Builder::new().name("some test".into()).spawn(move || {
            start();
            start();
            there("some test")
        });
        assert_eq!(thread.unwrap().join().unwrap(), 1);
        assert_eq!(there("some test"), 0);
    }
}
