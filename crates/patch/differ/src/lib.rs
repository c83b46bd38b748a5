//! The difference between two sets of objects, and the patch that applies it to the ELF file linked from the first.
//!
//! # What the caller guarantees
//! Each unit has up to three objects of one compiler with one set of flags and DWARF: *shipped*, compiled as the
//! target's was; *before*, from the source before the change, and *after*, from the source with it, these two with
//! `-ffunction-sections -fdata-sections` added. Every unit whose preprocessed text changes is included. Line numbers of
//! untouched code are kept (`#line`); otherwise `__LINE__` makes unchanged functions differ.
//!
//! # What the crate guarantees
//! [`diff`] returns a patch only when
//! - every function that the patch redirects is in the target byte for byte as in the shipped object, except for
//!   relocated places ([`place`] reports this for a whole unit): the compared code is the running code;
//! - every name that new code refers to has one address in the target. It is read back from the relocated places, and
//!   no relocated place, no symbol table of the target and no other unit contradicts it. All other names are in the
//!   patch, in an earlier patch of the series or in a library;
//! - every variable that live code holds keeps its address, size and type, and its initial value unless the author permits
//!   the change ([`Options::write_data`]); then the patch has the value as shipped, and all code that names it. A variable of
//!   another size has a new copy instead, if all code that names the old one is replaced and keeps its address to itself;
//! - every class of C++ keeps its table of virtual functions and its type, and every static object its initialisation;
//! - no remaining call would reach the wrong version: where an entry cannot be redirected, its callers are.
//!
//! Every violation is refused by name ([`Refusal::code`]), all of them at once; nothing is approximated. No input makes
//! the crate panic. It does no I/O.
//!
//! # What it does not do
//! It does not compile, and does not inspect processes. It does not judge if old and new code may run side by side for
//! a while: the author states this as the scope, and the crate only warns of new state. It does not detect identical
//! code that a linker folded across units that are not among the inputs.
//!
//! # C++
//! - *Inline code.* Each object has its own copy of an inline function or of a template's instance, and the linker keeps one. Small
//!   copies look alike, so equal bytes prove nothing. A copy counts as found only if callers, a table of virtual functions, a symbol
//!   table or the names that it refers to lead to it. A copy that nothing in any unit leads to is left alone. A changed header changes
//!   several units; the patch contains one copy for all of them.
//! - *Internal linkage.* Names of internal linkage that the kept copy refers to belong to the object that it is from. They prove
//!   nothing about the object that is compared.
//! - *Classes* are compared with their namespaces, bases and virtual functions, by DWARF 4, 5 and type units. Compilers are asked to
//!   describe every class in every unit. Live objects lead to the table of virtual functions and the type of their class, so a change
//!   of one of these is refused by the name of the class.
//! - *Exception tables* come with the code and are compared like code. `DW.ref.*` pointers are always those of the patch.
//! - *Static objects* exist already, so a changed initializer of a unit is refused. A static local keeps its value and its guard; a
//!   new one gets a guard of its own, once for all units. New thread-locals are refused.
//! - *Lambdas*: the module `unnamed` pairs them.
//!
//! ```text
//! shipped.o --place--> target ELF --reverse--> name -> address
//! before.o, after.o --correlate--> symbol <-> symbol --compare--> changed functions --closure--> what to bring
//!                                                                                        |
//! patch <--assemble-- new sections, relocations resolved against names, .eh_frame <------+
//! ```
//! The value of a relocated place in the target is `v = S + A - P` (or `S + A`). So the crate reads back the address as
//! `S = v - A + P`, also for each relaxation that linkers make of it.
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
mod data_changes;
mod diff;
mod error;
mod escape;
mod folded;
mod function_moves;
mod in_place;
mod library;
mod link_time;
mod object_file;
mod options;
mod placement;
mod renumbered;
mod resolve;
mod reverse;
mod shipped_unit;
mod symbol_names;
mod table_copies;
mod target;
pub mod types;
mod unit;
mod unnamed_types;
mod unwind_data;
mod unwind_records;

use std::collections::BTreeMap;

pub use error::Refusal;
pub use library::exports;
pub use link_time::distinguish_statics;
pub use options::{HookNames, Options, Outcome, Placed, Placement, SourceObjects, UnitInput};
pub use target::TargetElf;

/// Compares the units before and after, and makes the patch that changes `target` from one to the other.
///
/// # Errors
/// All reasons why the patch is impossible.
pub fn diff(target: &TargetElf, units: &[UnitInput<'_>], options: &Options) -> Result<Outcome, Vec<Refusal>> {
    diff::diff(target, units, options)
}

/// Finds one unit, compiled exactly as shipped, in the target.
///
/// # Errors
/// [`Refusal::BadObject`] or [`Refusal::Lto`] for an object that cannot be read, [`Refusal::SymbolConflict`] if the target contradicts it.
pub fn place(target: &TargetElf, path: &str, shipped: &[u8]) -> Result<Placement, Refusal> {
    match shipped_unit::ShippedUnit::find(target, path, shipped, &BTreeMap::new()) {
        Ok(found) => Ok(found.placement(target)),
        Err(refusals) => {
            Err(refusals.into_iter().next().unwrap_or(Refusal::BadTarget("no code of the unit was found".to_owned())))
        }
    }
}
