//! Reuse of a placed patch: a patch that was active before and is still in memory becomes active again without a new placement.
//!
//! A new placement each time would cost memory permanently. A placed patch is reused if a placement at the same address would write the
//! same bytes: the engine links it without writing and compares the result with the target's memory. The patch must not have writable data
//! of its own, because they would hold the values of its last use.

use super::placement;
use super::preflight::Preflight;
use crate::ledger::{PlacedPatch, Span};
use crate::link::{DISPATCHER_LEN, DISPATCHERS, Image, Layout, STATES_LEN, link, make_visible};
use crate::target::Target;
use stillpoint_patch_format::Signed;
use stillpoint_patch_tracee::Memory;

/// Returns the number of the placed patch that can be reused for `signed`, whose symbols have `values`.
pub(crate) fn find(
    target: &Target,
    signed: &Signed,
    signer: Option<&String>,
    prepared: &Preflight,
    layout: &Layout,
    values: &[Option<u64>],
) -> Option<u32> {
    if layout.lens[2] > 0 {
        return None;
    }
    let placed = target.view.placed.iter().enumerate().rev().map(|(number, placed)| (number as u32, &**placed));
    let inactive = placed.filter(|(number, _)| !target.view.active.contains(number));
    let mut same = inactive.filter(|(_, p)| p.digest == signed.digest && p.signer.as_ref() == signer);
    same.find(|(_, p)| matches_placement(target, signed, p, prepared, layout, values).unwrap_or(false))
        .map(|(number, _)| number)
}

/// Returns true if placing `signed` at the address of `placed` would change nothing; `None` if it cannot be placed there.
fn matches_placement(
    target: &Target,
    signed: &Signed,
    placed: &PlacedPatch,
    prepared: &Preflight,
    layout: &Layout,
    values: &[Option<u64>],
) -> Option<bool> {
    let (at, module) = (placed.arena.start, &target.modules[prepared.module]);
    if placed.arena != Span::new(at, layout.len()) {
        return Some(false);
    }
    let mut image = link(&signed.patch, layout, at, values).ok()?;
    let record = placement::place(signed, placed.signer.clone(), module, prepared, layout, at, &mut image).ok()?;
    make_visible(layout, at, &mut image).ok()?;
    if (PlacedPatch { placed_at_s: placed.placed_at_s, ..record }) != *placed {
        return Some(false);
    }
    matches_memory(target.process.memory(), placed, layout, image)
}

/// Returns true if the target holds the image, except for the parts that transitions write: dispatchers and state bytes.
fn matches_memory(memory: &Memory, placed: &PlacedPatch, layout: &Layout, image: Image) -> Option<bool> {
    let wanted = image.segments.concat();
    let mut present = memory.read_vec(placed.arena.start, wanted.len()).ok()?;
    let dispatchers = layout.functions.iter().map(|f| (f.dispatchers, DISPATCHERS * DISPATCHER_LEN));
    for (start, len) in dispatchers.chain([(layout.states, STATES_LEN)]) {
        let room = start as usize..(start + len) as usize;
        present[room.clone()].copy_from_slice(&wanted[room]);
    }
    Some(present == wanted)
}
