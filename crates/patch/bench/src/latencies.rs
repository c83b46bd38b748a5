//! Latencies of the requests of a window of time, and their drawing.

use crate::operation::{ALONE, RESTART};
use std::collections::BTreeMap;
use stillpoint_measure::summary::Distribution;
use stillpoint_patch_tests::load::LoadResult;
use stillpoint_testing::figure::{Axis, Curve, Figure};

/// Factor between the upper ends of the histogram's classes.
const CLASS_FACTOR: f64 = 1.3;

/// Upper end of each class of latencies, in microseconds, and the number of its requests.
pub type Histogram = Vec<(f64, u64)>;

/// Returns the latencies of requests in progress at any time of a window, in nanoseconds of `CLOCK_MONOTONIC`.
pub fn within(observed: &LoadResult, (from, to): (u64, u64)) -> (Distribution, Histogram) {
    let mut latencies = Distribution::default();
    let mut classes = BTreeMap::<i32, u64>::new();
    for sample in observed.record.samples.iter().filter(|s| s.scheduled_ns <= to && s.ended_ns() >= from) {
        let ns = sample.ended_ns() - sample.scheduled_ns;
        latencies.add(ns);
        *classes.entry((ns.max(1) as f64 / 1e3).log(CLASS_FACTOR).ceil() as i32).or_default() += 1;
    }
    (latencies, classes.into_iter().map(|(class, count)| (CLASS_FACTOR.powi(class), count)).collect())
}

/// Draws the numbers of requests by latency, a curve for each mode.
pub fn drawn<'a>(modes: impl Iterator<Item = (&'a str, &'a Histogram)>) -> Figure {
    let curve = |(mode, histogram): (&str, &Histogram)| Curve {
        name: label(mode),
        points: histogram.iter().map(|&(us, count)| (us, count as f64)).collect(),
        joined: true,
    };
    Figure {
        x: Axis { label: "latency, us", logarithmic: true },
        y: Axis { label: "requests", logarithmic: true },
        curves: modes.map(curve).collect(),
    }
}

/// Returns the name of a mode in a drawing.
pub fn label(mode: &str) -> String {
    match mode {
        ALONE => "left alone".to_owned(),
        RESTART => "one restart".to_owned(),
        mode => format!("--quiescence {mode}"),
    }
}
