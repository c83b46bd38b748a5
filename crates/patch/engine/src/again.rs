//! A patch that was in force before and lies in place still: it comes into force again without being placed again.
//!
//! Placing it anew each time costs memory for good. What lies in place serves when placing the patch at the same address
//! would write the same bytes: that is done, on paper, and compared with what the target holds. Data of its own it must
//! not have, for that would be what its last use left there.

use crate::ledger::{PlacedPatch, Span};
use crate::link::{DISPATCHER_LEN, DISPATCHERS, Image, Layout, STATES_LEN, link, make_visible};
use crate::operate::Target;
use crate::place;
use crate::prepare::Prepared;
use stillpoint_patch_format::Signed;
use stillpoint_patch_tracee::Memory;

/// The number of the placed patch that can serve as `signed`, whose symbols stand for `values`.
pub(crate) fn find(
    target: &Target,
    signed: &Signed,
    signer: Option<&String>,
    prepared: &Prepared,
    layout: &Layout,
    values: &[Option<u64>],
) -> Option<u32> {
    if layout.lens[2] > 0 {
        return None;
    }
    let placed = target.view.placed.iter().enumerate().rev().map(|(number, placed)| (number as u32, &**placed));
    let out_of_force = placed.filter(|(number, _)| !target.view.active.contains(number));
    let mut same = out_of_force.filter(|(_, p)| p.digest == signed.digest && p.signer.as_ref() == signer);
    same.find(|(_, p)| serves(target, signed, p, prepared, layout, values).unwrap_or(false)).map(|(number, _)| number)
}

/// Whether placing `signed` where `placed` lies would change nothing; no answer when it cannot be placed there.
fn serves(
    target: &Target,
    signed: &Signed,
    placed: &PlacedPatch,
    prepared: &Prepared,
    layout: &Layout,
    values: &[Option<u64>],
) -> Option<bool> {
    let (at, module) = (placed.arena.start, &target.modules[prepared.module]);
    if placed.arena != Span::new(at, layout.len()) {
        return Some(false);
    }
    let mut image = link(&signed.patch, layout, at, values).ok()?;
    let record = place::place(signed, placed.signer.clone(), module, prepared, layout, at, &mut image).ok()?;
    make_visible(layout, at, &mut image).ok()?;
    if (PlacedPatch { placed_at_s: placed.placed_at_s, ..record }) != *placed {
        return Some(false);
    }
    lies_there(target.process.memory(), placed, layout, image)
}

/// Whether the target holds the image, apart from what transitions write: dispatchers and state bytes.
fn lies_there(memory: &Memory, placed: &PlacedPatch, layout: &Layout, image: Image) -> Option<bool> {
    let wanted = image.segments.concat();
    let mut there = memory.read_vec(placed.arena.start, wanted.len()).ok()?;
    let dispatchers = layout.functions.iter().map(|f| (f.dispatchers, DISPATCHERS * DISPATCHER_LEN));
    for (start, len) in dispatchers.chain([(layout.states, STATES_LEN)]) {
        let room = start as usize..(start + len) as usize;
        there[room.clone()].copy_from_slice(&wanted[room]);
    }
    Some(there == wanted)
}
