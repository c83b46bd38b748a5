//! Two sets of objects and the ELF file they were linked into: what changed, and the patch that changes it.
#![forbid(unsafe_code)]

mod assemble;
mod change;
mod closure;
mod compare;
mod correlate;
mod diff;
mod error;
mod library;
mod names;
mod object_file;
mod options;
mod place;
mod resolve;
mod reverse;
mod shipped;
mod target;
pub mod types;
mod unit;
mod unwind_data;

use std::collections::BTreeMap;

pub use error::Refusal;
pub use library::exports;
pub use options::{HookNames, Options, Outcome, Placed, Placement, UnitInput};
pub use target::TargetElf;

/// Compares the units before and after, and makes the patch that turns one into the other in `target`.
pub fn diff(target: &TargetElf, units: &[UnitInput<'_>], options: &Options) -> Result<Outcome, Vec<Refusal>> {
    diff::diff(target, units, options)
}

/// Finds one unit, compiled exactly as shipped, in the target.
pub fn place(target: &TargetElf, path: &str, shipped: &[u8]) -> Result<Placement, Refusal> {
    match shipped::Shipped::find(target, path, shipped, &BTreeMap::new()) {
        Ok(found) => Ok(found.placement(target)),
        Err(refusals) => Err(refusals.into_iter().next().unwrap_or(Refusal::BadTarget("nothing found".to_owned()))),
    }
}
