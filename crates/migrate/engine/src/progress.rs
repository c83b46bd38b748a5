//! Events that a migration reports while it runs.

use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_events::{Event, EventKind};

/// Interval of progress reports.
pub(crate) const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// Receives events; several tasks call it.
pub type Observer = Arc<dyn Fn(Event) + Send + Sync>;

/// Sends events of one operation to an observer.
#[derive(Clone)]
pub(crate) struct Reporter {
    observer: Observer,
    operation: &'static str,
    /// Number of the target that its events concern; 0 for the first.
    number: usize,
}

impl Reporter {
    pub(crate) fn new(observer: Observer, operation: &'static str) -> Reporter {
        Reporter { observer, operation, number: 0 }
    }

    /// A reporter whose events are discarded.
    pub(crate) fn silent() -> Reporter {
        Reporter::new(Arc::new(|_| {}), "migrate")
    }

    /// Makes a reporter for events of one of several targets.
    pub(crate) fn of_target(&self, number: usize) -> Reporter {
        Reporter { number, ..self.clone() }
    }

    /// Number of the target that its events concern.
    pub(crate) fn number(&self) -> usize {
        self.number
    }

    pub(crate) fn report(&self, kind: impl Into<EventKind>) {
        let now = clock_gettime(ClockId::Monotonic);
        let event = Event::new(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64, None, kind.into());
        let target = (self.number > 0).then_some(self.number as u32 + 1);
        (self.observer)(Event { target, ..event });
    }

    pub(crate) fn warn(&self, text: String) {
        self.report(EventKind::Warning { text: self.with_target(text) });
    }

    /// Reports an event of the driver of phases; the phase's name gets the target's number.
    pub(crate) fn report_phase(&self, mut kind: EventKind) {
        if let EventKind::PhaseStarted { phase, .. } | EventKind::PhaseEnded { phase, .. } = &mut kind {
            *phase = self.with_target(std::mem::take(phase));
        }
        self.report(kind);
    }

    /// Adds the target's number to a text, unless it is the first target.
    fn with_target(&self, text: String) -> String {
        if self.number == 0 { text } else { format!("{text}, target {}", self.number + 1) }
    }

    /// Runs a part of a phase, or work before the first phase, and reports its beginning and its end.
    pub(crate) async fn phase<T, E>(&self, phase: &str, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let phase = self.with_target(phase.to_owned());
        let operation = self.operation.to_owned();
        self.report(EventKind::PhaseStarted { operation: operation.clone(), phase: phase.clone() });
        let begun = Instant::now();
        let result = work.await;
        if result.is_ok() {
            self.report(EventKind::PhaseEnded { operation, phase, duration_ns: begun.elapsed().as_nanos() as u64 });
        }
        result
    }
}
