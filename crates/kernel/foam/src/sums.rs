//! A checksum for each page that was stored.

use crate::PAGE;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Pages whose sums lie together: 2 MiB of memory.
pub(crate) const GROUP: u64 = 512;

pub(crate) type Digested = [u8; 32];

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

/// Checksums by address, while passes go over a memory.
#[derive(Debug, Clone, Default)]
pub struct Sums {
    groups: BTreeMap<u64, Group>,
}

#[derive(Debug, Clone)]
struct Group {
    sums: Box<[Option<u32>]>,
    /// Of its bytes; none since a sum of it has changed.
    digest: Option<Digested>,
}

impl Group {
    fn bytes(&self) -> Vec<u8> {
        self.sums.iter().flat_map(|sum| sum.unwrap_or_default().to_le_bytes()).collect()
    }
}

impl Sums {
    /// Notes the sum of the page at an address.
    pub fn set(&mut self, address: u64, sum: u32) {
        let (group, within) = place(address);
        let empty = || Group { sums: vec![None; GROUP as usize].into(), digest: None };
        let group = self.groups.entry(group).or_insert_with(empty);
        group.sums[within] = Some(sum);
        group.digest = None;
    }

    /// Forgets the pages of a range.
    pub fn forget(&mut self, start: u64, end: u64) {
        let groups = place(start).0..=place(end).0;
        for (number, group) in self.groups.range_mut(groups) {
            for (within, sum) in group.sums.iter_mut().enumerate() {
                let address = (number * GROUP + within as u64) * PAGE;
                if (start..end).contains(&address) {
                    *sum = None;
                    group.digest = None;
                }
            }
        }
    }

    /// Does ahead what the seal needs of sums that may stay as they are: then it has to do with those alone that have changed.
    pub fn settle(&mut self) {
        for group in self.groups.values_mut().filter(|group| group.digest.is_none()) {
            group.digest = Some(digest(&group.bytes()));
        }
    }

    /// The first page of a range that has no sum.
    pub(crate) fn missing(&self, start: u64, end: u64) -> Option<u64> {
        let mut at = start;
        while at < end {
            let (number, within) = place(at);
            let pages = ((end - at) / PAGE).min(GROUP - within as u64);
            let Some(group) = self.groups.get(&number) else { return Some(at) };
            if let Some(first) = group.sums[within..][..pages as usize].iter().position(Option::is_none) {
                return Some(at + first as u64 * PAGE);
            }
            at += pages * PAGE;
        }
        None
    }

    /// The bytes of a group, and their digest.
    pub(crate) fn group(&self, number: u64) -> Option<(Vec<u8>, Digested)> {
        let group = self.groups.get(&number)?;
        let bytes = group.bytes();
        let digest = group.digest.unwrap_or_else(|| digest(&bytes));
        Some((bytes, digest))
    }
}

/// The group of a page, and its place there.
pub(crate) fn place(address: u64) -> (u64, usize) {
    let page = address / PAGE;
    (page / GROUP, (page % GROUP) as usize)
}

/// SHA-256 of some sums.
pub(crate) fn digest(bytes: &[u8]) -> Digested {
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_is_kept_for_its_page_alone() {
        let mut sums = Sums::default();
        let pages = [0, 511, 512, 513, 4 * 512, 1 << 35];
        pages.iter().for_each(|page| sums.set(page * PAGE, *page as u32));
        let has = |sums: &Sums, page: u64| sums.missing(page * PAGE, (page + 1) * PAGE).is_none();
        assert!(pages.iter().all(|page| has(&sums, *page)));
        assert_eq!(sums.missing(511 * PAGE, 520 * PAGE), Some(514 * PAGE));
        assert_eq!(sums.missing(PAGE, 512 * PAGE), Some(PAGE));
        sums.forget(511 * PAGE, 513 * PAGE);
        let left: Vec<u64> = pages.into_iter().filter(|page| has(&sums, *page)).collect();
        assert_eq!(left, [0, 513, 4 * 512, 1 << 35]);
    }

    #[test]
    fn what_was_done_ahead_is_done_again_for_what_changed() {
        let mut sums = Sums::default();
        (0..600).for_each(|page| sums.set(page * PAGE, page as u32));
        let plain = |sums: &Sums| [0, 1].map(|group| sums.group(group).map(|(bytes, _)| digest(&bytes)));
        let told = |sums: &Sums| [0, 1].map(|group| sums.group(group).map(|(_, digest)| digest));
        let before = plain(&sums);
        sums.settle();
        assert_eq!(told(&sums), before);
        sums.set(3 * PAGE, 77);
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
