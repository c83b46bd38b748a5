//! Events that a migration reports while it runs.

use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::time::Instant;
use stillpoint_events::{Event, EventKind};

/// Receives events; several tasks call it.
pub type Observer = Arc<dyn Fn(Event) + Send + Sync>;

/// Sends events of one operation to an observer.
#[derive(Clone)]
pub(crate) struct Teller {
    observer: Observer,
    operation: &'static str,
    /// Number of the target that its events concern; 0 for the first.
    number: usize,
}

impl Teller {
    pub(crate) fn new(observer: Observer, operation: &'static str) -> Teller {
        Teller { observer, operation, number: 0 }
    }

    /// Makes a teller for events of one of several targets.
    pub(crate) fn of_target(&self, number: usize) -> Teller {
        Teller { number, ..self.clone() }
    }

    /// Number of the target that its events concern.
    pub(crate) fn number(&self) -> usize {
        self.number
    }

    pub(crate) fn tell(&self, kind: EventKind) {
        let now = clock_gettime(ClockId::Monotonic);
        let event = Event::new(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64, None, kind);
        let target = (self.number > 0).then_some(self.number as u32 + 1);
        (self.observer)(Event { target, ..event });
    }

    pub(crate) fn warn(&self, text: String) {
        self.tell(EventKind::Warning { text: self.named(text) });
    }

    /// Adds the target's number to a text, unless it is the first target.
    fn named(&self, text: String) -> String {
        if self.number == 0 { text } else { format!("{text}, target {}", self.number + 1) }
    }

    /// Runs one phase, and reports its beginning and its end.
    pub(crate) async fn phase<T, E>(&self, phase: &str, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let phase = self.named(phase.to_owned());
        let operation = self.operation.to_owned();
        self.tell(EventKind::PhaseStarted { operation: operation.clone(), phase: phase.clone() });
        let begun = Instant::now();
        let result = work.await;
        if result.is_ok() {
            self.tell(EventKind::PhaseEnded { operation, phase, duration_ns: begun.elapsed().as_nanos() as u64 });
        }
        result
    }
}
