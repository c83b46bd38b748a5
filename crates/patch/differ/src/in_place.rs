//! Constants that other units may use: their contents change where they lie, by a kernel that gives each thread its own view.

use crate::Refusal;
use crate::closure::{Function, Plan};
use crate::names;
use crate::object_file::{Nature, Site};
use crate::target::TargetElf;
use crate::unit::{Ancestor, Unit};
use std::collections::BTreeMap;
use stillpoint_patch_format::{OffStack, Range, ResolvedBy, TargetKind, readable};

/// Adds the constants of each unit to the plan, with where they lie.
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
                    "code of other units that uses `{}`, which changes where it lies, is not looked at",
                    readable(symbol.name)
                ));
            }
            None => refusals.push(Refusal::DataChanged {
                unit: unit.path.to_owned(),
                object: names::stem(symbol.name).to_owned(),
                why: "its initial value differs, and it was not found in the target, or other modules may have copies of it"
                    .to_owned(),
            }),
        }
    }
}

/// Where a constant lies. An executable may have made a copy of what a library exports.
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

/// Code of the units at hand that uses such a constant: no thread changes over in the middle of it.
pub(crate) fn users(units: &[Unit<'_>], plan: &Plan) -> Vec<OffStack> {
    let mut found: BTreeMap<Function, &str> = BTreeMap::new();
    for (index, unit) in units.iter().enumerate() {
        let Some(after) = &unit.after else { continue };
        for section in after.sections.iter().filter(|s| s.nature == Nature::Text) {
            for reloc in &section.relocations {
                let used = plan.constants.keys().find_map(|&(home, constant)| {
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
        let reason = format!("uses `{}`, which changes where it lies", readable(constant));
        Some(OffStack { name: old.to_owned(), range, reason })
    });
    off_stack.collect()
}
