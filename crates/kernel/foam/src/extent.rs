//! Pages that a memory has: ranges with flags, sorted, never overlapping.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use stillpoint_base::PAGE;

/// The page can wait: it may be fetched after the process runs.
pub const LAZY: u8 = 2;
/// The page is in the image.
pub const PRESENT: u8 = 4;
/// The end of what a process can address on x86-64 with five-level page tables.
const ADDRESS_SPACE_END: u64 = 1 << 56;

/// Consecutive pages that are of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Address of the first page.
    pub start: u64,
    /// Number of pages.
    pub pages: u64,
    /// Bits: [`LAZY`], [`PRESENT`].
    pub flags: u8,
    /// The pass that stored them last, counted from 1: a later pass means hotter pages.
    pub pass: u32,
}

impl Extent {
    /// Returns the address after the last page.
    pub fn end(&self) -> u64 {
        self.start + self.pages * PAGE
    }

    /// Returns true if its pages may be fetched after the process runs.
    pub fn is_lazy(&self) -> bool {
        self.flags & LAZY != 0
    }

    /// Refuses a range that is empty, not of whole pages or beyond the address space.
    ///
    /// # Errors
    /// The range is empty, not of whole pages, or beyond the address space.
    pub fn check(start: u64, pages: u64) -> Result<(), Error> {
        let end = pages.checked_mul(PAGE).and_then(|bytes| start.checked_add(bytes));
        match end {
            Some(end) if pages > 0 && start.is_multiple_of(PAGE) && end <= ADDRESS_SPACE_END => Ok(()),
            _ => Err(Error::Range { start, pages }),
        }
    }

    fn part(&self, start: u64, end: u64) -> Extent {
        Extent { start, pages: (end - start) / PAGE, ..*self }
    }
}

/// Extents by address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extents {
    by_start: BTreeMap<u64, Extent>,
}

impl Extents {
    /// Builds from extents in any order; later ones win.
    pub fn of(extents: impl IntoIterator<Item = Extent>) -> Self {
        let mut all = Extents::default();
        extents.into_iter().for_each(|extent| all.insert(extent));
        all
    }

    /// Inserts an extent, which replaces all that was in its range.
    pub fn insert(&mut self, extent: Extent) {
        self.cut(extent.start, extent.end());
        let mut extent = extent;
        let like = |a: &Extent, b: &Extent| (a.flags, a.pass) == (b.flags, b.pass);
        if let Some((_, before)) = self.by_start.range(..extent.start).next_back()
            && before.end() == extent.start
            && like(before, &extent)
        {
            extent = Extent { start: before.start, pages: before.pages + extent.pages, ..extent };
        }
        if let Some(after) = self.by_start.get(&extent.end()).copied()
            && like(&after, &extent)
        {
            self.by_start.remove(&after.start);
            extent.pages += after.pages;
        }
        self.by_start.insert(extent.start, extent);
    }

    /// Removes a range, and returns the extents that were in it.
    pub fn cut(&mut self, start: u64, end: u64) -> Vec<Extent> {
        let touched: Vec<Extent> = self.overlapping(start, end).collect();
        let mut taken = Vec::with_capacity(touched.len());
        for extent in touched {
            self.by_start.remove(&extent.start);
            if extent.start < start {
                self.by_start.insert(extent.start, extent.part(extent.start, start));
            }
            if extent.end() > end {
                self.by_start.insert(end, extent.part(end, extent.end()));
            }
            taken.push(extent.part(extent.start.max(start), extent.end().min(end)));
        }
        taken
    }

    /// Returns the parts of extents in a range.
    pub fn within(&self, start: u64, end: u64) -> impl Iterator<Item = Extent> {
        self.overlapping(start, end).map(move |e| e.part(e.start.max(start), e.end().min(end)))
    }

    /// Returns whole extents that have pages in a range.
    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = Extent> {
        let first = self.by_start.range(..start).next_back().map(|(_, e)| *e).filter(|e| e.end() > start);
        let end = end.max(start);
        first.into_iter().chain(self.by_start.range(start..end).map(|(_, e)| *e))
    }

    /// Returns the extent that contains this address.
    pub fn at(&self, address: u64) -> Option<Extent> {
        self.by_start.range(..=address).next_back().map(|(_, e)| *e).filter(|e| e.end() > address)
    }

    /// Iterates over all extents, by address.
    pub fn iter(&self) -> impl Iterator<Item = &Extent> {
        self.by_start.values()
    }

    /// Returns the number of pages in all extents.
    pub fn pages(&self) -> u64 {
        self.iter().map(|e| e.pages).sum()
    }

    /// Returns true if there are no extents.
    pub fn is_empty(&self) -> bool {
        self.by_start.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extent(page: u64, pages: u64, flags: u8) -> Extent {
        Extent { start: page * PAGE, pages, flags, pass: 1 }
    }

    #[test]
    fn neighbours_that_are_alike_become_one() {
        let mut extents = Extents::of([extent(0, 2, PRESENT), extent(4, 1, PRESENT)]);
        extents.insert(extent(2, 2, PRESENT));
        assert_eq!(extents.iter().copied().collect::<Vec<_>>(), [extent(0, 5, PRESENT)]);
    }

    #[test]
    fn what_is_no_range_is_refused() {
        assert!(Extent::check(PAGE, 1).is_ok());
        for (start, pages) in [(1, 1), (0, 0), (u64::MAX - PAGE + 1, 1), (PAGE, u64::MAX), (ADDRESS_SPACE_END, 1)] {
            assert_eq!(Extent::check(start, pages), Err(Error::Range { start, pages }));
        }
    }

    proptest! {
        // compared with the simplest model: one flag a page
        #[test]
        fn extents_are_what_their_pages_are(ops in prop::collection::vec((0u64..40, 1u64..12, 0u8..4), 1..40)) {
            let (mut extents, mut pages) = (Extents::default(), [None; 64]);
            for (page, count, what) in ops {
                if what == 3 {
                    let taken = extents.cut(page * PAGE, (page + count) * PAGE);
                    let there = (page..page + count).filter(|p| pages[*p as usize].is_some()).count();
                    prop_assert_eq!(taken.iter().map(|e| e.pages).sum::<u64>(), there as u64);
                    (page..page + count).for_each(|p| pages[p as usize] = None);
                } else {
                    extents.insert(extent(page, count, what));
                    (page..page + count).for_each(|p| pages[p as usize] = Some(what));
                }
                let found = |page: u64| extents.at(page * PAGE + 7).map(|e| e.flags);
                prop_assert!((0..64).all(|page| found(page) == pages[page as usize]));
                let mut end = 0;
                for extent in extents.iter() {
                    prop_assert!(extent.start >= end && extent.pages > 0);
                    end = extent.end();
                }
            }
        }
    }
}
