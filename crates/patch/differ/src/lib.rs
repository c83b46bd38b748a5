//! Two sets of objects and the ELF file they were linked into: what changed, and the patch that changes it.
//!
//! # What the caller guarantees
//! Each unit comes as up to three objects of one compiler with one set of flags and DWARF: *shipped*, compiled as the
//! target's was; *before*, the source as it stands before the change, and *after*, with it, these two with
//! `-ffunction-sections -fdata-sections` added. Every unit whose preprocessed text the change touches is among them, and
//! line numbers of untouched code are kept (`#line`), or `__LINE__` makes functions differ that do not.
//!
//! # What the crate guarantees
//! [`diff`] returns a patch only when
//! - every function that the patch redirects stands in the target byte for byte as the shipped object has it, but for
//!   relocated places ([`place`] tells for a whole unit): what was compared is what runs;
//! - every name that new code refers to has one address in the target, read back from the relocated places themselves
//!   and contradicted by none of them, nor by the target's symbol tables, nor by another unit; or the patch brings it,
//!   or an earlier patch of the series or a library does;
//! - every variable that live code holds keeps its address, size, type and initial value;
//! - every class of C++ keeps its table of virtual functions and its type, every static object the way it was made;
//! - no call is left that would reach the wrong version: where an entry cannot be redirected its callers are.
//!
//! Whatever does not hold is refused by name ([`Refusal::code`]), all of it at once; nothing is approximated. No input
//! makes the crate panic. It does no I/O.
//!
//! # What it does not do
//! It does not compile, and does not look at processes. It does not judge whether old and new code may run side by side
//! for a while: that is the scope, which the author states; it only warns of new state. Identical code that a linker
//! folded across units that are not at hand is not seen.
//!
//! ```text
//! shipped.o --place--> target ELF --reverse--> name -> address
//! before.o, after.o --correlate--> symbol <-> symbol --compare--> changed functions --closure--> what to bring
//!                                                                                        |
//! patch <--assemble-- new sections, relocations resolved against names, .eh_frame <------+
//! ```
//! The value of a relocated place in the target is `v = S + A - P` (or `S + A`), so that `S = v - A + P` is read back
//! from it, for each relaxation that linkers make of it as well.
//!
//! ```
//! use stillpoint_patch_differ::TargetElf;
//! let refusal = TargetElf::parse(b"not an ELF file", "redis-server").unwrap_err();
//! assert_eq!(refusal.code(), "bad-target");
//! ```
//!
//! Follows "Symbols without symbols" and "Build of the patch" of the design; relocations as in the x86-64 psABI,
//! `.eh_frame` as in the LSB.
#![forbid(unsafe_code)]

mod assemble;
mod change;
mod clobbers;
mod closure;
mod compare;
mod correlate;
mod diff;
mod error;
mod in_place;
mod library;
mod moved;
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
mod unnamed;
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
