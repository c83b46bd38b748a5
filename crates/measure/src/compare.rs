//! Comparison of two records by the ratios of their figures.

use serde::{Deserialize, Serialize};

use crate::report::ratio;
use crate::summary::Summary;

/// Figure of both records and their ratio.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Name of the figure: `p50`, `p99`, `p99.9`, `max`, `blackout`, `throughput`.
    pub figure: String,
    /// Value of the first record: nanoseconds, or answers per second.
    pub a: f64,
    /// Value of the second record, in the same unit.
    pub b: f64,
    /// `b / a`; `None` if one of them is 0.
    pub ratio: Option<f64>,
}

/// Comparison of `b` with `a`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Summary of the first record.
    pub a: Summary,
    /// Summary of the second.
    pub b: Summary,
    /// Figures one by one.
    pub rows: Vec<Row>,
}

/// Compares the second summary with the first.
pub fn compare(a: Summary, b: Summary) -> Comparison {
    type Figure = fn(&Summary) -> u64;
    let figures: [(&str, Figure); 6] = [
        ("p50", |summary| summary.latency.p50_ns),
        ("p90", |summary| summary.latency.p90_ns),
        ("p99", |summary| summary.latency.p99_ns),
        ("p99.9", |summary| summary.latency.p999_ns),
        ("max", |summary| summary.latency.max_ns),
        ("blackout", |summary| summary.blackout.duration_ns),
    ];
    let row = |(name, figure): (&str, Figure)| {
        let (of_a, of_b) = (figure(&a), figure(&b));
        Row { figure: name.into(), a: of_a as f64, b: of_b as f64, ratio: ratio(of_b, of_a) }
    };
    let mut rows: Vec<Row> = figures.into_iter().map(row).collect();
    let both = a.throughput > 0.0 && b.throughput > 0.0;
    rows.push(Row {
        figure: "throughput".into(),
        a: a.throughput,
        b: b.throughput,
        ratio: both.then(|| b.throughput / a.throughput),
    });
    Comparison { a, b, rows }
}
