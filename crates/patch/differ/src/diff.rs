//! The complete path from objects to a patch.

use crate::assemble::Assembly;
use crate::closure::{self, Plan};
use crate::object_file::Home;
use crate::table_copies::TableCopy;
use crate::target::TargetElf;
use crate::unit::{Ancestor, Unit};
use crate::{
    Options, Outcome, Refusal, UnitInput, change, data_changes, folded, function_moves, in_place, renumbered,
    table_copies, types,
};
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_patch_format as format;
use stillpoint_patch_format::{
    Constant, DataChange, Function, Hooks, OffStack, Patch, Range, Scope, Source, Svma, TypeFact, UnitFact,
};

/// Compares the units before and after, and makes the patch that changes `target` from one to the other.
///
/// # Errors
/// All reasons why the patch is impossible.
pub(crate) fn diff(target: &TargetElf, inputs: &[UnitInput<'_>], options: &Options) -> Result<Outcome, Vec<Refusal>> {
    let mut units = Unit::read_all(target, inputs)?;
    let mut refusals: Vec<Refusal> = Vec::new();
    let copies = table_copies::separate(target, &mut units, options, &mut refusals);
    let mut data: Vec<change::ChangedData> = units.iter().map(|_| change::ChangedData::default()).collect();
    refusals.extend(inputs.iter().zip(&units).filter_map(folded_otherwise));
    let find = |(unit, data)| change::find(unit, options, &mut refusals, data);
    let mut changed: Vec<change::ChangedFunctions> = units.iter().zip(&mut data).map(find).collect();
    function_moves::add(&units, &mut changed);
    let mut plan = closure::plan(target, &units, changed, options, &mut refusals);
    let (constants, data) = data.into_iter().map(|unit| (unit.constants, unit.data)).unzip();
    in_place::add(target, &units, constants, &mut plan, &mut refusals);
    data_changes::add(target, &units, data, &mut plan, &mut refusals);
    table_copies::check(&units, &copies, &mut plan, &mut refusals);
    let (facts, notes, renumbered) = compare_types(inputs, &units, (&plan, &copies), &mut refusals);
    let holding = renumbered::holding(inputs, &units, &plan, &renumbered, &mut refusals);
    if plan.entries.is_empty()
        && plan.rebound.is_empty()
        && plan.constants.is_empty()
        && plan.data.is_empty()
        && plan.in_place.is_empty()
        && refusals.is_empty()
    {
        return Ok(Outcome::NothingToPatch);
    }
    let mut assembly = Assembly::new(target, &units, options, &plan);
    let hooks = find_hooks(&mut assembly);
    assembly.run();
    let mut data = find_data(&mut assembly);
    data.extend(table_copies::bring(&mut assembly, &copies));
    assembly.warnings.extend(notes);
    for (unit, lambda) in units.iter().flat_map(|unit| unit.replaced_lambdas().iter().map(move |lambda| (unit, lambda)))
    {
        let warning = format!(
            "live closures of `{lambda}` of {} keep the old code, because the lambda does not exist after the change",
            unit.path
        );
        assembly.warnings.push(warning);
    }
    refusals.append(&mut assembly.refusals);
    let mut off_stack = off_stack(target, &units, options, &mut refusals);
    off_stack.extend(in_place::users(&units, &plan));
    off_stack.extend(in_place::code(&units, &plan));
    for user in data_changes::users(target, &units, &plan).into_iter().chain(holding) {
        if !off_stack.iter().any(|known| known.range.start == user.range.start) {
            off_stack.push(user);
        }
    }
    let staying = staying(&assembly, &off_stack, &mut refusals);
    if !refusals.is_empty() {
        return Err(refusals);
    }
    let patch = finish(assembly, (off_stack, staying), (hooks, data), facts);
    format::encode(&patch).map_err(|e| vec![Refusal::Format(e.to_string())])?;
    Ok(Outcome::Patch(Box::new(patch)))
}

/// Refuses a program that was optimised when it was linked, if statics that were one function are not any more: the functions that
/// stored pointers lead to are not known.
fn folded_otherwise((input, unit): (&UnitInput<'_>, &Unit<'_>)) -> Option<Refusal> {
    let (before, after) = (unit.before.as_ref()?, unit.after.as_ref()?);
    let shipped = unit.shipped.as_ref().filter(|_| input.sources.is_some())?;
    let (one, other) = folded::difference(&shipped.object, before).or_else(|| folded::difference(before, after))?;
    let at = shipped.code(&other).map_or(Svma(0), |code| code.start);
    Some(Refusal::IdenticalCodeFolded { unit: unit.path.to_owned(), one, other, at })
}

/// Compares types as shipped with types of the after side: the running data has the shipped layout.
fn compare_types(
    inputs: &[UnitInput<'_>],
    units: &[Unit<'_>],
    (plan, copies): (&Plan, &[TableCopy]),
    refusals: &mut Vec<Refusal>,
) -> (Vec<TypeFact>, Vec<String>, BTreeSet<String>) {
    let mut facts: BTreeMap<String, TypeFact> = BTreeMap::new();
    let (mut notes, mut renumbered) = (BTreeSet::new(), BTreeSet::new());
    for (index, (input, unit)) in inputs.iter().zip(units).enumerate() {
        let Some(after) = unit.after.as_ref().filter(|_| !input.shipped.is_empty()) else { continue };
        let changed = |s: &usize| plan.reasons.contains_key(&(index, *s)) || unit.ancestor(*s) == Ancestor::None;
        let names = |s: usize| {
            let after = after.symbols[s].name.to_owned();
            let Ancestor::Shipped(old) = unit.ancestor(s) else { return (after.clone(), after) };
            (old.to_owned(), after)
        };
        let used_by: Vec<(String, String)> = unit.functions().into_iter().filter(changed).map(names).collect();
        let own = [(input.shipped, input.after)];
        let copied: Vec<&str> = copies.iter().filter(|c| c.unit == index).filter_map(|c| c.name(units)).collect();
        let sources = input.sources.map(|all| all.iter().map(|of| (&of.shipped[..], &of.after[..])).collect());
        for (shipped, after) in sources.unwrap_or_else(|| own.to_vec()) {
            match types::compare_except(shipped, after, &used_by, &copied) {
                Ok(found) => {
                    facts.extend(found.facts.into_iter().map(|fact| (fact.name.clone(), fact)));
                    notes.extend(found.notes);
                    renumbered.extend(found.renumbered.into_keys());
                }
                Err(found) => {
                    for refusal in found {
                        if !refusals.contains(&refusal) {
                            refusals.push(refusal);
                        }
                    }
                }
            }
        }
    }
    (facts.into_values().collect(), notes.into_iter().collect(), renumbered)
}

/// Returns the changes of data, whose contents are among the sections of the patch.
fn find_data(assembly: &mut Assembly<'_, '_>) -> Vec<DataChange> {
    let mut all = Vec::new();
    for (&(unit, variable), &old) in &assembly.plan.data {
        let Some((shipped, new)) = data_changes::bring(assembly, (unit, variable)) else { continue };
        let Some(after) = assembly.after(unit) else { continue };
        let (name, unit) = (after.symbols[variable].name.to_owned(), assembly.units[unit].path.to_owned());
        all.push(DataChange { name, unit, old, shipped, new });
    }
    all
}

fn find_hooks(assembly: &mut Assembly<'_, '_>) -> Hooks {
    let options = assembly.options;
    let mut find =
        |names: &Vec<String>| -> Vec<u32> { names.iter().filter_map(|name| find_hook(assembly, name)).collect() };
    Hooks {
        pre_apply: find(&options.hooks.pre_apply),
        post_apply: find(&options.hooks.post_apply),
        pre_revert: find(&options.hooks.pre_revert),
        post_revert: find(&options.hooks.post_revert),
    }
}

fn find_hook(assembly: &mut Assembly<'_, '_>, name: &str) -> Option<u32> {
    for unit in 0..assembly.units.len() {
        let Some(after) = assembly.after(unit) else { continue };
        if let Some((function, _)) = after.functions().find(|(_, s)| s.name == name) {
            let function = assembly.canonical(unit, function);
            return assembly.add_function(unit, function);
        }
    }
    assembly.refusals.push(Refusal::UnknownName { what: "hook", name: name.to_owned() });
    None
}

/// Returns the code of the functions that the caller requires to be on no stack.
fn off_stack(target: &TargetElf, units: &[Unit<'_>], options: &Options, refusals: &mut Vec<Refusal>) -> Vec<OffStack> {
    let mut out = Vec::new();
    for name in &options.off_stack {
        let found = ranges_of(target, units, name);
        if found.is_empty() {
            refusals.push(Refusal::UnknownName { what: "off-stack function", name: name.clone() });
        }
        let reason = "stated by the author".to_owned();
        out.extend(found.into_iter().map(|range| OffStack { name: name.clone(), range, reason: reason.clone() }));
    }
    out
}

/// Returns the functions in which the caller lets threads stay, by the names that the patch uses.
fn staying(assembly: &Assembly<'_, '_>, off_stack: &[OffStack], refusals: &mut Vec<Refusal>) -> Vec<String> {
    let named = |(unit, function): &closure::Function| {
        let name = assembly.after(*unit)?.symbols[*function].name;
        Some((format!("{}:{name}", assembly.units[*unit].path), name.to_owned()))
    };
    let changed: Vec<(String, String)> = assembly.plan.entries.keys().filter_map(named).collect();
    let mut out = BTreeSet::new();
    for stated in &assembly.options.staying {
        let found = changed.iter().find(|(full, name)| stated == name || stated == full).map(|(_, name)| name);
        match found.or_else(|| off_stack.iter().map(|o| &o.name).find(|name| *name == stated)) {
            Some(name) => drop(out.insert(name.clone())),
            None => refusals.push(Refusal::UnknownName { what: "changed function", name: stated.clone() }),
        }
    }
    out.into_iter().collect()
}

fn ranges_of(target: &TargetElf, units: &[Unit<'_>], name: &str) -> Vec<Range> {
    for unit in units {
        let Some(shipped) = &unit.shipped else { continue };
        let plain = name.strip_prefix(unit.path).and_then(|rest| rest.strip_prefix(':')).unwrap_or(name);
        let mut found: Vec<Range> = shipped.code(plain).into_iter().collect();
        if !found.is_empty() {
            found.extend(shipped.cold_parts(plain).into_iter().filter_map(|cold| shipped.code(cold)));
            return found;
        }
    }
    let listed = target.symbols.get(name).into_iter().flatten();
    listed.filter_map(|s| Some(Range { start: Svma(s.at), len: *target.frames.get(&s.at)? })).take(1).collect()
}

fn finish(
    mut assembly: Assembly<'_, '_>,
    (off_stack, staying): (Vec<OffStack>, Vec<String>),
    (hooks, data): (Hooks, Vec<DataChange>),
    types: Vec<TypeFact>,
) -> Patch {
    let (plan, units, options) = (assembly.plan, assembly.units, assembly.options);
    let mut functions = Vec::new();
    for ((unit, function), entry) in &plan.entries {
        let Some(new) = assembly.add_function(*unit, *function) else { continue };
        let Some(after) = assembly.after(*unit) else { continue };
        functions.push(Function {
            name: after.symbols[*function].name.to_owned(),
            unit: units[*unit].path.to_owned(),
            old: entry.hot,
            old_parts: entry.parts.clone(),
            old_bytes: entry.bytes.clone(),
            new,
            reasons: plan.reasons.get(&(*unit, *function)).cloned().unwrap_or_default(),
        });
    }
    let mut constants = Vec::new();
    for (&(unit, symbol), &old) in &plan.constants {
        let (Some(new), Some(after)) = (assembly.add_constant(unit, symbol), assembly.after(unit)) else { continue };
        let (name, unit) = (after.symbols[symbol].name.to_owned(), units[unit].path.to_owned());
        constants.push(Constant { name, unit, old, new });
    }
    for (&(unit, symbol), &room) in &plan.in_place {
        let (Some(new), Some(after)) = (assembly.add_constant(unit, symbol), assembly.after(unit)) else { continue };
        let Home::Section(home) = after.symbols[symbol].home else { continue };
        let old = Range { start: room.start, len: after.sections[home].bytes.len() as u64 };
        let (name, unit) = (after.symbols[symbol].name.to_owned(), units[unit].path.to_owned());
        constants.push(Constant { name, unit, old, new });
    }
    let facts = units.iter().filter(|unit| unit.after.is_some()).map(|unit| {
        let (functions_placed, functions_total) = unit.shipped.as_ref().map_or((0, 0), |s| s.counts());
        UnitFact { path: unit.path.to_owned(), functions_placed, functions_total }
    });
    let units = facts.collect();
    Patch {
        name: options.name.clone(),
        description: options.description.clone(),
        cves: options.cves.clone(),
        replaces: options.replaces.clone(),
        source: Source { units, ..options.source.clone() },
        based_on: options.based_on.clone(),
        toolchain: options.toolchain.clone(),
        target: assembly.target.identity().clone(),
        // no thread may run old code when new values are there
        scope: if data.is_empty() { options.scope.unwrap_or(Scope::ThreadLocal) } else { Scope::Process },
        scope_stated: options.scope.is_some(),
        sections: assembly.sections,
        symbols: assembly.symbols,
        exports: assembly.exports.into_iter().collect(),
        functions,
        constants,
        data,
        off_stack,
        staying,
        hooks,
        types,
        escaping: assembly.escaping.into_iter().collect(),
        warnings: assembly.warnings,
    }
}
