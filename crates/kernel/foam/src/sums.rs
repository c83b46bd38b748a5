//! A checksum for each page that was stored.

use crate::PAGE;
use std::collections::BTreeMap;

/// Pages whose sums lie together: 2 MiB of memory.
const GROUP: u64 = 512;

/// Checksum of a page.
pub fn sum(page: &[u8]) -> u32 {
    crc32fast::hash(page)
}

/// Whether a page need not be stored: a hole reads as zeros.
pub fn is_zero(page: &[u8]) -> bool {
    let words = page.chunks_exact(64);
    let rest = words.remainder();
    // in blocks, so that the compiler takes wide registers and the first data ends it
    words.into_iter().all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}

/// Checksums by address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sums {
    groups: BTreeMap<u64, Box<[Option<u32>]>>,
}

impl Sums {
    /// Notes the sum of the page at an address.
    pub fn set(&mut self, address: u64, sum: u32) {
        let (group, within) = Self::place(address);
        let group = self.groups.entry(group).or_insert_with(|| vec![None; GROUP as usize].into());
        group[within] = Some(sum);
    }

    /// The sum of the page at an address, if it was stored.
    pub fn get(&self, address: u64) -> Option<u32> {
        let (group, within) = Self::place(address);
        self.groups.get(&group).and_then(|group| group[within])
    }

    /// Forgets the pages of a range.
    pub fn forget(&mut self, start: u64, end: u64) {
        let groups = Self::place(start).0..=Self::place(end).0;
        for (number, group) in self.groups.range_mut(groups) {
            for (within, sum) in group.iter_mut().enumerate() {
                let address = (number * GROUP + within as u64) * PAGE;
                if (start..end).contains(&address) {
                    *sum = None;
                }
            }
        }
    }

    fn place(address: u64) -> (u64, usize) {
        let page = address / PAGE;
        (page / GROUP, (page % GROUP) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_is_kept_for_its_page_alone() {
        let mut sums = Sums::default();
        let pages = [0, 511, 512, 513, 4 * 512, 1 << 35];
        pages.iter().for_each(|page| sums.set(page * PAGE, *page as u32));
        assert!(pages.iter().all(|page| sums.get(page * PAGE) == Some(*page as u32)));
        assert_eq!(sums.get(PAGE), None);
        sums.forget(511 * PAGE, 513 * PAGE);
        let left: Vec<u64> = pages.into_iter().filter(|page| sums.get(page * PAGE).is_some()).collect();
        assert_eq!(left, [0, 513, 4 * 512, 1 << 35]);
    }

    #[test]
    fn a_page_is_zero_when_every_byte_is() {
        let mut page = vec![0; PAGE as usize];
        assert!(is_zero(&page));
        for at in [0, 63, 64, 4095] {
            page[at] = 1;
            assert!(!is_zero(&page), "{at}");
            page[at] = 0;
        }
        assert!(!is_zero(&[0, 0, 1]));
    }
}
