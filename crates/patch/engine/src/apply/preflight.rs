//! All checks that are possible before anything is changed.

use crate::image::text_segments;
use crate::ledger::{Version, View};
use crate::uprobes::{no_uprobe, uprobes};
use crate::{Error, Quiescence};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use stillpoint_base::crosses_page;
use stillpoint_patch_format::{Avma, Constant, Function, Patch};
use stillpoint_patch_insn::{self as insn, EntryPlan, JUMP_LEN};
use stillpoint_patch_tracee::{Module, Process};

/// Alignment of functions if padding precedes the next one.
const FUNCTION_ALIGN: u64 = 16;

/// A patch that fits a process.
pub(crate) struct Preflight {
    /// Index of the module in the given list.
    pub(crate) module: usize,
    /// Plan of each function's entry.
    pub(crate) entries: Vec<EntryPlan>,
    /// Bytes from which each entry's plan was made, including padding.
    pub(crate) codes: Vec<Vec<u8>>,
    /// Shipped contents of each constant that changes in place.
    pub(crate) constants: Vec<Vec<u8>>,
}

/// Checks `patch` against the mapped modules and the active patches.
pub(crate) fn prepare(
    process: &Process,
    modules: &[Module],
    view: &View,
    patch: &Patch,
    quiescence: Quiescence,
) -> Result<Preflight, Error> {
    crate::points::check_scope(&patch.name, patch.scope, quiescence)?;
    let index = find_module(process, modules, view, patch)?;
    let module = &modules[index];
    let mut entries = Vec::with_capacity(patch.functions.len());
    let mut codes = Vec::with_capacity(patch.functions.len());
    for function in &patch.functions {
        let code = with_padding(process, module, view, function);
        let plan = insn::plan_entry(&code, function.old.start);
        let plan = plan.map_err(|source| Error::Entry { function: function.name.clone(), source })?;
        check_function(process, module, view, function, &plan)?;
        entries.push(plan);
        codes.push(code);
    }
    check_uprobes(module, patch, &entries)?;
    let constants = patch.constants.iter().map(|constant| shipped_contents(process, module, view, constant));
    let constants = constants.collect::<Result<_, _>>()?;
    Ok(Preflight { module: index, entries, codes, constants })
}

/// Returns the shipped contents of a constant; an error if its present contents are not those of the active patches.
fn shipped_contents(process: &Process, module: &Module, view: &View, constant: &Constant) -> Result<Vec<u8>, Error> {
    let at = module.avma(constant.old.start);
    let name = || constant.name.clone();
    let mappings = process.mappings()?;
    if mappings.iter().find(|m| m.contains(at)).is_none_or(|m| m.write) {
        return Err(Error::NotConstant { name: name(), at });
    }
    let now = process.memory().read_vec(at, constant.old.len as usize)?;
    let expected = view.contents(&view.active, at).unwrap_or(&now);
    let differs = |offset| Error::BytesDiffer { function: name(), at, offset };
    if expected.len() != now.len() {
        return Err(differs(0));
    }
    match expected.iter().zip(&now).position(|(a, b)| a != b) {
        Some(offset) => Err(differs(offset)),
        None => Ok(view.contents(&[], at).unwrap_or(&now).to_vec()),
    }
}

/// Checks that patches that will be active bring all diffs upon which `patch` builds.
pub(crate) fn check_based_on(view: &View, remaining: &[u32], patch: &Patch) -> Result<(), Error> {
    let active: Vec<_> = remaining.iter().filter_map(|n| view.patch(*n)).flat_map(|p| p.diffs.iter()).collect();
    match patch.based_on.iter().find(|diff| !active.iter().any(|a| a.sha256 == diff.sha256)) {
        Some(missing) => Err(Error::NotBased { patch: patch.name.clone(), diff: missing.name.clone() }),
        None => Ok(()),
    }
}

/// Checks that `patch` contains the diffs of each patch below it that changes the same function or constant: its code takes the place of
/// theirs.
pub(crate) fn check_undoes_none(view: &View, below: &[u32], module: &Module, patch: &Patch) -> Result<(), Error> {
    let functions = patch.functions.iter().map(|f| (&f.name, f.old.start));
    let constants = patch.constants.iter().map(|c| (&c.name, c.old.start));
    let data = patch.data.iter().map(|c| (&c.name, c.old.start));
    let changed: HashMap<Avma, &String> =
        functions.chain(constants).chain(data).map(|(name, at)| (module.avma(at), name)).collect();
    for active in below.iter().filter_map(|n| view.patch(*n)).filter(|active| !patch.contains(&active.diffs)) {
        let functions = active.functions.iter().map(|f| f.old.start);
        let data = active.constants.iter().chain(&active.data).map(|c| c.at);
        if let Some(object) = functions.chain(data).find_map(|at| changed.get(&at)) {
            return Err(Error::Undoes {
                patch: patch.name.clone(),
                object: object.to_string(),
                active: active.name.clone(),
                diff: active.diffs.iter().find(|diff| !patch.contains([*diff])).map(|diff| diff.name.clone()),
            });
        }
    }
    Ok(())
}

fn find_module(process: &Process, modules: &[Module], view: &View, patch: &Patch) -> Result<usize, Error> {
    let target = &patch.target;
    let base = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
    if target.build_id.0.is_empty() {
        let found = modules.iter().position(|m| base(&m.path) == target.file_name);
        let found = found.filter(|i| text_matches(process, &modules[*i], view, patch).unwrap_or(false));
        return found.ok_or_else(|| Error::OtherText {
            patch: patch.name.clone(),
            file: target.file_name.clone(),
            pid: process.pid(),
        });
    }
    // a copy that is mapped to be read does not run
    let runs = |m: &&Module| m.build_id.as_ref() == Some(&target.build_id) && m.mappings.iter().any(|m| m.execute);
    let count = modules.iter().filter(runs).count();
    if count > 1 {
        return Err(Error::ManyCopies { pid: process.pid(), count, file: target.file_name.as_str().into() });
    }
    if let Some(index) = modules.iter().position(|m| runs(&m)) {
        return Ok(index);
    }
    let same_name = modules.iter().find(|m| base(&m.path) == target.file_name);
    let hint = match same_name.map(|m| &m.build_id) {
        Some(Some(id)) => format!(": its {} has build-id {id}", target.file_name),
        Some(None) => format!(": its {} has no build-id", target.file_name),
        None => String::new(),
    };
    Err(Error::NoModule {
        patch: patch.name.clone(),
        wanted: target.build_id.clone(),
        file: target.file_name.as_str().into(),
        pid: process.pid(),
        hint: hint.into(),
        library: same_name.filter(|module| !module.executable).map(|module| module.path.as_str().into()),
    })
}

/// Compares the executable segment in memory, without our own jumps, with the digest in the patch.
fn text_matches(process: &Process, module: &Module, view: &View, patch: &Patch) -> Result<bool, Error> {
    for span in text_segments(process.memory(), module)? {
        let mut bytes = process.memory().read_vec(span.start, span.len as usize)?;
        for (entry, origin) in view.origins() {
            if span.contains(entry) && entry.0 + JUMP_LEN as u64 <= span.end().0 {
                let at = (entry.0 - span.start.0) as usize;
                bytes[at..at + JUMP_LEN].copy_from_slice(&origin.original);
            }
        }
        if <[u8; 32]>::from(Sha256::digest(&bytes)) == patch.target.text_sha256 {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the function's bytes as shipped. A function shorter than a jump includes the padding after it, if there is only padding up to
/// the next possible function start.
fn with_padding(process: &Process, module: &Module, view: &View, function: &Function) -> Vec<u8> {
    let start = module.avma(function.old.start);
    let end = start.0 + function.old.len;
    let room = (end.next_multiple_of(FUNCTION_ALIGN) - end) as usize;
    let len = function.old_bytes.len();
    if len >= JUMP_LEN || len + room < JUMP_LEN {
        return function.old_bytes.clone();
    }
    let Ok(mut code) = process.memory().read_vec(start, len + room) else { return function.old_bytes.clone() };
    if let Some(origin) = view.origins().get(&start) {
        // our jump may be there, in the padding as well
        code[..JUMP_LEN].copy_from_slice(&origin.original);
    }
    if !insn::is_padding(&code[len..]) {
        code.truncate(len);
    }
    code
}

fn check_function(
    process: &Process,
    module: &Module,
    view: &View,
    function: &Function,
    plan: &EntryPlan,
) -> Result<(), Error> {
    let at = module.avma(function.old.start);
    let name = || function.name.clone();
    if crosses_page(at.0, JUMP_LEN) {
        return Err(Error::EntryCrossesPage { function: name(), at });
    }
    let mut expected = function.old_bytes.clone();
    if let Version::Patched(_, current) = view.version(&view.active, at) {
        let jump = insn::jump5(at, current.new).map_err(|source| Error::Entry { function: name(), source })?;
        let len = expected.len().min(JUMP_LEN);
        expected[..len].copy_from_slice(&jump[..len]);
    }
    let live = process.memory().read_vec(at, expected.len())?;
    if let Some(offset) = expected.iter().zip(&live).position(|(a, b)| a != b) {
        return Err(Error::BytesDiffer { function: name(), at, offset });
    }
    let displaced = function.old.start.0 + 1..function.old.start.0 + plan.displaced_len as u64;
    for part in &function.old_parts {
        let code = process.memory().read_vec(module.avma(part.start), part.len as usize)?;
        let targets = insn::branch_targets(&code, part.start);
        let targets = targets.map_err(|source| Error::Entry { function: name(), source })?;
        if let Some((from, to)) = targets.into_iter().find(|(_, to)| displaced.contains(&to.0)) {
            let source = insn::Error::BranchIntoEntry { start: function.old.start, from, to };
            return Err(Error::Entry { function: name(), source });
        }
    }
    Ok(())
}

/// Refuses uprobes that are registered for the bytes to be overwritten, as far as the kernel lists them.
fn check_uprobes(module: &Module, patch: &Patch, entries: &[EntryPlan]) -> Result<(), Error> {
    let probes = uprobes(module);
    let functions = patch.functions.iter().zip(entries);
    functions.clone().try_for_each(|(f, plan)| no_uprobe(&probes, &f.name, module.avma(f.old.start), plan))
}
