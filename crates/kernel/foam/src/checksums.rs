//! A checksum for each page that was stored.

use crate::PAGE;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::ops::Range;

/// Pages whose checksums are stored together: 2 MiB of memory.
pub(crate) const GROUP: u64 = 512;
/// Bytes of a group: a checksum for each page by its address, zeros where none is stored.
pub(crate) const BYTES: usize = GROUP as usize * SUM;
/// Bytes of a checksum.
pub(crate) const SUM: usize = 16;

pub(crate) type Digested = [u8; 32];
/// Checksum of a page.
pub type PageSum = [u8; SUM];

/// Checksum of a page: the first half of its SHA-256.
///
/// The obvious way is a CRC, which costs a fifth of that. A CRC finds damage, but an attacker can make a page that has
/// the checksum of another one. The memory of a program holds code and return addresses, so the seal of an image would
/// be worth nothing.
pub fn sum(page: &[u8]) -> PageSum {
    let mut sum = [0; SUM];
    sum.copy_from_slice(&Sha256::digest(page)[..SUM]);
    sum
}

/// Returns true if a page need not be stored: a hole reads as zeros.
pub fn is_zero(page: &[u8]) -> bool {
    let words = page.chunks_exact(64);
    let rest = words.remainder();
    // in blocks, so that the compiler uses wide registers and the first data ends the search
    words.into_iter().all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}

/// Checksums by address, while passes go over a memory.
#[derive(Debug, Clone, Default)]
pub struct Sums {
    groups: BTreeMap<u64, Group>,
}

/// Checksums of a group as they are in a file, so that the seal only has to copy them.
#[derive(Debug, Clone)]
struct Group {
    /// A checksum for each page, zeros where none is stored.
    bytes: Box<[u8; BYTES]>,
    /// Pages that have a checksum, a bit for each.
    stored: [u64; (GROUP / 64) as usize],
    /// Digest of the bytes; `None` since a checksum of the group has changed.
    digest: Option<Digested>,
}

impl Group {
    fn empty() -> Self {
        Group { bytes: Box::new([0; BYTES]), stored: [0; (GROUP / 64) as usize], digest: None }
    }

    fn set(&mut self, within: usize, sum: Option<PageSum>) {
        self.bytes[within * SUM..][..SUM].copy_from_slice(&sum.unwrap_or_default());
        let (word, bit) = (&mut self.stored[within / 64], 1 << (within % 64));
        *word = if sum.is_some() { *word | bit } else { *word & !bit };
        self.digest = None;
    }

    /// Returns the first of some places that has no checksum.
    fn missing(&self, within: Range<usize>) -> Option<usize> {
        let mut at = within.start;
        while at < within.end {
            let present = (self.stored[at / 64] >> (at % 64)).trailing_ones() as usize;
            if present == 0 {
                return Some(at);
            }
            // at most to the end of the word: the shift brings in zeros
            at += present;
        }
        None
    }
}

impl Sums {
    /// Records the checksum of the page at an address.
    pub fn set(&mut self, address: u64, sum: PageSum) {
        let (group, within) = place(address);
        self.groups.entry(group).or_insert_with(Group::empty).set(within, Some(sum));
    }

    /// Removes the checksums of a range.
    pub fn forget(&mut self, start: u64, end: u64) {
        let groups = place(start).0..=place(end).0;
        for (number, group) in self.groups.range_mut(groups) {
            for within in 0..GROUP as usize {
                let address = (number * GROUP + within as u64) * PAGE;
                if (start..end).contains(&address) {
                    group.set(within, None);
                }
            }
        }
    }

    /// Computes in advance the digests of all groups: the seal then computes only those of groups that have changed
    /// since.
    pub fn settle(&mut self) {
        for group in self.groups.values_mut().filter(|group| group.digest.is_none()) {
            group.digest = Some(digest(&group.bytes[..]));
        }
    }

    /// Returns the first page of a range that has no checksum.
    pub(crate) fn missing(&self, start: u64, end: u64) -> Option<u64> {
        let mut at = start;
        while at < end {
            let (number, within) = place(at);
            let pages = ((end - at) / PAGE).min(GROUP - within as u64);
            let Some(group) = self.groups.get(&number) else { return Some(at) };
            if let Some(missing) = group.missing(within..within + pages as usize) {
                return Some(at + (missing - within) as u64 * PAGE);
            }
            at += pages * PAGE;
        }
        None
    }

    /// Returns the bytes of a group, and their digest.
    pub(crate) fn group(&self, number: u64) -> Option<(&[u8], Digested)> {
        let group = self.groups.get(&number)?;
        let digest = group.digest.unwrap_or_else(|| digest(&group.bytes[..]));
        Some((&group.bytes[..], digest))
    }
}

/// Returns the group of a page, and its place in that group.
pub(crate) fn place(address: u64) -> (u64, usize) {
    let page = address / PAGE;
    (page / GROUP, (page % GROUP) as usize)
}

/// Returns the SHA-256 of some checksums.
pub(crate) fn digest(bytes: &[u8]) -> Digested {
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_page_has_another_sum() {
        let page = vec![7; PAGE as usize];
        let known: PageSum = Sha256::digest(&page)[..16].try_into().unwrap();
        assert_eq!(sum(&page), known);
        let mut other = page.clone();
        other[4095] = 6;
        assert_ne!(sum(&other), known);
    }

    #[test]
    fn a_sum_is_kept_for_its_page_alone() {
        let mut sums = Sums::default();
        let pages = [0, 511, 512, 513, 4 * 512, 1 << 35];
        pages.iter().for_each(|page| sums.set(page * PAGE, [*page as u8; SUM]));
        let has = |sums: &Sums, page: u64| sums.missing(page * PAGE, (page + 1) * PAGE).is_none();
        assert!(pages.iter().all(|page| has(&sums, *page)));
        assert_eq!(sums.missing(511 * PAGE, 520 * PAGE), Some(514 * PAGE));
        assert_eq!(sums.missing(PAGE, 512 * PAGE), Some(PAGE));
        sums.forget(511 * PAGE, 513 * PAGE);
        let left: Vec<u64> = pages.into_iter().filter(|page| has(&sums, *page)).collect();
        assert_eq!(left, [0, 513, 4 * 512, 1 << 35]);
    }

    #[test]
    fn the_first_page_without_a_sum_is_found_wherever_it_is() {
        for hole in 0..2 * GROUP {
            let mut sums = Sums::default();
            (0..2 * GROUP).filter(|page| *page != hole).for_each(|page| sums.set(page * PAGE, [1; SUM]));
            for (start, end) in
                [(0, 2 * GROUP), (hole, hole + 1), (hole / 2, hole + 1), (0, hole), (hole + 1, 2 * GROUP)]
            {
                let expected = (start..end).contains(&hole).then_some(hole * PAGE);
                assert_eq!(sums.missing(start * PAGE, end * PAGE), expected, "{start} to {end} without {hole}");
            }
        }
    }

    #[test]
    fn what_was_done_ahead_is_done_again_for_what_changed() {
        let mut sums = Sums::default();
        (0..600).for_each(|page| sums.set(page * PAGE, [page as u8; SUM]));
        let plain = |sums: &Sums| [0, 1].map(|group| sums.group(group).map(|(bytes, _)| digest(bytes)));
        let told = |sums: &Sums| [0, 1].map(|group| sums.group(group).map(|(_, digest)| digest));
        let before = plain(&sums);
        sums.settle();
        assert_eq!(told(&sums), before);
        sums.set(3 * PAGE, [77; SUM]);
        sums.forget(550 * PAGE, 551 * PAGE);
        assert_eq!(told(&sums), plain(&sums));
        assert!(before.iter().zip(told(&sums)).all(|(before, now)| *before != now));
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
