//! Table of the lookup redirect in the target. Its readers are the target's threads, which hold no lock and may be stopped between any two
//! instructions; its only writer may be killed between any two writes.

use crate::ledger::Span;
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::{FIND_ENTRY_LEN, FIND_HEADER_LEN, FIND_STATE_AT};
use stillpoint_patch_tracee::Memory;

/// Length of the table in bytes; only written pages use memory.
pub(crate) const TABLE_LEN: u64 = 64 << 10;
/// Number of usable entries; the last one is never used, because it ends the table.
const ENTRIES_MAX: usize = (TABLE_LEN as usize - FIND_HEADER_LEN) / FIND_ENTRY_LEN - 1;
const MAGIC: &[u8; 16] = b"STILLPOINT-GUIDE";
/// Largest distance of a patch from its module in bytes.
const DISTANCE_MAX: u64 = 1 << 31;

/// Code and unwind data of one patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) code: Span,
    pub(crate) link_map: Avma,
    pub(crate) search_table: Avma,
}

#[derive(Debug)]
pub(crate) enum Error {
    Memory(stillpoint_patch_tracee::Error),
    Full,
}

impl From<stillpoint_patch_tracee::Error> for Error {
    fn from(error: stillpoint_patch_tracee::Error) -> Self {
        Error::Memory(error)
    }
}

impl Entry {
    fn bytes(&self) -> [u8; FIND_STATE_AT] {
        let words = [self.code.start.0, self.code.end().0, self.link_map.0, self.search_table.0];
        let mut out = [0; FIND_STATE_AT];
        out.as_chunks_mut::<8>().0.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
        out
    }
}

/// Writes the header of a table that no thread reads yet: addresses around `module` are looked up.
pub(crate) fn create(memory: &Memory, table: Span, module: Span) -> Result<(), crate::Error> {
    let window = [module.start.0.saturating_sub(DISTANCE_MAX), module.end().0.saturating_add(DISTANCE_MAX)];
    memory.write(table.start, MAGIC)?;
    memory.write(Avma(table.start.0 + 16), &window.map(u64::to_le_bytes).concat())?;
    Ok(())
}

/// Makes exactly the entries in `wanted` active.
pub(crate) fn update(memory: &Memory, table: Span, wanted: &[Entry]) -> Result<(), Error> {
    let bytes = memory.read_vec(table.start, table.len as usize)?;
    let at = |index: usize| table.start.0 + (FIND_HEADER_LEN + index * FIND_ENTRY_LEN) as u64;
    let entry = |index: usize| &bytes[FIND_HEADER_LEN + index * FIND_ENTRY_LEN..][..FIND_ENTRY_LEN];
    let state = |index: usize| entry(index)[FIND_STATE_AT];
    let mut missing = wanted.to_vec();
    let mut free = Vec::new();
    for index in 0..ENTRIES_MAX.min((bytes.len() - FIND_HEADER_LEN) / FIND_ENTRY_LEN) {
        let known = missing.iter().position(|m| m.bytes() == entry(index)[..FIND_STATE_AT]);
        match (state(index) % 2, known) {
            (1, Some(known)) => drop(missing.swap_remove(known)),
            (1, None) => {
                memory.write(Avma(at(index) + FIND_STATE_AT as u64), &[next(state(index))])?;
                free.push((index, next(state(index))));
            }
            _ => free.push((index, state(index))),
        }
        if state(index) == 0 {
            // no entry after it has ever been used
            free.extend((index + 1..ENTRIES_MAX).map(|i| (i, 0)));
            break;
        }
    }
    widen(memory, table, &bytes, &missing)?;
    for entry in missing {
        let (index, state) = if free.is_empty() { return Err(Error::Full) } else { free.remove(0) };
        memory.write(Avma(at(index)), &entry.bytes())?;
        memory.write(Avma(at(index) + FIND_STATE_AT as u64), &[next(state)])?;
    }
    Ok(())
}

/// Returns the next state: odd and even alternate, and 0 is never used again, because it ends the table.
fn next(state: u8) -> u8 {
    if state == u8::MAX { 2 } else { state + 1 }
}

/// Extends the window to all addresses if a patch of another module is outside it. Byte by byte both bounds move only outwards, so a reader
/// meanwhile always sees a window that is large enough.
fn widen(memory: &Memory, table: Span, bytes: &[u8], more: &[Entry]) -> Result<(), Error> {
    let bound = |at: usize| bytes[at..at + 8].try_into().map(u64::from_le_bytes).unwrap_or_default();
    let (lowest, highest) = (bound(16), bound(24));
    if more.iter().any(|e| e.code.start.0 < lowest || e.code.end().0 > highest) {
        memory.write(Avma(table.start.0 + 16), &0u64.to_le_bytes())?;
        memory.write(Avma(table.start.0 + 24), &u64::MAX.to_le_bytes())?;
    }
    Ok(())
}
