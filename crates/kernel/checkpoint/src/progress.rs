//! Phases of an operation, reported to its observer.

use crate::Error;
use crate::journal::Journal;
use std::path::Path;
use stillpoint_events::{Event, EventKind};
pub use stillpoint_host::clock::now_ns;

/// Function that receives each event.
pub type Observer<'o> = &'o (dyn Fn(&Event) + Sync);

/// Events of an operation, and its lines in the image's journal.
pub(crate) struct Progress<'o> {
    operation: &'static str,
    image: &'o Path,
    pid: Option<i32>,
    observer: Observer<'o>,
    journal: Option<Journal>,
}

impl<'o> Progress<'o> {
    pub(crate) fn new(operation: &'static str, image: &'o Path, pid: Option<i32>, observer: Observer<'o>) -> Self {
        Progress { operation, image, pid, observer, journal: None }
    }

    /// Records the end of a phase. The journal begins after the first one: the check is not part of it.
    pub(crate) fn ended(&mut self, phase: &str, duration_ns: u64, error: Option<&Error>) {
        if self.journal.is_some() {
            self.record(phase, Some(duration_ns), error);
        } else if error.is_none() {
            self.journal = Some(Journal::of(self.image).with_pid(self.pid));
            self.record("begun", None, None);
        }
    }

    /// Ends the operation.
    pub(crate) fn finish<T>(&self, done: &Result<T, Error>) {
        self.record("done", None, done.as_ref().err());
    }

    fn record(&self, what: &str, duration_ns: Option<u64>, error: Option<&Error>) {
        if let Some(journal) = &self.journal {
            journal.note(self.operation, what, duration_ns, error);
        }
    }

    /// Reports something that does not stop the operation.
    pub(crate) fn warn(&self, text: String) {
        self.report(EventKind::Warning { text });
    }

    /// Sends one event to the observer.
    pub(crate) fn report(&self, kind: EventKind) {
        (self.observer)(&Event::new(now_ns(), self.pid, kind));
    }
}
