//! Static tables that grow or shrink. They cannot be written where they are; but if all code that names a table is replaced, and
//! neither data nor that code gives its address to anything else, the new code can have a copy of its own.
//!
//! What the program has written into the old one would be lost, so the patch compares it with its contents as shipped: a
//! change of data from the shipped contents to themselves.

use crate::assemble::Assembly;
use crate::closure::Plan;
use crate::object_file::{Home, Nature, Object};
use crate::target::TargetElf;
use crate::unit::{Ancestor, Unit};
use crate::{Options, Refusal, data_changes, escape, symbol_names};
use std::collections::BTreeSet;
use stillpoint_patch_format::{DataChange, Range, readable};

/// A table of which new code has a copy.
#[derive(Debug, Clone)]
pub(crate) struct TableCopy {
    pub(crate) unit: usize,
    /// Symbol of the after side.
    new: usize,
    /// Symbol of the before side.
    old: usize,
    /// Name in the shipped object.
    shipped: String,
    /// Old table in the target.
    place: Range,
}

impl TableCopy {
    /// Returns the name in the source.
    pub(crate) fn name<'u>(&self, units: &'u [Unit<'_>]) -> Option<&'u str> {
        Some(symbol_names::stem(units[self.unit].after.as_ref()?.symbols[self.new].name))
    }
}

/// Separates each static table of another size from the one in the target, if new code can have a copy. Refuses the others.
pub(crate) fn separate(
    target: &TargetElf,
    units: &mut [Unit<'_>],
    options: &Options,
    refusals: &mut Vec<Refusal>,
) -> Vec<TableCopy> {
    let mut copies = Vec::new();
    for unit in 0..units.len() {
        let (found, refused) = copies_of(target, units, unit);
        for (old, new, why) in refused {
            refusals.extend(refusal(&units[unit], (old, new), Some(why)));
        }
        if !options.write_data {
            refusals.extend(found.iter().filter_map(|copy| refusal(&units[unit], (copy.old, copy.new), None)));
            continue;
        }
        found.iter().for_each(|copy| units[unit].separate(copy.new));
        copies.extend(found);
    }
    copies
}

fn refusal(unit: &Unit<'_>, (old, new): (usize, usize), why: Option<String>) -> Option<Refusal> {
    let (before, after) = (unit.before.as_ref()?, unit.after.as_ref()?);
    let copyable = why.is_none();
    let why = why.map_or_else(String::new, |why| format!(", and new code cannot have a copy: {why}"));
    Some(Refusal::VariableChanged {
        unit: unit.path.to_owned(),
        object: symbol_names::stem(after.symbols[new].name).to_owned(),
        before: format!("{} bytes", before.symbols[old].size),
        after: format!("{} bytes{why}", after.symbols[new].size),
        copyable,
    })
}

/// Tables of the before and the after side that need a copy and cannot have one, with the reason.
type Refused = Vec<(usize, usize, String)>;

fn copies_of(target: &TargetElf, units: &[Unit<'_>], index: usize) -> (Vec<TableCopy>, Refused) {
    let (unit, mut refused) = (&units[index], Refused::new());
    let Some(before) = &unit.before else { return (Vec::new(), refused) };
    let mut copies = Vec::new();
    for (new, old) in unit.resized() {
        let Ancestor::Shipped(name) = unit.ancestor(new) else {
            refused.push((old, new, "the target does not have it, or has several".to_owned()));
            continue;
        };
        match data_changes::shipped_place(target, units, unit, name) {
            Some(place) if copies.len() < escape::VARIABLES_MAX => {
                copies.push(TableCopy { unit: index, new, old, shipped: name.to_owned(), place });
            }
            Some(_) => refused.push((old, new, "too many tables change".to_owned())),
            None => refused.push((old, new, "the old one was not found in the target".to_owned())),
        }
    }
    // one that stays may hold the address of another
    loop {
        let tables: Vec<usize> = copies.iter().map(|copy: &TableCopy| copy.old).collect();
        let outlets: Vec<Option<String>> = (0..copies.len()).map(|bit| outlet(unit, before, &tables, bit)).collect();
        if outlets.iter().all(Option::is_none) {
            return (copies, refused);
        }
        let mut rest = Vec::new();
        for (copy, why) in copies.into_iter().zip(outlets) {
            match why {
                Some(why) => refused.push((copy.old, copy.new, why)),
                None => rest.push(copy),
            }
        }
        copies = rest;
    }
}

/// Returns the way by which the address of a table may reach something that stays.
fn outlet(unit: &Unit<'_>, before: &Object<'_>, tables: &[usize], bit: usize) -> Option<String> {
    let followed = followed(before, tables);
    if followed.holds[bit] & 1 << bit != 0 {
        return Some("it holds its own address".to_owned());
    }
    let names = |section: usize| {
        let mut relocations = before.sections[section].relocations.iter();
        relocations.any(|reloc| followed.at(before, before.site(reloc)) & 1 << bit != 0)
    };
    for (index, section) in before.sections.iter().enumerate() {
        let is_aside = matches!(section.nature, Nature::Text | Nature::Aside | Nature::Unwind | Nature::Exceptions);
        if is_aside || !names(index) {
            continue;
        }
        for reloc in &section.relocations {
            let holder = before.owner(index, reloc.offset as i64);
            if followed.at(before, before.site(reloc)) & 1 << bit != 0 && !holder.is_some_and(|s| tables.contains(&s)) {
                let name = holder.map_or(section.name, |s| symbol_names::stem(before.symbols[s].name));
                return Some(format!("`{}` holds its address", readable(name)));
            }
        }
    }
    let kept = unit.kept();
    for (function, symbol) in before.functions().filter(|(_, s)| !symbol_names::is_cold(s.name)) {
        if !before.parts(function).unwrap_or_default().into_iter().any(names) {
            continue;
        }
        let name = readable(symbol_names::stem(symbol.name));
        let Home::Section(home) = symbol.home else { continue };
        if !before.sections[home].symbols.iter().any(|s| kept.contains(s)) {
            return Some(format!("`{name}`, which does not exist after the change, uses it"));
        }
        if let Some(how) = escape::of(before, function, &followed) {
            return Some(format!("`{name}` {how}"));
        }
    }
    None
}

fn followed(before: &Object<'_>, tables: &[usize]) -> escape::Followed {
    let mut followed = escape::Followed { symbols: tables.to_vec(), holds: Vec::new() };
    let held = |table: &usize| {
        let symbol = &before.symbols[*table];
        let Home::Section(section) = symbol.home else { return 0 };
        let within = symbol.value..symbol.value.saturating_add(symbol.size);
        let inside = before.sections[section].relocations.iter().filter(|r| within.contains(&r.offset));
        inside.fold(0, |all, reloc| all | followed.at(before, before.site(reloc)))
    };
    followed.holds = tables.iter().map(held).collect();
    followed
}

/// Checks that the plan replaces all code that names one of the tables, and adds warnings.
pub(crate) fn check(units: &[Unit<'_>], copies: &[TableCopy], plan: &mut Plan, refusals: &mut Vec<Refusal>) {
    for copy in copies {
        let unit = &units[copy.unit];
        let Some(before) = &unit.before else { continue };
        let entries = plan.entries.keys().filter(|(unit, _)| *unit == copy.unit);
        let replaced: BTreeSet<usize> =
            entries.filter_map(|(_, function)| before.parts(unit.older(*function)?)).flatten().collect();
        let followed = followed(before, &[copy.old]);
        let user = before.sections.iter().enumerate().find(|(index, section)| {
            let mut relocations = section.relocations.iter();
            section.nature == Nature::Text
                && !replaced.contains(index)
                && relocations.any(|reloc| followed.at(before, before.site(reloc)) != 0)
        });
        if let Some((_, section)) = user {
            let name = section.symbols.first().map_or(section.name, |s| symbol_names::stem(before.symbols[*s].name));
            let why = format!("the entry of `{}`, which uses it, cannot be redirected", readable(name));
            refusals.extend(refusal(unit, (copy.old, copy.new), Some(why)));
        } else if let Some(name) = copy.name(units) {
            plan.warnings.push(format!(
                "new code has its own copy of `{name}`: copies that the program has made of its values, for instance when it \
                 started, do not change"
            ));
        }
    }
}

/// Adds the contents as shipped of each table to the patch: the program must not have changed them.
pub(crate) fn bring(assembly: &mut Assembly<'_, '_>, copies: &[TableCopy]) -> Vec<DataChange> {
    let mut all = Vec::new();
    for copy in copies {
        let units = assembly.units;
        let Some(name) = copy.name(units) else { continue };
        let found = data_changes::bring_shipped(assembly, copy.unit, &copy.shipped, copy.place);
        match found {
            Ok(shipped) => {
                let (name, unit) = (name.to_owned(), units[copy.unit].path.to_owned());
                all.push(DataChange { name, unit, old: copy.place, shipped, new: shipped });
            }
            Err(why) => assembly.refusals.extend(refusal(&units[copy.unit], (copy.old, copy.new), Some(why))),
        }
    }
    all
}
