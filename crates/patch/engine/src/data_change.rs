//! Changes of data for all threads at once: checks, and what a transition needs for them.

use crate::Error;
use crate::ledger::{Contents, Span, View};
use crate::link::{Image, Layout, contents};
use std::collections::BTreeMap;
use stillpoint_base::{PAGE, page_start};
use stillpoint_patch_format::{Avma, Patch};
use stillpoint_patch_insn::{self as insn, COMPLETE_DATA_LEN};
use stillpoint_patch_tracee::{Mapping, Memory, Module, Process};

/// Memory of a transition for a change of data. The program may write to its state byte, as threads complete the change by themselves if the
/// tool dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DataRoom {
    /// Address of the code that completes the change.
    pub(crate) completer: Avma,
    /// Address of the list of pieces, which is read-only.
    pub(crate) list: Avma,
    /// Address of the state byte; the claim is the next byte.
    pub(crate) state: Avma,
}

impl DataRoom {
    /// Length of the code in bytes.
    pub(crate) const CODE_LEN: u64 = COMPLETE_DATA_LEN as u64;

    /// Returns the code.
    pub(crate) fn code(&self) -> Span {
        Span::new(self.completer, DataRoom::CODE_LEN)
    }

    /// Returns the bytes that must be in memory before the transition begins.
    pub(crate) fn pieces(&self, changes: &[Contents]) -> Result<Vec<(Avma, Vec<u8>)>, insn::Error> {
        let claim = Avma(self.state.0 + 1);
        let code = insn::complete_data(self.completer, self.list, self.state, claim)?;
        Ok(vec![(self.completer, code.to_vec()), (self.list, list(self.list, changes)), (claim, vec![0])])
    }
}

fn list(at: Avma, changes: &[Contents]) -> Vec<u8> {
    let pieces: Vec<(Avma, &[u8])> = changes.iter().map(|change| (change.at, &change.to[..])).collect();
    insn::data_list(at, &pieces)
}

/// Returns the length of the list of pieces in bytes.
pub(crate) fn list_len(changes: &[Contents]) -> u64 {
    list(Avma(0), changes).len() as u64
}

/// Returns the variables whose contents differ between two lists of active patches.
pub(crate) fn changes(view: &View, before: &[u32], after: &[u32]) -> Vec<Contents> {
    let touched = before.iter().chain(after).filter_map(|n| view.patch(*n)).flat_map(|p| &p.data);
    let touched: BTreeMap<Avma, &str> = touched.map(|c| (c.at, c.name.as_str())).collect();
    let (before, after) = (view.data(before), view.data(after));
    let change = |(at, name): (Avma, &str)| {
        let (from, to) = (before.get(&at)?.to_vec(), after.get(&at)?.to_vec());
        (from != to).then(|| Contents { name: name.to_owned(), at, from, to })
    };
    touched.into_iter().filter_map(change).collect()
}

/// Checks that the variables of `patch`, linked as `image` in an arena at `arena`, can be written and hold the contents that they had at the
/// start, or those of an active patch.
///
/// # Errors
/// The program has changed one of them, or it is not in memory that can be written.
pub(crate) fn check(
    process: &Process,
    mappings: &[Mapping],
    (module, view): (&Module, &View),
    patch: &Patch,
    (layout, arena, image): (&Layout, Avma, &Image),
) -> Result<(), Error> {
    let active = view.data(&view.active);
    for change in &patch.data {
        let at = module.avma(change.old.start);
        pages(mappings, &change.name, at, change.old.len)?;
        let shipped = contents(image, layout, arena, change.shipped, change.old.len);
        let expected = active.get(&at).copied().unwrap_or(&shipped);
        expect(process.memory(), view, (&change.name, at), expected)?;
    }
    Ok(())
}

/// Checks that every variable holds what it holds while the active patches are active.
///
/// # Errors
/// The program has changed one of them.
pub(crate) fn expect_all<'c>(
    memory: &Memory,
    view: &View,
    changes: impl IntoIterator<Item = &'c Contents>,
) -> Result<(), Error> {
    changes.into_iter().try_for_each(|change| expect(memory, view, (&change.name, change.at), &change.from))
}

fn expect(memory: &Memory, view: &View, (name, at): (&str, Avma), expected: &[u8]) -> Result<(), Error> {
    let now = memory.read_vec(at, expected.len())?;
    let Some(offset) = expected.iter().zip(&now).position(|(a, b)| a != b) else { return Ok(()) };
    let active = view.active.iter().rev().filter_map(|n| view.patch(*n));
    let writer = active.into_iter().find(|p| p.data.iter().any(|c| c.at == at)).map(|p| p.name.clone());
    Err(Error::DataWritten { name: name.to_owned(), at, offset, patch: writer })
}

/// Returns the pages of a variable that the program maps read-only.
///
/// # Errors
/// [`Error::DataUnwritable`] if the variable is not in private readable memory without code.
pub(crate) fn pages(mappings: &[Mapping], name: &str, at: Avma, len: u64) -> Result<Vec<Span>, Error> {
    let refuse = |why: &str| Err(Error::DataUnwritable { name: name.to_owned(), at, why: why.to_owned() });
    let (mut next, end) = (at.0, at.0.saturating_add(len));
    let mut closed = Vec::new();
    while next < end {
        let Some(mapping) = mappings.iter().find(|m| m.contains(Avma(next))) else { return refuse("is not mapped") };
        if mapping.shared || !mapping.read || mapping.execute {
            return refuse("is not located in private data of the program");
        }
        let until = mapping.end.0.min(end);
        if !mapping.write {
            let start = page_start(next);
            closed.push(Span::new(Avma(start), page_start(until + PAGE - 1) - start));
        }
        next = until;
    }
    Ok(closed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(start: u64, end: u64, write: bool) -> Mapping {
        Mapping {
            start: Avma(start),
            end: Avma(end),
            read: true,
            write,
            execute: false,
            shared: false,
            offset: 0,
            inode: 1,
            path: None,
            device: (0, 0),
            deleted: false,
        }
    }

    #[test]
    fn only_pages_without_write_permission_are_opened() {
        let all = [mapping(0x1000, 0x3000, false), mapping(0x3000, 0x5000, true)];
        let opened = |at, len| pages(&all, "limits", Avma(at), len).expect("private data");
        assert_eq!(opened(0x1ff8, 16), [Span::new(Avma(0x1000), 0x2000)]);
        assert_eq!(opened(0x2ff8, 16), [Span::new(Avma(0x2000), 0x1000)]);
        assert_eq!(opened(0x3000, 0x2000), []);
        assert!(matches!(pages(&all, "limits", Avma(0x4fff), 2), Err(Error::DataUnwritable { .. })));
        let code = [Mapping { execute: true, ..mapping(0x1000, 0x2000, false) }];
        assert!(matches!(pages(&code, "limits", Avma(0x1000), 2), Err(Error::DataUnwritable { .. })));
    }
}
