//! Report of a run: the clients' view before, during and after each operation.
//!
//! [`Report::of`] computes everything that the page shows, and serialises to the JSON that `measure report --json` prints; [`Report::html`]
//! draws it as one page that needs neither network nor scripts.

mod page;
mod plot;
mod series;
mod subject;

use serde::{Deserialize, Serialize};

use crate::blackout::{Blackout, Intervals};
use crate::error::{Error, Result};
use crate::record::{End, Header, Mark, MarkKind, Outcome, Record, Sample};
use crate::summary::{Counts, Distribution, Latency, Summary, Tally};
use crate::timeline::{Ending, Operation, Timeline};
use series::Series;
use subject::Subject;

/// Maximum length of a window before or after an operation.
pub const WINDOW_NS: u64 = 5_000_000_000;

/// Requests of a part of the run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Outcomes of the requests.
    pub counts: Counts,
    /// Latencies of the requests.
    pub latency: Latency,
    /// Longest interval in which a client waited and none got a right answer, in nanoseconds. One that overlaps an operation counts in
    /// full.
    pub blackout_ns: u64,
}

/// Phase of an operation, with its effect on clients.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseReport {
    /// Name of the phase.
    pub phase: String,
    /// Duration in nanoseconds.
    pub duration_ns: u64,
    /// Requests in progress at any time of it.
    pub during: Part,
}

/// Operation, with its effect on clients.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperationReport {
    /// Data from the engine's events.
    #[serde(flatten)]
    pub operation: Operation,
    /// Effect of each phase on clients.
    pub by_phase: Vec<PhaseReport>,
    /// Times for which threads were stopped.
    pub stop: Latency,
    /// Requests that ended before it, at most [`WINDOW_NS`] and not before the previous operation.
    pub before: Part,
    /// Requests in progress at any time from its start to its end.
    pub during: Part,
    /// Requests due after it, at most [`WINDOW_NS`] and not in progress in the next operation.
    pub after: Part,
}

/// Everything that the page shows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of this object.
    pub v: u32,
    /// Parameters of the run; one for each record.
    pub runs: Vec<Header>,
    /// End of each; `None` if its record is truncated.
    pub ends: Vec<Option<End>>,
    /// The whole run.
    pub summary: Summary,
    /// Number of connections that ended although no client ended them.
    pub dropped: u64,
    /// Requests in progress during any operation.
    pub during: Part,
    /// Requests that overlapped no operation.
    pub outside: Part,
    /// Times for which threads were stopped, over all operations.
    pub stop: Latency,
    /// Times of committed operations, from the start of the transition to the commit.
    pub migration: Latency,
    /// Operations in order.
    pub operations: Vec<OperationReport>,
    /// Warnings of the engines.
    pub warnings: Vec<String>,
    #[serde(skip)]
    series: Series,
    #[serde(skip)]
    marks: Vec<Mark>,
}

/// All records of a run as one.
#[derive(Default)]
struct Merged {
    kinds: Vec<String>,
    samples: Vec<Sample>,
    marks: Vec<Mark>,
    started_ns: u64,
    ended_ns: u64,
    longest_ns: u64,
    blackouts: Intervals,
}

impl Report {
    /// Combines records and events of one machine.
    ///
    /// # Errors
    /// There is no record, no request in any of them, or none of the operations is within them (they were made on another machine, or
    /// before a reboot).
    pub fn of(records: Vec<Record>, timeline: Timeline) -> Result<Report> {
        let runs: Vec<Header> = records.iter().map(|record| record.header.clone()).collect();
        let ends: Vec<Option<End>> = records.iter().map(|record| record.end).collect();
        let merged = merge(records)?;
        let all = timeline.operations.len();
        let within = |op: &Operation| op.ended_ns >= merged.started_ns && op.started_ns <= merged.ended_ns;
        let operations: Vec<Operation> = timeline.operations.iter().filter(|op| within(op)).cloned().collect();
        if all > 0 && operations.is_empty() {
            let text = format!("none of the {all} operations is within the time of the records");
            return Err(Error::Mismatch(text));
        }
        let spans: Vec<(u64, u64)> = operations.iter().map(|op| (op.started_ns, op.ended_ns)).collect();
        let (during, outside) = split(&merged, &spans);
        let series = Series::of(&merged.samples, merged.started_ns, merged.ended_ns, &timeline.versions());
        let summary = Summary::of_samples(&merged.kinds, merged.samples.iter(), merged.started_ns, merged.ended_ns);
        let stops = operations.iter().flat_map(|op| op.stops.iter().map(|stop| stop.stopped_ns));
        let dropped = merged.marks.iter().filter(|mark| mark.what == MarkKind::Dropped).count() as u64;
        Ok(Report {
            v: 1,
            dropped,
            during,
            outside,
            stop: stops.collect::<Distribution>().latency(),
            migration: operations.iter().filter_map(|op| op.migration_ns).collect::<Distribution>().latency(),
            operations: report_operations(&merged, operations, &spans),
            warnings: timeline.warnings.into_iter().map(|(_, text)| text).collect(),
            runs,
            ends,
            summary,
            series,
            marks: merged.marks,
        })
    }

    /// Returns the page.
    pub fn html(&self) -> String {
        page::render(self)
    }

    /// Returns true if every request was answered rightly and every connection stayed open.
    pub fn is_clean(&self) -> bool {
        let alive =
            self.runs.iter().zip(&self.ends).all(|(run, end)| {
                end.is_some_and(|end| end.idle_alive == run.idle && end.blocking_alive == run.blocking)
            });
        self.summary.counts.failed() == 0 && self.dropped == 0 && alive
    }

    /// Returns p99.9 during operations divided by p99.9 of all other requests, if there are both.
    pub fn p999_ratio(&self) -> Option<f64> {
        ratio(self.during.latency.p999_ns, self.outside.latency.p999_ns)
    }

    fn subject(&self) -> Subject {
        Subject::of(self)
    }

    /// Returns true if threads change over one by one: migrations of databases and switches of kernels have no threads.
    fn has_threads(&self) -> bool {
        self.subject() == Subject::Code
    }

    fn committed(&self) -> usize {
        self.operations.iter().filter(|op| op.operation.ending == Ending::Committed).count()
    }
}

pub(crate) fn ratio(a: u64, b: u64) -> Option<f64> {
    (a > 0 && b > 0).then(|| a as f64 / b as f64)
}

fn merge(records: Vec<Record>) -> Result<Merged> {
    let started_ns = records.iter().map(|record| record.header.started_ns).min();
    let started_ns = started_ns.ok_or_else(|| Error::Mismatch("there is no record to report on".into()))?;
    let ended_ns = records.iter().map(Record::ended_ns).max().unwrap_or(started_ns);
    let several = records.len() > 1;
    let mut merged = Merged { started_ns, ended_ns, ..Merged::default() };
    for (number, record) in records.into_iter().enumerate() {
        let first = merged.kinds.len();
        let name = |kind: &String| if several { format!("{}: {kind}", number + 1) } else { kind.clone() };
        merged.kinds.extend(record.header.kinds.iter().map(name));
        if merged.kinds.len() > usize::from(u8::MAX) {
            return Err(Error::Mismatch("the records contain more kinds of requests than one report can show".into()));
        }
        let kind = |sample: Sample| Sample { kind: sample.kind + first as u8, ..sample };
        merged.samples.extend(record.samples.into_iter().map(kind));
        merged.marks.extend(record.marks);
    }
    if merged.samples.is_empty() {
        return Err(Error::Mismatch("the records contain no requests".into()));
    }
    merged.samples.sort_by_key(Sample::ended_ns);
    merged.marks.sort_by_key(|mark| mark.t_ns);
    merged.longest_ns = merged.samples.iter().map(|sample| sample.latency_ns).max().unwrap_or(0);
    let span = |sample: &Sample| (sample.scheduled_ns, sample.ended_ns(), sample.outcome == Outcome::Ok);
    merged.blackouts = Intervals::of(merged.samples.iter().map(span).collect(), started_ns, ended_ns);
    Ok(merged)
}

impl Merged {
    /// Requests that ended in the window, with any due time.
    fn ended_in(&self, from_ns: u64, to_ns: u64) -> &[Sample] {
        let first = self.samples.partition_point(|sample| sample.ended_ns() < from_ns);
        let last = self.samples.partition_point(|sample| sample.ended_ns() <= to_ns);
        &self.samples[first..last.max(first)]
    }

    /// Requests in progress at any time of the window.
    fn under_way(&self, from_ns: u64, to_ns: u64) -> impl Iterator<Item = &Sample> {
        let candidates = self.ended_in(from_ns, to_ns.saturating_add(self.longest_ns));
        candidates.iter().filter(move |sample| sample.scheduled_ns <= to_ns)
    }

    fn during(&self, from_ns: u64, to_ns: u64) -> Part {
        Part::of(self.under_way(from_ns, to_ns), self.blackouts.longest_overlapping(from_ns, to_ns))
    }
}

impl Part {
    fn of<'a>(samples: impl Iterator<Item = &'a Sample>, blackout: Blackout) -> Part {
        let mut tally = Tally::default();
        samples.for_each(|sample| tally.add(sample));
        Part { counts: tally.counts, latency: tally.latency(), blackout_ns: blackout.duration_ns }
    }
}

/// Splits all requests into those that overlapped one of the spans, and the rest.
fn split(merged: &Merged, spans: &[(u64, u64)]) -> (Part, Part) {
    let meets =
        |sample: &&Sample| spans.iter().any(|&(from, to)| sample.scheduled_ns <= to && sample.ended_ns() >= from);
    let (mut inside, mut outside) = (Vec::new(), Vec::new());
    merged.samples.iter().for_each(|sample| if meets(&sample) { inside.push(sample) } else { outside.push(sample) });
    let touched = spans.iter().map(|&(from, to)| merged.blackouts.longest_overlapping(from, to));
    let touched = touched.max_by_key(|blackouts| blackouts.duration_ns).unwrap_or_default();
    (Part::of(inside.into_iter(), touched), Part::of(outside.into_iter(), merged.blackouts.longest_outside(spans)))
}

fn report_operations(merged: &Merged, operations: Vec<Operation>, spans: &[(u64, u64)]) -> Vec<OperationReport> {
    let report = |operation: Operation| {
        let (from, to) = (operation.started_ns, operation.ended_ns);
        // Operations on several processes may overlap: the neighbours are those that end before or begin after.
        let previous = spans.iter().map(|span| span.1).filter(|&end| end < from).max().unwrap_or(merged.started_ns);
        let next = spans.iter().map(|span| span.0).filter(|&start| start > to).min().unwrap_or(merged.ended_ns);
        let before_from = previous.max(from.saturating_sub(WINDOW_NS));
        let after_to = next.min(to.saturating_add(WINDOW_NS));
        let before = merged.ended_in(before_from, from.saturating_sub(1)).iter().filter(|s| s.scheduled_ns > previous);
        let after = merged.ended_in(to, after_to).iter().filter(|s| s.scheduled_ns > to && s.ended_ns() < next);
        let by_phase = operation.phases.iter().map(|phase| PhaseReport {
            phase: phase.phase.clone(),
            duration_ns: phase.ended_ns.saturating_sub(phase.started_ns),
            during: merged.during(phase.started_ns, phase.ended_ns),
        });
        OperationReport {
            by_phase: by_phase.collect(),
            stop: operation.stops.iter().map(|stop| stop.stopped_ns).collect::<Distribution>().latency(),
            before: Part::of(before, merged.blackouts.longest_within(before_from, from)),
            during: merged.during(from, to),
            after: Part::of(after, merged.blackouts.longest_within(to, after_to)),
            operation,
        }
    };
    operations.into_iter().map(report).collect()
}
