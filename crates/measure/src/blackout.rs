//! Blackout: the longest interval in which a client waited and no client got a right answer. Pure.
//!
//! A request waits from its due time to its end. Let `g(1) < g(2) < ...` be the times of right answers. Between two of them the service was
//! dark from
//!
//! ```text
//! max( g(k) , min { due(r) : request r ended after g(k) } )   to   g(k+1)
//! ```
//!
//! so an interval without requests is not a blackout, while an interval with only errors is one. The start of a window counts like an
//! answer before it, its end like an answer after it. Every dark interval that overlaps an operation counts for it in full, also if the
//! interval began before or ended after it.

use serde::{Deserialize, Serialize};

/// Interval without any right answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blackout {
    /// Start (`CLOCK_MONOTONIC`, ns); 0 if there was none.
    pub from_ns: u64,
    /// Length in nanoseconds.
    pub duration_ns: u64,
}

impl Blackout {
    fn between(from_ns: u64, to_ns: u64) -> Self {
        Blackout { from_ns, duration_ns: to_ns.saturating_sub(from_ns) }
    }

    fn longer(self, other: Blackout) -> Blackout {
        if other.duration_ns > self.duration_ns { other } else { self }
    }

    /// Returns the longest interval; of equally long ones the first.
    fn longest<'a>(intervals: impl IntoIterator<Item = &'a (u64, u64)>) -> Blackout {
        let all = intervals.into_iter().map(|&(from, to)| Blackout::between(from, to));
        all.fold(Blackout::default(), Blackout::longer)
    }
}

/// Finds the blackout while a load runs.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    /// Start of the current wait of any client without a right answer.
    wait_start_ns: Option<u64>,
    last_answer_ns: u64,
    longest: Blackout,
}

impl Tracker {
    pub(crate) fn waiting_since(&mut self, due_ns: u64) {
        self.wait_start_ns.get_or_insert(due_ns.max(self.last_answer_ns));
    }

    pub(crate) fn answered(&mut self, t_ns: u64, others_wait: bool) {
        if let Some(since) = self.wait_start_ns {
            self.longest = self.longest.longer(Blackout::between(since, t_ns));
        }
        self.last_answer_ns = self.last_answer_ns.max(t_ns);
        self.wait_start_ns = others_wait.then_some(t_ns);
    }

    pub(crate) fn ended(&mut self, t_ns: u64) {
        if let Some(since) = self.wait_start_ns.take() {
            self.longest = self.longest.longer(Blackout::between(since, t_ns));
        }
    }

    pub(crate) fn longest(&self) -> Blackout {
        self.longest
    }
}

/// All intervals in which a client waited and no client got a right answer, in order of time.
#[derive(Debug, Default)]
pub(crate) struct Intervals(Vec<(u64, u64)>);

impl Intervals {
    /// Finds the intervals for requests given as (due, ended, answered rightly), from `from_ns` to `to_ns`.
    pub(crate) fn of(mut spans: Vec<(u64, u64, bool)>, from_ns: u64, to_ns: u64) -> Intervals {
        spans.retain(|&(due, end, _)| due <= to_ns && end >= from_ns);
        spans.sort_unstable_by_key(|&(_, end, _)| end);
        let mut intervals = Vec::new();
        // From the last to the first, so that the earliest due time of all requests that end later is known.
        let mut later_due = u64::MAX;
        let mut next_answer = to_ns;
        let mut add = |answer: u64, later_due: u64, next_answer: u64| {
            let since = answer.max(later_due).clamp(from_ns, to_ns);
            if since < next_answer {
                intervals.push((since, next_answer));
            }
        };
        for &(due, end, right) in spans.iter().rev() {
            if right && end <= to_ns {
                add(end, later_due, next_answer);
                next_answer = end;
            }
            later_due = later_due.min(due);
        }
        add(from_ns, later_due, next_answer);
        intervals.reverse();
        Intervals(intervals)
    }

    /// Returns the longest; of equally long ones the first.
    pub(crate) fn longest(&self) -> Blackout {
        Blackout::longest(&self.0)
    }

    /// Returns the longest that overlaps a window, in its full length.
    pub(crate) fn longest_overlapping(&self, from_ns: u64, to_ns: u64) -> Blackout {
        Blackout::longest(self.overlapping(from_ns, to_ns))
    }

    /// Returns the longest part of any of them within a window.
    pub(crate) fn longest_within(&self, from_ns: u64, to_ns: u64) -> Blackout {
        let inside = |&(from, to): &(u64, u64)| Blackout::between(from.max(from_ns), to.min(to_ns));
        self.overlapping(from_ns, to_ns).iter().map(inside).fold(Blackout::default(), Blackout::longer)
    }

    /// Returns the longest that overlaps none of the windows.
    pub(crate) fn longest_outside(&self, windows: &[(u64, u64)]) -> Blackout {
        let meets = |from, to| windows.iter().any(|&(start, end)| from <= end && to >= start);
        Blackout::longest(self.0.iter().filter(|&&(from, to)| !meets(from, to)))
    }

    fn overlapping(&self, from_ns: u64, to_ns: u64) -> &[(u64, u64)] {
        let first = self.0.partition_point(|&(_, to)| to < from_ns);
        let last = self.0.partition_point(|&(from, _)| from <= to_ns);
        &self.0[first..last.max(first)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn no_answer(spans: &[(u64, u64, bool)], from: u64, to: u64) -> (u64, u64) {
        let blackout = Intervals::of(spans.to_vec(), from, to).longest();
        (blackout.from_ns, blackout.duration_ns)
    }

    #[test]
    fn a_pause_under_load_is_a_blackout() {
        let mut spans: Vec<_> = (0..100).map(|n| (n * 10, n * 10 + 3, true)).collect();
        // The server stops at 500 and continues at 700: it then answers the requests that were due meanwhile.
        spans.retain(|&(due, _, _)| due < 500);
        spans.extend((50..70).map(|n| (n * 10, 700 + n, true)));
        assert_eq!(no_answer(&spans, 0, 1_000), (500, 250));
    }

    #[test]
    fn an_interval_without_requests_is_none() {
        let spans = [(0, 2, true), (10, 11, true), (500, 503, true)];
        assert_eq!(no_answer(&spans, 0, 1_000), (500, 3));
    }

    #[test]
    fn errors_are_no_answers() {
        let mut spans: Vec<_> = (0..10).map(|n| (n * 10, n * 10 + 1, false)).collect();
        spans.push((0, 1, true));
        spans.push((90, 95, true));
        assert_eq!(no_answer(&spans, 0, 100), (10, 85));
    }

    #[test]
    fn a_window_ends_a_blackout_at_its_edges() {
        let spans = [(100, 900, true)];
        assert_eq!(no_answer(&spans, 200, 300), (200, 100));
        assert_eq!(no_answer(&spans, 0, 50), (0, 0));
        assert_eq!(no_answer(&spans, 0, 1_000), (100, 800));
    }

    #[test]
    fn an_operation_answers_for_the_whole_blackout_that_it_touches() {
        let spans = [(100, 900, true), (950, 960, true), (2_000, 2_400, true)];
        let no_answer = Intervals::of(spans.to_vec(), 0, 3_000);
        assert_eq!(no_answer.longest_overlapping(850, 955).duration_ns, 800);
        assert_eq!(no_answer.longest_within(850, 955).duration_ns, 50);
        assert_eq!(no_answer.longest_overlapping(1_000, 1_500), Blackout::default());
        assert_eq!(no_answer.longest_outside(&[(850, 855)]).duration_ns, 400);
        assert_eq!(no_answer.longest(), Blackout { from_ns: 100, duration_ns: 800 });
    }

    #[test]
    fn without_any_answer_the_first_request_begins_it() {
        assert_eq!(no_answer(&[(40, 80, false)], 0, 100), (40, 60));
    }

    proptest! {
        /// Compares the literal definition with both implementations.
        #[test]
        fn the_three_ways_agree(raw in proptest::collection::vec((0u64..500, 1u64..80, any::<bool>()), 1..60)) {
            // Distinct ends, so that "before" and "after" are defined.
            let mut spans: Vec<(u64, u64, bool)> = Vec::new();
            for (due, latency, right) in raw {
                let mut end = due + latency;
                while spans.iter().any(|&(_, other, _)| other == end) {
                    end += 1;
                }
                spans.push((due, end, right));
            }
            let to = spans.iter().map(|&(_, end, _)| end).max().unwrap();

            let mut answers: Vec<u64> = spans.iter().filter(|s| s.2).map(|s| s.1).collect();
            answers.sort_unstable();
            answers.insert(0, 0);
            answers.push(to);
            let literal = answers.windows(2).filter_map(|pair| {
                let due = spans.iter().filter(|s| s.1 > pair[0]).map(|s| s.0).min()?;
                Some(pair[1].saturating_sub(pair[0].max(due)))
            }).max().unwrap_or(0);
            prop_assert_eq!(Intervals::of(spans.clone(), 0, to).longest().duration_ns, literal);

            // In the same way as the driver: events in order of time.
            let mut events: Vec<(u64, u8, usize)> = Vec::new();
            for (index, &(due, end, _)) in spans.iter().enumerate() {
                events.push((due, 1, index));
                events.push((end, 0, index));
            }
            events.sort_unstable();
            let mut tracker = Tracker::default();
            let mut waiting = 0;
            for (t, what, index) in events {
                if what == 1 {
                    waiting += 1;
                    tracker.waiting_since(t);
                } else {
                    waiting -= 1;
                    if spans[index].2 {
                        tracker.answered(t, waiting > 0);
                    }
                }
            }
            tracker.ended(to);
            prop_assert_eq!(tracker.longest().duration_ns, literal);
        }
    }
}
