//! Interface of a protocol to the driver: requests, and judgement of answers. No I/O.

use super::resp::Malformed;
use stillpoint_base::Random;

/// Judgement of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is the right one.
    Ok,
    /// The server answered with an error.
    Error(String),
    /// It is not the expected one.
    Wrong(String),
}

impl From<Result<(), String>> for Verdict {
    fn from(checked: Result<(), String>) -> Self {
        checked.map_or_else(Verdict::Wrong, |()| Verdict::Ok)
    }
}

/// Answer at the front of the input.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Length in bytes.
    pub(crate) used: usize,
    /// Judgement.
    pub(crate) verdict: Verdict,
}

/// Push to a list, and the pop of a blocked connection that returns it.
#[derive(Debug)]
pub(crate) struct PushAndPop<E> {
    pub(crate) push: E,
    pub(crate) pop: E,
}

/// Protocol with a mix of requests.
pub(crate) trait Workload {
    /// Data that is needed to judge an answer.
    type Expect: std::fmt::Debug;

    /// Returns the names of the kinds of requests.
    fn kinds(&self) -> Vec<String>;

    /// Draws the kind of the next request.
    fn draw(&mut self, _rng: &mut Random) -> u8 {
        0
    }

    /// Returns true if requests of this kind go through the feeder to a blocked connection.
    fn is_push(&self, _kind: u8) -> bool {
        false
    }

    /// Appends a request.
    fn append_request(&mut self, kind: u8, connection: u32, rng: &mut Random, out: &mut Vec<u8>) -> Self::Expect;

    /// Judges one answer at the front of `input`; `None` if it is incomplete.
    fn judge_answer(&mut self, expect: &Self::Expect, input: &[u8]) -> Result<Option<Answer>, Malformed>;

    /// Discards a request whose answer will not come, or not be judged.
    fn abandon(&mut self, _expect: Self::Expect) {}

    /// Appends a request that shows whether an idle connection is alive.
    fn ping(&mut self, out: &mut Vec<u8>) -> Self::Expect;

    /// Appends the request that blocks a connection until an element is pushed to its list. A connection that was opened again has another
    /// `epoch`, and so another list: elements in the old list are never used. A plan with blocking connections is refused for a protocol
    /// without such a request.
    fn block(&mut self, _connection: u32, _epoch: u32, _out: &mut Vec<u8>) {}

    /// Appends a push for the connection that blocks on that list.
    fn push(&mut self, _connection: u32, _epoch: u32, out: &mut Vec<u8>) -> PushAndPop<Self::Expect> {
        PushAndPop { push: self.ping(out), pop: self.ping(&mut Vec::new()) }
    }
}

/// Kinds with weights, to draw from.
#[derive(Debug, Clone)]
pub(crate) struct Weights {
    names: Vec<String>,
    /// Sums of the weights up to and including each kind.
    sums: Vec<u64>,
}

impl Weights {
    /// Makes weights from (name, weight) pairs; at least one weight must be positive.
    pub(crate) fn new(pairs: &[(String, u32)]) -> Self {
        let mut sum = 0;
        let sums = pairs.iter().map(|(_, weight)| {
            sum += u64::from(*weight);
            sum
        });
        Weights { sums: sums.collect(), names: pairs.iter().map(|(name, _)| name.clone()).collect() }
    }

    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    pub(crate) fn draw(&self, rng: &mut Random) -> u8 {
        let total = self.sums.last().copied().unwrap_or(1);
        let drawn = rng.below(total.max(1));
        self.sums.partition_point(|&sum| sum <= drawn) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_drawn_by_weight() {
        let pairs = [("a", 70), ("none", 0), ("b", 30)].map(|(name, weight)| (name.to_owned(), weight));
        let weights = Weights::new(&pairs);
        let mut rng = Random::new(3);
        let mut counts = [0; 3];
        for _ in 0..100_000 {
            counts[usize::from(weights.draw(&mut rng))] += 1;
        }
        assert_eq!(counts[1], 0);
        assert!((69_000..71_000).contains(&counts[0]), "{counts:?}");
    }
}
