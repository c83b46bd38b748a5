//! Numbers that look random and are the same for the same seed. They are no source of secrets.

/// SplitMix64: a few nanoseconds per number, and the same sequence on every machine.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Makes a generator; the same seed makes the same choices.
    pub const fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Returns the next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.number()) * u128::from(end)) >> 64) as u64
    }

    /// Returns an index of one of `len` items.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// Returns a number strictly between 0 and 1, so that its logarithm is finite.
    pub fn unit(&mut self) -> f64 {
        ((self.number() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Returns true once in `n` times on average; `n` must not be 0.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.index(n) == 0
    }

    /// Returns one of several values.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.index(of.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_same_for_a_seed_and_stay_in_their_range() {
        let numbers = |seed| {
            let mut random = Random::new(seed);
            (0..100).map(|_| random.number()).collect::<Vec<_>>()
        };
        assert_eq!(numbers(7), numbers(7));
        assert_ne!(numbers(7), numbers(8));
        let mut random = Random::new(7);
        let units: Vec<f64> = (0..10_000).map(|_| random.unit()).collect();
        assert!(units.iter().all(|unit| *unit > 0.0 && *unit < 1.0));
        let mean = units.iter().sum::<f64>() / units.len() as f64;
        assert!((0.48..0.52).contains(&mean), "{mean}");
        assert!(
            (0..1000).all(|_| random.below(10) < 10 && random.index(3) < 3 && [1, 2].contains(&random.pick(&[1, 2])))
        );
    }
}
