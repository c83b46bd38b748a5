//! A checksum for each page that was stored.

use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::ops::Range;
use stillpoint_base::PAGE;

/// Pages whose checksums are stored together: 2 MiB of memory.
pub(crate) const PAGES_PER_GROUP: u64 = 512;
/// Bytes of a group: a checksum for each page by its address, zeros where none is stored.
pub(crate) const GROUP_BYTES: usize = PAGES_PER_GROUP as usize * CHECKSUM_BYTES;
/// Bytes of a checksum.
pub(crate) const CHECKSUM_BYTES: usize = 16;

pub(crate) type GroupDigest = [u8; 32];
/// Checksum of a page.
pub type PageChecksum = [u8; CHECKSUM_BYTES];

/// Checksum of a page: the first half of its SHA-256.
///
/// The obvious way is a CRC, which costs a fifth of that. A CRC finds damage, but an attacker can make a page that has
/// the checksum of another one. The memory of a program holds code and return addresses, so the seal of an image would
/// be worth nothing.
pub fn page_checksum(page: &[u8]) -> PageChecksum {
    let mut sum = [0; CHECKSUM_BYTES];
    sum.copy_from_slice(&Sha256::digest(page)[..CHECKSUM_BYTES]);
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
pub struct Checksums {
    groups: BTreeMap<u64, Group>,
}

/// Checksums of a group as they are in a file, so that the seal only has to copy them.
#[derive(Debug, Clone)]
struct Group {
    /// A checksum for each page, zeros where none is stored.
    bytes: Box<[u8; GROUP_BYTES]>,
    /// Pages that have a checksum, a bit for each.
    stored: [u64; (PAGES_PER_GROUP / 64) as usize],
    /// Digest of the bytes; `None` since a checksum of the group has changed.
    digest: Option<GroupDigest>,
}

impl Group {
    fn empty() -> Self {
        Group { bytes: Box::new([0; GROUP_BYTES]), stored: [0; (PAGES_PER_GROUP / 64) as usize], digest: None }
    }

    fn set(&mut self, within: usize, sum: Option<PageChecksum>) {
        self.bytes[within * CHECKSUM_BYTES..][..CHECKSUM_BYTES].copy_from_slice(&sum.unwrap_or_default());
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

impl Checksums {
    /// Records the checksum of the page at an address.
    pub fn set(&mut self, address: u64, sum: PageChecksum) {
        let (group, within) = locate(address);
        self.groups.entry(group).or_insert_with(Group::empty).set(within, Some(sum));
    }

    /// Removes the checksums of a range.
    pub fn remove(&mut self, start: u64, end: u64) {
        let groups = locate(start).0..=locate(end).0;
        for (number, group) in self.groups.range_mut(groups) {
            for within in 0..PAGES_PER_GROUP as usize {
                let address = (number * PAGES_PER_GROUP + within as u64) * PAGE;
                if (start..end).contains(&address) {
                    group.set(within, None);
                }
            }
        }
    }

    /// Computes in advance the digests of all groups: the seal then computes only those of groups that have changed
    /// since.
    pub fn compute_digests(&mut self) {
        for group in self.groups.values_mut().filter(|group| group.digest.is_none()) {
            group.digest = Some(digest(&group.bytes[..]));
        }
    }

    /// Returns the first page of a range that has no checksum.
    pub(crate) fn missing(&self, start: u64, end: u64) -> Option<u64> {
        let mut at = start;
        while at < end {
            let (number, within) = locate(at);
            let pages = ((end - at) / PAGE).min(PAGES_PER_GROUP - within as u64);
            let Some(group) = self.groups.get(&number) else { return Some(at) };
            if let Some(missing) = group.missing(within..within + pages as usize) {
                return Some(at + (missing - within) as u64 * PAGE);
            }
            at += pages * PAGE;
        }
        None
    }

    /// Returns the bytes of a group, and their digest.
    pub(crate) fn group(&self, number: u64) -> Option<(&[u8], GroupDigest)> {
        let group = self.groups.get(&number)?;
        let digest = group.digest.unwrap_or_else(|| digest(&group.bytes[..]));
        Some((&group.bytes[..], digest))
    }
}

/// Returns the group of a page, and its place in that group.
pub(crate) fn locate(address: u64) -> (u64, usize) {
    let page = address / PAGE;
    (page / PAGES_PER_GROUP, (page % PAGES_PER_GROUP) as usize)
}

/// Returns the SHA-256 of some checksums.
pub(crate) fn digest(bytes: &[u8]) -> GroupDigest {
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_page_has_another_sum() {
        let page = vec![7; PAGE as usize];
        let known: PageChecksum = Sha256::digest(&page)[..16].try_into().unwrap();
        assert_eq!(page_checksum(&page), known);
        let mut other = page.clone();
        other[4095] = 6;
        assert_ne!(page_checksum(&other), known);
    }

    #[test]
    fn a_sum_is_kept_for_its_page_alone() {
        let mut checksums = Checksums::default();
        let pages = [0, 511, 512, 513, 4 * 512, 1 << 35];
        pages.iter().for_each(|page| checksums.set(page * PAGE, [*page as u8; CHECKSUM_BYTES]));
        let has = |checksums: &Checksums, page: u64| checksums.missing(page * PAGE, (page + 1) * PAGE).is_none();
        assert!(pages.iter().all(|page| has(&checksums, *page)));
        assert_eq!(checksums.missing(511 * PAGE, 520 * PAGE), Some(514 * PAGE));
        assert_eq!(checksums.missing(PAGE, 512 * PAGE), Some(PAGE));
        checksums.remove(511 * PAGE, 513 * PAGE);
        let left: Vec<u64> = pages.into_iter().filter(|page| has(&checksums, *page)).collect();
        assert_eq!(left, [0, 513, 4 * 512, 1 << 35]);
    }

    #[test]
    fn the_first_page_without_a_sum_is_found_wherever_it_is() {
        for hole in 0..2 * PAGES_PER_GROUP {
            let mut checksums = Checksums::default();
            (0..2 * PAGES_PER_GROUP)
                .filter(|page| *page != hole)
                .for_each(|page| checksums.set(page * PAGE, [1; CHECKSUM_BYTES]));
            for (start, end) in [
                (0, 2 * PAGES_PER_GROUP),
                (hole, hole + 1),
                (hole / 2, hole + 1),
                (0, hole),
                (hole + 1, 2 * PAGES_PER_GROUP),
            ] {
                let expected = (start..end).contains(&hole).then_some(hole * PAGE);
                assert_eq!(checksums.missing(start * PAGE, end * PAGE), expected, "{start} to {end} without {hole}");
            }
        }
    }

    #[test]
    fn what_was_done_ahead_is_done_again_for_what_changed() {
        let mut checksums = Checksums::default();
        (0..600).for_each(|page| checksums.set(page * PAGE, [page as u8; CHECKSUM_BYTES]));
        let plain = |checksums: &Checksums| [0, 1].map(|group| checksums.group(group).map(|(bytes, _)| digest(bytes)));
        let from_digests = |checksums: &Checksums| [0, 1].map(|group| checksums.group(group).map(|(_, digest)| digest));
        let before = plain(&checksums);
        checksums.compute_digests();
        assert_eq!(from_digests(&checksums), before);
        checksums.set(3 * PAGE, [77; CHECKSUM_BYTES]);
        checksums.remove(550 * PAGE, 551 * PAGE);
        assert_eq!(from_digests(&checksums), plain(&checksums));
        assert!(before.iter().zip(from_digests(&checksums)).all(|(before, now)| *before != now));
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
