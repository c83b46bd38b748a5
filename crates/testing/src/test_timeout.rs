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
pub const SECONDS: u32 = 900;

#[derive(Debug)]
struct Watched {
    test: String,
    seconds: u32,
}

static WATCHED: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

/// The test of this thread; it ends with the thread, or when the thread begins another one.
struct Own(String);

impl Drop for Own {
    fn drop(&mut self) {
        WATCHED.lock().unwrap_or_else(PoisonError::into_inner).retain(|watched| watched.test != self.0);
    }
}

/// Starts the limit: from here on the calling test has [`SECONDS`] to end. In the long form (`make soak`) there is no
/// limit.
pub fn begin() {
    if crate::soak::is_soak() {
        return;
    }
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    // The previous test of this thread ends first.
    OWN.with_borrow_mut(|own| {
        drop(own.take());
        WATCHED.lock().unwrap_or_else(PoisonError::into_inner).push(Watched { test: test.clone(), seconds: 0 });
        *own = Some(Own(test));
    });
    static WATCH: Once = Once::new();
    WATCH.call_once(|| drop(std::thread::spawn(watch)));
}

fn watch() {
    loop {
        std::thread::sleep(Duration::from_secs(1));
        if let Some(test) = tick(&mut WATCHED.lock().unwrap_or_else(PoisonError::into_inner), SECONDS) {
            // Past libtest's capture, which would be lost with the process.
            let _ = writeln!(std::io::stderr().lock(), "test {test} hangs: it has run for {SECONDS} seconds. FAILED");
            std::process::exit(101);
        }
    }
}

/// Adds a second; returns the test whose time is over.
fn tick(watched: &mut [Watched], limit: u32) -> Option<String> {
    watched.iter_mut().for_each(|watched| watched.seconds += 1);
    watched.iter().find(|watched| watched.seconds >= limit).map(|watched| watched.test.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_too_long_is_named() {
        let watched = |test: &str, seconds| Watched { test: test.into(), seconds };
        let mut all = [watched("a", 0), watched("b", 8)];
        assert_eq!(tick(&mut all, 10), None);
        assert_eq!(tick(&mut all, 10).as_deref(), Some("b"));
    }

    #[test]
    fn a_test_that_has_ended_is_not_watched() {
        let there = |name: &str| WATCHED.lock().unwrap().iter().filter(|watched| watched.test == name).count();
        let thread = std::thread::Builder::new().name("some test".into()).spawn(move || {
            begin();
            begin();
            there("some test")
        });
        assert_eq!(thread.unwrap().join().unwrap(), 1);
        assert_eq!(there("some test"), 0);
    }
}
