//! Evidence for the verdict on a file that the diffs change.

use crate::account::Account;
use crate::tree::is_unit;
use crate::verdict::{Bounded, ChangedFile, Verdict};

/// Units that read a file, by their paths.
#[derive(Debug, Default)]
pub(crate) struct Readers<'a> {
    /// Units with different text.
    pub(crate) changed: Vec<&'a str>,
    /// Units with the same text.
    pub(crate) same: Vec<&'a str>,
    /// Units with different text, of which the target's link took nothing.
    pub(crate) unlinked: Vec<&'a str>,
}

/// Everything that decides the verdict on one file.
#[derive(Debug)]
pub(crate) struct Evidence<'a> {
    /// Name of the target.
    pub(crate) target: &'a str,
    pub(crate) account: &'a Account,
    pub(crate) readers: Readers<'a>,
    /// True if a unit that reads the file is certainly in the target.
    pub(crate) is_attributed: bool,
    /// True if the caller includes the file in the examination.
    pub(crate) is_examined: bool,
    /// File that the build may have made of it.
    pub(crate) derived_file: Option<&'a str>,
}

impl Evidence<'_> {
    /// Decides the verdict on one file.
    pub(crate) fn verdict(&self, path: &str) -> ChangedFile {
        let (verdict, reason) = self.decide(path);
        ChangedFile { path: path.to_owned(), verdict, reason }
    }

    fn decide(&self, path: &str) -> (Verdict, String) {
        let (target, readers) = (self.target, &self.readers);
        let read = readers.changed.len() + readers.same.len();
        let missing = self.account.missing.len();
        if read > 0 && missing > 0 && !is_unit(path) {
            // a unit's own text is compiled where it is known to be; a header may be read by unknown units
            let why =
                format!("{read} known units read it, and so may the {missing} inputs of the link that are not known");
            return (Verdict::Unaccounted, why);
        }
        if !readers.changed.is_empty() {
            return (Verdict::Compiled, format!("other code in {}", Bounded(&readers.changed)));
        }
        if !readers.same.is_empty() {
            return match self.is_attributed {
                true => (Verdict::NoDifference, format!("the same code in {}", Bounded(&readers.same))),
                false => (
                    Verdict::Unaccounted,
                    format!("the same code in {}, none of which is found in {target}", Bounded(&readers.same)),
                ),
            };
        }
        if !self.is_examined {
            return (Verdict::LeftOut, "no unit that is looked at reads it".to_owned());
        }
        if let Some(made) = self.derived_file {
            return (Verdict::Unaccounted, format!("the build has {made}, which may be made of it"));
        }
        match &self.account.unknown {
            _ if self.account.is_complete() && !readers.unlinked.is_empty() => {
                (Verdict::NoPart, format!("the link of {target} took nothing of {}", Bounded(&readers.unlinked)))
            }
            _ if self.account.is_complete() => {
                let inputs = self.account.inputs;
                (Verdict::NoPart, format!("no unit of {target} reads it, and all {inputs} of its objects are known"))
            }
            Some(why) => (Verdict::Unaccounted, format!("no known command reads it, and {why}")),
            None => {
                let inputs = self.account.inputs;
                let why =
                    format!("no known command reads it, and {missing} of {inputs} inputs of the link are not known");
                (Verdict::Unaccounted, why)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn complete() -> Account {
        Account { inputs: 5, exact: true, ..Account::default() }
    }

    fn verdict(account: &Account, readers: Readers<'_>, path: &str) -> Verdict {
        let evidence =
            Evidence { target: "t", account, readers, is_attributed: true, is_examined: true, derived_file: None };
        evidence.verdict(path).verdict
    }

    #[test]
    fn a_file_that_no_unit_reads_is_no_part_only_of_what_is_wholly_known() {
        let partly = Account { missing: BTreeSet::from(["x.o".to_owned()]), ..complete() };
        let unknown = Account::unknown("no link is known".to_owned());
        for path in ["a.c", "a.h"] {
            assert_eq!(verdict(&complete(), Readers::default(), path), Verdict::NoPart);
            assert_eq!(verdict(&partly, Readers::default(), path), Verdict::Unaccounted);
            assert_eq!(verdict(&unknown, Readers::default(), path), Verdict::Unaccounted);
        }
        let unlinked = || Readers { unlinked: vec!["a.c"], ..Readers::default() };
        assert_eq!(verdict(&complete(), unlinked(), "a.c"), Verdict::NoPart);
        assert_eq!(verdict(&partly, unlinked(), "a.c"), Verdict::Unaccounted);
    }

    #[test]
    fn a_header_may_be_read_by_what_is_not_known() {
        let partly = Account { missing: BTreeSet::from(["x.o".to_owned()]), ..complete() };
        let changed = || Readers { changed: vec!["a.c"], ..Readers::default() };
        let same = || Readers { same: vec!["a.c"], ..Readers::default() };
        assert_eq!(verdict(&partly, changed(), "a.h"), Verdict::Unaccounted);
        assert_eq!(verdict(&partly, same(), "a.h"), Verdict::Unaccounted);
        assert_eq!(verdict(&partly, changed(), "a.c"), Verdict::Compiled);
        assert_eq!(verdict(&partly, same(), "a.c"), Verdict::NoDifference);
        assert_eq!(verdict(&complete(), changed(), "a.h"), Verdict::Compiled);
    }

    #[test]
    fn the_same_code_and_what_was_made_of_a_file_need_evidence() {
        let account = complete();
        let readers = Readers { same: vec!["a.c"], ..Readers::default() };
        let evidence = Evidence {
            target: "t",
            account: &account,
            readers,
            is_attributed: false,
            is_examined: true,
            derived_file: None,
        };
        assert_eq!(evidence.verdict("a.c").verdict, Verdict::Unaccounted);
        let made = Evidence { readers: Readers::default(), derived_file: Some("all.c"), ..evidence };
        assert_eq!(made.verdict("a.c").verdict, Verdict::Unaccounted);
        let left = Evidence { is_examined: false, ..made };
        assert_eq!(left.verdict("a.c").verdict, Verdict::LeftOut);
    }
}
