//! Touched pages of a process, from `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).

use crate::Pid;
use std::fs::File;
use std::os::unix::fs::FileExt;
use stillpoint_base::PAGE;
use stillpoint_host::kernel_files;
use stillpoint_patch_format::Avma;

/// Length of an entry in bytes.
const ENTRY: usize = 8;
/// Number of entries read at once: those of 32 MiB.
const AT_ONCE: usize = 8192;
/// Bits of an entry: in memory, or swapped out.
const HELD: u64 = 1 << 63 | 1 << 62;

/// Pages of a process, as the kernel reports them; reading never touches a page.
#[derive(Debug)]
pub struct Pagemap {
    file: Option<File>,
    /// Number of the first page in `entries`.
    first: u64,
    entries: Vec<u8>,
}

impl Pagemap {
    /// Opens the map of a process; if the kernel shows none, every page counts as held.
    pub fn of(pid: Pid) -> Pagemap {
        Pagemap { file: kernel_files::open(format!("/proc/{pid}/pagemap")).ok(), first: 0, entries: Vec::new() }
    }

    /// Returns true if the page at an address was ever touched and holds data, or if that is unknown. Calls in ascending order of addresses
    /// cost little.
    pub fn is_held(&mut self, at: Avma) -> bool {
        let page = at.0 / PAGE;
        self.entry(page).or_else(|| self.read(page)).is_none_or(|entry| entry & HELD != 0)
    }

    fn entry(&self, page: u64) -> Option<u64> {
        let index = usize::try_from(page.checked_sub(self.first)?).ok()?.checked_mul(ENTRY)?;
        let bytes = self.entries.get(index..index + ENTRY)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    }

    fn read(&mut self, page: u64) -> Option<u64> {
        let file = self.file.as_ref()?;
        self.first = page;
        self.entries.resize(AT_ONCE * ENTRY, 0);
        let read = file.read_at(&mut self.entries, page.checked_mul(ENTRY as u64)?).unwrap_or(0);
        self.entries.truncate(read);
        self.entry(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    #[test]
    fn pages_that_nothing_touched_hold_nothing() {
        const LEN: usize = 1 << 30;
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: new memory of this process, at no fixed address.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), LEN, prot, flags) }.expect("map memory");
        let start = at as u64;
        let page = |number: u64| Avma(start + number * PAGE);
        // SAFETY: the page was just mapped writable, and nothing else knows of it.
        unsafe { at.cast::<u8>().add(200_000 * PAGE as usize).write(1) };
        let mut map = Pagemap::of(Pid(std::process::id().cast_signed()));
        let held: Vec<u64> = (0..(LEN as u64 / PAGE)).filter(|number| map.is_held(page(*number))).collect();
        assert!(held.contains(&200_000), "{held:?}");
        // at most one huge page
        assert!(held.len() <= 512, "{} pages are held", held.len());
        // SAFETY: nothing refers to the memory any more.
        unsafe { munmap(at, LEN) }.expect("unmap memory");
    }

    #[test]
    fn what_is_not_known_counts_as_held() {
        assert!(Pagemap::of(Pid(0)).is_held(Avma(0x1000)));
        assert!(Pagemap::of(Pid(std::process::id().cast_signed())).is_held(Avma(u64::MAX)));
    }
}
