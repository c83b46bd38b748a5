//! Verdicts on the files that diffs change: the relation of each to the target.

use serde::Serialize;
use std::fmt;

/// Relation of a changed file to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Units of the target read it, and have other code with the change.
    Compiled,
    /// Units of the target read it, and their code stays the same.
    NoDifference,
    /// Provably no part of the target.
    NoPart,
    /// The caller states that it makes no difference.
    LeftOut,
    /// Possible part of the target that no known command compiles there.
    Unaccounted,
}

/// A file that the diffs of a patch change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChangedFile {
    /// Path relative to the source directory, as the diffs have it.
    pub path: String,
    /// Relation to the target.
    pub verdict: Verdict,
    /// Evidence for the verdict, for people.
    pub reason: String,
}

/// A list that prints at most eight names, and the number of others.
pub(crate) struct Bounded<'a, T>(pub(crate) &'a [T]);

impl<T: AsRef<str>> fmt::Display for Bounded<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Limit of names.
        const SHOWN_MAX: usize = 8;
        let shown: Vec<&str> = self.0.iter().take(SHOWN_MAX).map(AsRef::as_ref).collect();
        f.write_str(&shown.join(", "))?;
        match self.0.len().saturating_sub(SHOWN_MAX) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut() {
        let names: Vec<String> = (0..10).map(|n| n.to_string()).collect();
        assert_eq!(Bounded(&names).to_string(), "0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
        assert_eq!(Bounded(&names[..1]).to_string(), "0");
    }
}
