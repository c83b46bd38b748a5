//! Buckets over time, and a selection of single requests, for the plots.

use crate::record::{Outcome, Sample};
use crate::summary::Distribution;
use stillpoint_base::Random;

/// Number of buckets of the whole run.
pub(super) const BUCKET_COUNT: usize = 360;
/// Single requests drawn per bucket. The slowest one is always among them; the same number of failed ones may be added.
const DOTS_PER_BUCKET: usize = 16;

/// Interval of time.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Bucket {
    pub(super) p50_ns: u64,
    pub(super) p99_ns: u64,
    pub(super) max_ns: u64,
    pub(super) late_max_ns: u64,
    pub(super) right: u64,
    pub(super) failed: u64,
}

/// Single request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Dot {
    pub(super) t_ns: u64,
    pub(super) latency_ns: u64,
    /// Index into [`Series::versions`].
    pub(super) version: usize,
    pub(super) failed: bool,
}

/// Data of the plots.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Series {
    pub(super) from_ns: u64,
    pub(super) bucket_ns: u64,
    pub(super) buckets: Vec<Bucket>,
    pub(super) dots: Vec<Dot>,
    /// Sets of patches that were active at any time, each once, in the order of their first appearance.
    pub(super) versions: Vec<Vec<String>>,
    /// Times of changes, each with the version (index into `versions`) from then on.
    pub(super) changes: Vec<(u64, usize)>,
}

impl Series {
    /// Makes the series from samples in the order of their ends.
    pub(super) fn of(samples: &[Sample], from_ns: u64, to_ns: u64, history: &[(u64, Vec<String>)]) -> Series {
        let bucket_ns = ((to_ns - from_ns) / BUCKET_COUNT as u64).max(1);
        let mut series = Series { from_ns, bucket_ns, ..Series::default() };
        series.set_versions(history);
        let mut random = Random::new(1);
        let mut rest = samples;
        for number in 0..BUCKET_COUNT as u64 {
            let end = from_ns + (number + 1) * bucket_ns;
            // The last bucket gets the remainder of the division.
            let last = number == BUCKET_COUNT as u64 - 1;
            let count = if last { rest.len() } else { rest.partition_point(|sample| sample.ended_ns() < end) };
            let (inside, after) = rest.split_at(count);
            rest = after;
            series.buckets.push(bucket(inside));
            series.choose_dots(inside, &mut random);
        }
        series
    }

    fn set_versions(&mut self, history: &[(u64, Vec<String>)]) {
        for (t_ns, names) in history {
            let known = self.versions.iter().position(|version| version == names);
            let version = known.unwrap_or_else(|| {
                self.versions.push(names.clone());
                self.versions.len() - 1
            });
            self.changes.push((*t_ns, version));
        }
    }

    /// Returns the version of the code at a time.
    pub(super) fn version_at(&self, t_ns: u64) -> usize {
        let after = self.changes.partition_point(|&(t, _)| t <= t_ns);
        self.changes[..after].last().map_or(0, |&(_, version)| version)
    }

    fn choose_dots(&mut self, samples: &[Sample], random: &mut Random) {
        let Some(slowest) = samples.iter().max_by_key(|sample| sample.latency_ns) else { return };
        let chosen = if samples.len() <= DOTS_PER_BUCKET {
            samples.iter().collect::<Vec<_>>()
        } else {
            let mut some: Vec<_> =
                (1..DOTS_PER_BUCKET).map(|_| &samples[random.below(samples.len() as u64) as usize]).collect();
            some.push(slowest);
            some.retain(|sample| sample.outcome == Outcome::Ok);
            some.extend(samples.iter().filter(|sample| sample.outcome != Outcome::Ok).take(DOTS_PER_BUCKET));
            some
        };
        for sample in chosen {
            let t_ns = sample.ended_ns();
            let failed = sample.outcome != Outcome::Ok;
            self.dots.push(Dot { t_ns, latency_ns: sample.latency_ns, version: self.version_at(t_ns), failed });
        }
    }
}

fn bucket(samples: &[Sample]) -> Bucket {
    let latency = samples.iter().map(|sample| sample.latency_ns).collect::<Distribution>().latency();
    let failed = samples.iter().filter(|sample| sample.outcome != Outcome::Ok).count() as u64;
    Bucket {
        p50_ns: latency.p50_ns,
        p99_ns: latency.p99_ns,
        max_ns: latency.max_ns,
        late_max_ns: samples.iter().map(|sample| u64::from(sample.late_us) * 1000).max().unwrap_or(0),
        right: samples.len() as u64 - failed,
        failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(t: u64, latency_ns: u64) -> Sample {
        Sample { scheduled_ns: t, latency_ns, late_us: 0, connection: 0, kind: 0, outcome: Outcome::Ok }
    }

    #[test]
    fn no_request_is_left_out_of_the_buckets_and_the_slowest_has_a_dot() {
        let samples: Vec<_> = (0..100_003).map(|n| sample(n * 1_000, if n == 70_001 { 900_000 } else { 10 })).collect();
        let mut sorted = samples.clone();
        sorted.sort_by_key(Sample::ended_ns);
        let series = Series::of(&sorted, 0, 100_003_000, &[(0, vec![])]);
        assert_eq!(series.buckets.iter().map(|bucket| bucket.right).sum::<u64>(), 100_003);
        assert_eq!(series.dots.iter().filter(|dot| dot.latency_ns == 900_000).count(), 1);
        assert!(series.dots.len() <= 2 * BUCKET_COUNT * DOTS_PER_BUCKET);
    }

    #[test]
    fn a_version_that_comes_back_keeps_its_number() {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let history = [(0, names(&[])), (10, names(&["a"])), (20, names(&[])), (30, names(&["a", "b"]))];
        let series = Series::of(&[sample(5, 1)], 0, 100, &history);
        assert_eq!(series.versions.len(), 3);
        let at: Vec<_> = [5, 10, 25, 99].map(|t| series.version_at(t)).to_vec();
        assert_eq!(at, [0, 1, 0, 2]);
    }
}
