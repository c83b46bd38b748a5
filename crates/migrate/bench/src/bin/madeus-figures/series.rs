//! Answers to browsers, over time.

use stillpoint_measure::record::{Outcome, Record, Sample};

/// Length of a stretch in the plots.
const BUCKET_NS: u64 = 1_000_000_000;

/// All answers to browsers.
pub(crate) struct Answers {
    samples: Vec<Sample>,
    pub(crate) dropped: u64,
}

/// Answers in one stretch of time.
pub(crate) struct Stretch {
    seconds: f64,
    /// Response times in ascending order, in milliseconds.
    response_ms: Vec<f64>,
    pub(crate) failed: usize,
}

/// A second of a plot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Point {
    /// Middle of the second, counted from the beginning of the plot.
    pub(crate) at_s: f64,
    pub(crate) response_ms: f64,
    pub(crate) rate: f64,
}

impl Answers {
    pub(crate) fn of(record: Record, dropped: u64) -> Answers {
        let mut samples = record.samples;
        samples.sort_by_key(Sample::ended_ns);
        Answers { samples, dropped }
    }

    /// Answers between two moments.
    pub(crate) fn between(&self, from_ns: u64, to_ns: u64) -> Stretch {
        let place = |at: u64| self.samples.partition_point(|sample| sample.ended_ns() < at);
        let answered = &self.samples[place(from_ns)..place(to_ns).max(place(from_ns))];
        let mut response_ms: Vec<f64> =
            answered.iter().filter(|sample| good(sample)).map(|sample| sample.latency_ns as f64 / 1e6).collect();
        response_ms.sort_by(f64::total_cmp);
        let failed = answered.len() - response_ms.len();
        Stretch { seconds: (to_ns.saturating_sub(from_ns)) as f64 / 1e9, response_ms, failed }
    }

    /// Points for each second.
    pub(crate) fn points(&self, from_ns: u64, to_ns: u64) -> Vec<Point> {
        let seconds = (to_ns - from_ns) / BUCKET_NS;
        let point = |second: u64| {
            let from = from_ns + second * BUCKET_NS;
            let stretch = self.between(from, from + BUCKET_NS);
            Point { at_s: second as f64 + 0.5, response_ms: stretch.mean_ms(), rate: stretch.rate() }
        };
        (0..seconds).map(point).collect()
    }
}

fn good(sample: &Sample) -> bool {
    sample.outcome == Outcome::Ok
}

impl Stretch {
    pub(crate) fn mean_ms(&self) -> f64 {
        self.response_ms.iter().sum::<f64>() / self.response_ms.len().max(1) as f64
    }

    pub(crate) fn percentile_ms(&self, hundredths: usize) -> f64 {
        let at = self.response_ms.len() * hundredths / 100;
        self.response_ms.get(at).or(self.response_ms.last()).copied().unwrap_or(0.0)
    }

    /// Answers a second.
    pub(crate) fn rate(&self) -> f64 {
        self.response_ms.len() as f64 / self.seconds.max(0.001)
    }

    /// Mean and 99th percentile, and answers a second, as cells of a table.
    pub(crate) fn cells(&self) -> [String; 2] {
        [format!("{:.1} ({:.0})", self.mean_ms(), self.percentile_ms(99)), format!("{:.0}", self.rate())]
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "seconds": self.seconds, "mean_ms": self.mean_ms(), "p99_ms": self.percentile_ms(99), "rate": self.rate(),
            "failed": self.failed,
        })
    }
}

/// Points as JSON values.
pub(crate) fn values(points: &[Point]) -> serde_json::Value {
    points.iter().map(|point| serde_json::json!([point.at_s, point.response_ms, point.rate])).collect()
}
