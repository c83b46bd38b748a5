//! Phases of an operation, reported to its observer.

use crate::Error;
use crate::journal::Journal;
use rustix::time::{ClockId, clock_gettime};
use std::cell::OnceCell;
use std::path::Path;
use stillpoint_events::{Event, EventKind};

/// Function that receives each event.
pub type Observer<'o> = &'o (dyn Fn(&Event) + Sync);

/// An operation whose phases are reported, and recorded in the image's journal.
pub(crate) struct Progress<'o> {
    operation: &'static str,
    pid: Option<i32>,
    observer: Observer<'o>,
    journal: OnceCell<Journal>,
}

impl<'o> Progress<'o> {
    pub(crate) fn new(operation: &'static str, pid: Option<i32>, observer: Observer<'o>) -> Self {
        Progress { operation, pid, observer, journal: OnceCell::new() }
    }

    /// Records from now on in the journal of the image in this directory.
    pub(crate) fn journal_in(&self, dir: &Path) {
        let _ = self.journal.set(Journal::of(dir).with_pid(self.pid));
        self.record("begun", None, None);
    }

    /// Runs a phase, and reports its beginning and its duration, also if it fails.
    pub(crate) fn phase<T>(&self, name: &str, run: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let (operation, phase) = (self.operation.to_owned(), name.to_owned());
        self.report(EventKind::PhaseStarted { operation: operation.clone(), phase: phase.clone() });
        let begun = now_ns();
        let done = run();
        let duration_ns = now_ns() - begun;
        self.report(EventKind::PhaseEnded { operation, phase, duration_ns });
        self.record(name, Some(duration_ns), done.as_ref().err());
        done
    }

    /// Ends the operation.
    pub(crate) fn finish<T>(&self, done: &Result<T, Error>) {
        self.record("done", None, done.as_ref().err());
    }

    fn record(&self, what: &str, duration_ns: Option<u64>, error: Option<&Error>) {
        if let Some(journal) = self.journal.get() {
            journal.note(self.operation, what, duration_ns, error);
        }
    }

    /// Reports something that does not stop the operation.
    pub(crate) fn warn(&self, text: String) {
        self.report(EventKind::Warning { text });
    }

    /// Sends one event to the observer.
    fn report(&self, kind: EventKind) {
        (self.observer)(&Event::new(now_ns(), self.pid, kind));
    }
}

/// Returns `CLOCK_MONOTONIC` in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
