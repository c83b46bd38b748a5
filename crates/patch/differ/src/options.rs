//! Inputs of the differ: units and statements of the caller. Outputs: a patch, and places of names.

use std::collections::BTreeMap;
use stillpoint_patch_format::{DiffFact, Patch, ResolvedBy, Scope, Source, SymbolValue, Toolchain};

/// One translation unit in its three builds, each a relocatable x86-64 ELF object.
#[derive(Debug, Clone, Copy)]
pub struct UnitInput<'a> {
    /// Path relative to the source directory; prefixes the names of statics (`networking.c:processInlineBuffer`).
    pub path: &'a str,
    /// Object compiled exactly as shipped. Empty for a unit that the target does not have.
    pub shipped: &'a [u8],
    /// Object of the source of the series before this patch, with `-ffunction-sections -fdata-sections` added. Empty
    /// for a unit that is new on the after side.
    pub before: &'a [u8],
    /// Object of the source with this patch, compiled as `before` was.
    pub after: &'a [u8],
    /// Source units of a program that was optimised when it was linked: its objects have the code of all of them
    /// (see [`distinguish_statics`](crate::distinguish_statics)), and types are compared in each changed one. `None` for
    /// a unit that was compiled alone.
    pub sources: Option<&'a [SourceObjects]>,
}

/// Objects of one source unit, for their types alone.
#[derive(Debug, Clone, Default)]
pub struct SourceObjects {
    /// Path relative to the source directory.
    pub path: String,
    /// Object compiled as shipped.
    pub shipped: Vec<u8>,
    /// Object of the source with this patch.
    pub after: Vec<u8>,
}

/// Names of functions of the after side that run around the transition; each is `int f(void)`, static or global.
#[derive(Debug, Clone, Default)]
pub struct HookNames {
    /// Hooks that run before the first thread migrates.
    pub pre_apply: Vec<String>,
    /// Hooks that run after the commit.
    pub post_apply: Vec<String>,
    /// Hooks that run before the first thread rolls back.
    pub pre_revert: Vec<String>,
    /// Hooks that run after all threads have rolled back.
    pub post_revert: Vec<String>,
}

/// Statements of the caller about the patch.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Name of the patch (see [`Patch::name`]).
    pub name: String,
    /// One line for people.
    pub description: String,
    /// CVE identifiers.
    pub cves: Vec<String>,
    /// Patches that this one replaces.
    pub replaces: Vec<String>,
    /// Limit on how far apart old and new code may run; inferred as thread-local when not stated.
    pub scope: Option<Scope>,
    /// Functions that must be on no stack besides the changed ones; `unit.c:name` picks among statics.
    pub off_stack: Vec<String>,
    /// Functions, changed ones or of `off_stack`, in which a thread may stay with the old version without a time limit.
    pub staying: Vec<String>,
    /// True if constants may change in place, for a kernel with address-space generations.
    pub in_place: bool,
    /// True if variables and constants that the program holds may get their new initial value, while all threads are stopped.
    pub write_data: bool,
    /// Functions that run around the transition.
    pub hooks: HookNames,
    /// Diffs that `before` contains and `shipped` does not.
    pub based_on: Vec<DiffFact>,
    /// Exports of earlier patches of the series (globals by name, statics as `unit.c:name`): new code refers to them
    /// there.
    pub known: Vec<String>,
    /// Exports of the libraries that the target needs, each with its default version (see [`exports`](crate::exports)):
    /// new code may import them. With `None` they are not known; then any name that is found nowhere else is resolved
    /// at run time, with a warning.
    pub imports: Option<BTreeMap<String, Option<String>>>,
    /// Source package and diffs; the differ fills in `units`.
    pub source: Source,
    /// Compiler of the objects.
    pub toolchain: Toolchain,
}

/// Result of a comparison.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The two sides are the same code and data.
    NothingToPatch,
    /// A patch that passes [`stillpoint_patch_format::encode`].
    Patch(Box<Patch>),
}

/// Places of one unit's names in the target.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Placement {
    /// Place of each name in the object (as the compiler wrote it); compiler-made names (`.LC0`) are left out.
    pub symbols: BTreeMap<String, Placed>,
    /// Number of functions found byte for byte, cold parts not counted.
    pub functions_placed: u32,
    /// Number of functions of the unit, cold parts not counted.
    pub functions_total: u32,
    /// Functions that were not found, or found at more than one place.
    pub unplaced: Vec<String>,
}

/// A name's value in the target, and the method that found it.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// Value of the name.
    pub value: SymbolValue,
    /// Method that found the value.
    pub how: ResolvedBy,
    /// Size in bytes, from the object; 0 for names that the unit does not define.
    pub size: u64,
}
