//! The functions that a patch must contain so that every call in the new code reaches the right version.
//!
//! Normally these are the changed functions alone. The compiler made the bytes of an unchanged caller for the changed
//! callee on the after side as well. This includes the registers saved around the call: with `-fipa-ra`, a caller whose
//! assumptions no longer hold gets other bytes, and is thereby changed itself. Where an entry cannot be redirected, its
//! callers are patched instead.

use crate::change::ChangedFunctions;
use crate::object_file::{Home, Nature, Object, Site};
use crate::shipped_unit::ShippedUnit;
use crate::target::TargetElf;
use crate::unit::{Ancestor, Unit};
use crate::{Options, Refusal};
use crate::{function_moves, in_place, symbol_names};
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_patch_format::{Range, ResolvedBy, Svma, TargetKind, readable};
use stillpoint_patch_insn as insn;

/// A function of the after side: index of its unit, index of its symbol.
pub(crate) type Function = (usize, usize);

/// The code that a changed function has in the target.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) hot: Range,
    pub(crate) parts: Vec<Range>,
    pub(crate) bytes: Vec<u8>,
}

/// The functions and constants that the patch must contain, and how each takes effect.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Functions whose entry is redirected.
    pub(crate) entries: BTreeMap<Function, Entry>,
    /// Changed functions that new code calls directly, since their entry cannot be redirected.
    pub(crate) rebound: BTreeSet<Function>,
    /// Inline functions without a known reference to their copy in the target: no code calls it, and new code has its
    /// own.
    pub(crate) absent: BTreeSet<Function>,
    pub(crate) reasons: BTreeMap<Function, Vec<String>>,
    /// Functions that change in place, each with the available range.
    pub(crate) in_place: BTreeMap<Function, Range>,
    /// Constants that change in place.
    pub(crate) constants: BTreeMap<Function, Range>,
    /// Variables and constants that are written while all threads are stopped.
    pub(crate) data: BTreeMap<Function, Range>,
    pub(crate) warnings: Vec<String>,
}

/// Reason why an entry cannot be redirected.
struct EntryObstacle {
    why: String,
    /// Range of the function if it is in one piece, and the jump is the only obstacle.
    alone: Option<Range>,
    refusal: Box<dyn Fn(String) -> Refusal>,
}

enum EntryState {
    Redirect(Entry),
    Absent,
    /// The linker kept another unit's copy, which that unit's change replaces.
    Elsewhere,
    Blocked(EntryObstacle),
}

/// Computes the plan for all units.
pub(crate) fn plan(
    target: &TargetElf,
    units: &[Unit<'_>],
    changed: Vec<ChangedFunctions>,
    options: &Options,
    refusals: &mut Vec<Refusal>,
) -> Plan {
    let mut plan = Plan::default();
    let mut work: Vec<Function> = Vec::new();
    for (index, changed) in changed.into_iter().enumerate() {
        for (symbol, reasons) in changed {
            plan.reasons.insert((index, symbol), reasons);
            work.push((index, symbol));
        }
    }
    while let Some(function) = work.pop() {
        if plan.entries.contains_key(&function)
            || plan.rebound.contains(&function)
            || plan.in_place.contains_key(&function)
            || plan.absent.contains(&function)
        {
            continue;
        }
        match entry_state(target, units, function, options) {
            Ok(EntryState::Redirect(entry)) => {
                let warning = shared_with_modules(target, &units[function.0], function.1);
                plan.warnings.extend(warning.filter(|warning| !plan.warnings.contains(warning)));
                plan.entries.insert(function, entry);
            }
            Ok(EntryState::Elsewhere) => {}
            Ok(EntryState::Absent) => {
                plan.absent.insert(function);
            }
            Ok(EntryState::Blocked(blocked)) => match callers(&units[function.0], function.1) {
                Ok(found) => {
                    plan.rebound.insert(function);
                    add_callers(units, &mut plan, &mut work, function, &found, &blocked.why);
                }
                Err(why) => match blocked.alone.and_then(|old| in_place::room(target, units, function, old, options)) {
                    Some(room) => drop(plan.in_place.insert(function, room)),
                    None => refusals.push((blocked.refusal)(why)),
                },
            },
            Err(refusal) => refusals.push(refusal),
        }
    }
    deduplicate_inline(units, &mut plan);
    plan
}

/// Keeps one entry of an inline function that several units define: the linker kept one copy, and the first unit's new
/// code replaces it.
fn deduplicate_inline(units: &[Unit<'_>], plan: &mut Plan) {
    let name = |(unit, symbol): &Function| units[*unit].after.as_ref().map(|after| after.symbols[*symbol].name);
    let comdat = |(unit, symbol): &Function| units[*unit].after.as_ref().is_some_and(|after| after.is_comdat(*symbol));
    let mut first: BTreeMap<Svma, Function> = BTreeMap::new();
    let mut twins = Vec::new();
    for (function, entry) in plan.entries.iter().filter(|(function, _)| comdat(function)) {
        match first.get(&entry.hot.start) {
            Some(one) if name(one) == name(function) && one.0 != function.0 => twins.push(*function),
            Some(_) => {}
            None => drop(first.insert(entry.hot.start, *function)),
        }
    }
    for twin in twins {
        plan.entries.remove(&twin);
    }
}

fn add_callers(
    units: &[Unit<'_>],
    plan: &mut Plan,
    work: &mut Vec<Function>,
    function: Function,
    found: &Callers,
    why: &str,
) {
    let Some(after) = &units[function.0].after else { return };
    let name = readable(after.symbols[function.1].name);
    // New callers call the new code anyway, and are added when other code needs them.
    let existing = |caller: &&usize| units[function.0].ancestor(**caller) != Ancestor::None;
    for &caller in found.functions.iter().filter(existing) {
        let key = (function.0, caller);
        let reasons = plan.reasons.entry(key).or_default();
        reasons.push(format!("calls `{name}`, whose entry cannot be redirected: {why}"));
        work.push(key);
    }
    if found.address_taken {
        plan.warnings.push(format!(
            "pointers to `{name}` that the program has stored still point to the old code, because its entry cannot be redirected: {why}"
        ));
    }
}

/// Returns a warning for a library that exports inline code: the dynamic linker keeps one copy for all modules.
fn shared_with_modules(target: &TargetElf, unit: &Unit<'_>, function: usize) -> Option<String> {
    let after = unit.after.as_ref()?;
    let symbol = &after.symbols[function];
    let library = target.identity().kind == TargetKind::SharedLibrary;
    let exported = |name| target.symbols.get(name).into_iter().flatten().any(|s| s.how == ResolvedBy::Dynsym);
    (library && after.is_comdat(function) && !symbol.local && exported(symbol.name)).then(|| {
        let (name, file) = (readable(symbol.name), &target.identity().file_name);
        format!(
            "`{name}` is inline and exported: if {file} calls the copy of another module, that module needs a patch too"
        )
    })
}

struct Callers {
    functions: Vec<usize>,
    address_taken: bool,
}

/// Returns all functions of the unit that refer to `function`; an error if other code or data does, or might.
fn callers(unit: &Unit<'_>, function: usize) -> Result<Callers, String> {
    let Some(after) = &unit.after else { return Err("its unit was not compiled".to_owned()) };
    let symbol = &after.symbols[function];
    // Every caller of inline code has its source: all of them are known.
    if !symbol.local && !after.is_comdat(function) {
        return Err("it is global, so other units may call it".to_owned());
    }
    let Home::Section(home) = symbol.home else { return Err("it has no section".to_owned()) };
    let own = after.parts(function).unwrap_or_default();
    let mut found = Callers { functions: Vec::new(), address_taken: false };
    for (index, section) in after.sections.iter().enumerate() {
        if own.contains(&index) || matches!(section.nature, Nature::Unwind | Nature::Exceptions | Nature::Aside) {
            continue;
        }
        for reloc in &section.relocations {
            let Site::Inside { section: to, offset, .. } = after.site(reloc) else { continue };
            if to != home || section.nature == Nature::Constant && section.symbols.is_empty() {
                continue;
            }
            if section.nature != Nature::Text || offset != symbol.value as i64 {
                let holder = after.owner(index, reloc.offset as i64).map_or(section.name, |s| after.symbols[s].name);
                return Err(format!("`{}` holds its address", readable(holder)));
            }
            found.address_taken |= !reloc.is_branch();
            let caller = section.symbols.first().copied().ok_or("code without a symbol calls it")?;
            let caller = hot_parent(after, caller).ok_or("code without a symbol calls it")?;
            if !found.functions.contains(&caller) {
                found.functions.push(caller);
            }
        }
    }
    Ok(found)
}

/// Returns the function itself, or the function that a cold part belongs to.
fn hot_parent(object: &Object<'_>, symbol: usize) -> Option<usize> {
    match symbol_names::cold_parent(object.symbols[symbol].name) {
        None => Some(symbol),
        Some(parent) => {
            let (found, symbol) = object.functions().find(|(_, s)| s.name == parent)?;
            let Home::Section(section) = symbol.home else { return None };
            let first = |s: &&usize| object.symbols[**s].value == symbol.value;
            object.sections[section].symbols.iter().find(first).copied().or(Some(found))
        }
    }
}

fn entry_state(
    target: &TargetElf,
    units: &[Unit<'_>],
    (unit, function): Function,
    options: &Options,
) -> Result<EntryState, Refusal> {
    let moved = function_moves::from(units, unit, function);
    let unit = &units[unit];
    let Some(after) = &unit.after else {
        return Err(Refusal::BadTarget("a function without a unit".to_owned()));
    };
    let (path, name) = (unit.path.to_owned(), after.symbols[function].name.to_owned());
    let unsuitable = {
        let (unit, function) = (path.clone(), name.clone());
        move |why: String| Refusal::EntryUnsuitable { unit: unit.clone(), function: function.clone(), why }
    };
    if options.known.contains(&unit.public_name(after, function)) {
        let why = "an earlier patch of the series added it".to_owned();
        let refusal = move |also: String| unsuitable(format!("an earlier patch of the series added it, and {also}"));
        return Ok(EntryState::Blocked(EntryObstacle { why, alone: None, refusal: Box::new(refusal) }));
    }
    let (shipped, old) = match (&unit.shipped, unit.ancestor(function), moved) {
        (Some(shipped), Ancestor::Shipped(old), _) => (shipped, old),
        (_, _, Some((_, shipped, old))) => (shipped, old),
        _ => {
            let why = "the target does not have it".to_owned();
            let refusal = move |also: String| unsuitable(format!("the target does not have it, and {also}"));
            return Ok(EntryState::Blocked(EntryObstacle { why, alone: None, refusal: Box::new(refusal) }));
        }
    };
    let unplaced = |part: &str| Refusal::UnplacedFunction {
        unit: path.clone(),
        function: part.to_owned(),
        why: shipped.unplaced_reason(part),
    };
    let comdat = after.is_comdat(function) && !after.symbols[function].local;
    let Some(mut hot) = shipped.code(old) else {
        let has = |unit: &Unit<'_>, holds: &dyn Fn(&ShippedUnit<'_>) -> bool| unit.shipped.as_ref().is_some_and(holds);
        return match comdat {
            true if units.iter().any(|unit| has(unit, &|s| s.code(old).is_some())) => Ok(EntryState::Elsewhere),
            true if !units.iter().any(|unit| has(unit, &|s| s.may_refer_to(old))) => Ok(EntryState::Absent),
            _ => Err(unplaced(old)),
        };
    };
    let (mut parts, placed) = (Vec::new(), hot);
    for cold in shipped.cold_parts(old) {
        parts.push(shipped.code(cold).ok_or_else(|| unplaced(cold))?);
    }
    if let Some(other) = folded_with(unit, function, old) {
        let why = format!("it shares its code with `{other}`, whose code differs after the change");
        let at = hot.start;
        let refusal =
            move |_| Refusal::IdenticalCodeFolded { unit: path.clone(), one: name.clone(), other: other.clone(), at };
        return Ok(EntryState::Blocked(EntryObstacle { why, alone: None, refusal: Box::new(refusal) }));
    }
    if let Some(mut blocked) = entry_blocked(target, &path, &name, &mut hot, &parts) {
        blocked.alone = parts.is_empty().then_some(placed);
        return Ok(EntryState::Blocked(blocked));
    }
    let bytes = target.bytes(hot.start.0, hot.len).map(<[u8]>::to_vec).ok_or_else(|| unplaced(old))?;
    Ok(EntryState::Redirect(Entry { hot, parts, bytes }))
}

/// Returns another function that has the same code in the target and other code (or its own copy) after the change.
fn folded_with(unit: &Unit<'_>, function: usize, old: &str) -> Option<String> {
    let (shipped, after) = (unit.shipped.as_ref()?, unit.after.as_ref()?);
    let here = shipped.code(old)?.start;
    unit.functions().into_iter().find_map(|other| {
        let same_code = after.symbols[other].home == after.symbols[function].home
            && after.symbols[other].value == after.symbols[function].value;
        let Ancestor::Shipped(name) = unit.ancestor(other) else { return None };
        let folded = !same_code && name != old && shipped.code(name).is_some_and(|r| r.start == here);
        folded.then(|| after.symbols[other].name.to_owned())
    })
}

/// Returns the length of whole padding instructions at `at`, `need` bytes or more, before the next function.
pub(crate) fn padding(target: &TargetElf, at: u64, need: u64) -> Option<u64> {
    const INSTRUCTION_LEN_MAX: u64 = 15;
    let next = target.frames.range(at..).next().map_or(u64::MAX, |(start, _)| *start);
    let last = (need + INSTRUCTION_LEN_MAX).min(next.saturating_sub(at));
    (need..=last).find(|len| target.bytes(at, *len).is_some_and(insn::is_padding))
}

/// Returns the reason why a jump does not fit at the entry. Adds padding after a short function to its range.
fn entry_blocked(
    target: &TargetElf,
    unit: &str,
    name: &str,
    hot: &mut Range,
    parts: &[Range],
) -> Option<EntryObstacle> {
    let (unit, function) = (unit.to_owned(), name.to_owned());
    let len = hot.len;
    if len < insn::JUMP_LEN as u64 {
        match padding(target, hot.start.0 + len, insn::JUMP_LEN as u64 - len) {
            Some(room) => hot.len += room,
            None => {
                let refusal = move |why: String| Refusal::EntryTooShort {
                    unit: unit.clone(),
                    function: function.clone(),
                    len,
                    why,
                };
                let why = format!("it has {len} bytes, too few for a jump");
                return Some(EntryObstacle { why, alone: None, refusal: Box::new(refusal) });
            }
        }
    }
    let code = target.bytes(hot.start.0, hot.len)?;
    let into_entry = |to: u64| to > hot.start.0 && to < hot.start.0 + insn::JUMP_LEN as u64;
    let from_parts = parts.iter().find_map(|part| {
        let code = target.bytes(part.start.0, part.len)?;
        insn::branch_targets(code, part.start).ok()?.into_iter().find(|(_, to)| into_entry(to.0))
    });
    let elsewhere = target.branch_into(hot.start.0).map(|(from, to)| (Svma(from), Svma(to)));
    let (from, to) = match insn::plan_entry(code, hot.start) {
        Ok(_) => from_parts.or(elsewhere)?,
        Err(insn::Error::BranchIntoEntry { from, to, .. }) => (from, to),
        Err(error) => {
            let text = error.to_string();
            let why = text.clone();
            let refusal = move |also: String| Refusal::EntryUnsuitable {
                unit: unit.clone(),
                function: function.clone(),
                why: format!("{text}, and {also}"),
            };
            return Some(EntryObstacle { why, alone: None, refusal: Box::new(refusal) });
        }
    };
    let refusal =
        move |why: String| Refusal::BranchIntoEntry { unit: unit.clone(), function: function.clone(), from, to, why };
    Some(EntryObstacle { alone: None, why: format!("the branch at {from} goes into it"), refusal: Box::new(refusal) })
}
