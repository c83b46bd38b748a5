//! Unwind data of an arena beyond the compiler's: descriptions of our own code, and the table by which all of it is searched.

use super::{DISPATCHER_LEN, DISPATCHERS, Image, Layout, LinkError};
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::{DISPLACED_MAX, stack_states};
use stillpoint_patch_unwind::{Piece, Row, TableError, describe, search_table};

/// Describes dispatchers, stubs and displaced prologues, which must be in `image`, and makes the search table.
///
/// A thread can be cancelled or examined in any of them, although no call returns there.
///
/// # Errors
/// [`LinkError::UnwindData`] if a record of the patch cannot be read, or is out of reach of the table.
pub fn make_visible(layout: &Layout, arena: Avma, image: &mut Image) -> Result<(), LinkError> {
    let at = |offset: u64| arena.0 + offset;
    let [text, read_only, _] = &mut image.segments;
    let mut pieces = Vec::with_capacity(layout.functions.len() * 2 + 1);
    for function in &layout.functions {
        pieces.push(Piece::plain(at(function.dispatchers), DISPATCHERS * DISPATCHER_LEN));
        let start = function.displaced as usize;
        pieces.push(displaced(&text[start..start + DISPLACED_MAX], at(function.displaced)));
    }
    let (stubs, stubs_len) = layout.stubs_span;
    if stubs_len > 0 {
        pieces.push(Piece::plain(at(stubs), stubs_len));
    }
    let inside = |offset: u64| (offset - layout.lens[0]) as usize;
    let room = inside(layout.described.0)..inside(layout.described.0 + layout.described.1);
    let reach = || TableError::Reach(at(layout.described.0));
    let described = describe(at(layout.described.0), &pieces).filter(|d| d.len() <= room.len()).ok_or_else(reach)?;
    read_only[room][..described.len()].copy_from_slice(&described);

    let (eh_frame, len) = layout.eh_frame;
    let records = &read_only[inside(eh_frame)..inside(eh_frame + len)];
    let table = search_table(at(eh_frame), records, at(layout.search_table.0))?;
    let room = inside(layout.search_table.0)..inside(layout.search_table.0 + layout.search_table.1);
    if table.len() > room.len() {
        return Err(TableError::Record(0).into());
    }
    read_only[room][..table.len()].copy_from_slice(&table);
    Ok(())
}

fn displaced(code: &[u8], at: u64) -> Piece {
    let found = stack_states(code, Avma(at));
    let row = |s: stillpoint_patch_insn::StackState| Row { offset: s.offset, frame: s.frame, saved: s.saved };
    Piece { start: at, len: u64::from(found.len), rows: found.states.into_iter().map(row).collect() }
}
