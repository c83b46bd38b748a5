//! Functions that may have a value of a renumbered enumeration in their frames. One that does not change would give an old
//! value to new code, or the other way round, so that it must be on no stack when a thread changes over.

use crate::closure::Plan;
use crate::symbol_names;
use crate::unit::Unit;
use crate::{Refusal, UnitInput, types};
use std::collections::BTreeSet;
use stillpoint_patch_format::{OffStack, readable};

/// Returns the code of all such functions of all units.
pub(crate) fn holding(
    inputs: &[UnitInput<'_>],
    units: &[Unit<'_>],
    plan: &Plan,
    enumerations: &BTreeSet<String>,
    refusals: &mut Vec<Refusal>,
) -> Vec<OffStack> {
    let mut found = Vec::new();
    for enumeration in enumerations {
        for (input, unit) in inputs.iter().zip(units).filter(|(input, _)| !input.shipped.is_empty()) {
            // names of its functions are not those of the program
            let frames = match input.sources.is_none() {
                true => types::frames_with(input.shipped, enumeration),
                false => Err(Refusal::TypeLayoutChanged {
                    type_name: format!("enum {enumeration}"),
                    what: "enumerators have other values, in a program that was optimised when it was linked"
                        .to_owned(),
                    added: None,
                }),
            };
            match frames {
                Ok(frames) => code(unit, plan, enumeration, &frames, &mut found, refusals),
                Err(refusal) if refusals.contains(&refusal) => {}
                Err(refusal) => refusals.push(refusal),
            }
        }
    }
    found
}

fn code(
    unit: &Unit<'_>,
    plan: &Plan,
    enumeration: &str,
    functions: &BTreeSet<String>,
    found: &mut Vec<OffStack>,
    refusals: &mut Vec<Refusal>,
) {
    let Some(shipped) = &unit.shipped else { return };
    let replaced = |start| {
        plan.entries.values().any(|entry| entry.hot.start == start || entry.parts.iter().any(|p| p.start == start))
    };
    for (_, symbol) in shipped.object.functions().filter(|(_, s)| functions.contains(symbol_names::stem(s.name))) {
        match shipped.code(symbol.name) {
            Some(range) if replaced(range.start) || found.iter().any(|known| known.range.start == range.start) => {}
            Some(range) => {
                let reason = format!("has values of `enum {}`, which change", readable(enumeration));
                found.push(OffStack { name: symbol.name.to_owned(), range, reason });
            }
            None => refusals.push(Refusal::UnplacedFunction {
                unit: unit.path.to_owned(),
                function: symbol.name.to_owned(),
                why: shipped.unplaced_reason(symbol.name),
            }),
        }
    }
}
