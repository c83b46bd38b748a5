//! The table by which unwinders search `.eh_frame` (`.eh_frame_hdr` of the LSB).

use crate::section::Section;
use gimli::{BaseAddresses, CieOrFde, EhFrame, EndianSlice, LittleEndian, UnwindSection};

/// Bytes before the first entry.
const HEADER_LEN: usize = 12;
const ENTRY_LEN: usize = 8;
/// Version, and pcrel|sdata4, udata4, datarel|sdata4: the only form on which libgcc uses binary search.
const ENCODING: [u8; 4] = [1, 0x1b, 0x03, 0x3b];

/// The reason why there is no table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// A record is not understood.
    #[error("unwind data at offset {0:#x} has an unknown format")]
    Record(usize),
    /// Code or records are more than 2 GiB away from the table.
    #[error("unwind data for {0:#x} is out of the search table's reach")]
    Reach(u64),
}

/// Code with the record that describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Described {
    /// First byte of the code.
    pub start: u64,
    /// One past its last byte.
    pub end: u64,
    /// Offset of the record in `.eh_frame`, in bytes.
    pub record: usize,
}

/// Returns all code that the records in `eh_frame` (mapped at `at`) describe, in ascending order.
///
/// # Errors
/// [`TableError::Record`] for a record that cannot be read.
pub fn described(at: u64, eh_frame: &[u8]) -> Result<Vec<Described>, TableError> {
    let bases = BaseAddresses::default().set_eh_frame(at);
    let section = EhFrame::from(EndianSlice::new(eh_frame, LittleEndian));
    let mut entries = section.entries(&bases);
    let mut out = Vec::new();
    let mut last = 0;
    while let Some(entry) = entries.next().map_err(|_| TableError::Record(last))? {
        let CieOrFde::Fde(partial) = entry else { continue };
        let fde = partial.parse(EhFrame::cie_from_offset).map_err(|_| TableError::Record(last))?;
        last = fde.offset();
        let start = fde.initial_address();
        if let Some(end) = start.checked_add(fde.len()).filter(|end| *end > start) {
            out.push(Described { start, end, record: last });
        }
    }
    out.sort_unstable();
    Ok(out)
}

/// Counts the pieces of code that the records in `eh_frame` describe. Reads only the record headers, so it works before relocation.
///
/// # Errors
/// [`TableError::Record`] for a record that cannot be read.
pub fn count_described(eh_frame: &[u8]) -> Result<usize, TableError> {
    let word = |at: usize| eh_frame.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
    let (mut at, mut count) = (0, 0);
    while at < eh_frame.len() {
        let damaged = TableError::Record(at);
        let len = word(at).ok_or(damaged)? as usize;
        if len == 0 {
            break;
        }
        count += usize::from(word(at + 4).ok_or(damaged)? != 0);
        at = at.checked_add(4 + len).filter(|end| *end <= eh_frame.len()).ok_or(damaged)?;
    }
    Ok(count)
}

/// Bytes of a table of `count` entries.
pub fn table_len(count: usize) -> usize {
    HEADER_LEN + count * ENTRY_LEN
}

/// Returns the table for the records in `eh_frame` (at `eh_frame_at`), made for the address `at`, a multiple of four.
///
/// # Errors
/// A record cannot be read, or its code is out of reach of the table.
pub fn search_table(eh_frame_at: u64, eh_frame: &[u8], at: u64) -> Result<Vec<u8>, TableError> {
    let all = described(eh_frame_at, eh_frame)?;
    let near = |to: u64, from: u64| {
        let distance = i32::try_from(to.wrapping_sub(from) as i64).map_err(|_| TableError::Reach(to))?;
        Ok(distance.to_le_bytes())
    };
    let mut out = ENCODING.to_vec();
    out.extend_from_slice(&near(eh_frame_at, at.wrapping_add(4))?);
    out.extend_from_slice(&(all.len() as u32).to_le_bytes());
    for code in all {
        out.extend_from_slice(&near(code.start, at)?);
        out.extend_from_slice(&near(eh_frame_at.wrapping_add(code.record as u64), at)?);
    }
    Ok(out)
}

/// A table in a process, in the form that linkers and [`search_table()`] make.
pub(crate) struct SearchTable<'r> {
    hdr: Section<'r>,
    count: usize,
}

impl<'r> SearchTable<'r> {
    /// Returns the table in `.eh_frame_hdr`, if it has the known form and belongs to this `.eh_frame`.
    pub(crate) fn of(hdr: Section<'r>, eh_frame_at: u64) -> Option<Self> {
        let known = hdr.word(0)? == u32::from_le_bytes(ENCODING);
        let leads_to = hdr.at().wrapping_add(4).wrapping_add_signed(i64::from(hdr.word(4)? as i32));
        let count = hdr.word(8)? as usize;
        (known && leads_to == eh_frame_at && count > 0).then_some(SearchTable { hdr, count })
    }

    /// Returns the address of the record of the last function that begins at or before this address; that function may also end before it.
    pub(crate) fn last_to_begin_at_most(&self, address: u64) -> Option<u64> {
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.field(middle, 0)? <= address {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        self.field(low.checked_sub(1)?, 4)
    }

    fn field(&self, entry: usize, part: usize) -> Option<u64> {
        let distance = self.hdr.word(HEADER_LEN + entry * ENTRY_LEN + part)?;
        Some(self.hdr.at().wrapping_add_signed(i64::from(distance as i32)))
    }
}
