//! Percentiles, counts and blackout of a set of requests.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::blackout::{Blackout, Intervals, Tracker};
use crate::record::{Outcome, Record, Sample};

/// Latencies in nanoseconds. Percentiles are those of an HDR histogram with three digits: at most 0.1 % too high.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Number of requests. Every request counts; one that timed out with the time until then.
    pub count: u64,
    /// Mean latency in nanoseconds.
    pub mean_ns: u64,
    /// Half of the requests took no longer, in nanoseconds.
    pub p50_ns: u64,
    /// 90 % took no longer, in nanoseconds.
    pub p90_ns: u64,
    /// 99 % took no longer, in nanoseconds.
    pub p99_ns: u64,
    /// 99.9 % took no longer, in nanoseconds.
    pub p999_ns: u64,
    /// Exact maximum in nanoseconds.
    pub max_ns: u64,
}

/// Histogram of durations in nanoseconds that also keeps the exact maximum.
#[derive(Debug, Clone)]
pub struct Distribution {
    histogram: Histogram<u64>,
    max_ns: u64,
}

impl Default for Distribution {
    fn default() -> Self {
        // Three digits from 1 ns to one hour; the bounds are valid constants.
        let histogram = Histogram::new_with_bounds(1, 3_600_000_000_000, 3);
        Distribution { histogram: histogram.expect("constant bounds"), max_ns: 0 }
    }
}

impl Distribution {
    /// Adds a duration; one longer than an hour counts as one hour in the percentiles.
    pub fn add(&mut self, ns: u64) {
        self.histogram.saturating_record(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Number of durations.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Returns the value that `quantile` (0 to 1) of the durations do not exceed.
    pub fn quantile(&self, quantile: f64) -> u64 {
        if self.histogram.is_empty() { 0 } else { self.histogram.value_at_quantile(quantile).min(self.max_ns) }
    }

    /// Returns the usual percentiles.
    pub fn latency(&self) -> Latency {
        Latency {
            count: self.count(),
            mean_ns: if self.count() == 0 { 0 } else { self.histogram.mean() as u64 },
            p50_ns: self.quantile(0.5),
            p90_ns: self.quantile(0.9),
            p99_ns: self.quantile(0.99),
            p999_ns: self.quantile(0.999),
            max_ns: self.max_ns,
        }
    }
}

impl FromIterator<u64> for Distribution {
    fn from_iter<T: IntoIterator<Item = u64>>(durations: T) -> Self {
        let mut all = Distribution::default();
        durations.into_iter().for_each(|ns| all.add(ns));
        all
    }
}

/// Numbers of requests by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Number of all requests.
    pub requests: u64,
    /// Number of requests that were answered rightly.
    pub ok: u64,
    /// Number of requests that were answered with an error.
    pub errors: u64,
    /// Number of requests that were answered wrongly.
    pub wrong: u64,
    /// Number of requests that were not answered in time.
    pub timeouts: u64,
    /// Number of requests in progress on a connection that ended.
    pub lost: u64,
}

impl Counts {
    /// Adds one request.
    pub fn add(&mut self, outcome: Outcome) {
        self.requests += 1;
        *match outcome {
            Outcome::Ok => &mut self.ok,
            Outcome::ErrorReply => &mut self.errors,
            Outcome::WrongAnswer => &mut self.wrong,
            Outcome::Timeout => &mut self.timeouts,
            Outcome::Lost => &mut self.lost,
        } += 1;
    }

    /// Number of requests without a right answer.
    pub fn failed(&self) -> u64 {
        self.requests - self.ok
    }
}

/// Requests of one kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KindSummary {
    /// Name of the kind.
    pub kind: String,
    /// Outcomes.
    pub counts: Counts,
    /// Latencies.
    pub latency: Latency,
}

/// Figures of a run or of a window of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Nanoseconds from the start to the end.
    pub duration_ns: u64,
    /// Outcomes of the requests.
    pub counts: Counts,
    /// Right answers per second.
    pub throughput: f64,
    /// Latencies of the requests, from their due times.
    pub latency: Latency,
    /// Lateness of the client itself: its own part in the latency.
    pub lateness: Latency,
    /// Longest interval in which a client waited and none got a right answer.
    pub blackout: Blackout,
    /// Figures by kind of request.
    pub kinds: Vec<KindSummary>,
}

/// Outcomes and latencies of a set of requests.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) counts: Counts,
    latency: Distribution,
}

impl Tally {
    pub(crate) fn add(&mut self, sample: &Sample) {
        self.counts.add(sample.outcome);
        self.latency.add(sample.latency_ns);
    }

    pub(crate) fn latency(&self) -> Latency {
        self.latency.latency()
    }
}

/// Builds a [`Summary`] from requests in the order of their ends.
#[derive(Debug, Default)]
pub struct SummaryBuilder {
    began_ns: u64,
    all: Tally,
    lateness: Distribution,
    tracker: Tracker,
    kinds: Vec<(String, Tally)>,
}

impl SummaryBuilder {
    /// Makes a tally for requests of these kinds, from `began_ns` on.
    pub fn new(kinds: &[String], began_ns: u64) -> Self {
        let kinds = kinds.iter().map(|kind| (kind.clone(), Tally::default())).collect();
        SummaryBuilder { began_ns, kinds, ..SummaryBuilder::default() }
    }

    /// Notes a request that is due and not answered yet.
    pub fn waiting_since(&mut self, due_ns: u64) {
        self.tracker.waiting_since(due_ns);
    }

    /// Adds a request that ended; `others_wait` is true if other due requests are still unanswered.
    pub fn add(&mut self, sample: &Sample, others_wait: bool) {
        self.all.add(sample);
        self.lateness.add(u64::from(sample.late_us) * 1000);
        if sample.outcome == Outcome::Ok {
            self.tracker.answered(sample.ended_ns(), others_wait);
        }
        if let Some((_, tally)) = self.kinds.get_mut(usize::from(sample.kind)) {
            tally.add(sample);
        }
    }

    /// Returns the summary.
    pub fn finish(mut self, ended_ns: u64) -> Summary {
        self.tracker.ended(ended_ns);
        self.summary(ended_ns, self.tracker.longest())
    }

    fn summary(&self, ended_ns: u64, blackout: Blackout) -> Summary {
        let duration_ns = ended_ns.saturating_sub(self.began_ns);
        let seconds = (duration_ns as f64 / 1e9).max(1e-9);
        let kinds = self.kinds.iter().filter(|(_, tally)| tally.counts.requests > 0);
        let kind = |(kind, tally): &(String, Tally)| KindSummary {
            kind: kind.clone(),
            counts: tally.counts,
            latency: tally.latency(),
        };
        Summary {
            duration_ns,
            counts: self.all.counts,
            throughput: self.all.counts.ok as f64 / seconds,
            latency: self.all.latency(),
            lateness: self.lateness.latency(),
            blackout,
            kinds: kinds.map(kind).collect(),
        }
    }
}

impl Summary {
    /// Summary of a whole record.
    pub fn of_record(record: &Record) -> Summary {
        Summary::of_window(record, record.header.started_ns, record.ended_ns())
    }

    /// Summary of the requests of a record that were in progress at any time between `from_ns` and `to_ns`.
    pub fn of_window(record: &Record, from_ns: u64, to_ns: u64) -> Summary {
        let inside = record.samples.iter().filter(|s| s.scheduled_ns <= to_ns && s.ended_ns() >= from_ns);
        Summary::of_samples(&record.header.kinds, inside, from_ns, to_ns)
    }

    /// Summary of any requests; throughput counts the right answers that came between `from_ns` and `to_ns`.
    pub fn of_samples<'a>(
        kinds: &[String],
        samples: impl Iterator<Item = &'a Sample>,
        from_ns: u64,
        to_ns: u64,
    ) -> Summary {
        let mut builder = SummaryBuilder::new(kinds, from_ns);
        let mut spans = Vec::new();
        let mut answered = 0u64;
        for sample in samples {
            builder.add(sample, true);
            spans.push((sample.scheduled_ns, sample.ended_ns(), sample.outcome == Outcome::Ok));
            answered += u64::from(sample.outcome == Outcome::Ok && (from_ns..=to_ns).contains(&sample.ended_ns()));
        }
        let mut summary = builder.summary(to_ns, Intervals::of(spans, from_ns, to_ns).longest());
        summary.throughput = answered as f64 / (summary.duration_ns as f64 / 1e9).max(1e-9);
        summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn exact(sorted: &[u64], quantile: f64) -> u64 {
        let rank = (quantile * sorted.len() as f64).ceil() as usize;
        sorted[rank.clamp(1, sorted.len()) - 1]
    }

    proptest! {
        #[test]
        fn percentiles_agree_with_a_sort(mut values in proptest::collection::vec(1u64..10_000_000_000, 1..2000)) {
            let latency = values.iter().copied().collect::<Distribution>().latency();
            values.sort_unstable();
            let pairs = [(0.5, latency.p50_ns), (0.9, latency.p90_ns), (0.99, latency.p99_ns), (0.999, latency.p999_ns)];
            for (quantile, found) in pairs {
                let right = exact(&values, quantile);
                prop_assert!(found >= right && found <= right + right / 1000 + 1, "{quantile}: {found} against {right}");
            }
            prop_assert_eq!(latency.max_ns, *values.last().unwrap());
            prop_assert_eq!(latency.count, values.len() as u64);
        }
    }

    #[test]
    fn nothing_measured_is_all_zero() {
        assert_eq!(Distribution::default().latency(), Latency::default());
    }

    #[test]
    fn failures_are_told_apart() {
        let mut counts = Counts::default();
        Outcome::ALL.iter().for_each(|&outcome| counts.add(outcome));
        assert_eq!(counts, Counts { requests: 5, ok: 1, errors: 1, wrong: 1, timeouts: 1, lost: 1 });
        assert_eq!(counts.failed(), 4);
    }
}
