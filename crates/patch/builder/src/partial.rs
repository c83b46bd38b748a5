//! Patches of as many diffs as possible: where another version gives the diffs, one that cannot be live prevents no other one.
//!
//! The obvious way is to build every diff alone: one that needs an earlier one fails then, and each costs a build. So all are built together,
//! and a set that is refused is divided in halves. A diff counts as impossible if it is refused on top of all that were found possible before
//! it; one that needs it does not apply, or does not compile, and is left out with that reason.

use crate::build::{Built, LeftOut};
use crate::debian::Diff;
use crate::{Builder, Error};

/// Search for the diffs that a patch can have.
struct Search<'a, F> {
    build: &'a F,
    possible: Vec<Diff>,
    /// Patch of the possible diffs; `None` before the first one.
    best: Option<Built>,
    left_out: Vec<LeftOut>,
}

impl Builder<'_> {
    /// Builds a patch of the diffs that can be in one; `build` makes the patch of some diffs.
    ///
    /// # Errors
    /// No diff that changes the target can be in a patch: the error for all of them. Or a build fails for another reason than its diffs.
    pub(crate) fn build_partial(
        &self,
        diffs: &[Diff],
        build: impl Fn(&[Diff]) -> Result<Built, Error>,
    ) -> Result<Built, Error> {
        let refused = match build(diffs) {
            Err(error) if error.is_about_diffs() && diffs.len() > 1 => error,
            other => return other,
        };
        let mut search = Search { build: &build, possible: Vec::new(), best: None, left_out: Vec::new() };
        self.progress(&format!("searching for those of {} diffs that can be live", diffs.len()));
        search.divide(diffs)?;
        let Search { best, left_out, .. } = search;
        let Some(Built { patch: Some(mut patch), mut report }) = best else { return Err(refused) };
        patch.cves.retain(|cve| left_out.iter().all(|diff| !diff.cves.contains(cve)));
        patch.warnings.extend(left_out.iter().map(LeftOut::to_string));
        report.left_out = left_out;
        Ok(Built { patch: Some(patch), report })
    }
}

impl<F: Fn(&[Diff]) -> Result<Built, Error>> Search<'_, F> {
    /// Divides diffs that cannot all be on top of the possible ones.
    fn divide(&mut self, diffs: &[Diff]) -> Result<(), Error> {
        let (first, second) = diffs.split_at(diffs.len() / 2);
        [first, second].into_iter().filter(|half| !half.is_empty()).try_for_each(|half| self.add(half))
    }

    fn add(&mut self, diffs: &[Diff]) -> Result<(), Error> {
        let all = [&self.possible[..], diffs].concat();
        match ((self.build)(&all), diffs) {
            (Ok(built), _) => {
                self.possible = all;
                self.best = Some(built);
            }
            (Err(error), [one]) if error.is_about_diffs() => self.left_out.push(LeftOut::of(one, &error)),
            (Err(error), more) if error.is_about_diffs() => self.divide(more)?,
            (Err(error), _) => return Err(error),
        }
        Ok(())
    }
}

impl LeftOut {
    fn of(diff: &Diff, error: &Error) -> LeftOut {
        let code = error.codes().into_iter().next().unwrap_or_else(|| "refused".to_owned());
        let (diff, cves) = (diff.name.clone(), diff.cves.clone());
        LeftOut { diff, cves, code, reason: error.to_string(), proposal: error.proposal() }
    }
}

impl std::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let cves = if self.cves.is_empty() { String::new() } else { format!(" ({})", self.cves.join(", ")) };
        write!(f, "{}{cves} is not in the patch: {}", self.diff, self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cache;
    use crate::build::Report;
    use std::cell::Cell;

    fn build(diffs: &[Diff], impossible: &[&str], needs: (&str, &str)) -> Result<Vec<String>, Error> {
        let names: Vec<&str> = diffs.iter().map(|diff| diff.name.as_str()).collect();
        if names.iter().any(|name| impossible.contains(name)) {
            return Err(Error::Refused(Vec::new()));
        }
        if names.contains(&needs.0) && !names.contains(&needs.1) {
            let (name, file) = (needs.0.to_owned(), "a.c".to_owned());
            return Err(Error::DoesNotApply { name, file, output: String::new() });
        }
        Ok(names.into_iter().map(str::to_owned).collect())
    }

    #[test]
    fn one_impossible_diff_prevents_no_other_one() {
        let diffs: Vec<Diff> = (0..16).map(|n| Diff::new(&format!("d{n}"), Vec::new())).collect();
        let builds = Cell::new(0);
        let tried = |diffs: &[Diff]| {
            builds.set(builds.get() + 1);
            let diffs = build(diffs, &["d5"], ("d9", "d5"))?;
            Ok::<_, Error>(Built { patch: None, report: Report { diffs, ..Report::default() } })
        };
        let mut search = Search { build: &tried, possible: Vec::new(), best: None, left_out: Vec::new() };
        search.divide(&diffs).unwrap();
        let left: Vec<(&str, &str)> = search.left_out.iter().map(|l| (l.diff.as_str(), l.code.as_str())).collect();
        assert_eq!(left, [("d5", "refused"), ("d9", "does-not-apply")]);
        assert_eq!(search.possible.len(), 14);
        assert_eq!(search.best.unwrap().report.diffs.len(), 14);
        assert!(builds.get() <= 16, "{}", builds.get());
    }

    #[test]
    fn nothing_possible_is_the_error_of_all() {
        let dir = tempfile::tempdir().unwrap();
        let builder = Builder::new(Cache::at(dir.path()).unwrap(), 1, &|_| {});
        let diffs = ["a", "b"].map(|name| Diff::new(name, Vec::new()));
        let none = |diffs: &[Diff]| {
            build(diffs, &["a", "b"], ("", "")).map(|_| Built { patch: None, report: Report::default() })
        };
        assert!(matches!(builder.build_partial(&diffs, none), Err(Error::Refused(_))));
        // `a` changes nothing of the target: without `b` there is no patch, and "nothing to patch" would be false
        let one =
            |diffs: &[Diff]| build(diffs, &["b"], ("", "")).map(|_| Built { patch: None, report: Report::default() });
        assert!(matches!(builder.build_partial(&diffs, one), Err(Error::Refused(_))));
        let failed = |_: &[Diff]| Err(Error::Environment("x".into()));
        assert!(matches!(builder.build_partial(&diffs, failed), Err(Error::Environment(_))));
    }
}
