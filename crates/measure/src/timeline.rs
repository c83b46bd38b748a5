//! Operations of the engines, assembled from their events.
//!
//! An operation begins with its first phase and ends with its last event: committed, fallen back, already there, or the end of its last
//! phase. Operations on different processes may run at the same time; those on one process follow each other.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use stillpoint_events::{Event, EventKind, VERSION, kernel, migrate, patch};
use stillpoint_host::file;

use crate::error::{Error, Result};

/// Size limit of a file of events, in bytes.
const EVENTS_MAX: u64 = 4 << 30;

/// End of an operation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "result")]
pub enum Ending {
    /// Every thread runs the new side.
    Committed,
    /// Every thread runs the old side again.
    FellBack {
        /// Reason.
        reason: String,
    },
    /// There was nothing to do.
    AlreadyThere,
    /// The events end before the operation does.
    #[default]
    Open,
}

/// Name of the active version while the server that a database was moved to serves it.
pub const TARGET: &str = "target";

/// Stop of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stop {
    /// Number of the thread.
    pub tid: i32,
    /// Reason.
    pub reason: String,
    /// Time at which it was continued (`CLOCK_MONOTONIC`), in nanoseconds.
    pub t_ns: u64,
    /// Length of the stop in nanoseconds.
    pub stopped_ns: u64,
}

/// Phase of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// Name of the phase.
    pub phase: String,
    /// Start (`CLOCK_MONOTONIC`), in nanoseconds.
    pub started_ns: u64,
    /// End in nanoseconds; if it has none, the last event of the operation.
    pub ended_ns: u64,
}

/// Operation of an engine, such as an apply or a revert.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// `apply`, `revert`, `abort`, `check`, ...
    pub operation: String,
    /// Number of the process that it worked on.
    pub pid: Option<i32>,
    /// Patches that became active or inactive.
    pub patches: Vec<String>,
    /// Start (`CLOCK_MONOTONIC`), in nanoseconds.
    pub started_ns: u64,
    /// End (`CLOCK_MONOTONIC`), in nanoseconds.
    pub ended_ns: u64,
    /// Outcome.
    pub ending: Ending,
    /// Patches active afterwards, oldest first.
    pub active: Vec<String>,
    /// Time of that change in nanoseconds.
    pub committed_ns: Option<u64>,
    /// Nanoseconds from the start of the transition to the commit.
    pub migration_ns: Option<u64>,
    /// Number of threads that migrated.
    pub threads: u32,
    /// Phases in the order of their starts.
    pub phases: Vec<Phase>,
    /// Threads that were stopped.
    pub stops: Vec<Stop>,
    /// Functions that prevented the migration of a thread, with the number of times.
    pub busy: BTreeMap<String, u32>,
}

impl Operation {
    /// Label of a mark in a plot.
    pub fn label(&self) -> String {
        let what = if self.patches.is_empty() { String::new() } else { format!(" {}", self.patches.join(", ")) };
        match self.ending {
            Ending::FellBack { .. } => format!("{}{what} (fell back)", self.operation),
            _ => format!("{}{what}", self.operation),
        }
    }
}

/// Operations of a run and the versions of the code between them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Operations in the order of their starts.
    pub operations: Vec<Operation>,
    /// Warnings of the engines: time and text.
    pub warnings: Vec<(u64, String)>,
    /// Number of lines of the event files that are not events.
    pub other_lines: u64,
}

impl Timeline {
    /// Reads the output of `stillpoint --json` from files; lines that are not events are counted and left out.
    ///
    /// # Errors
    /// A file cannot be read, or contains events of another version.
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Timeline> {
        let mut events = Vec::new();
        let mut other_lines = 0;
        for path in paths {
            let path = path.as_ref();
            // Read as bytes: a file that a crash truncated in the middle of a character is still useful.
            let bytes = file::read_named(path, EVENTS_MAX).map_err(Error::file("read", path))?;
            for line in bytes.split(|&byte| byte == b'\n').filter(|line| !line.trim_ascii().is_empty()) {
                match serde_json::from_slice::<Event>(line) {
                    Ok(event) if event.v > VERSION => {
                        let text = format!("{} contains events of version {}", path.display(), event.v);
                        return Err(Error::Mismatch(format!("{text}; this program reads version {VERSION}")));
                    }
                    Ok(event) => events.push(event),
                    Err(_) => other_lines += 1,
                }
            }
        }
        Ok(Timeline { other_lines, ..Timeline::of(events) })
    }

    /// Makes the timeline from events in any order.
    pub fn of(mut events: Vec<Event>) -> Timeline {
        events.sort_by_key(|event| event.t_ns);
        let mut builder = Builder::default();
        events.iter().for_each(|event| builder.event(event));
        builder.finish()
    }

    /// Returns the patches active at the start, and every change of them.
    pub fn versions(&self) -> Vec<(u64, Vec<String>)> {
        let mut changes: Vec<_> = self.operations.iter().filter_map(|op| Some((op.committed_ns?, op))).collect();
        changes.sort_by_key(|&(t, _)| t);
        let initial = changes.first().map_or(Vec::new(), |(_, op)| before(op));
        let mut versions = vec![(0, initial)];
        versions.extend(changes.into_iter().map(|(t, op)| (t, op.active.clone())));
        versions
    }
}

/// Patches that must have been active before an operation; for a migration the server.
fn before(op: &Operation) -> Vec<String> {
    match op.operation.as_str() {
        "revert" => op.active.iter().chain(&op.patches).cloned().collect(),
        "migrate" => Vec::new(),
        "fallback" => vec![TARGET.to_owned()],
        _ => op.active.iter().filter(|name| !op.patches.contains(name)).cloned().collect(),
    }
}

/// Placeholder for the end of a phase whose end event has not come yet.
const UNENDED: u64 = u64::MAX;

#[derive(Default)]
struct Builder {
    open: BTreeMap<Option<i32>, Operation>,
    active: BTreeMap<Option<i32>, Vec<String>>,
    done: Vec<Operation>,
    warnings: Vec<(u64, String)>,
}

impl Builder {
    fn event(&mut self, event: &Event) {
        let t_ns = event.t_ns;
        if let EventKind::Warning { text } = &event.kind {
            self.warnings.push((t_ns, text.clone()));
            return;
        }
        if let EventKind::PhaseStarted { operation, phase } = &event.kind {
            self.phase_started(event, operation, phase);
            return;
        }
        let Some(op) = self.open.get_mut(&event.pid) else { return };
        op.ended_ns = t_ns;
        match &event.kind {
            EventKind::Patch(patch::Event::ThreadStopped { tid, reason, stopped_ns }) => {
                op.stops.push(Stop { tid: *tid, reason: reason.clone(), t_ns, stopped_ns: *stopped_ns });
            }
            EventKind::Patch(patch::Event::ThreadMigrated { .. }) => op.threads += 1,
            EventKind::Patch(patch::Event::ThreadBusy { function, .. }) => {
                *op.busy.entry(function.clone()).or_default() += 1
            }
            EventKind::Patch(patch::Event::Committed { active, duration_ns, threads, .. }) => {
                let was = self.active.insert(event.pid, active.clone());
                op.patches = changed(&op.operation, was.as_deref(), active);
                op.active.clone_from(active);
                op.ending = Ending::Committed;
                op.committed_ns = Some(t_ns);
                op.migration_ns = Some(*duration_ns);
                op.threads = *threads;
            }
            EventKind::FellBack { reason, .. } => op.ending = Ending::FellBack { reason: reason.clone() },
            EventKind::AlreadyThere { .. } => op.ending = Ending::AlreadyThere,
            EventKind::Kernel(kernel::Event::KernelChanged { release, duration_ns }) => {
                op.active = vec![release.clone()];
                op.patches.clone_from(&op.active);
                op.ending = Ending::Committed;
                op.committed_ns = Some(t_ns);
                op.migration_ns = Some(*duration_ns);
            }
            EventKind::PhaseEnded { phase, .. } => {
                if let Some(phase) = op.phases.iter_mut().find(|other| other.phase == *phase) {
                    phase.ended_ns = t_ns;
                }
            }
            EventKind::Migrate(migrate::Event::SwitchedOver { .. }) => {
                op.active = if op.operation == "fallback" { Vec::new() } else { vec![TARGET.to_owned()] };
                op.ending = Ending::Committed;
                op.committed_ns = Some(t_ns);
            }
            EventKind::PhaseStarted { .. }
            | EventKind::Warning { .. }
            | EventKind::Patch(patch::Event::SuspendedFramesSearched { .. } | patch::Event::OthersUnpatched { .. })
            | EventKind::Migrate(
                migrate::Event::Copying { .. }
                | migrate::Event::Throttled { .. }
                | migrate::Event::Yielding { .. }
                | migrate::Event::Following { .. }
                | migrate::Event::Compared { .. }
                | migrate::Event::Redefining { .. }
                | migrate::Event::Redefined { .. }
                | migrate::Event::SettingsWritten { .. }
                | migrate::Event::SlotMade { .. }
                | migrate::Event::TargetDropped { .. },
            ) => {}
        }
    }

    fn phase_started(&mut self, event: &Event, operation: &str, phase: &str) {
        let goes_on = self.open.get(&event.pid).is_some_and(|open| {
            // A repeated phase belongs to the next operation of the same name.
            open.operation == operation && !open.phases.iter().any(|seen| seen.phase == phase)
        });
        if !goes_on {
            self.close(event.pid);
            let active = self.active.get(&event.pid).cloned().unwrap_or_default();
            let operation = Operation {
                operation: operation.to_owned(),
                pid: event.pid,
                started_ns: event.t_ns,
                ended_ns: event.t_ns,
                active,
                ..Operation::default()
            };
            self.open.insert(event.pid, operation);
        }
        if let Some(open) = self.open.get_mut(&event.pid) {
            open.phases.push(Phase { phase: phase.to_owned(), started_ns: event.t_ns, ended_ns: UNENDED });
            open.ended_ns = event.t_ns;
        }
    }

    fn close(&mut self, pid: Option<i32>) {
        let Some(mut operation) = self.open.remove(&pid) else { return };
        for phase in operation.phases.iter_mut().filter(|phase| phase.ended_ns == UNENDED) {
            phase.ended_ns = operation.ended_ns;
        }
        self.done.push(operation);
    }

    fn finish(mut self) -> Timeline {
        let pids: Vec<_> = self.open.keys().copied().collect();
        pids.into_iter().for_each(|pid| self.close(pid));
        self.done.sort_by_key(|op| op.started_ns);
        Timeline { operations: self.done, warnings: self.warnings, other_lines: 0 }
    }
}

/// Returns the patches by which two versions differ. If the version before is unknown, an apply added the last patch.
fn changed(operation: &str, was: Option<&[String]>, active: &[String]) -> Vec<String> {
    match was {
        Some(was) => {
            let gone = was.iter().filter(|name| !active.contains(name));
            let new: Vec<_> = active.iter().filter(|name| !was.contains(name)).cloned().collect();
            if new.is_empty() { gone.cloned().collect() } else { new }
        }
        None if operation == "revert" => Vec::new(),
        None => active.last().cloned().into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(t_ns: u64, kind: EventKind) -> Event {
        Event::new(t_ns, Some(7), kind)
    }

    fn started(t_ns: u64, operation: &str, phase: &str) -> Event {
        event(t_ns, EventKind::PhaseStarted { operation: operation.into(), phase: phase.into() })
    }

    fn committed(t_ns: u64, active: &[&str]) -> Event {
        let active = active.iter().map(|&name| name.to_owned()).collect();
        event(t_ns, EventKind::Patch(patch::Event::Committed { transition: 1, active, duration_ns: 5, threads: 4 }))
    }

    fn run() -> Vec<Event> {
        vec![
            started(10, "apply", "check"),
            event(12, EventKind::PhaseEnded { operation: "apply".into(), phase: "check".into(), duration_ns: 2 }),
            started(12, "apply", "migrate"),
            event(
                13,
                EventKind::Patch(patch::Event::ThreadStopped { tid: 8, reason: "probe".into(), stopped_ns: 900 }),
            ),
            event(14, EventKind::Patch(patch::Event::ThreadBusy { tid: 9, function: "f".into() })),
            committed(15, &["a"]),
            started(16, "apply", "release"),
            started(20, "apply", "check"),
            committed(25, &["a", "b"]),
            started(30, "revert", "check"),
            committed(35, &["a"]),
            started(40, "apply", "check"),
            event(45, EventKind::FellBack { transition: Some(4), reason: "time".into() }),
        ]
    }

    #[test]
    fn a_database_that_moved_is_at_the_target_until_it_comes_back() {
        let mut events = Vec::new();
        for (at, operation) in [(10, "migrate"), (20, "fallback")] {
            let (operation, phase) = (operation.to_owned(), "switch-over".to_owned());
            events.push(event(at, EventKind::PhaseStarted { operation, phase }));
            events.push(event(
                at + 1,
                EventKind::Migrate(migrate::Event::SwitchedOver { paused_us: 5, drained_us: 2, sessions: 1 }),
            ));
        }
        let versions = Timeline::of(events).versions();
        assert_eq!(versions, [(0, vec![]), (11, vec![TARGET.to_owned()]), (21, vec![])]);
    }

    #[test]
    fn events_become_operations() {
        let timeline = Timeline::of(run());
        let labels: Vec<_> = timeline.operations.iter().map(Operation::label).collect();
        assert_eq!(labels, ["apply a", "apply b", "revert b", "apply (fell back)"]);
        let first = &timeline.operations[0];
        assert_eq!((first.started_ns, first.ended_ns, first.threads), (10, 16, 4));
        assert_eq!(first.stops.len(), 1);
        assert_eq!(first.busy["f"], 1);
        let phases: Vec<_> = first.phases.iter().map(|p| (p.phase.as_str(), p.started_ns, p.ended_ns)).collect();
        assert_eq!(phases, [("check", 10, 12), ("migrate", 12, 16), ("release", 16, 16)]);
        assert_eq!(timeline.operations[3].active, ["a"]);
        let counts: Vec<_> = timeline.versions().into_iter().map(|(t, names)| (t, names.len())).collect();
        assert_eq!(counts, [(0, 0), (15, 1), (25, 2), (35, 1)]);
    }

    #[test]
    fn the_order_of_the_lines_does_not_matter() {
        let mut events = run();
        events.rotate_left(5);
        assert_eq!(Timeline::of(events), Timeline::of(run()));
    }

    #[test]
    fn what_was_active_before_the_first_event_is_inferred() {
        let timeline = Timeline::of(vec![started(1, "apply", "check"), committed(2, &["x", "y"])]);
        assert_eq!(timeline.operations[0].patches, ["y"]);
        assert_eq!(timeline.versions()[0].1, ["x"]);
    }

    #[test]
    fn files_may_hold_other_lines_but_no_later_version() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let mut text: String = run().iter().map(|event| serde_json::to_string(event).unwrap() + "\n").collect();
        text += "{\"v\":1,\"event\":\"applied\",\"t_ns\":3}\nnot json\n\n";
        std::fs::write(&path, &text).unwrap();
        let timeline = Timeline::open(&[&path]).unwrap();
        assert_eq!((timeline.operations.len(), timeline.other_lines), (4, 2));
        std::fs::write(&path, text.replace(&format!("\"v\":{VERSION}"), &format!("\"v\":{}", VERSION + 1))).unwrap();
        assert!(matches!(Timeline::open(&[&path]), Err(Error::Mismatch(_))));
        assert!(matches!(Timeline::open(&[dir.path().join("gone")]), Err(Error::File { .. })));
    }
}
