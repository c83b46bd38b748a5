//! Functions that a change moves from one unit to another.
//!
//! The obvious way is to treat such a function as new. Then callers of the entry in the target continue with the old
//! code, and new code calls the new function. So the entry is that of the old unit, redirected to the function of the
//! new unit.

use crate::change::ChangedFunctions;
use crate::shipped_unit::ShippedUnit;
use crate::unit::{Ancestor, Unit};

/// Finds the former place of a global function of the after side that is new in `unit`: the former unit's path, that
/// unit as shipped, and the function's name.
pub(crate) fn from<'u, 'a>(
    units: &'u [Unit<'a>],
    unit: usize,
    function: usize,
) -> Option<(&'a str, &'u ShippedUnit<'a>, &'a str)> {
    let after = units[unit].after.as_ref()?;
    let symbol = &after.symbols[function];
    if symbol.local || after.is_comdat(function) || units[unit].ancestor(function) != Ancestor::None {
        return None;
    }
    units.iter().find_map(|other| {
        let (shipped, before, after) = (other.shipped.as_ref()?, other.before.as_ref()?, other.after.as_ref()?);
        before.defined(symbol.name).filter(|(_, s)| !s.local && s.is_function())?;
        let gone = after.defined(symbol.name).is_none();
        let there = shipped.object.defined(symbol.name).is_some_and(|(_, s)| !s.local && s.is_function());
        (gone && there).then_some((other.path, shipped, symbol.name))
    })
}

/// Adds moved functions to the changed ones, which are listed by unit.
pub(crate) fn add(units: &[Unit<'_>], changed: &mut [ChangedFunctions]) {
    for (index, changed) in changed.iter_mut().enumerate() {
        for function in units[index].functions() {
            if let Some((path, ..)) = from(units, index, function) {
                changed.insert(function, vec![format!("it was in {path} before the change")]);
            }
        }
    }
}
