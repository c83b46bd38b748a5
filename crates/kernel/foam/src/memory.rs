//! One memory over the passes of a checkpoint: the pages that each pass names, and those that it keeps from earlier
//! ones.

use crate::{Checksums, Error, Extent, Extents, Object, PRESENT};
use stillpoint_base::PAGE;

/// The memory of one process, or one shared memory, while it is recorded.
#[derive(Debug, Clone)]
pub struct Memory {
    object: Object,
    pass: u32,
    before: Extents,
    now: Extents,
    /// Checksums of the pages stored so far.
    pub checksums: Checksums,
}

impl Memory {
    /// Makes a memory with no pages and no passes.
    pub fn new(object: Object) -> Self {
        Memory { object, pass: 0, before: Extents::default(), now: Extents::default(), checksums: Checksums::default() }
    }

    /// Returns true if an earlier pass has recorded pages, to which the next one can refer.
    pub fn has_parent(&self) -> bool {
        !self.now.is_empty() || !self.before.is_empty()
    }

    /// Begins a pass: it will name all pages that the memory has now, stored again or unchanged.
    pub fn begin_pass(&mut self) {
        self.pass += 1;
        self.before = std::mem::take(&mut self.now);
    }

    /// Adds pages that the pass names; those with [`PRESENT`] are in this pass and are stored in place.
    ///
    /// # Errors
    /// The range is not valid, no pass has begun, or the pass already contains a page of it.
    pub fn add(&mut self, start: u64, pages: u64, flags: u8) -> Result<(), Error> {
        Extent::check(start, pages)?;
        if self.pass == 0 {
            return Err(Error::Page { object: self.object, start, why: "was sent before a pass began" });
        }
        if self.now.within(start, start + pages * PAGE).next().is_some() {
            return Err(Error::Page { object: self.object, start, why: "was sent twice in one pass" });
        }
        self.now.insert(Extent { start, pages, flags, pass: self.pass });
        Ok(())
    }

    /// Keeps pages that the pass reports as unchanged since an earlier one. Their flags are the earlier ones, because
    /// the message of the pass does not repeat them.
    ///
    /// # Errors
    /// The range is not valid, or no earlier pass has a page of it.
    pub fn keep_unchanged(&mut self, start: u64, pages: u64) -> Result<(), Error> {
        Extent::check(start, pages)?;
        let (end, mut at) = (start + pages * PAGE, start);
        let parts: Vec<Extent> = self.before.within(start, end).collect();
        for part in &parts {
            if part.start != at {
                break;
            }
            at = part.end();
        }
        if at != end {
            return Err(Error::NotInParent { object: self.object, start: at });
        }
        parts.into_iter().for_each(|part| self.now.insert(part));
        Ok(())
    }

    /// Keeps pages that the pass has sent but that are equal to those of an earlier one: they keep its number, as they
    /// were not touched since, and have the flags of this pass.
    pub fn keep(&mut self, start: u64, pages: u64) {
        let parts: Vec<Extent> = self.stored_extents(start, pages).collect();
        for part in parts {
            let brought: Vec<Extent> = self.now.within(part.start, part.end()).collect();
            for now in brought.into_iter().filter(|now| now.flags & PRESENT != 0) {
                self.now.insert(Extent { pass: part.pass, ..now });
            }
        }
    }

    /// Returns the pages in a range that earlier passes have stored.
    pub fn stored_extents(&self, start: u64, pages: u64) -> impl Iterator<Item = Extent> {
        self.before.within(start, start.saturating_add(pages * PAGE)).filter(|extent| extent.flags & PRESENT != 0)
    }

    /// Ends a pass, which has named everything. Pages that earlier passes stored and this one does not name are gone
    /// from the memory: returns their ranges, to be punched out of the file.
    pub fn end_pass(&mut self) -> Vec<(u64, u64)> {
        let mut freed = std::mem::take(&mut self.before);
        for extent in self.now.iter() {
            freed.cut(extent.start, extent.end());
        }
        let freed: Vec<(u64, u64)> =
            freed.iter().filter(|e| e.flags & PRESENT != 0).map(|e| (e.start, e.end())).collect();
        freed.iter().for_each(|(start, end)| self.checksums.remove(*start, *end));
        freed
    }

    /// Returns the pages that the memory has, as the last pass named them.
    pub fn extents(&self) -> &Extents {
        &self.now
    }

    /// Returns the process or shared memory that this memory belongs to.
    pub fn object(&self) -> Object {
        self.object
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LAZY;

    fn memory() -> Memory {
        let mut memory = Memory::new(Object::Task(7));
        memory.begin_pass();
        memory.add(PAGE, 4, LAZY | PRESENT).unwrap();
        memory.add(9 * PAGE, 1, PRESENT).unwrap();
        assert_eq!(memory.end_pass(), []);
        memory
    }

    #[test]
    fn an_unchanged_page_keeps_its_flags_and_its_pass() {
        let mut memory = memory();
        assert!(memory.has_parent());
        memory.begin_pass();
        assert!(memory.has_parent());
        memory.keep_unchanged(PAGE, 2).unwrap();
        memory.add(3 * PAGE, 1, LAZY | PRESENT).unwrap();
        memory.keep_unchanged(9 * PAGE, 1).unwrap();
        assert_eq!(memory.end_pass(), [(4 * PAGE, 5 * PAGE)]);
        let passes: Vec<_> = memory.extents().iter().map(|e| (e.start / PAGE, e.pages, e.flags, e.pass)).collect();
        assert_eq!(passes, [(1, 2, LAZY | PRESENT, 1), (3, 1, LAZY | PRESENT, 2), (9, 1, PRESENT, 1)]);
    }

    #[test]
    fn a_page_that_comes_again_as_it_was_keeps_its_pass_and_has_the_new_flags() {
        let mut memory = memory();
        memory.begin_pass();
        memory.add(PAGE, 6, PRESENT).unwrap();
        let before: Vec<_> = memory.stored_extents(0, 20).map(|e| (e.start / PAGE, e.pages)).collect();
        assert_eq!(before, [(1, 4), (9, 1)]);
        memory.keep(2 * PAGE, 4);
        assert_eq!(memory.end_pass(), [(9 * PAGE, 10 * PAGE)]);
        let passes: Vec<_> = memory.extents().iter().map(|e| (e.start / PAGE, e.pages, e.flags, e.pass)).collect();
        assert_eq!(passes, [(1, 1, PRESENT, 2), (2, 3, PRESENT, 1), (5, 2, PRESENT, 2)]);
    }

    #[test]
    fn a_hole_that_no_pass_has_is_refused_by_its_address() {
        let mut memory = memory();
        memory.begin_pass();
        let missing = Error::NotInParent { object: Object::Task(7), start: 5 * PAGE };
        assert_eq!(memory.keep_unchanged(PAGE, 5), Err(missing));
        assert!(memory.extents().is_empty());
    }

    #[test]
    fn a_page_comes_once_in_a_pass_and_in_no_time_before_one() {
        let mut memory = Memory::new(Object::Shmem(3));
        assert!(memory.add(0, 1, PRESENT).is_err());
        memory.begin_pass();
        memory.add(0, 4, PRESENT).unwrap();
        assert!(memory.add(3 * PAGE, 1, PRESENT).unwrap_err().to_string().contains("twice in one pass"));
    }
}
