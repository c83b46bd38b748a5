//! `pagemap-*.img`: the pages of a memory, whose order gives their places in `pages-*.img`.
//!
//! criu reads `pages-*.img` from the front: the place of a page is the number of stored pages before it. Gaps between
//! extents are named as stored, lazy pages that no thread will touch: then the place of a page is its address, and the
//! file of pages can be a sparse image itself.

use crate::Error;
use crate::image::{Kind, begin, entries, message, put};
use crate::page_server::{Form, PE_LAZY, PE_PRESENT};
use stillpoint_base::PAGE;

/// Largest number of pages in older versions.
const PAGES_SHORT: u64 = u32::MAX as u64;

messages! {
    struct Head {
        pages_id: u32 = (uint32, required, tag = "1"),
    }

    struct Entry {
        vaddr: u64 = (uint64, required, tag = "1"),
        compat_nr_pages: u32 = (uint32, required, tag = "2"),
        flags: Option<u32> = (uint32, optional, tag = "4"),
        nr_pages: Option<u64> = (uint64, optional, tag = "5"),
    }
}

/// Consecutive pages that are of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pages {
    /// Address of the first one.
    pub start: u64,
    /// Number of pages.
    pub pages: u64,
    /// Bits: [`PE_LAZY`], [`PE_PRESENT`].
    pub flags: u32,
}

/// Relation between places in the file of pages and addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gaps {
    /// One stored page after another.
    Closed,
    /// Gaps are named, so that the place of a page is its address.
    Named,
}

/// Encodes a pagemap for the version of criu whose headers have `form`. `pages` are sorted and do not overlap.
pub fn encode(form: Form, pages_id: u32, gaps: Gaps, pages: impl IntoIterator<Item = Pages>) -> Vec<u8> {
    let mut bytes = begin(Kind::Pagemap);
    put(&mut bytes, &Head { pages_id });
    let mut at = 0;
    for range in pages {
        if gaps == Gaps::Named && range.start > at {
            let gap = Pages { start: at, pages: (range.start - at) / PAGE, flags: PE_LAZY | PE_PRESENT };
            put_range(&mut bytes, form, gap);
        }
        put_range(&mut bytes, form, range);
        at = range.start + range.pages * PAGE;
    }
    bytes
}

fn put_range(bytes: &mut Vec<u8>, form: Form, range: Pages) {
    let Pages { mut start, mut pages, flags } = range;
    while pages > 0 {
        let part = if form == Form::Short { pages.min(PAGES_SHORT) } else { pages };
        let entry = match form {
            Form::Short => Entry { vaddr: start, compat_nr_pages: part as u32, flags: Some(flags), nr_pages: None },
            Form::Long => Entry { vaddr: start, compat_nr_pages: 0, flags: Some(flags), nr_pages: Some(part) },
        };
        put(bytes, &entry);
        start += part * PAGE;
        pages -= part;
    }
}

/// Decodes a pagemap: the number of its file of pages, and its ranges, which are sorted and do not overlap.
///
/// # Errors
/// The bytes are not a pagemap, or its ranges overlap or are not sorted.
pub fn decode(bytes: &[u8]) -> Result<(u32, Vec<Pages>), Error> {
    let entries = entries(Kind::Pagemap, bytes)?;
    let (head, ranges) = entries.split_first().ok_or(Error::Short(bytes.len()))?;
    let head: Head = message("the head of a pagemap", head)?;
    let (mut pages, mut at) = (Vec::with_capacity(ranges.len()), 0);
    for entry in ranges {
        let entry: Entry = message("an entry of a pagemap", entry)?;
        let count = entry.nr_pages.unwrap_or(u64::from(entry.compat_nr_pages));
        let start = entry.vaddr;
        let end = count.checked_mul(PAGE).and_then(|bytes| start.checked_add(bytes)).filter(|end| *end <= 1 << 56);
        let sound = count > 0 && start >= at && start.is_multiple_of(PAGE);
        at = end.filter(|_| sound).ok_or(Error::Pages { start, pages: count })?;
        pages.push(Pages { start, pages: count, flags: entry.flags.unwrap_or(PE_PRESENT) });
    }
    Ok((head.pages_id, pages))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGES: [Pages; 3] = [
        Pages { start: 0x5555_5555_5000, pages: 3, flags: PE_LAZY | PE_PRESENT },
        Pages { start: 0x5555_5555_8000, pages: 1, flags: PE_PRESENT },
        Pages { start: 0x7fff_ffff_e000, pages: 2, flags: PE_PRESENT },
    ];

    #[test]
    fn ranges_are_read_as_they_were_written() {
        for form in [Form::Short, Form::Long] {
            assert_eq!(decode(&encode(form, 9, Gaps::Closed, RANGES)).unwrap(), (9, RANGES.to_vec()));
        }
    }

    #[test]
    fn named_gaps_make_places_of_addresses() {
        for form in [Form::Short, Form::Long] {
            let (_, ranges) = decode(&encode(form, 9, Gaps::Named, RANGES)).unwrap();
            let mut place = 0;
            for range in &ranges {
                assert_eq!(range.start, place, "{range:?}");
                place += range.pages * PAGE;
            }
            assert_eq!(place, 0x8000_0000_0000);
            let kept: Vec<Pages> = ranges.into_iter().filter(|r| RANGES.contains(r)).collect();
            assert_eq!(kept, RANGES);
        }
    }
}
