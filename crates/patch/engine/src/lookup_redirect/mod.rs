//! Makes code that is unknown to the loader visible to the unwinders of a process, before that code runs.
//!
//! Every unwinder in use with glibc 2.35 and later asks `_dl_find_object` for the unwind data of an address: libgcc's, shared or linked
//! into a program, and the copy that `pthread_cancel` and `backtrace` load only when they are called. While a patch is active its entry
//! leads to the *lookup redirect*, a few instructions that look the address up in a table of ours and forward all others to glibc.
//!
//! The obvious way is `__register_frame_info`, called by a thread of the target. It takes a lock inside libgcc (from libgcc 13 on it also
//! allocates). From then on every throw in every thread of the process takes that lock, permanently, and a child forked meanwhile inherits
//! it locked. The lookup redirect has no lock. It is written together with the entries, while all threads are stopped; like them it is a
//! site of the transition, so that abort, recovery and revert handle it.
//!
//! ```text
//! entry of _dl_find_object:  jmp redirect    redirect:  in the table?  -> answer
//!                                      otherwise      -> displaced instructions, jmp entry + n
//! table:  header (lowest, highest address)  | start, end, link map, search table, state | ...
//! ```
//! An entry is filled while its state is even, and becomes active by the write of that byte.
//!
//! The guide is removed with the last patch, after the entries of functions, when no thread is in code that only the guide describes. If
//! another patch stays, the table entries of a reverted one become inactive as soon as its functions are restored. In that instant a signal
//! may find no unwind data for a dispatcher. C libraries before 2.35 have no `_dl_find_object`: there, patches of programs that throw are
//! refused, and others are applied with a warning.

mod table;

use crate::Error;
use crate::image::{Dynamic, link_map, search_order};
use crate::ledger::{LookupRedirectRecord, PlacedPatch, Side, Site, Span, View};
use crate::target::Target;
use crate::uprobes::{no_uprobe, uprobes};
use std::collections::BTreeSet;
use stillpoint_base::{PAGE, crosses_page};
use stillpoint_patch_format::{Avma, Patch, SectionKind, Svma};
use stillpoint_patch_insn::{self as insn, EntryPlan, FIND_OBJECT_LEN, JUMP_LEN};
use stillpoint_patch_tracee::{Memory, Module, Process};
pub(crate) use table::TABLE_LEN;

const NAME: &str = "_dl_find_object";
/// Offset of the displaced instructions after the lookup redirect.
const DISPLACED_AT: u64 = 128;
const _: () = assert!(FIND_OBJECT_LEN as u64 <= DISPLACED_AT);

/// Lengths of the segments of the lookup redirect's memory in bytes: code, table, none.
pub(crate) const LENS: [u64; 3] = [PAGE, TABLE_LEN, 0];

/// `_dl_find_object` of a process, as in glibc.
pub(crate) struct Entry {
    /// Index of the C library among the modules.
    pub(crate) module: usize,
    at: Avma,
    code: Vec<u8>,
    plan: EntryPlan,
}

/// Way to make a patch visible.
pub(crate) enum UnwindSupport {
    /// The lookup redirect is in place.
    Installed,
    /// The lookup redirect must be placed.
    Place(Entry),
    /// The lookup redirect is impossible for this reason, and the patch does not need it.
    Unavailable(String),
}

/// Finds out, before anything is changed, how new code can be made visible to the unwinders. Refuses a patch that needs the lookup redirect
/// if it is impossible.
pub(crate) fn unwind_support(
    process: &Process,
    modules: &[Module],
    view: &View,
    patch: &Patch,
) -> Result<UnwindSupport, Error> {
    let found = match &view.lookup_redirect {
        Some(redirect) => is_installed(process.memory(), redirect).map(|_| UnwindSupport::Installed),
        None => find(process, modules).map(UnwindSupport::Place),
    };
    let foreign = found.and_then(|support| match foreign_unwinder(process, modules)? {
        Some(path) => Err(invisible(process, format!("the unwinder of {path} does not call {NAME}"))),
        None => Ok(support),
    });
    match foreign {
        Err(Error::Invisible { why, .. }) if !is_needed(modules, patch) => Ok(UnwindSupport::Unavailable(why)),
        other => other,
    }
}

fn invisible(process: &Process, why: String) -> Error {
    Error::Invisible { pid: process.pid(), why }
}

/// Returns true if exceptions are thrown in the process, or if the new code handles exceptions.
fn is_needed(modules: &[Module], patch: &Patch) -> bool {
    let throws = |m: &Module| {
        let file = m.path.rsplit('/').next().unwrap_or_default();
        ["libstdc++.so", "libc++abi.so", "libc++.so"].iter().any(|name| file.starts_with(name))
    };
    patch.sections.iter().any(|s| s.kind == SectionKind::ExceptTable) || modules.iter().any(throws)
}

/// Returns the library that throws for the whole process, if it does not ask glibc.
fn foreign_unwinder(process: &Process, modules: &[Module]) -> Result<Option<String>, Error> {
    for index in search_order(process, modules) {
        let Some(dynamic) = Dynamic::of(process.memory(), &modules[index])? else { continue };
        if dynamic.find("_Unwind_RaiseException", None).is_some() {
            let asks = !dynamic.bound_slots(|name| name == NAME.as_bytes()).is_empty();
            return Ok((!asks).then(|| modules[index].path.clone()));
        }
    }
    Ok(None)
}

/// Finds `_dl_find_object` and checks that its entry can be redirected.
fn find(process: &Process, modules: &[Module]) -> Result<Entry, Error> {
    for module in search_order(process, modules) {
        let Some(dynamic) = Dynamic::of(process.memory(), &modules[module])? else { continue };
        let Some(found) = dynamic.find(NAME, None) else { continue };
        let at = found.address;
        if crosses_page(at.0, JUMP_LEN) {
            return Err(Error::EntryCrossesPage { function: NAME.to_owned(), at });
        }
        let code = process.memory().read_vec(at, found.len.min(PAGE) as usize)?;
        let plan = insn::plan_entry(&code, Svma(at.0));
        let plan = plan.map_err(|source| Error::Entry { function: NAME.to_owned(), source })?;
        no_uprobe(&uprobes(&modules[module]), NAME, at, &plan)?;
        return Ok(Entry { module, at, code, plan });
    }
    Err(invisible(process, format!("its C library has no {NAME} (glibc has it since 2.35)")))
}

/// Fills the lookup redirect's memory at `area`; no jump leads there yet.
pub(crate) fn place(target: &Target, entry: &Entry, area: Avma, module: Span) -> Result<LookupRedirectRecord, Error> {
    let failed = |source| Error::Entry { function: NAME.to_owned(), source };
    let (displaced_at, table) = (Avma(area.0 + DISPLACED_AT), Span::new(Avma(area.0 + LENS[0]), TABLE_LEN));
    let displaced = insn::displace(&entry.code, Svma(entry.at.0), &entry.plan, entry.at, displaced_at);
    let code = insn::find_object(area, table.start, displaced_at).map_err(failed)?;
    let memory = target.process.memory();
    memory.write(area, &code)?;
    memory.write(displaced_at, &displaced.map_err(failed)?)?;
    table::create(memory, table, module)?;
    Ok(LookupRedirectRecord {
        entry: entry.at,
        original: std::array::from_fn(|i| entry.code.get(i).copied().unwrap_or_default()),
        jump: insn::jump5(entry.at, area).map_err(failed)?,
        inner_boundaries: entry.plan.inner_boundaries.clone(),
        code: area,
        displaced: displaced_at,
        table,
    })
}

/// Returns true if the entry holds the jump to the lookup redirect.
fn is_installed(memory: &Memory, redirect: &LookupRedirectRecord) -> Result<bool, Error> {
    match memory.read_array(redirect.entry)? {
        now if now == redirect.jump => Ok(true),
        now if now == redirect.original => Ok(false),
        _ => Err(Error::BytesDiffer { function: NAME.to_owned(), at: redirect.entry, offset: 0 }),
    }
}

/// Returns the site that a transition to `after` needs, so that the lookup redirect is active exactly when the table has entries.
pub(crate) fn site(memory: &Memory, view: &View, after: &[u32]) -> Result<Option<Site>, Error> {
    let Some(redirect) = &view.lookup_redirect else { return Ok(None) };
    let wanted = !reachable_patches(view, after).is_empty();
    if is_installed(memory, redirect)? == wanted {
        return Ok(None);
    }
    let off = Side { bytes: redirect.original, target: redirect.displaced, patch: None };
    let on = Side { bytes: redirect.jump, target: redirect.code, patch: None };
    let (from, to) = if wanted { (off, on) } else { (on, off) };
    let inner_boundaries = if wanted { redirect.inner_boundaries.clone() } else { Vec::new() };
    let (entry, dispatcher, armed) = (redirect.entry, redirect.code, redirect.jump);
    Ok(Some(Site { name: NAME.to_owned(), entry, from, to, dispatcher, armed, inner_boundaries }))
}

/// Returns true if writing these bytes at a site removes the lookup redirect.
pub(crate) fn removes_redirect(site: &Site, bytes: [u8; JUMP_LEN]) -> bool {
    site.name == NAME && bytes != site.armed
}

/// Returns the patches whose code threads may run when those in `active` are active: these, and earlier active ones whose functions'
/// addresses may remain in data.
fn reachable_patches(view: &View, active: &[u32]) -> BTreeSet<u32> {
    let escaped = view.came.iter().filter(|n| view.patch(**n).is_some_and(code_escapes));
    active.iter().chain(escaped).copied().filter(|n| view.patch(*n).is_some()).collect()
}

fn code_escapes(patch: &PlacedPatch) -> bool {
    patch.escaping.iter().any(|name| patch.symbols.iter().any(|s| s.code && s.name == *name))
}

/// Updates the table for the case that the patches in `active` may run: entries of others are deactivated, missing ones become active. A
/// second call has no effect.
pub(crate) fn update_table(target: &Target, view: &View, active: &[u32]) -> Result<(), Error> {
    let Some(redirect) = &view.lookup_redirect else { return Ok(()) };
    let wanted: Vec<_> = reachable_patches(view, active).into_iter().filter_map(|n| view.patch(n)).collect();
    let entry = |patch: &&PlacedPatch| table::Entry {
        // the whole text segment: the read-only segment begins with the state bytes
        code: Span::new(patch.arena.start, patch.states.start.0 - patch.arena.start.0),
        link_map: module_of(target, patch).unwrap_or(Avma(0)),
        search_table: patch.search_table.start,
    };
    let entries: Vec<table::Entry> = wanted.iter().map(entry).collect();
    table::update(target.process.memory(), redirect.table, &entries).map_err(|why| match why {
        table::Error::Memory(error) => error.into(),
        table::Error::Full => invisible(&target.process, "the lookup redirect's table is full".to_owned()),
    })
}

fn module_of(target: &Target, patch: &PlacedPatch) -> Option<Avma> {
    let mut modules = target.modules.iter();
    let module = modules.find(|m| m.bias == patch.bias && m.build_id.as_ref() == Some(&patch.build_id));
    let module = module.or_else(|| target.modules.iter().find(|m| m.executable))?;
    link_map(&target.process, &target.modules, module)
}
