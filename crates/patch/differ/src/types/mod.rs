//! Comparison, member by member, of the types of live data that old and new code share.
//!
//! # What the caller guarantees
//! Both objects are the same translation unit, compiled with DWARF 4 or 5 (`-g`): `shipped` as the running program was,
//! `after` with the change. `used_by` names the functions that are changed or new, as shipped and after.
//!
//! # What this module guarantees
//! When [`compare`] succeeds, an object that the running program built with the layout of `shipped` reads and writes the
//! same through the code of `after`:
//!
//! ```text
//! for every named type t of both units:   size, alignment, kind        equal
//!     for every member m of shipped:      offset, bits, type(m)        equal, and m exists after
//!     for every enumerator e of shipped:  value(e)                     equal, and e exists after; or no data has type t
//! for every variable v of both units:     type(v)                      equal, unless v is constant
//! for every f in used_by, of both units:  parameters, result           equal, or no unchanged code refers to f
//! ```
//!
//! The types reached from parameters, locals, results, calls and inlined code of `used_by`, and from the unit's
//! variables, are listed as facts. All other named types of the unit are compared as well, because a cast leaves no
//! trace in DWARF, but not listed. If `used_by` is empty, no data crosses, and nothing is compared.
//!
//! A new type is allowed. A type grown at its end is refused: live objects have the old size. A member placed in
//! padding is refused: live objects hold no value there. An enumerator added, or an alternative added to a union that
//! does not grow, is allowed and noted.
//!
//! # What it does not do
//! It does not check data that no type describes (buffers filled by hand, enumerators in integers), or a changed meaning of an
//! unchanged layout. Functions that have values of a renumbered enumeration in their frames are named; the caller keeps them off
//! the stack.
//! It does not compare constant data: that is compared by content. Functions that a unit only declares are compared in
//! the unit that defines them.
//!
//! The index holds names only; a type's members are read when it is compared. Each pair of types is compared once, so
//! that cost grows with the size of the unit and cycles end.

mod closures;
mod dwarf;
mod enumerations;
mod layout;
mod owners;
mod references;
mod scopes;
mod shape;
mod signature;

use crate::Refusal;
use dwarf::{Sections, Side};
use layout::Comparison;
pub(crate) use owners::{Owners, owners};
pub(crate) use scopes::{Scopes, scopes};
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_patch_format::TypeFact;

/// Result of a comparison that found nothing to refuse.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Compared {
    /// Named types of data that crosses the change, sorted by name.
    pub facts: Vec<TypeFact>,
    /// Changes of types that are allowed and that the author should check, one line each.
    pub notes: Vec<String>,
    /// Enumerations with other values, each with the functions of `shipped` that may have one in their frames.
    pub renumbered: BTreeMap<String, BTreeSet<String>>,
}

/// Compares every type that the functions in `used_by` or static data reach, as `shipped` and as `after` lay it out.
/// Each function is a pair of names, in `shipped` and in `after` (a lambda's number may differ). Both objects are whole
/// files with DWARF; an empty one is compared with nothing.
///
/// # Errors
/// A refusal for each type that changed, or [`Refusal::DebugInfo`] if debug information cannot be read.
pub fn compare(shipped: &[u8], after: &[u8], used_by: &[(String, String)]) -> Result<Compared, Vec<Refusal>> {
    compare_except(shipped, after, used_by, &[])
}

/// Compares like [`compare`], without the variables of which new code has a copy.
pub(crate) fn compare_except(
    shipped: &[u8],
    after: &[u8],
    used_by: &[(String, String)],
    copied: &[&str],
) -> Result<Compared, Vec<Refusal>> {
    if shipped.is_empty() || after.is_empty() || used_by.is_empty() {
        return Ok(Compared::default());
    }
    let damaged = |side: &str, why: String| vec![Refusal::DebugInfo { unit: format!("{side} object"), why }];
    let old_sections = Sections::load(shipped).map_err(|e| damaged("shipped", e.to_string()))?;
    let new_sections = Sections::load(after).map_err(|e| damaged("after", e.to_string()))?;
    let old = Side::index(&old_sections).map_err(|e| damaged("shipped", e.to_string()))?;
    let new = Side::index(&new_sections).map_err(|e| damaged("after", e.to_string()))?;
    let functions: BTreeMap<&str, &str> =
        used_by.iter().map(|(old, new)| (source_name(new), source_name(old))).collect();

    let mut comparison = Comparison::new(&old, &new, copied);
    let outcome =
        comparison.run(&functions).and_then(|()| signature::compare(&mut comparison, shipped, after, &functions));
    let unit = || new.unit_name().unwrap_or_else(|| "after object".to_owned());
    match outcome {
        Err(e) => Err(vec![Refusal::DebugInfo { unit: unit(), why: e.to_string() }]),
        Ok(()) => comparison.finish(&unit()),
    }
}

/// Returns the functions of an object that may have values of an enumeration in their frames.
///
/// # Errors
/// A refusal if data may hold one, or if debug information cannot be read.
pub(crate) fn frames_with(shipped: &[u8], enumeration: &str) -> Result<BTreeSet<String>, Refusal> {
    let sections = Sections::load(shipped).map_err(damaged)?;
    let uses = Side::index(&sections).and_then(|side| enumerations::uses(&side, enumeration)).map_err(damaged)?;
    match uses.data {
        None => Ok(uses.functions),
        Some(data) => Err(Refusal::TypeLayoutChanged {
            type_name: format!("enum {enumeration}"),
            what: format!("enumerators have other values; {data} may hold one"),
            added: None,
        }),
    }
}

/// Returns the members of the closures of each function, in the order of the source, by the function's readable name.
pub(crate) fn closures(object: &[u8]) -> Result<BTreeMap<String, Vec<String>>, Refusal> {
    let sections = match Sections::load(object) {
        // A unit without types is refused by name once its types are needed.
        Err(dwarf::DebugInfoError::Missing) => return Ok(BTreeMap::new()),
        other => other.map_err(damaged)?,
    };
    Side::index(&sections).and_then(|side| closures::all(&side)).map_err(damaged)
}

fn damaged(error: dwarf::DebugInfoError) -> Refusal {
    Refusal::DebugInfo { unit: "an object".to_owned(), why: error.to_string() }
}

/// Returns the function's name in the source: without the suffixes of compiler-made clones (`.part.0`, `.cold`, ...).
fn source_name(symbol: &str) -> &str {
    symbol.split_once('.').map_or(symbol, |(name, _)| name)
}
