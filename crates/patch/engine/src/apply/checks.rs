//! All checks of a patch that need no stopped thread.

use super::placement_reuse;
use super::preflight::{Preflight, check_based_on, check_undoes_none, prepare};
use super::resolve::resolve;
use super::{arena, memory_limit};
use crate::ledger::{Span, View};
use crate::link::{Layout, link, make_visible};
use crate::options::{Options, ThreadView};
use crate::target::Target;
use crate::{Error, data_change, lookup_redirect, points, suspended_frames};
use stillpoint_patch_format::{Avma, Patch, Signed};
use stillpoint_patch_tracee::{Mapping, Module};

/// Returns true if the patch is active.
pub(crate) fn is_applied(view: &View, signed: &Signed) -> bool {
    view.active.iter().filter_map(|n| view.patch(*n)).any(|p| p.digest == signed.digest)
}

/// Returns the patches that stay active below a new one.
pub(crate) fn remaining_patches(view: &View, signed: &Signed, options: &Options) -> Vec<u32> {
    let patch = &signed.patch;
    let stays = |n: &u32| {
        view.patch(*n).is_some_and(|p| {
            p.build_id != patch.target.build_id || !(options.replace || patch.replaces.contains(&p.name))
        })
    };
    view.active.iter().copied().filter(stays).collect()
}

/// Results of the checks that need no stopped thread.
pub(crate) struct CheckResult {
    pub(crate) prepared: Preflight,
    /// Values of the patch's symbols.
    pub(crate) values: Vec<Option<u64>>,
    /// The placed patch that can be reused.
    pub(crate) reused: Option<u32>,
    /// Number of bytes of memory needed.
    pub(crate) len: u64,
    /// Way to make the code visible to unwinders.
    pub(crate) unwind_support: lookup_redirect::UnwindSupport,
}

/// Runs all checks that need no stopped thread.
pub(crate) fn run_checks(target: &Target, signed: &Signed, options: &Options) -> Result<CheckResult, Error> {
    let patch = &signed.patch;
    let view = &target.view;
    let below = remaining_patches(view, signed, options);
    if below.iter().filter_map(|n| view.patch(*n)).any(|p| p.name == patch.name) {
        return Err(Error::NameTaken(patch.name.clone()));
    }
    check_view(view, view.active.iter().filter(|n| !below.contains(n)), Some(patch), options)?;
    suspended_frames::refuse_contexts(target, options)?;
    let prepared = prepare(&target.process, &target.modules, view, patch, options.quiescence)?;
    points::check_points(&target.process, &target.modules, options.quiescence)?;
    check_based_on(view, &below, patch)?;
    let module = &target.modules[prepared.module];
    check_undoes_none(view, &below, module, patch)?;
    let values = resolve(&target.process, &target.modules, module, view, patch)?;
    let layout = Layout::of(patch);
    let reused = placement_reuse::find(target, signed, options.signer.as_ref(), &prepared, &layout, &values);
    if reused.is_none() || !patch.data.is_empty() {
        let at = find_room(&target.mappings, module, layout.len(), 0)?;
        let unlinkable = |source| Error::Link { patch: patch.name.clone(), source };
        let mut image = link(patch, &layout, at, &values).map_err(unlinkable)?;
        data_change::check(&target.process, &target.mappings, (module, view), patch, (&layout, at, &image))?;
        make_visible(&layout, at, &mut image).map_err(unlinkable)?;
    }
    let unwind_support = lookup_redirect::unwind_support(&target.process, &target.modules, view, patch)?;
    let len = if reused.is_some() { 0 } else { layout.len() };
    memory_limit::check(target.process.pid(), len)?;
    Ok(CheckResult { prepared, values, reused, len, unwind_support })
}

/// Refuses to apply or revert a patch by a mechanism that does not support it.
pub(super) fn check_view<'n>(
    view: &View,
    dropped: impl Iterator<Item = &'n u32>,
    coming: Option<&Patch>,
    options: &Options,
) -> Result<(), Error> {
    let dropped: Vec<_> = dropped.filter_map(|n| view.patch(*n)).collect();
    if options.view != ThreadView::Trampoline {
        let going = dropped.iter().filter(|p| !p.data.is_empty()).map(|p| &p.name);
        let changes_data = coming.filter(|p| !p.data.is_empty()).map(|p| &p.name);
        return changes_data
            .into_iter()
            .chain(going)
            .next()
            .map_or(Ok(()), |name| Err(Error::DataByTrampolinesOnly(name.clone())));
    }
    let going = dropped.iter().filter(|p| !p.constants.is_empty()).map(|p| &p.name);
    let in_place = coming.filter(|p| !p.constants.is_empty()).map(|p| &p.name);
    if let Some(name) = in_place.into_iter().chain(going).next() {
        return Err(Error::ByGenerationsOnly(name.clone()));
    }
    for patch in dropped.iter().filter(|p| !p.data.is_empty()) {
        points::check_scope(&patch.name, patch.scope, options.quiescence)?;
    }
    match coming.filter(|p| !p.staying.is_empty()) {
        Some(p) => Err(Error::StayingByGenerationsOnly { patch: p.name.clone(), functions: p.staying.join(", ") }),
        None => Ok(()),
    }
}

/// Returns the addresses from the first to the last mapping of a module.
pub(super) fn module_span(module: &Module) -> Span {
    let start = module.mappings.iter().map(|m| m.start).min().unwrap_or(Avma(0));
    let end = module.mappings.iter().map(|m| m.end).max().unwrap_or(Avma(0));
    Span::new(start, end.0 - start.0)
}

/// Finds an address for an arena of `len` bytes, `distance` bytes below the module if there is room.
pub(crate) fn find_room(mappings: &[Mapping], module: &Module, len: u64, distance: u64) -> Result<Avma, Error> {
    let found = arena::find(mappings, module_span(module), len, distance);
    found.ok_or_else(|| Error::NoRoom { len, module: module.path.clone() })
}
