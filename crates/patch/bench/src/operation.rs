//! One call of `stillpoint patch apply` or `revert`: its time, the threads that it stopped and the duration of each
//! stop.

use stillpoint_events::{EventKind, patch};
use stillpoint_measure::clock::now_ns;
use stillpoint_patch_tests::cli::{Run, Stillpoint, UnreadRun};

/// Modes of quiescence of a comparison; all but the first need quiescence points.
pub const MODES: [&str; 3] = ["probe", "local", "global"];
/// Mode in which nothing happens.
pub const ALONE: &str = "none";
/// The other way to install new code: an orderly end, and a new start on the same data and port.
pub const RESTART: &str = "restart";

/// One thread, stopped once.
#[derive(Debug, Clone)]
pub struct Stop {
    /// Reason, see [`Why`].
    pub why: Why,
    /// Duration in nanoseconds.
    pub ns: u64,
}

/// Reason why a thread was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// Alone, to check if it may migrate.
    Probe,
    /// Together with all others, while entries are written (or, with `--quiescence stop`, for the whole transition).
    All,
    /// Stop of a thread that makes system calls for the tool: one thread, an idle one if there is one.
    Carrier,
}

/// A completed call whose output is not read yet: reading waits for the end of the measurement.
#[derive(Debug)]
pub struct PendingOperation {
    unread: UnreadRun,
    window_ns: (u64, u64),
}

impl PendingOperation {
    /// Makes the call, with `--json`.
    pub fn of(call: Stillpoint) -> PendingOperation {
        let from = now_ns();
        let unread = call.json().run_unread();
        PendingOperation { unread, window_ns: (from, now_ns()) }
    }

    /// Reads its results.
    pub fn operation(self) -> Operation {
        Operation::read(self)
    }
}

/// Effects of a call, from its events.
#[derive(Debug, Clone)]
pub struct Operation {
    /// Exit code and output.
    pub run: Run,
    /// Nanoseconds of `CLOCK_MONOTONIC` before the program was started and after it had ended.
    pub window_ns: (u64, u64),
    /// Each stop of a thread.
    pub stops: Vec<Stop>,
    /// Time from the start of the transition until every thread ran the new code.
    pub migrated_ns: Option<u64>,
    /// Number of threads that migrated.
    pub threads: u32,
    /// Phases by name, with the duration of each in nanoseconds.
    pub phases: Vec<(String, u64)>,
}

impl Operation {
    /// Makes the call, with `--json`.
    pub fn of(call: Stillpoint) -> Operation {
        PendingOperation::of(call).operation()
    }

    fn read(called: PendingOperation) -> Operation {
        let PendingOperation { unread, window_ns } = called;
        let run = unread.read();
        let mut operation =
            Operation { run, window_ns, stops: Vec::new(), migrated_ns: None, threads: 0, phases: Vec::new() };
        if matches!(operation.run.code, Some(0 | 4)) {
            operation.take_events();
        }
        operation
    }

    fn take_events(&mut self) {
        for event in self.run.events() {
            match event.kind {
                EventKind::Patch(patch::Event::ThreadStopped { stopped_ns: ns, reason, .. }) => {
                    let why = match reason.as_str() {
                        "carrier" => Why::Carrier,
                        reason if reason.starts_with("freeze") => Why::All,
                        _ => Why::Probe,
                    };
                    self.stops.push(Stop { why, ns });
                }
                EventKind::Patch(patch::Event::Committed { duration_ns, threads, .. }) => {
                    self.migrated_ns = Some(duration_ns);
                    self.threads = threads;
                }
                EventKind::PhaseEnded { phase, duration_ns, .. } => self.phases.push((phase, duration_ns)),
                _ => {}
            }
        }
    }

    /// Returns the duration of the phases in which threads migrate, or are stopped until all do; and of all others
    /// together.
    pub fn reached_and_rest_ns(&self) -> (u64, u64) {
        let (reached, rest): (Vec<_>, Vec<_>) =
            self.phases.iter().partition(|(phase, _)| ["migrate", "gather"].contains(&phase.as_str()));
        let sum = |phases: Vec<&(String, u64)>| phases.into_iter().map(|(_, ns)| ns).sum();
        (sum(reached), sum(rest))
    }

    /// Panics with all output unless it succeeded.
    #[track_caller]
    pub fn succeeded(self) -> Operation {
        assert_eq!(self.run.code, Some(0), "{}", self.run);
        self
    }

    /// Returns the durations of stops for this reason, in nanoseconds.
    pub fn stopped(&self, why: Why) -> impl Iterator<Item = u64> {
        self.stops.iter().filter(move |stop| stop.why == why).map(|stop| stop.ns)
    }

    /// Returns the time from the start of the program to its end.
    pub fn elapsed_ns(&self) -> u64 {
        self.window_ns.1 - self.window_ns.0
    }
}

/// Durations of stops, by reason, in microseconds.
#[derive(Debug, Clone, serde::Serialize)]
pub struct StopsUs {
    /// Stops for [`Why::Probe`].
    pub probe: Spread,
    /// Stops for [`Why::All`].
    pub all: Spread,
    /// Stops for [`Why::Carrier`].
    pub carrier: Spread,
}

impl StopsUs {
    /// Collects the stops of several calls.
    pub fn of(operations: &[Operation]) -> StopsUs {
        let of = |why| Spread::us(operations.iter().flat_map(move |operation| operation.stopped(why)));
        StopsUs { probe: of(Why::Probe), all: of(Why::All), carrier: of(Why::Carrier) }
    }
}

impl std::fmt::Display for StopsUs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let one = |spread: &Spread| format!("{:.0} us (p99 {:.0}, max {:.0})", spread.median, spread.p99, spread.max);
        write!(
            f,
            "a thread was stopped to be probed for {}, with all others while entries were written for {}, as the carrier of system calls for {}",
            one(&self.probe),
            one(&self.all),
            one(&self.carrier)
        )
    }
}

/// Median, p99 and maximum of values in any order.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Spread {
    /// Number of values.
    pub count: usize,
    /// Median: half of them are no larger.
    pub median: f64,
    /// Percentile 99: 99 % are no larger.
    pub p99: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Computes the spread of these values; all zero if there are none.
    pub fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let at = |quantile: f64| {
            let rank = (quantile * values.len() as f64).ceil() as usize;
            values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        Spread { count: values.len(), median: at(0.5), p99: at(0.99), min: at(0.0), max: at(1.0) }
    }

    /// Computes the spread of nanoseconds, in microseconds.
    pub fn us(values_ns: impl IntoIterator<Item = u64>) -> Spread {
        Spread::of(values_ns.into_iter().map(|ns| ns as f64 / 1e3).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_sorts_and_survives_nothing() {
        let spread = Spread::us([3_000, 1_000, 2_000]);
        assert_eq!((spread.count, spread.min, spread.median, spread.max), (3, 1.0, 2.0, 3.0));
        assert_eq!(Spread::of(vec![]).max, 0.0);
    }
}
