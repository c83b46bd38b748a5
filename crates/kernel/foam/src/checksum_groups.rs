//! The checksums of an image after its index, in groups: a group is read when a page of it is read.
//!
//! The obvious way is to read all of them with the index, under one digest. Then a restore begins later the more memory
//! there is, before any page has been faulted in. So the index has a digest for each group.

use crate::checksums::{CHECKSUM_BYTES, GROUP_BYTES, GroupDigest, PAGES_PER_GROUP, digest, locate};
use crate::{Checksums, Error, Extents, Object, PRESENT, PageChecksum};

/// Groups that a memory has, and their positions in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChecksumGroups {
    /// Numbers of those with stored pages, by address.
    numbers: Vec<u64>,
    digests: Vec<GroupDigest>,
}

impl ChecksumGroups {
    /// Returns the groups of the pages that are stored, and the bytes of these groups one after another.
    pub(crate) fn of(object: Object, extents: &Extents, checksums: &Checksums) -> Result<(Self, Vec<u8>), Error> {
        let missing = |start| Error::Page { object, start, why: "was announced but not stored" };
        let stored = extents.iter().filter(|extent| extent.flags & PRESENT != 0);
        if let Some(start) = stored.into_iter().find_map(|extent| checksums.missing(extent.start, extent.end())) {
            return Err(missing(start));
        }
        let (mut groups, mut bytes) = (ChecksumGroups::default(), Vec::new());
        for (first, last) in spans(extents) {
            for number in first..=last {
                let (of_group, digest) =
                    checksums.group(number).ok_or(missing(number * PAGES_PER_GROUP * stillpoint_base::PAGE))?;
                groups.numbers.push(number);
                groups.digests.push(digest);
                bytes.extend_from_slice(of_group);
            }
        }
        Ok((groups, bytes))
    }

    /// Takes the digests that an index has; returns `None` if they are not those of the stored pages.
    pub(crate) fn from_digests(extents: &Extents, digests: Vec<GroupDigest>) -> Option<Self> {
        let count = spans(extents).map(|(first, last)| last - first + 1).sum::<u64>();
        if count != digests.len() as u64 {
            return None;
        }
        let numbers = spans(extents).flat_map(|(first, last)| first..=last).collect();
        Some(ChecksumGroups { numbers, digests })
    }

    pub(crate) fn digests(&self) -> &[GroupDigest] {
        &self.digests
    }

    /// Returns the number of groups.
    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Returns true if no page is stored.
    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    /// Returns the group in which the checksum of a page is located, and its place in that group.
    pub fn place(&self, address: u64) -> Option<(usize, usize)> {
        let (number, within) = locate(address);
        self.numbers.binary_search(&number).ok().map(|group| (group, within))
    }

    /// Returns the length of all groups in bytes.
    pub fn bytes(&self) -> u64 {
        self.len() as u64 * GROUP_BYTES as u64
    }

    /// Returns the position of a group among those bytes, and its length in bytes.
    pub fn bytes_of(&self, group: usize) -> (u64, usize) {
        (group as u64 * GROUP_BYTES as u64, GROUP_BYTES)
    }

    /// Returns the checksums of a group, or `None` if the bytes are not those that it was sealed with.
    pub fn decode(&self, group: usize, bytes: &[u8]) -> Option<Vec<PageChecksum>> {
        if self.digests.get(group) != Some(&digest(bytes)) {
            return None;
        }
        Some(bytes.chunks_exact(CHECKSUM_BYTES).filter_map(<[u8]>::first_chunk).copied().collect())
    }
}

/// Returns the numbers of groups with stored pages, as pairs of first and last, by address; each number occurs once.
fn spans(extents: &Extents) -> impl Iterator<Item = (u64, u64)> {
    let stored = extents.iter().filter(|extent| extent.flags & PRESENT != 0);
    let mut next = 0;
    stored.filter_map(move |extent| {
        let (first, last) = (locate(extent.start).0.max(next), locate(extent.end() - 1).0);
        next = last + 1;
        (first <= last).then_some((first, last))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Extent, LAZY};
    use stillpoint_base::PAGE;

    fn extents(ranges: &[(u64, u64, u8)]) -> Extents {
        let extent = |&(page, pages, flags)| Extent { start: page * PAGE, pages, flags, pass: 1 };
        Extents::of(ranges.iter().map(extent))
    }

    #[test]
    fn every_stored_page_has_its_sum_in_one_group() {
        let extents = extents(&[
            (500, 20, PRESENT),
            (1000, 10, LAZY | PRESENT),
            (1020, 1, PRESENT),
            (5000, 9, LAZY),
            (9000, 1, PRESENT),
        ]);
        let mut checksums = Checksums::default();
        let stored: Vec<u64> = (500..520).chain(1000..1010).chain([1020, 9000]).collect();
        stored.iter().for_each(|page| checksums.set(page * PAGE, [*page as u8; CHECKSUM_BYTES]));
        let (groups, bytes) = ChecksumGroups::of(Object::Task(7), &extents, &checksums).unwrap();
        assert_eq!((groups.len(), bytes.len()), (3, 3 * GROUP_BYTES));
        for page in stored {
            let (group, within) = groups.place(page * PAGE).unwrap();
            let (at, length) = groups.bytes_of(group);
            let found = groups.decode(group, &bytes[at as usize..][..length]).unwrap();
            assert_eq!(found[within], [page as u8; CHECKSUM_BYTES]);
        }
        assert_eq!(groups.place(5000 * PAGE), None);
        assert_eq!(ChecksumGroups::from_digests(&extents, groups.digests().to_vec()), Some(groups.clone()));
        assert_eq!(ChecksumGroups::from_digests(&extents, groups.digests()[1..].to_vec()), None);
        assert_eq!(groups.bytes(), bytes.len() as u64);
    }

    #[test]
    fn no_byte_of_a_group_can_be_changed() {
        let extents = extents(&[(0, 3, PRESENT)]);
        let mut checksums = Checksums::default();
        (0..3).for_each(|page| checksums.set(page * PAGE, [9; CHECKSUM_BYTES]));
        let (groups, bytes) = ChecksumGroups::of(Object::Task(7), &extents, &checksums).unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert_eq!(groups.decode(0, &damaged), None, "byte {at}");
        }
        assert_eq!(groups.decode(0, &bytes[1..]), None);
        assert_eq!(groups.decode(1, &bytes), None);
    }
}
