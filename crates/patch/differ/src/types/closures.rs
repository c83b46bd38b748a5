//! Captures of lambdas.

use super::dwarf::{DebugInfoError, Die, Side, is_aggregate};
use gimli::constants as dw;
use std::collections::BTreeMap;
use stillpoint_patch_format::readable;

/// Returns the members, with their places, of each closure of each function.
pub(super) fn all(side: &Side<'_>) -> Result<BTreeMap<String, Vec<String>>, DebugInfoError> {
    let mut out = BTreeMap::new();
    for (name, dies) in &side.functions {
        let mut found = Vec::new();
        for &function in dies.iter().filter(|_| name.starts_with("_Z")) {
            side.below(function, true, |die, entry| {
                if is_aggregate(entry.tag()) && is_closure(side, die)? {
                    found.push(layout(side, die)?);
                }
                Ok(())
            })?;
        }
        if !found.is_empty() {
            out.insert(readable(name).into_owned(), found);
        }
    }
    Ok(out)
}

/// Returns true for a callable class without a name of its own.
fn is_closure(side: &Side<'_>, class: Die) -> Result<bool, DebugInfoError> {
    let named = side.string(&side.entry(class)?, dw::DW_AT_name, class.unit())?;
    let mut called = false;
    side.below(class, false, |die, entry| {
        called |= entry.tag() == dw::DW_TAG_subprogram && side.name_of(entry, die.unit())? == Some("operator()");
        Ok(())
    })?;
    Ok(called && named.is_none_or(|name| name.starts_with("<lambda")))
}

fn layout(side: &Side<'_>, class: Die) -> Result<String, DebugInfoError> {
    let members = side.members(class)?.into_iter();
    let members: Vec<String> = members
        .map(|m| Ok(format!("{} at {}", side.describe(m.ty)?, m.place)))
        .collect::<Result<_, DebugInfoError>>()?;
    Ok(format!("{} bytes: {}", side.extent(class)?.0, members.join(", ")))
}
