//! Memory of a patch in the target: mapped and filled before any jump leads there.

use super::checks::{CheckResult, find_room, module_span};
use super::mapping::{self, MemoryRequest};
use super::placement;
use super::plan::{Room, changed_entries, dispatchers_missing};
use crate::data_change::DataRoom;
use crate::ledger::store::Store;
use crate::ledger::{Record, Span, View};
use crate::link::{DISPATCHER_LEN, Layout, link, make_visible};
use crate::lookup_redirect::{self, UnwindSupport};
use crate::mechanism::Context;
use crate::{Error, data_change, generation_word, points};
use stillpoint_base::PAGE;
use stillpoint_patch_format::{Avma, Signed};
use stillpoint_patch_tracee::{self as tracee, Module};

/// First distance in bytes below a library, when memory directly below it was mapped meanwhile: some stacks; it doubles each time.
const DISTANCE_MIN: u64 = 32 << 20;
/// Largest such distance in bytes, well within reach.
const DISTANCE_MAX: u64 = 1 << 30;

/// Puts the patch into the target, or finds the placed one that is reused; no jump leads there yet. Returns its number.
///
/// # Errors
/// There is no room, the patch does not link, or the process cannot be changed.
pub(super) fn inject(
    cx: &mut Context<'_, '_, '_>,
    signed: &Signed,
    module: &Module,
    ready: CheckResult,
) -> Result<u32, Error> {
    match ready.reused {
        Some(number) => place_lookup_redirect(cx, module, ready.unwind_support).map(|()| number),
        None => place(cx, signed, module, ready),
    }
}

/// Writes the patch and its unwind data into the target; returns its number.
fn place(cx: &mut Context<'_, '_, '_>, signed: &Signed, module: &Module, ready: CheckResult) -> Result<u32, Error> {
    let patch = &signed.patch;
    let CheckResult { prepared, values, unwind_support, .. } = ready;
    let layout = Layout::of(patch);
    let word_offset = match &cx.target.store {
        Some(store) => store.ledger.word_offset,
        None => match points::own_word(cx.process, &cx.target.modules)? {
            Some(offset) => offset,
            None => {
                let (session, report) = (&mut *cx.session, &mut *cx.report);
                generation_word::choose(cx.process, session, &mut |tid, ns| report.stopped(tid, "check", ns))?
            }
        },
    };
    let at = map_arena(cx, module, layout.lens, word_offset)?;
    let unlinkable = |source| Error::Link { patch: patch.name.clone(), source };
    let mut image = link(patch, &layout, at, &values).map_err(unlinkable)?;
    let signer = cx.options.signer.clone();
    let mut placed = placement::place(signed, signer, module, &prepared, &layout, at, &mut image)?;
    make_visible(&layout, at, &mut image).map_err(unlinkable)?;
    place_lookup_redirect(cx, module, unwind_support)?;
    let memory = cx.process.memory();
    for (segment, offset) in image.segments.iter().zip([0, layout.lens[0], layout.lens[0] + layout.lens[1]]) {
        if !segment.is_empty() {
            memory.write(Avma(at.0 + offset), segment)?;
        }
    }
    let store = cx.target.store.as_mut().ok_or(Error::NoWord(cx.process.pid()))?;
    let data = std::mem::take(&mut placed.data);
    store.append(memory, Record::Placed(Box::new(placed)))?;
    if !data.is_empty() {
        store.append(memory, Record::PlacedData(data))?;
    }
    Ok(store.view().placed.len() as u32 - 1)
}

/// Places the lookup redirect near the C library, unless it is in memory.
fn place_lookup_redirect(
    cx: &mut Context<'_, '_, '_>,
    module: &Module,
    unwind_support: UnwindSupport,
) -> Result<(), Error> {
    let entry = match unwind_support {
        UnwindSupport::Installed => return Ok(()),
        UnwindSupport::Place(entry) => entry,
        UnwindSupport::Unavailable(why) => {
            let text = format!("exceptions, thread cancellation and backtraces cannot pass through new code: {why}");
            cx.report.warn(text);
            return Ok(());
        }
    };
    let library = cx.target.modules[entry.module].clone();
    let area = map_arena(cx, &library, lookup_redirect::LENS, cx.target.word_offset())?;
    let record = lookup_redirect::place(cx.target, &entry, area, module_span(module))?;
    cx.target.append(Record::LookupRedirect(Box::new(record)))
}

/// Maps an arena near `module`, and the ledger if there is none yet.
fn map_arena(cx: &mut Context<'_, '_, '_>, module: &Module, lens: [u64; 3], word_offset: i32) -> Result<Avma, Error> {
    let Context { session, process, target, report, .. } = cx;
    let mut distance = 0;
    loop {
        target.mappings = process.mappings()?;
        let at = find_room(&target.mappings, module, lens.iter().sum(), distance)?;
        let wanted = MemoryRequest { arena: Some((at, lens)), ledger: target.store.is_none() };
        match mapping::map(process, session, wanted, &mut |tid, ns| report.stopped(tid, "carrier", ns)) {
            Ok(ledger) => {
                if let Some(ledger) = ledger {
                    target.store = Some(Store::create(process.memory(), ledger, word_offset)?);
                }
                return Ok(at);
            }
            // the target has mapped memory there meanwhile; a program that makes threads will do so again
            Err(Error::Tracee(tracee::Error::RemoteSyscall { source, .. }))
                if distance < DISTANCE_MAX && source.kind() == std::io::ErrorKind::AlreadyExists =>
            {
                distance = (distance * 2).max(DISTANCE_MIN);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Returns room for the needs of a transition beyond the patches' own memory; maps it only if some is missing.
///
/// # Errors
/// There is no room, or the process cannot be changed.
pub(super) fn room(
    cx: &mut Context<'_, '_, '_>,
    module: &Module,
    view: &View,
    after: &[u32],
    state: Option<Avma>,
) -> Result<Room, Error> {
    // the calls that change generations also need room
    let without = changed_entries(view, &view.active, after).is_empty();
    let missing = (dispatchers_missing(view, &view.active, after) as u64).max(without.into());
    let changes = data_change::changes(view, &view.active, after);
    if !changes.is_empty() {
        let (dispatchers, list) = (missing * DISPATCHER_LEN, data_change::list_len(&changes).next_multiple_of(PAGE));
        let text = (dispatchers + DataRoom::CODE_LEN).next_multiple_of(PAGE);
        let at = map_arena(cx, module, [text, list, PAGE], cx.target.word_offset())?;
        let (completer, list, state) = (Avma(at.0 + dispatchers), Avma(at.0 + text), Avma(at.0 + text + list));
        let data = Some(DataRoom { completer, list, state });
        return Ok(Room { state, dispatchers: Some(Span::new(at, dispatchers)), data });
    }
    if let (Some(state), 0) = (state, missing) {
        return Ok(Room { state, dispatchers: None, data: None });
    }
    let text = (missing.max(1) * DISPATCHER_LEN).next_multiple_of(PAGE);
    let at = map_arena(cx, module, [text, PAGE, 0], cx.target.word_offset())?;
    Ok(Room { state: state.unwrap_or(Avma(at.0 + text)), dispatchers: Some(Span::new(at, text)), data: None })
}
