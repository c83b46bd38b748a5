//! What a protocol must tell the driver: how to ask and how to judge the answer. No I/O.

use super::resp::Malformed;
use super::schedule::Random;

/// What an answer is worth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is the right one.
    Ok,
    /// The server answered with an error.
    Error(String),
    /// It is not what it must be.
    Wrong(String),
}

impl From<Result<(), String>> for Verdict {
    fn from(checked: Result<(), String>) -> Self {
        checked.map_or_else(Verdict::Wrong, |()| Verdict::Ok)
    }
}

/// An answer taken from the front of the input.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Its length in bytes.
    pub(crate) used: usize,
    /// What it is worth.
    pub(crate) verdict: Verdict,
}

/// A push to a list and the pop that a blocked connection makes of it.
#[derive(Debug)]
pub(crate) struct PushAndPop<E> {
    pub(crate) push: E,
    pub(crate) pop: E,
}

/// A protocol and the mix of requests made with it.
pub(crate) trait Workload {
    /// What is needed to judge an answer.
    type Expect: std::fmt::Debug;

    /// Names of the kinds of requests.
    fn kinds(&self) -> Vec<String>;

    /// The kind of the next request.
    fn draw(&mut self, rng: &mut Random) -> u8;

    /// Whether requests of this kind go through the feeder to a blocked connection.
    fn is_push(&self, _kind: u8) -> bool {
        false
    }

    /// Appends a request.
    fn ask(&mut self, kind: u8, connection: u32, rng: &mut Random, out: &mut Vec<u8>) -> Self::Expect;

    /// Takes one answer from the front of `input`; `None` when it is not complete yet.
    fn judge(&mut self, expect: &Self::Expect, input: &[u8]) -> Result<Option<Answer>, Malformed>;

    /// The answer to this will not come, or not be looked at.
    fn abandon(&mut self, _expect: Self::Expect) {}

    /// Appends a request that shows whether an idle connection is alive.
    fn ping(&mut self, out: &mut Vec<u8>) -> Self::Expect;

    /// Appends the request that blocks a connection until something is pushed to its list. A connection that was
    /// opened again has another `epoch`, and so another list: what lies in the old one is nobody's.
    fn block(&mut self, connection: u32, epoch: u32, out: &mut Vec<u8>);

    /// Appends a push for the connection that blocks on that list.
    fn push(&mut self, connection: u32, epoch: u32, out: &mut Vec<u8>) -> PushAndPop<Self::Expect>;
}

/// Kinds with weights.
#[derive(Debug, Clone)]
pub(crate) struct Weights {
    names: Vec<String>,
    /// Sums of the weights up to and with each kind.
    sums: Vec<u64>,
}

impl Weights {
    /// From (name, weight) pairs; at least one weight must be positive.
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
