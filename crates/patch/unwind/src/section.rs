//! Bytes of a process that are read at first use: a stack walk or a symbol lookup needs only some pages of megabytes of data.

use std::sync::{Mutex, MutexGuard, PoisonError};
use stillpoint_base::PAGE;

/// Reads bytes at an address; returns how many bytes it read.
type ReadFn<'r> = Box<dyn Fn(u64, &mut [u8]) -> usize + Send + Sync + 'r>;

/// A section of a module, at the address that it has in the process.
pub struct Section<'r> {
    at: u64,
    len: usize,
    read: ReadFn<'r>,
    copy: Mutex<SectionCopy>,
}

/// Copy of a section. Untouched pages of `bytes` cost nothing: the system zeroes them at the first write.
#[derive(Default)]
struct SectionCopy {
    bytes: Vec<u8>,
    /// True for each page of the process that has been read.
    present: Vec<bool>,
}

/// The bytes of a section that have been read, at their offsets; zeroes elsewhere.
pub(crate) struct Bytes<'s>(MutexGuard<'s, SectionCopy>);

impl std::ops::Deref for Bytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.bytes
    }
}

impl<'r> Section<'r> {
    /// Returns the section of `len` bytes at `at`. `read` fills a buffer from an address on and returns how many bytes it could read. It is
    /// called once for every page of 4 KiB that is needed, and again for a page that it could not read.
    pub fn new(at: u64, len: usize, read: impl Fn(u64, &mut [u8]) -> usize + Send + Sync + 'r) -> Self {
        Section { at, len, read: Box::new(read), copy: Mutex::default() }
    }

    /// Address in the process.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Reads the whole section, as far as it can be read.
    pub(crate) fn whole(&self) -> Bytes<'_> {
        let mut copy = self.copy();
        self.fetch(&mut copy, 0, self.len);
        Bytes(copy)
    }

    /// Returns the section with these bytes read; `None` if some of them cannot be read or are outside.
    pub(crate) fn with(&self, offset: usize, len: usize) -> Option<Bytes<'_>> {
        let mut copy = self.copy();
        let end = offset.checked_add(len).filter(|end| *end <= self.len)?;
        self.fetch(&mut copy, offset, end).then_some(Bytes(copy))
    }

    /// Returns the word of four bytes at an offset; `None` if it cannot be read or is outside.
    pub fn word(&self, offset: usize) -> Option<u32> {
        let bytes = self.with(offset, 4)?;
        bytes[offset..offset + 4].try_into().ok().map(u32::from_le_bytes)
    }

    /// Returns the bytes from an offset to the next zero, without it; `None` if they cannot be read, or if no zero comes within `limit`
    /// bytes.
    pub fn c_string(&self, offset: usize, limit: usize) -> Option<Vec<u8>> {
        let mut text = Vec::new();
        while text.len() < limit {
            let start = offset.checked_add(text.len()).filter(|start| *start < self.len)?;
            // no page more than needed
            let left_in_page = PAGE - self.at.wrapping_add(start as u64) % PAGE;
            let end = start.saturating_add(left_in_page as usize).min(self.len);
            let bytes = self.with(start, end - start)?;
            let rest = &bytes[start..end];
            match rest.iter().position(|byte| *byte == 0) {
                Some(len) => {
                    text.extend(&rest[..len]);
                    return (text.len() < limit).then_some(text);
                }
                None => text.extend(rest),
            }
        }
        None
    }

    fn copy(&self) -> MutexGuard<'_, SectionCopy> {
        let mut copy = self.copy.lock().unwrap_or_else(PoisonError::into_inner);
        if copy.bytes.is_empty() {
            let pages = (self.at % PAGE + self.len as u64).div_ceil(PAGE);
            *copy = SectionCopy { bytes: vec![0; self.len], present: vec![false; pages as usize] };
        }
        copy
    }

    /// Reads the missing pages of this range; returns true if all of its bytes are present now.
    fn fetch(&self, copy: &mut SectionCopy, offset: usize, end: usize) -> bool {
        let into = (self.at % PAGE) as usize;
        let pages = (into + offset) / PAGE as usize..(into + end).div_ceil(PAGE as usize);
        let mut all = true;
        for page in pages {
            if !copy.present[page] {
                let start = (page * PAGE as usize).saturating_sub(into);
                let stop = ((page + 1) * PAGE as usize - into).min(self.len);
                // a target may state an address at the very end of the address space
                let read = (self.read)(self.at.wrapping_add(start as u64), &mut copy.bytes[start..stop]);
                copy.present[page] = read == stop - start;
            }
            all &= copy.present[page];
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::sync::Arc;

    #[test]
    fn each_page_is_read_once_and_only_when_it_is_needed() {
        let asked = Arc::new(Mutex::new(RefCell::new(Vec::new())));
        let read = |at: u64, buf: &mut [u8]| {
            asked.lock().expect("no panic").borrow_mut().push((at, buf.len()));
            (at..).zip(buf.iter_mut()).for_each(|(address, byte)| *byte = address as u8);
            buf.len()
        };
        let section = Section::new(0x1ff0, 0x3000, read);
        let taken = || asked.lock().expect("no panic").take();
        assert_eq!((section.word(0), taken()), (Some(0xf3f2_f1f0), vec![(0x1ff0, 0x10)]));
        assert_eq!((section.word(0xe), taken()), (Some(0x0100_fffe), vec![(0x2000, 0x1000)]));
        assert_eq!((section.word(0x100), taken()), (Some(0xf3f2_f1f0), vec![]));
        assert_eq!((section.word(0x2ffc), taken()), (Some(0xefee_edec), vec![(0x4000, 0xff0)]));
        assert_eq!((section.word(0x2ffd), section.word(usize::MAX - 1)), (None, None));
        assert_eq!(section.whole().len(), 0x3000);
        assert_eq!(taken(), [(0x3000, 0x1000)]);
        assert!(section.whole().iter().zip(0x1ff0_u64..).all(|(byte, address)| *byte == address as u8));
    }

    #[test]
    fn strings_end_at_a_zero_within_the_limit() {
        let bytes: Vec<u8> = (0..0x2100).map(|at| if at % 0x1010 == 5 { 0 } else { b'a' }).collect();
        let read = |at: u64, buf: &mut [u8]| {
            let from = (at - 0xff0) as usize;
            buf.copy_from_slice(&bytes[from..from + buf.len()]);
            buf.len()
        };
        let section = Section::new(0xff0, 0x2100, read);
        let len = |offset: usize, limit: usize| section.c_string(offset, limit).map(|text| text.len());
        assert_eq!((len(0, 100), len(5, 100), len(6, 0x2000)), (Some(5), Some(0), Some(0x100f)));
        assert_eq!((len(6, 0x1010), len(6, 0x100f), len(0, 5)), (Some(0x100f), None, None));
        assert_eq!((len(0x2026, 0x1000), len(0x2100, 10), len(usize::MAX, 10)), (None, None, None));
        let at_the_end = Section::new(u64::MAX - 7, 0x1000, |_, buf| buf.len());
        assert_eq!(at_the_end.c_string(0, 8), Some(Vec::new()));
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_zeroes() {
        let section = Section::new(0x1000, 0x2000, |at, buf| if at < 0x2000 { buf.len() } else { 8 });
        assert!(section.with(0, 0x1000).is_some() && section.with(0xfff, 2).is_none());
        assert_eq!((section.word(0xffc), section.word(0x1000)), (Some(0), None));
    }
}
