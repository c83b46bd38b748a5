//! Changes of entries in a transition. Pure: takes the ledger's view, returns a transition.

use crate::data_change::DataRoom;
use crate::generation_word::word_value;
use crate::ledger::{
    Contents, DataTransition, FunctionRecord, LedgerError, NamedSpan, PlacedPatch, Side, Site, Span, Transition,
    Version, View,
};
use crate::{Error, data_change};
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::{self as insn, DISPATCH_LEN};

/// Room for new dispatchers and the state byte of a transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// Address of the state byte.
    pub(crate) state: Avma,
    /// Room for dispatchers that do not fit beside their function; `None` if it is not needed.
    pub(crate) dispatchers: Option<Span>,
    /// Room for a change of data; `None` if it is not needed.
    pub(crate) data: Option<DataRoom>,
}

/// A transition, and the bytes that must be in memory before it begins.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    pub(crate) transition: Transition,
    pub(crate) dispatchers: Vec<(Avma, [u8; DISPATCH_LEN])>,
    /// Code and list of a change of data.
    pub(crate) data: Vec<(Avma, Vec<u8>)>,
}

/// Returns the entries that differ between two lists of active patches.
pub(crate) fn changed_entries(view: &View, before: &[u32], after: &[u32]) -> Vec<Avma> {
    let touched: BTreeSet<Avma> = before
        .iter()
        .chain(after)
        .filter_map(|n| view.patch(*n))
        .flat_map(|p| p.functions.iter().map(|f| f.old.start))
        .collect();
    let (before, after) = (view.versions(before), view.versions(after));
    let differs = |entry: &Avma| before.get(entry).map(|known| known.0) != after.get(entry).map(|known| known.0);
    touched.into_iter().filter(differs).collect()
}

/// Returns the constants that differ between two lists of active patches.
fn changed_constants(view: &View, before: &[u32], after: &[u32]) -> Vec<Contents> {
    let touched = before.iter().chain(after).filter_map(|n| view.patch(*n)).flat_map(|p| &p.constants);
    let touched: BTreeMap<Avma, &str> = touched.map(|c| (c.at, c.name.as_str())).collect();
    let change = |(at, name): (Avma, &str)| {
        let (from, to) = (view.contents(before, at)?.to_vec(), view.contents(after, at)?.to_vec());
        (from != to).then(|| Contents { name: name.to_owned(), at, from, to })
    };
    touched.into_iter().filter_map(change).collect()
}

/// Returns a function's record by its entry, from any patch ever placed: the shipped bytes do not change.
fn shipped(view: &View, entry: Avma) -> Option<&FunctionRecord> {
    view.placed.iter().rev().flat_map(|p| &p.functions).find(|f| f.old.start == entry)
}

fn unknown(entry: Avma) -> Error {
    Error::Ledger(LedgerError::Inconsistent(format!("no patch records the shipped bytes at {entry}")))
}

fn side(view: &View, active: &[u32], entry: Avma) -> Result<Side, Error> {
    match view.version(active, entry) {
        Version::Patched(number, function) => {
            let bytes = insn::jump5(entry, function.new).map_err(|source| entry_error(function, source))?;
            Ok(Side { bytes, target: function.new, patch: Some(number) })
        }
        Version::Shipped => {
            let function = shipped(view, entry).ok_or_else(|| unknown(entry))?;
            Ok(Side { bytes: function.original, target: function.displaced, patch: None })
        }
    }
}

fn entry_error(function: &FunctionRecord, source: insn::Error) -> Error {
    Error::Entry { function: function.name.clone(), source }
}

/// Returns the room of a dispatcher beside a function that no thread can be in any more.
fn free_dispatcher(view: &View, function: &FunctionRecord) -> Option<Avma> {
    let used = |at: Avma| view.recent.iter().flat_map(|t| &t.sites).any(|s| s.dispatcher == at);
    let len = u64::from(function.dispatcher_len.max(DISPATCH_LEN as u32));
    let count = function.dispatchers.len / len;
    (0..count).map(|i| Avma(function.dispatchers.start.0 + i * len)).find(|at| !used(*at))
}

/// Counts the changed entries without a free dispatcher's room beside the newer of their two functions.
pub(crate) fn dispatchers_missing(view: &View, before: &[u32], after: &[u32]) -> usize {
    let entries = changed_entries(view, before, after);
    entries.iter().filter(|entry| beside(view, before, after, **entry).is_none()).count()
}

fn beside(view: &View, before: &[u32], after: &[u32], entry: Avma) -> Option<Avma> {
    let of = |active: &[u32]| match view.version(active, entry) {
        Version::Patched(_, function) => free_dispatcher(view, function),
        Version::Shipped => None,
    };
    of(after).or_else(|| of(before))
}

/// Returns a state byte that no thread can read any more, in the memory of one of these patches.
pub(crate) fn free_state(view: &View, patches: &[u32]) -> Option<Avma> {
    let used = |at: Avma| view.recent.iter().any(|t| t.state == at);
    let states = patches.iter().rev().filter_map(|n| view.patch(*n)).map(|p| p.states);
    states.flat_map(|s| (0..s.len).map(move |i| Avma(s.start.0 + i))).find(|at| !used(*at))
}

/// Plans the transition from the active patches to `after`.
pub(crate) fn plan(view: &View, operation: &str, after: &[u32], room: Room, word_offset: i32) -> Result<Plan, Error> {
    let before = view.active.clone();
    let number = view.last_transition + 1;
    let mut extra = room.dispatchers;
    let mut sites = Vec::new();
    let mut dispatchers = Vec::new();
    for entry in changed_entries(view, &before, after) {
        let (from, to) = (side(view, &before, entry)?, side(view, after, entry)?);
        let function = shipped(view, entry).ok_or_else(|| unknown(entry))?;
        let dispatcher = match beside(view, &before, after, entry) {
            Some(at) => at,
            None => take(&mut extra, function)?,
        };
        let code = insn::dispatch(dispatcher, room.state, word_offset, word_value(number), to.target, from.target);
        dispatchers.push((dispatcher, code.map_err(|source| entry_error(function, source))?));
        let armed = insn::jump5(entry, dispatcher).map_err(|source| entry_error(function, source))?;
        let inner_boundaries = if from.patch.is_none() { function.inner_boundaries.clone() } else { Vec::new() };
        sites.push(Site { name: function.name.clone(), entry, from, to, dispatcher, armed, inner_boundaries });
    }
    let gone = |list: &[u32], other: &[u32]| list.iter().copied().filter(|n| !other.contains(n)).collect::<Vec<_>>();
    let (leaving, entering) = (gone(&before, after), gone(after, &before));
    let mut leave = code_of(view, &sites, |site| site.from, &leaving);
    let mut enter = code_of(view, &sites, |site| site.to, &entering);
    for patch in leaving.iter().chain(&entering).filter_map(|n| view.patch(*n)) {
        let named = patch.off_stack.iter().map(|o| NamedSpan { name: o.name.clone(), span: o.span });
        leave.extend(named.clone());
        enter.extend(named);
    }
    let loops = |site: &&Site| shipped(view, site.entry).is_some_and(|f| f.loops_to_entry);
    let loop_entries = sites.iter().filter(loops).map(|s| s.entry).collect();
    let staying: Vec<&String> =
        leaving.iter().chain(&entering).filter_map(|n| view.patch(*n)).flat_map(|p| &p.staying).collect();
    let may_stay = |code: &&NamedSpan| staying.iter().any(|name| is_of(&code.name, name));
    let staying = leave.iter().filter(may_stay).cloned().collect();
    let constants = changed_constants(view, &before, after);
    let (data, pieces) = data_transition(view, &before, after, &room)?;
    let transition = Transition {
        number,
        operation: operation.to_owned(),
        state: room.state,
        before,
        after: after.to_vec(),
        sites,
        constants,
        data,
        trampolines: room.dispatchers.into_iter().chain(room.data.map(|room| room.code())).collect(),
        leave,
        enter,
        staying,
        loop_entries,
    };
    Ok(Plan { transition, dispatchers, data: pieces })
}

type DataPlan = (Option<Box<DataTransition>>, Vec<(Avma, Vec<u8>)>);

/// Plans the change of data of a transition; the pages that have to be opened are still to be found.
fn data_transition(view: &View, before: &[u32], after: &[u32], room: &Room) -> Result<DataPlan, Error> {
    let changes = data_change::changes(view, before, after);
    let Some(first) = changes.first() else { return Ok((None, Vec::new())) };
    let missing = || Error::NoRoom { len: DataRoom::CODE_LEN, module: first.name.clone() };
    let room = room.data.ok_or_else(missing)?;
    let pieces = room.pieces(&changes).map_err(|source| Error::Entry { function: first.name.clone(), source })?;
    Ok((Some(Box::new(DataTransition { changes, opened: Vec::new(), completer: room.completer })), pieces))
}

/// Returns true if the code is the function, or one of its parts (`serve.cold`).
fn is_of(code: &str, function: &str) -> bool {
    code.strip_prefix(function).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn take(extra: &mut Option<Span>, function: &FunctionRecord) -> Result<Avma, Error> {
    let len = crate::link::DISPATCHER_LEN;
    match extra {
        Some(span) if span.len >= len => {
            let at = span.start;
            *span = Span::new(Avma(at.0 + len), span.len - len);
            Ok(at)
        }
        _ => Err(Error::NoRoom { len, module: function.name.clone() }),
    }
}

/// Returns all code of one side: the shipped functions, or the patches' versions of them. Of a patch that stays active only the functions
/// concerned count, and its code outside redirected functions (helpers, cold parts). Of a patch that comes or goes all code counts.
fn code_of(view: &View, sites: &[Site], side: impl Fn(&Site) -> Side, whole: &[u32]) -> Vec<NamedSpan> {
    let mut out = Vec::new();
    let mut partly: BTreeSet<u32> = BTreeSet::new();
    for site in sites {
        match side(site).patch {
            None => {
                let Some(function) = shipped(view, site.entry) else { continue };
                let spans = std::iter::once(&function.old).chain(&function.old_parts);
                out.extend(spans.map(|span| NamedSpan { name: site.name.clone(), span: *span }));
            }
            Some(number) if !whole.contains(&number) => {
                partly.insert(number);
                let functions = view.patch(number).into_iter().flat_map(|p| &p.functions);
                let function = functions.into_iter().find(|f| f.old.start == site.entry);
                out.extend(function.map(|f| NamedSpan { name: f.name.clone(), span: f.new_span }));
            }
            Some(_) => {}
        }
    }
    out.extend(whole.iter().filter_map(|n| view.patch(*n)).flat_map(|p| p.text.clone()));
    out.extend(partly.into_iter().filter_map(|n| view.patch(n)).flat_map(helpers));
    out
}

fn helpers(patch: &PlacedPatch) -> impl Iterator<Item = NamedSpan> {
    let redirected = |span: &Span| patch.functions.iter().any(|f| f.new_span == *span);
    patch.text.iter().filter(move |t| !redirected(&t.span)).cloned()
}
