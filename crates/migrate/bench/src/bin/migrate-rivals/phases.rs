//! Effect of each phase of a migration on clients.

use crate::pgbench::{Answer, of_event_s};
use std::collections::BTreeMap;
use stillpoint_events::{Event, EventKind};

/// Time outside all phases.
const PHASE_OUTSIDE: &str = "before and after";

/// Beginnings in seconds, each with the phase from then on; of nested phases the inner one.
pub(crate) struct Phases(Vec<(f64, String)>);

impl Phases {
    pub(crate) fn of(events: &[Event]) -> Phases {
        let (mut marks, mut open) = (vec![(f64::NEG_INFINITY, PHASE_OUTSIDE.to_owned())], Vec::new());
        for event in events {
            match &event.kind {
                EventKind::PhaseStarted { phase, .. } => open.push(phase.clone()),
                EventKind::PhaseEnded { .. } => drop(open.pop()),
                _ => continue,
            }
            marks.push((of_event_s(event.t_ns), open.last().cloned().unwrap_or_else(|| PHASE_OUTSIDE.into())));
        }
        Phases(marks)
    }

    fn at(&self, at_s: f64) -> &str {
        &self.0[self.0.partition_point(|(from, _)| *from <= at_s).saturating_sub(1)].1
    }

    /// Seconds of each phase, and latencies of the answers in it, in the order of phases.
    pub(crate) fn table(&self, answers: &[Answer]) -> Vec<(String, f64, Vec<f64>)> {
        let mut latencies: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for answer in answers {
            latencies.entry(self.at(answer.at_s)).or_default().push(answer.latency_ms);
        }
        let mut table: Vec<(String, f64, Vec<f64>)> = Vec::new();
        for (number, (from, phase)) in self.0.iter().enumerate() {
            let took = self.0.get(number + 1).map_or(0.0, |(to, _)| if from.is_finite() { to - from } else { 0.0 });
            match table.iter_mut().find(|(known, ..)| known == phase) {
                Some((_, so_far, _)) => *so_far += took,
                None => table.push((phase.clone(), took, latencies.remove(&phase[..]).unwrap_or_default())),
            }
        }
        table
    }
}

/// The value below which this many of a hundred values are.
pub(crate) fn percentile(values: &[f64], hundredths: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() * hundredths / 100).or(sorted.last()).copied().unwrap_or(0.0)
}
