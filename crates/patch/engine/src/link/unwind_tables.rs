//! Unwind data of an arena beyond the compiler's: descriptions of our own code, and the table by which all of it is searched.

use super::{DISPATCHER_LEN, DISPATCHERS, Image, Layout, LinkError};
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::{DISPLACED_MAX, stack_states};
use stillpoint_patch_unwind::{Piece, Row, describe, search_table};

/// Describes dispatchers, stubs and displaced prologues, which must be in `image`, and makes the search table.
///
/// A thread can be cancelled or examined in any of them, although no call returns there.
///
/// # Errors
/// [`LinkError::UnwindData`] if a record of the patch cannot be read, or is out of reach of the table; [`LinkError::UnwindReach`] or
/// [`LinkError::Room`] if the layout does not fit the records of our own code.
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
    let described_at = at(layout.described.0);
    let described = describe(described_at, &pieces).ok_or(LinkError::UnwindReach(Avma(described_at)))?;
    check_room("the unwind data of our own code", described.len(), room.len())?;
    read_only[room][..described.len()].copy_from_slice(&described);

    let (eh_frame, len) = layout.eh_frame;
    let records = &read_only[inside(eh_frame)..inside(eh_frame + len)];
    let table = search_table(at(eh_frame), records, at(layout.search_table.0))?;
    let room = inside(layout.search_table.0)..inside(layout.search_table.0 + layout.search_table.1);
    check_room("the search table of the unwind data", table.len(), room.len())?;
    read_only[room][..table.len()].copy_from_slice(&table);
    Ok(())
}

fn check_room(part: &'static str, needed: usize, reserved: usize) -> Result<(), LinkError> {
    if needed <= reserved { Ok(()) } else { Err(LinkError::Room { part, needed, reserved }) }
}

fn displaced(code: &[u8], at: u64) -> Piece {
    let found = stack_states(code, Avma(at));
    let row = |s: stillpoint_patch_insn::StackState| Row { offset: s.offset, frame: s.frame, saved: s.saved };
    Piece { start: at, len: u64::from(found.len), rows: found.states.into_iter().map(row).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_is_too_long_is_named() {
        assert_eq!(check_room("a table", 12, 12), Ok(()));
        let error = check_room("a table", 20, 12).expect_err("more than its room");
        assert_eq!(error.to_string(), "a table needs 20 bytes, but the layout reserves 12");
    }
}
