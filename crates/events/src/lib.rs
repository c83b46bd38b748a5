//! Records of phases and outcomes: actions of an engine, their times and the processes concerned. Data only.
//!
//! Every engine reports through [`Event`]; `stillpoint --json` prints one per line, and `stillpoint measure` merges them with the clients'
//! latencies. All times are `CLOCK_MONOTONIC` nanoseconds of the machine that ran the engine, so records of one machine share one clock
//! without any translation.
//!
//! The caller takes `t_ns` from that clock. Guarantees: what this version writes, it reads; adding a field or an event kind is compatible,
//! changing the meaning of one raises [`VERSION`]. The crate decides nothing and performs no I/O.
#![forbid(unsafe_code)]

pub mod kernel;
pub mod migrate;
pub mod patch;

use serde::{Deserialize, Serialize};

/// Version of the event records, printed as `"v"` in every JSON line.
pub const VERSION: u32 = 2;

/// One event, timed by the engine's clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Version of the record, [`VERSION`].
    pub v: u32,
    /// `CLOCK_MONOTONIC` in nanoseconds at the end of the reported action.
    pub t_ns: u64,
    /// Number of the process concerned, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Number of the target concerned, for the second and later targets of a migration. The event's kind may name a target as well.
    #[serde(default, rename = "target_number", skip_serializing_if = "Option::is_none")]
    pub target: Option<u32>,
    /// Database concerned, if several move together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub database: Option<String>,
    /// Kind of the event, with its data.
    #[serde(flatten)]
    pub kind: EventKind,
}

/// Kind of an [`Event`], with its data: an event of any operation, or of one pillar. The tag is `"event"` in JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum EventKind {
    /// A phase of an operation begins (`check`, `inject`, `arm`, `migrate`, `commit`, ...).
    PhaseStarted {
        /// Operation that the phase belongs to: `apply`, `revert`, `abort`, `check`.
        operation: String,
        /// Name of the phase.
        phase: String,
    },
    /// The phase ended.
    PhaseEnded {
        /// Operation that the phase belongs to.
        operation: String,
        /// Name of the phase.
        phase: String,
        /// Duration, in nanoseconds.
        duration_ns: u64,
    },
    /// The operation was rolled back.
    FellBack {
        /// Number of the abandoned transition, if the operation patches a process.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        transition: Option<u32>,
        /// Reason.
        reason: String,
    },
    /// The operation had nothing to do: the requested state was there already.
    AlreadyThere {
        /// State that was there already.
        what: String,
    },
    /// Warning for the operator.
    Warning {
        /// The text.
        text: String,
    },
    /// Event of `stillpoint patch`.
    #[serde(untagged)]
    Patch(patch::Event),
    /// Event of `stillpoint migrate`.
    #[serde(untagged)]
    Migrate(migrate::Event),
    /// Event of `stillpoint kernel`.
    #[serde(untagged)]
    Kernel(kernel::Event),
}

impl From<patch::Event> for EventKind {
    fn from(event: patch::Event) -> Self {
        EventKind::Patch(event)
    }
}

impl From<migrate::Event> for EventKind {
    fn from(event: migrate::Event) -> Self {
        EventKind::Migrate(event)
    }
}

impl From<kernel::Event> for EventKind {
    fn from(event: kernel::Event) -> Self {
        EventKind::Kernel(event)
    }
}

impl Event {
    /// Makes an event of this version.
    pub fn new(t_ns: u64, pid: Option<i32>, kind: EventKind) -> Self {
        Event { v: VERSION, t_ns, pid, target: None, database: None, kind }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(kind: EventKind) -> String {
        serde_json::to_string(&Event::new(5, Some(7), kind)).unwrap()
    }

    #[test]
    fn events_of_every_pillar_are_flat_lines_that_are_read_back() {
        let events = [
            EventKind::PhaseStarted { operation: "apply".into(), phase: "check".into() },
            patch::Event::ThreadMigrated { tid: 8, transition: 3 }.into(),
            migrate::Event::Compared { tables: 4, rows: 1 << 40, not_compared: 3 }.into(),
            kernel::Event::KernelChanged { release: "6.12".into(), duration_ns: 9 }.into(),
        ];
        for kind in events {
            let event = Event::new(5, Some(7), kind);
            let text = serde_json::to_string(&event).unwrap();
            assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), event, "{text}");
        }
        let compared = line(migrate::Event::Compared { tables: 4, rows: 2, not_compared: 0 }.into());
        assert_eq!(compared, r#"{"v":2,"t_ns":5,"pid":7,"event":"compared","tables":4,"rows":2}"#);
    }

    #[test]
    fn a_rollback_has_a_transition_in_patching_only() {
        let back = |transition| EventKind::FellBack { transition, reason: "time".into() };
        assert_eq!(
            line(back(Some(4))),
            r#"{"v":2,"t_ns":5,"pid":7,"event":"fell-back","transition":4,"reason":"time"}"#
        );
        assert_eq!(line(back(None)), r#"{"v":2,"t_ns":5,"pid":7,"event":"fell-back","reason":"time"}"#);
    }

    #[test]
    fn unknown_events_and_missing_fields_are_errors() {
        for text in [r#"{"v":2,"t_ns":5,"event":"other"}"#, r#"{"v":2,"t_ns":5,"event":"compared","tables":4}"#] {
            assert!(serde_json::from_str::<Event>(text).is_err(), "{text}");
        }
    }
}
