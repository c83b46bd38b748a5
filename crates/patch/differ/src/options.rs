//! What a caller says about the patch to be made, and what comes back.

use std::collections::BTreeMap;
use stillpoint_patch_format::{DiffFact, Patch, ResolvedBy, Scope, Source, SymbolValue, Toolchain};

/// One translation unit in its three builds, each a relocatable x86-64 ELF object.
#[derive(Debug, Clone, Copy)]
pub struct UnitInput<'a> {
    /// Path relative to the source directory; prefixes the names of statics (`networking.c:processInlineBuffer`).
    pub path: &'a str,
    /// Compiled exactly as shipped. Empty for a unit that the target does not have.
    pub shipped: &'a [u8],
    /// The source as the series stands before this patch, with `-ffunction-sections -fdata-sections` added. Empty
    /// for a unit that is new on the after side.
    pub before: &'a [u8],
    /// The source with this patch, compiled as `before` was.
    pub after: &'a [u8],
}

/// Names of functions of the after side that run around the transition; each is `int f(void)`, static or global.
#[derive(Debug, Clone, Default)]
pub struct HookNames {
    /// Before the first thread migrates.
    pub pre_apply: Vec<String>,
    /// After the commit.
    pub post_apply: Vec<String>,
    /// Before the first thread goes back.
    pub pre_revert: Vec<String>,
    /// After all have gone back.
    pub post_revert: Vec<String>,
}

/// What the caller states about the patch.
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
    /// How far apart old and new code may run; inferred as thread-local when not stated.
    pub scope: Option<Scope>,
    /// Functions that must be on no stack besides the changed ones; `unit.c:name` picks among statics.
    pub off_stack: Vec<String>,
    /// Functions, changed ones or of `off_stack`, in which a thread may stay with the old version for as long as it likes.
    pub staying: Vec<String>,
    /// Whether constants may change where they lie, for a kernel with address-space generations.
    pub in_place: bool,
    /// Functions that run around the transition.
    pub hooks: HookNames,
    /// Diffs that `before` contains and `shipped` does not.
    pub based_on: Vec<DiffFact>,
    /// What earlier patches of the series export (globals by name, statics as `unit.c:name`): refer to it there.
    pub known: Vec<String>,
    /// What the libraries that the target needs export, each with its default version (see
    /// [`exports`](crate::exports)): new code may import it. `None`: not known, so that any name which is found nowhere
    /// else is looked up at run time, with a warning.
    pub imports: Option<BTreeMap<String, Option<String>>>,
    /// Source package and diffs; the differ fills in `units`.
    pub source: Source,
    /// What compiled the objects.
    pub toolchain: Toolchain,
}

/// What came out of a comparison.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The two sides are the same code and data.
    NothingToPatch,
    /// A patch that passes [`stillpoint_patch_format::encode`].
    Patch(Box<Patch>),
}

/// Where one unit's names are in the target.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Placement {
    /// Name in the object (as the compiler wrote it) to its place; compiler-made names (`.LC0`) are left out.
    pub symbols: BTreeMap<String, Placed>,
    /// Functions found byte for byte, cold parts not counted.
    pub functions_placed: u32,
    /// Functions of the unit, cold parts not counted.
    pub functions_total: u32,
    /// Functions that were not found, or found at more than one place.
    pub unplaced: Vec<String>,
}

/// A name's value in the target, and how it was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// Its value.
    pub value: SymbolValue,
    /// How it was found.
    pub how: ResolvedBy,
    /// Size in bytes as the object says; 0 for names that the unit does not define.
    pub size: u64,
    /// Whether the name is local to the unit.
    pub is_static: bool,
}
