//! Offsets of all parts of a patch in its arena, before the arena's address is known.
//!
//! ```text
//! RX  displaced prologues | far stubs | [dispatcher 0 | dispatcher 1 | new function] ... | other text
//! R   state bytes | slots | read-only data | exception tables | unwind data, its search table
//! RW  data | zeroed data
//! ```
//! Dispatchers are directly before their function, at an address for which the jumps from the entry to either of them and to the function
//! differ only in their lowest byte. Switching between them is a write of one byte, which cannot tear.

use crate::ledger::Span;
use std::collections::BTreeMap;
use stillpoint_base::PAGE;
use stillpoint_patch_format::{Avma, Patch, RelocationKind, SectionKind, SymbolValue};
use stillpoint_patch_insn::{DISPATCH_LEN, DISPLACED_MAX, JUMP_LEN};
use stillpoint_patch_unwind::{COMMON_LEN, PIECE_MAX, PLAIN_LEN, count_described, table_len};

/// Length of one dispatcher's room in bytes.
pub const DISPATCHER_LEN: u64 = 64;
/// Number of dispatchers' rooms of each function: one for the transition that brings the patch, one for the next.
pub const DISPATCHERS: u64 = 2;
/// Number of state bytes reserved in each arena.
pub const STATES_LEN: u64 = 64;
const STUB_LEN: u64 = 8;
const SLOT_LEN: u64 = 8;
const _: () = assert!(DISPATCH_LEN as u64 <= DISPATCHER_LEN);

/// Offsets of the parts made for a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionLayout {
    /// Offset of its displaced prologue in the arena, in bytes.
    pub displaced: u64,
    /// Offset of its first dispatcher's room in the arena, in bytes.
    pub dispatchers: u64,
}

/// Offsets in an arena, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Lengths of the segments in bytes, whole pages: text, read-only, data.
    pub lens: [u64; 3],
    /// Offset of each section of the patch.
    pub sections: Vec<u64>,
    /// Offsets for each function of the patch.
    pub functions: Vec<FunctionLayout>,
    /// Offsets of each far stub and its slot, by symbol.
    pub stubs: BTreeMap<u32, (u64, u64)>,
    /// Offset of each slot, by symbol.
    pub slots: BTreeMap<u32, u64>,
    /// Offset of the state bytes.
    pub states: u64,
    /// Offset of the unwind data, and its length with the terminator.
    pub eh_frame: (u64, u64),
    /// Offset and length of the room for unwind data of our own code, a part of `eh_frame`.
    pub described: (u64, u64),
    /// Offset and length of the room for the table by which unwinders search it.
    pub search_table: (u64, u64),
    /// Offset and length of all far stubs.
    pub stubs_span: (u64, u64),
    displaced_len: u64,
}

struct Cursor(u64);

impl Cursor {
    fn take(&mut self, len: u64, align: u64) -> u64 {
        let at = self.0.next_multiple_of(align);
        self.0 = at + len;
        at
    }

    fn page(&mut self) -> u64 {
        self.0 = self.0.next_multiple_of(PAGE);
        self.0
    }
}

impl Layout {
    /// Lays out `patch`.
    pub fn of(patch: &Patch) -> Self {
        let mut at = Cursor(0);
        let mut sections = vec![None; patch.sections.len()];
        let displaced: Vec<u64> = patch.functions.iter().map(|_| at.take(DISPLACED_MAX as u64, 16)).collect();
        let displaced_len = at.0;
        let stubs_at: Vec<(u32, u64)> = far_symbols(patch).map(|symbol| (symbol, at.take(STUB_LEN, 8))).collect();
        let stubs_span = (displaced_len, at.0 - displaced_len);
        let mut functions = Vec::with_capacity(patch.functions.len());
        for (function, displaced) in patch.functions.iter().zip(displaced) {
            let dispatchers = place_function(patch, function, &mut at, &mut sections);
            functions.push(FunctionLayout { displaced, dispatchers });
        }
        place(patch, SectionKind::Text, &mut at, &mut sections);
        let text_end = at.page();

        let states = at.take(STATES_LEN, 64);
        let stubs = stubs_at.into_iter().map(|(s, stub)| (s, (stub, at.take(SLOT_LEN, 8)))).collect();
        let slots = slot_symbols(patch).map(|symbol| (symbol, at.take(SLOT_LEN, 8))).collect();
        place(patch, SectionKind::RoData, &mut at, &mut sections);
        place(patch, SectionKind::ExceptTable, &mut at, &mut sections);
        let eh_start = at.take(0, 8);
        for (section, place) in patch.sections.iter().zip(&mut sections) {
            if section.kind == SectionKind::EhFrame {
                // no padding between: four zero bytes would end the list
                *place = Some(at.take(section.size, 1));
            }
        }
        let pieces = described_room(functions.len(), stubs_span.1);
        let described = (at.take(pieces, 1), pieces);
        let eh_end = at.take(4, 1) + 4;
        let table = table_len(own_records(patch) + 2 * functions.len() + 1) as u64;
        let search_table = (at.take(table, 8), table);
        let read_only_end = at.page();

        place(patch, SectionKind::Data, &mut at, &mut sections);
        place(patch, SectionKind::Bss, &mut at, &mut sections);
        let data_end = at.page();
        Layout {
            lens: [text_end, read_only_end - text_end, data_end - read_only_end],
            sections: sections.into_iter().map(Option::unwrap_or_default).collect(),
            functions,
            stubs,
            slots,
            states,
            eh_frame: (eh_start, eh_end - eh_start),
            described,
            search_table,
            stubs_span,
            displaced_len,
        }
    }

    /// Returns the length of the whole arena in bytes.
    pub fn len(&self) -> u64 {
        self.lens.iter().sum()
    }

    /// Returns false: an arena is never empty, because it holds state bytes.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the offsets of the read-only segment, which follows the text, and of the data, which follows that.
    pub fn starts(&self) -> [u64; 2] {
        [self.lens[0], self.lens[0] + self.lens[1]]
    }

    /// Returns the displaced prologues and dispatchers, for an arena at `arena`.
    pub fn trampolines(&self, arena: Avma) -> Vec<Span> {
        let dispatchers = self.functions.iter().map(|f| (f.dispatchers, DISPATCHERS * DISPATCHER_LEN));
        let all = std::iter::once((0, self.displaced_len)).chain(dispatchers);
        all.map(|(offset, len)| Span::new(Avma(arena.0 + offset), len)).collect()
    }
}

/// Places `function`'s section with its dispatchers before it; returns the offset of the dispatchers.
fn place_function(
    patch: &Patch,
    function: &stillpoint_patch_format::Function,
    at: &mut Cursor,
    sections: &mut [Option<u64>],
) -> u64 {
    let room = DISPATCHERS * DISPATCHER_LEN;
    let start = match patch.symbols.get(function.new as usize).map(|s| &s.value) {
        Some(SymbolValue::Patch { section, offset: 0 }) if sections[*section as usize].is_none() => *section as usize,
        // a second name for the same code, or code in the middle of a section: dispatchers of its own
        _ => return at.take(room, DISPATCHER_LEN),
    };
    let section = &patch.sections[start];
    let align = u64::from(section.align).max(DISPATCHER_LEN);
    let behind_jump = function.old.start.0.wrapping_add(JUMP_LEN as u64);
    let first = at.take(room, DISPATCHER_LEN).next_multiple_of(align);
    let new = (0..4).map(|i| (first + room).next_multiple_of(align) + i * align);
    let lowest = |new: u64| (new - room).wrapping_sub(behind_jump) & 0xff;
    let new = new.clone().find(|new| lowest(*new) + room < 256).unwrap_or((first + room).next_multiple_of(align));
    at.0 = new;
    sections[start] = Some(at.take(section.size, align));
    new - room
}

fn place(patch: &Patch, kind: SectionKind, at: &mut Cursor, sections: &mut [Option<u64>]) {
    for (section, place) in patch.sections.iter().zip(sections) {
        if section.kind == kind && place.is_none() {
            *place = Some(at.take(section.size, u64::from(section.align)));
        }
    }
}

/// Returns the room for the unwind data of our own code: dispatchers and a displaced prologue of each function, and the stubs.
fn described_room(functions: usize, stubs: u64) -> u64 {
    let stubs = if stubs > 0 { PLAIN_LEN } else { 0 };
    (COMMON_LEN + functions * (PLAIN_LEN + PIECE_MAX) + stubs) as u64
}

/// Counts the records of the patch's own unwind data that describe code; damaged records are refused at link time.
fn own_records(patch: &Patch) -> usize {
    let sections = patch.sections.iter().filter(|s| s.kind == SectionKind::EhFrame);
    sections.map(|s| count_described(&s.bytes).unwrap_or(0)).sum()
}

/// Returns the symbols that may have to be reached through a stub: by a branch, or because an address of 32 bits is needed (for a
/// function's address in code at a fixed address, or for a personality routine in unwind data).
fn far_symbols(patch: &Patch) -> impl Iterator<Item = u32> {
    let outside = |symbol: u32| {
        let value = patch.symbols.get(symbol as usize).map(|s| &s.value);
        matches!(value, Some(SymbolValue::Import { .. } | SymbolValue::TargetSlot(_) | SymbolValue::OtherPatch))
    };
    let unwind_data = patch.sections.iter().filter(|s| s.kind == SectionKind::EhFrame).flat_map(|s| &s.relocations);
    let personalities = unwind_data.filter(|r| r.kind != RelocationKind::Abs64 && outside(r.symbol)).map(|r| r.symbol);
    let wanted = [RelocationKind::Branch32, RelocationKind::Abs32, RelocationKind::Abs32Signed];
    let code = used(patch, move |kind, symbol| wanted.contains(&kind) && outside(symbol));
    code.chain(personalities).collect::<std::collections::BTreeSet<u32>>().into_iter()
}

/// Returns the symbols whose value a slot must hold.
fn slot_symbols(patch: &Patch) -> impl Iterator<Item = u32> {
    used(patch, |kind, _| matches!(kind, RelocationKind::GotPc32 | RelocationKind::GotTpOff32))
}

fn used(patch: &Patch, wanted: impl Fn(RelocationKind, u32) -> bool) -> impl Iterator<Item = u32> {
    let relocations = patch.sections.iter().flat_map(|s| &s.relocations);
    let set: std::collections::BTreeSet<u32> =
        relocations.filter(|r| wanted(r.kind, r.symbol)).map(|r| r.symbol).collect();
    set.into_iter()
}
