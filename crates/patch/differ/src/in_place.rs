//! Changes in place, with a kernel that gives each thread its own view: constants that other units may use, and
//! functions that have no room for a jump.

use crate::closure::{Function, Plan, padding};
use crate::object_file::{Home, Nature, Site};
use crate::symbol_names;
use crate::target::TargetElf;
use crate::unit::{Ancestor, Unit};
use crate::{Options, Refusal};
use std::collections::BTreeMap;
use stillpoint_patch_format::{Avma, OffStack, Range, ResolvedBy, TargetKind, readable};
use stillpoint_patch_insn as insn;

/// Adds the constants of each unit to the plan, with their ranges.
pub(crate) fn add(
    target: &TargetElf,
    units: &[Unit<'_>],
    constants: Vec<Vec<usize>>,
    plan: &mut Plan,
    refusals: &mut Vec<Refusal>,
) {
    let all = constants.into_iter().enumerate().flat_map(|(unit, all)| all.into_iter().map(move |c| (unit, c)));
    for (index, constant) in all {
        let unit = &units[index];
        let Some(after) = &unit.after else { continue };
        let symbol = &after.symbols[constant];
        match place(target, units, unit, constant).filter(|old| old.len == symbol.size && old.len > 0) {
            Some(old) => {
                plan.constants.insert((index, constant), old);
                plan.warnings.push(format!(
                    "`{}` changes in place; code of other units that uses it was not checked",
                    readable(symbol.name)
                ));
            }
            None => refusals.push(Refusal::DataChanged {
                unit: unit.path.to_owned(),
                object: symbol_names::stem(symbol.name).to_owned(),
                why: "its initial value differs, and it was not found in the target, or other modules may have copies of it"
                    .to_owned(),
                writable: false,
            }),
        }
    }
}

/// Returns the range for a change of a function in place, if its new code fits, refers to nothing, and needs no other
/// unwind data.
pub(crate) fn room(
    target: &TargetElf,
    units: &[Unit<'_>],
    (unit, function): Function,
    old: Range,
    options: &Options,
) -> Option<Range> {
    let after = units[unit].after.as_ref().filter(|_| options.in_place)?;
    let symbol = &after.symbols[function];
    let Home::Section(home) = symbol.home else { return None };
    let section = &after.sections[home];
    let new = section.bytes;
    let alone = symbol.value == 0 && section.relocations.is_empty() && !new.is_empty();
    let more = (new.len() as u64).saturating_sub(old.len);
    let len = if more == 0 { old.len } else { old.len + padding(target, old.start.0 + old.len, more)? };
    // code that jumps into it would find other instructions
    if target.branch_into(old.start.0).is_some_and(|(from, _)| !(old.start.0..old.start.0 + old.len).contains(&from)) {
        return None;
    }
    let shipped = target.bytes(old.start.0, old.len)?;
    let simple = |code: &[u8]| insn::leaves_stack_alone(code, Avma(old.start.0));
    (alone && after.parts(function).is_some_and(|parts| parts.len() == 1) && simple(new) && simple(shipped))
        .then_some(Range { start: old.start, len })
}

/// Returns the functions that change in place: a thread does not migrate while it executes one of them.
pub(crate) fn code<'p>(units: &'p [Unit<'_>], plan: &'p Plan) -> impl Iterator<Item = OffStack> + 'p {
    plan.in_place.iter().filter_map(|(&(unit, function), room)| {
        let name = units[unit].after.as_ref()?.symbols[function].name.to_owned();
        Some(OffStack { name, range: *room, reason: "changes in place".to_owned() })
    })
}

/// Returns the range of a constant. An executable may have a copy of a constant that a library exports.
fn place(target: &TargetElf, units: &[Unit<'_>], unit: &Unit<'_>, constant: usize) -> Option<Range> {
    let Ancestor::Shipped(old) = unit.ancestor(constant) else { return None };
    let listed = target.symbols.get(old).into_iter().flatten().find(|s| s.global);
    let is_library = target.identity().kind == TargetKind::SharedLibrary;
    if is_library && listed.is_some_and(|s| s.how == ResolvedBy::Dynsym) {
        return None;
    }
    let shown = units.iter().find_map(|other| other.shipped.as_ref()?.name(old)?.direct);
    unit.shipped.as_ref()?.constant(target, old, shown.or(listed.map(|s| s.at)))
}

/// Returns the code of the known units that uses such a constant: a thread does not migrate while it executes this
/// code.
pub(crate) fn users(units: &[Unit<'_>], plan: &Plan) -> Vec<OffStack> {
    let mut found: BTreeMap<Function, &str> = BTreeMap::new();
    for (index, unit) in units.iter().enumerate() {
        let Some(after) = &unit.after else { continue };
        for section in after.sections.iter().filter(|s| s.nature == Nature::Text) {
            for reloc in &section.relocations {
                let used = plan.constants.keys().chain(plan.data.keys()).find_map(|&(home, constant)| {
                    let name = units[home].after.as_ref()?.symbols[constant].name;
                    let uses = match after.site(reloc) {
                        Site::Extern(other, _) => other == name,
                        Site::Inside { section, offset, .. } => {
                            home == index && after.owner(section, offset) == Some(constant)
                        }
                        Site::Value(_) => false,
                    };
                    uses.then_some(name)
                });
                let user = section.symbols.iter().rev().find(|s| after.symbols[**s].value <= reloc.offset);
                if let (Some(name), Some(user)) = (used, user) {
                    found.insert((index, *user), name);
                }
            }
        }
    }
    let off_stack = found.into_iter().filter_map(|((unit, user), constant)| {
        let Ancestor::Shipped(old) = units[unit].ancestor(user) else { return None };
        let range = units[unit].shipped.as_ref()?.code(old)?;
        Some(OffStack { name: old.to_owned(), range, reason: use_reason(constant) })
    });
    off_stack.collect()
}

/// Returns the reason why code that uses a constant or a variable must not be on a stack.
pub(crate) fn use_reason(name: &str) -> String {
    format!("uses `{}`, which changes in place", readable(name))
}
