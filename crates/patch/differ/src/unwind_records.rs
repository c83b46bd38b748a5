//! Records of an object's `.eh_frame`, and the exception tables that they name.

use crate::object_file::{Nature, Object, Site};
use std::collections::BTreeMap;

/// One record: a CIE, or an FDE with the start of its CIE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    /// Offset of its first byte in the section.
    pub(crate) start: usize,
    /// Offset of its end.
    pub(crate) end: usize,
    /// Start of its CIE; `None` for a CIE.
    pub(crate) cie: Option<usize>,
}

/// Cuts `.eh_frame` into records.
pub(crate) fn records(bytes: &[u8]) -> Option<Vec<Record>> {
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize);
    let (mut out, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let len = word(at)?;
        // Zero ends the section; no compiler uses the 64-bit form for code of this size.
        if len == 0 {
            break;
        }
        let end = at.checked_add(4)?.checked_add(len).filter(|end| *end <= bytes.len() && len >= 8)?;
        let id = word(at + 4)?;
        let cie = if id == 0 { None } else { Some((at + 4).checked_sub(id)?) };
        out.push(Record { start: at, end, cie });
        at = end;
    }
    Some(out)
}

/// Returns the exception tables by the section of their code: an FDE refers to them besides the code.
pub(crate) fn exception_tables(object: &Object<'_>) -> BTreeMap<usize, Vec<(usize, i64)>> {
    let mut out: BTreeMap<usize, Vec<(i64, usize, i64)>> = BTreeMap::new();
    for section in object.sections.iter().filter(|s| s.nature == Nature::Unwind) {
        let mut relocations = section.relocations.iter().peekable();
        for record in records(section.bytes).unwrap_or_default() {
            let (start, end) = (record.start as u64, record.end as u64);
            let mut code = None;
            while relocations.next_if(|r| r.offset < start).is_some() {}
            while let Some(reloc) = relocations.next_if(|r| r.offset < end).filter(|_| record.cie.is_some()) {
                match (object.site(reloc), code) {
                    (Site::Inside { section, offset, .. }, None) => code = Some((section, offset)),
                    (Site::Inside { section, offset, .. }, Some((text, at))) => {
                        out.entry(text).or_default().push((at, section, offset));
                    }
                    _ => break,
                }
            }
        }
    }
    let sorted = out.into_iter().map(|(text, mut tables)| {
        tables.sort_unstable();
        (text, tables.into_iter().map(|(_, section, offset)| (section, offset)).collect())
    });
    sorted.collect()
}
