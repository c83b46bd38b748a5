//! Changes of data that the program holds, written while all its threads are stopped: variables with another initial value, and constants
//! that other units or live data refer to.
//!
//! The author permits them: the differ cannot see the copies that a program makes of its tables when it starts.

use crate::assemble::Assembly;
use crate::closure::Plan;
use crate::object_file::{Home, Nature, Object, Site};
use crate::shipped_unit::ShippedUnit;
use crate::symbol_names;
use crate::target::{Dynamic, TargetElf};
use crate::unit::{Ancestor, Unit};
use crate::{Refusal, in_place};
use object::elf;
use std::collections::BTreeSet;
use stillpoint_patch_format::{DATA_MAX, OffStack, Range, Relocation, RelocationKind, ResolvedBy, Svma, SymbolValue};
use stillpoint_patch_format::{TargetKind, readable};

/// Adds the changed variables of each unit to the plan, with their ranges.
pub(crate) fn add(
    target: &TargetElf,
    units: &[Unit<'_>],
    changed: Vec<Vec<usize>>,
    plan: &mut Plan,
    refusals: &mut Vec<Refusal>,
) {
    let all = changed.into_iter().enumerate().flat_map(|(unit, all)| all.into_iter().map(move |v| (unit, v)));
    let mut sum = 0;
    for (index, variable) in all {
        let unit = &units[index];
        let Some(after) = &unit.after else { continue };
        let symbol = &after.symbols[variable];
        match place(target, units, (index, variable)) {
            // another name of it, or another unit's copy of inline data, of which the linker kept one
            Ok(old) if plan.data.values().any(|known| known.start == old.start) => {}
            Ok(old) => {
                sum += old.len;
                let name = readable(symbol.name);
                plan.warnings.push(format!(
                    "`{name}` ({} bytes) is written where it is: copies that the program has made of its values, for instance when it \
                     started, do not change",
                    old.len
                ));
                if let Some(holder) = holder(target, units, (index, variable), old) {
                    plan.warnings.push(format!(
                        "code that reads `{name}` through {holder} was not looked for: it may be on a stack when `{name}` changes"
                    ));
                }
                plan.data.insert((index, variable), old);
            }
            Err(why) => refusals.push(refusal(unit, symbol.name, why)),
        }
    }
    if sum > DATA_MAX {
        let why = format!("{sum} bytes of data change, more than {DATA_MAX}");
        let first =
            plan.data.keys().next().and_then(|(unit, v)| Some((&units[*unit], units[*unit].after.as_ref()?, *v)));
        refusals.extend(first.map(|(unit, after, variable)| refusal(unit, after.symbols[variable].name, why)));
    }
}

fn refusal(unit: &Unit<'_>, name: &str, why: String) -> Refusal {
    let object = symbol_names::stem(name).to_owned();
    Refusal::DataChanged { unit: unit.path.to_owned(), object, why, writable: false }
}

/// Returns the range of a variable of the after side, or the reason why it cannot be written.
fn place(target: &TargetElf, units: &[Unit<'_>], (index, variable): (usize, usize)) -> Result<Range, String> {
    let unit = &units[index];
    let missing = || "its initial value differs, and it was not found in the target".to_owned();
    let (Some(after), Some(shipped)) = (&unit.after, &unit.shipped) else { return Err(missing()) };
    let Ancestor::Shipped(old) = unit.ancestor(variable) else { return Err(missing()) };
    let listed = target.symbols.get(old).into_iter().flatten().find(|s| s.global);
    if target.identity().kind == TargetKind::SharedLibrary && listed.is_some_and(|s| s.how == ResolvedBy::Dynsym) {
        return Err(
            "its initial value differs, and an executable may have a copy of it that programs use instead".to_owned()
        );
    }
    if let Some(function) = after.label_holder(variable) {
        return Err(format!("it holds addresses inside of `{}`", readable(function)));
    }
    if after.has_relative_pointer(variable) {
        return Err("it holds distances between its own place and another".to_owned());
    }
    let place = shipped_place(target, units, unit, old);
    let place = place.filter(|place| place.len == after.symbols[variable].size && place.len > 0).ok_or_else(missing)?;
    contents(target, shipped, old, place)?;
    let constant = match after.symbols[variable].home {
        Home::Section(section) => matches!(after.sections[section].nature, Nature::Constant | Nature::Merged { .. }),
        _ => false,
    };
    match holder(target, units, (index, variable), place).filter(|_| constant) {
        Some(holder) => Err(format!("it is a constant, and code that reads it through {holder} cannot be known")),
        None => Ok(place),
    }
}

/// Returns the range of a variable of a unit as shipped.
pub(crate) fn shipped_place(target: &TargetElf, units: &[Unit<'_>], unit: &Unit<'_>, name: &str) -> Option<Range> {
    let shipped = unit.shipped.as_ref()?;
    let (_, symbol) = shipped.object.defined(name)?;
    let listed = target.symbols.get(name).into_iter().flatten().find(|s| s.global && !symbol.local);
    let shown = || units.iter().find_map(|other| other.shipped.as_ref()?.name(name)?.direct);
    let own = shipped.name(name).and_then(|known| known.direct);
    let shown = if symbol.local { own } else { shown() };
    let elsewhere = shown.or(listed.map(|s| s.at));
    match symbol.home {
        Home::Section(section) if shipped.object.sections[section].nature == Nature::Zero => {
            own.or(elsewhere).map(|at| Range { start: Svma(at), len: symbol.size })
        }
        _ => shipped.constant(target, name, elsewhere),
    }
}

/// Returns data that holds the address of a variable, for messages.
fn holder(target: &TargetElf, units: &[Unit<'_>], (index, variable): (usize, usize), place: Range) -> Option<String> {
    let name = units[index].after.as_ref()?.symbols[variable].name;
    for (number, unit) in units.iter().enumerate() {
        let Some(after) = &unit.after else { continue };
        for (from, section) in after.sections.iter().enumerate() {
            if !matches!(section.nature, Nature::Data | Nature::Constant | Nature::Custom { .. }) {
                continue;
            }
            for reloc in &section.relocations {
                let refers = match after.site(reloc) {
                    Site::Extern(other, _) => other == name,
                    Site::Inside { section, offset, .. } => {
                        number == index && after.owner(section, offset) == Some(variable)
                    }
                    Site::Value(_) => false,
                };
                let holder = after.owner(from, reloc.offset as i64);
                if refers && (number != index || holder != Some(variable)) {
                    let name = holder.map_or(section.name, |s| symbol_names::stem(after.symbols[s].name));
                    return Some(format!("`{}`", readable(name)));
                }
            }
        }
    }
    target.pointer_into(place).map(|at| format!("the pointer at {}", Svma(at)))
}

/// A pointer among the contents of a variable: its offset, and its value.
type Pointer = (u32, SymbolValue);

/// Returns the contents of a variable in the target's file, with zeros where the dynamic linker writes pointers, and these pointers.
fn contents(
    target: &TargetElf,
    shipped: &ShippedUnit<'_>,
    name: &str,
    place: Range,
) -> Result<(Vec<u8>, Vec<Pointer>), String> {
    let outside = || "the target's file does not hold its initial value".to_owned();
    let mut bytes = target.initial_bytes(place.start.0, place.len).ok_or_else(outside)?;
    let mut pointers = Vec::new();
    for at in pointer_places(target, &shipped.object, name, place) {
        let offset = (at - place.start.0) as usize;
        let word = bytes.get_mut(offset..offset + 8).ok_or_else(outside)?;
        let value = match target.dynamic.get(&at) {
            Some(Dynamic::Relative(value)) => SymbolValue::Target(Svma(*value)),
            Some(Dynamic::Name(name)) => match target.symbols.get(name).into_iter().flatten().find(|s| s.global) {
                Some(own) => SymbolValue::Target(Svma(own.at)),
                None => SymbolValue::Import { version: None },
            },
            None => match u64::from_le_bytes(std::array::from_fn(|i| word[i])) {
                0 => continue,
                value => SymbolValue::Target(Svma(value)),
            },
            Some(_) => return Err("its initial value has an address that only the dynamic linker knows".to_owned()),
        };
        word.fill(0);
        pointers.push((offset as u32, value));
    }
    Ok((bytes, pointers))
}

/// Returns the addresses of the pointers in a variable that depend on where the target is mapped.
fn pointer_places(target: &TargetElf, object: &Object<'_>, name: &str, place: Range) -> BTreeSet<u64> {
    let end = place.start.0 + place.len;
    let mut places: BTreeSet<u64> = target.dynamic.range(place.start.0..end).map(|(at, _)| *at).collect();
    if target.identity().kind == TargetKind::Executable {
        return places;
    }
    let Some((_, symbol)) = object.defined(name) else { return places };
    let Home::Section(section) = symbol.home else { return places };
    let within = symbol.value..symbol.value + symbol.size;
    let inside = object.sections[section].relocations.iter().filter(|r| within.contains(&r.offset));
    let absolute = inside.filter(|r| elf::RelocationType(r.kind) == elf::R_X86_64_64);
    places.extend(absolute.map(|r| place.start.0 + (r.offset - symbol.value)));
    places
}

/// Adds the contents of a changed variable to the patch; returns the symbols of the shipped contents and of the new ones.
pub(crate) fn bring(assembly: &mut Assembly<'_, '_>, (unit, variable): (usize, usize)) -> Option<(u32, u32)> {
    let place = *assembly.plan.data.get(&(unit, variable))?;
    let (after, units) = (assembly.after(unit)?, assembly.units);
    let name = after.symbols[variable].name;
    let Ancestor::Shipped(old) = units[unit].ancestor(variable) else { return None };
    let shipped = match bring_shipped(assembly, unit, old, place) {
        Ok(shipped) => shipped,
        Err(why) => {
            assembly.refusals.push(refusal(&units[unit], name, why));
            return None;
        }
    };
    let stem = symbol_names::stem(name);
    let new = match after.symbols[variable].home {
        Home::Section(home) if after.sections[home].nature == Nature::Zero => {
            assembly.add_contents(&format!(".rodata.new.{stem}"), vec![0; place.len as usize], Vec::new())
        }
        _ => assembly.add_constant(unit, variable)?,
    };
    Some((shipped, new))
}

/// Adds the contents as shipped of a variable to the patch; returns their symbol.
pub(crate) fn bring_shipped(
    assembly: &mut Assembly<'_, '_>,
    unit: usize,
    name: &str,
    place: Range,
) -> Result<u32, String> {
    let (units, target) = (assembly.units, assembly.target);
    let shipped = units[unit].shipped.as_ref().ok_or("its unit is new")?;
    let (bytes, pointers) = contents(target, shipped, name, place)?;
    let relocations = pointers.into_iter().map(|(offset, value)| {
        let at = place.start.0 + u64::from(offset);
        let import = matches!(value, SymbolValue::Import { .. });
        let symbol_name = match target.dynamic.get(&at) {
            Some(Dynamic::Name(imported)) if import => imported.clone(),
            _ => format!("pointer in {name} as shipped"),
        };
        let value = match value {
            SymbolValue::Import { .. } => {
                let version =
                    assembly.options.imports.as_ref().and_then(|all| all.get(&symbol_name).cloned().flatten());
                SymbolValue::Import { version }
            }
            other => other,
        };
        let how = if import { ResolvedBy::Runtime } else { ResolvedBy::ReverseRelocation };
        let symbol = assembly.symbol(&symbol_name, value, how);
        Relocation { offset, kind: RelocationKind::Abs64, symbol, addend: 0 }
    });
    let relocations = relocations.collect();
    let stem = symbol_names::stem(name);
    Ok(assembly.add_contents(&format!(".rodata.shipped.{stem}"), bytes, relocations))
}

/// Returns the sections of the after side that hold new contents of changed variables: the patch never writes to them.
pub(crate) fn is_contents(plan: &Plan, after: &Object<'_>, (unit, section): (usize, usize)) -> bool {
    let mut own = plan.data.keys().filter(|(of, _)| *of == unit);
    own.any(|(_, variable)| after.symbols[*variable].home == Home::Section(section))
}

/// Returns all code of the target that names a changed variable: none of it may be on a stack when the variable changes.
pub(crate) fn users(target: &TargetElf, units: &[Unit<'_>], plan: &Plan) -> Vec<OffStack> {
    let mut found: Vec<OffStack> = Vec::new();
    for (&(unit, variable), place) in &plan.data {
        let Some(after) = &units[unit].after else { continue };
        let reason = in_place::use_reason(after.symbols[variable].name);
        for (start, len) in target.code_that_names(*place) {
            if found.iter().any(|known| known.range.start.0 == start) {
                continue;
            }
            let name =
                units.iter().filter_map(|unit| unit.shipped.as_ref()).find_map(|shipped| shipped.name_of_code(start));
            let listed = || {
                target.symbols.iter().find(|(_, all)| all.iter().any(|s| s.at == start)).map(|(name, _)| name.as_str())
            };
            let name = name.or_else(listed).map_or_else(|| format!("the code at {}", Svma(start)), str::to_owned);
            found.push(OffStack { name, range: Range { start: Svma(start), len }, reason: reason.clone() });
        }
    }
    found
}
