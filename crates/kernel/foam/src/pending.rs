//! Pages of a process that are still only in its image, while the process runs and changes its memory.
//!
//! An address has a place in the image until its page is resident or the process has given the page up. A page that was
//! given up (`MADV_DONTNEED`, `munmap`) must read as zeros from then on: its image is never read again.

use crate::{Extents, PRESENT};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_base::PAGE;

/// Consecutive pages whose images are also consecutive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Address of the pages in the process now.
    pub address: u64,
    /// Address of the pages when the image was made.
    pub image: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Number of the pass that stored them.
    pub pass: u32,
}

/// Runs that are not resident yet, by their present address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pending {
    runs: BTreeMap<u64, Run>,
    /// The newest pass first, by address within it.
    hot: BTreeSet<(Reverse<u32>, u64)>,
}

impl Pending {
    /// Returns all lazy pages of an image.
    pub fn of(extents: &Extents) -> Self {
        let lazy = extents.iter().filter(|e| e.is_lazy() && e.flags & PRESENT != 0);
        let run = |e: &crate::Extent| Run { address: e.start, image: e.start, bytes: e.pages * PAGE, pass: e.pass };
        let mut pending = Pending::default();
        lazy.for_each(|extent| pending.put(run(extent)));
        pending
    }

    /// Returns the run that begins at this page and extends as far as its image does, if the page is not resident yet.
    pub fn at(&self, address: u64) -> Option<Run> {
        let (_, run) = self.runs.range(..=address).next_back()?;
        let into = address - run.address;
        (into < run.bytes).then(|| Run { address, image: run.image + into, bytes: run.bytes - into, pass: run.pass })
    }

    /// Removes pages that are resident or were given up: their image is not needed any more.
    pub fn remove(&mut self, start: u64, end: u64) {
        self.cut(start, end);
    }

    /// Follows an `mremap`: the pages that are not resident yet get the new address. Pages that were there are gone.
    pub fn remap(&mut self, from: u64, to: u64, bytes: u64) {
        let moved = self.cut(from, from.saturating_add(bytes));
        self.cut(to, to.saturating_add(bytes));
        for run in moved {
            let address = to.saturating_add(run.address - from);
            self.put(Run { address, ..run });
        }
    }

    fn put(&mut self, run: Run) {
        self.runs.insert(run.address, run);
        self.hot.insert((Reverse(run.pass), run.address));
    }

    /// Returns the next run to fetch in the background: of the newest pass, touched last before the freeze, from
    /// `cursor` on.
    pub fn next(&self, cursor: u64) -> Option<Run> {
        let &(hottest, first) = self.hot.first()?;
        if let Some(run) = self.at(cursor).filter(|run| Reverse(run.pass) == hottest) {
            return Some(run);
        }
        let after = self.hot.range((hottest, cursor)..=(hottest, u64::MAX)).next();
        self.runs.get(after.map_or(&first, |(_, address)| address)).copied()
    }

    /// Returns the bytes that are not resident yet.
    pub fn bytes(&self) -> u64 {
        self.runs.values().map(|run| run.bytes).sum()
    }

    /// Returns true if everything is resident.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    fn cut(&mut self, start: u64, end: u64) -> Vec<Run> {
        let end = end.max(start);
        let first = self.runs.range(..start).next_back().map(|(_, run)| *run).filter(|r| r.address + r.bytes > start);
        let touched: Vec<Run> = first.into_iter().chain(self.runs.range(start..end).map(|(_, run)| *run)).collect();
        let mut taken = Vec::with_capacity(touched.len());
        for run in touched {
            self.runs.remove(&run.address);
            self.hot.remove(&(Reverse(run.pass), run.address));
            let last = run.address + run.bytes;
            let part = |from: u64, to: u64| Run {
                address: from,
                image: run.image + (from - run.address),
                bytes: to - from,
                pass: run.pass,
            };
            if run.address < start {
                self.put(part(run.address, start));
            }
            if last > end {
                self.put(part(end, last));
            }
            taken.push(part(run.address.max(start), last.min(end)));
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Extent, LAZY};
    use proptest::prelude::*;

    fn pending(runs: &[(u64, u64, u32)]) -> Pending {
        let extent = |&(page, pages, pass)| Extent { start: page * PAGE, pages, flags: LAZY | PRESENT, pass };
        Pending::of(&Extents::of(runs.iter().map(extent)))
    }

    #[test]
    fn only_lazy_pages_that_are_stored_are_awaited() {
        let of = |flags| Pending::of(&Extents::of([Extent { start: PAGE, pages: 1, flags, pass: 1 }]));
        assert!(of(PRESENT).is_empty() && of(LAZY).is_empty() && !of(LAZY | PRESENT).is_empty());
    }

    #[test]
    fn what_was_given_up_is_never_looked_at_again() {
        let mut pending = pending(&[(10, 10, 1)]);
        pending.remove(12 * PAGE, 15 * PAGE);
        assert_eq!(pending.at(12 * PAGE), None);
        assert_eq!(pending.at(11 * PAGE).map(|run| run.bytes), Some(PAGE));
        assert_eq!(pending.bytes(), 7 * PAGE);
    }

    #[test]
    fn what_moves_takes_its_image_along() {
        let mut pending = pending(&[(10, 10, 1), (100, 10, 1)]);
        pending.remove(13 * PAGE, 14 * PAGE);
        pending.remap(12 * PAGE, 102 * PAGE, 4 * PAGE);
        assert_eq!(pending.at(12 * PAGE), None);
        assert_eq!(pending.at(102 * PAGE).map(|run| run.image), Some(12 * PAGE));
        assert_eq!(pending.at(103 * PAGE), None);
        assert_eq!(pending.at(105 * PAGE).map(|run| run.image), Some(15 * PAGE));
        assert_eq!(pending.at(106 * PAGE).map(|run| run.image), Some(106 * PAGE));
    }

    #[test]
    fn the_newest_pass_comes_first_and_goes_round() {
        let mut pending = pending(&[(10, 2, 1), (20, 2, 2), (30, 2, 2)]);
        let mut order = Vec::new();
        let mut cursor = 21 * PAGE;
        while let Some(run) = pending.next(cursor) {
            order.push(run.address / PAGE);
            cursor = run.address + PAGE;
            pending.remove(run.address, cursor);
        }
        assert_eq!(order, [21, 30, 31, 20, 10, 11]);
    }

    proptest! {
        // compared with a list of pages
        #[test]
        fn every_page_is_where_it_should_be(ops in prop::collection::vec((0u8..2, 0u64..60, 0u64..60, 1u64..9), 1..40)) {
            let (mut pending, mut plain) = (pending(&[(5, 30, 1)]), [None::<u64>; 80]);
            (5..35).for_each(|page| plain[page as usize] = Some(page));
            for (what, from, to, pages) in ops {
                if what == 0 {
                    pending.remove(from * PAGE, (from + pages) * PAGE);
                    (from..from + pages).for_each(|page| plain[page as usize] = None);
                } else if from + pages <= to || to + pages <= from {
                    pending.remap(from * PAGE, to * PAGE, pages * PAGE);
                    for page in 0..pages {
                        plain[(to + page) as usize] = plain[(from + page) as usize].take();
                    }
                }
                for page in 0..80 {
                    prop_assert_eq!(pending.at(page * PAGE).map(|run| run.image / PAGE), plain[page as usize]);
                }
            }
        }
    }
}
