//! Reports events, on the machine's monotonic clock.

use crate::Error;
use stillpoint_events::{Event, EventKind, patch};
pub use stillpoint_patch_tracee::now_ns;
use stillpoint_patch_tracee::{Pid, Tid};

/// Callback that receives the events.
pub type Observer<'a> = &'a mut (dyn FnMut(Event) + Send);

/// Reports one operation on one process.
pub(crate) struct Report<'a> {
    observer: Observer<'a>,
    pid: Pid,
    operation: String,
}

impl<'a> Report<'a> {
    pub(crate) fn new(observer: Observer<'a>, pid: Pid, operation: &str) -> Self {
        Report { observer, pid, operation: operation.to_owned() }
    }

    pub(crate) fn event(&mut self, kind: impl Into<EventKind>) {
        (self.observer)(Event::new(now_ns(), Some(self.pid.0), kind.into()));
    }

    pub(crate) fn warn(&mut self, text: impl Into<String>) {
        self.event(EventKind::Warning { text: text.into() });
    }

    pub(crate) fn stopped(&mut self, tid: Tid, reason: &str, stopped_ns: u64) {
        self.event(patch::Event::ThreadStopped { tid: tid.0, reason: reason.to_owned(), stopped_ns });
    }

    pub(crate) fn started(&mut self, phase: &str) {
        let operation = self.operation.clone();
        self.event(EventKind::PhaseStarted { operation, phase: phase.to_owned() });
    }

    pub(crate) fn ended(&mut self, phase: &str, duration_ns: u64) {
        let operation = self.operation.clone();
        self.event(EventKind::PhaseEnded { operation, phase: phase.to_owned(), duration_ns });
    }

    /// Does `work` as a phase; its end is reported even if it fails.
    pub(crate) fn in_phase<T>(
        &mut self,
        phase: &str,
        work: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.started(phase);
        let start = now_ns();
        let result = work(self);
        self.ended(phase, now_ns() - start);
        result
    }

    /// Assigns later phases to another operation: the rollback of a transition.
    pub(crate) fn operation(&mut self, operation: &str) {
        self.operation = operation.to_owned();
    }
}
