//! Contents of a patch.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A *stated* virtual memory address: as the target's ELF file states it, before any load bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Svma(pub u64);

/// An *actual* virtual memory address: in a running process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Avma(pub u64);

impl fmt::Display for Svma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for Avma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The GNU build-id of an ELF file (`.note.gnu.build-id`), as bytes; prints as lower-case hex.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BuildId(pub Vec<u8>);

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

impl fmt::Debug for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BuildId({self})")
    }
}

/// A live patch for one ELF file: code, data, and everything needed to load them into a running process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Patch {
    /// Name of the patch, unique among those of one target: `[A-Za-z0-9._+:~-]{1,128}`.
    pub name: String,
    /// Description in one line, for people.
    pub description: String,
    /// CVE identifiers that the patch fixes.
    pub cves: Vec<String>,
    /// Names of patches that this one replaces; with `replace_all` it replaces every older patch.
    pub replaces: Vec<String>,
    /// Origin of the code.
    pub source: Source,
    /// Diffs that active patches must have brought already, because this patch was built on top of them.
    pub based_on: Vec<DiffFact>,
    /// Tools that compiled the patch.
    pub toolchain: Toolchain,
    /// The one ELF file that it fits.
    pub target: Target,
    /// Set of threads that must change from old to new code together.
    pub scope: Scope,
    /// True if the author stated the scope (otherwise the builder inferred it).
    pub scope_stated: bool,
    /// Pieces of memory that the patch brings; every function is a section of its own.
    pub sections: Vec<Section>,
    /// Names that relocations refer to.
    pub symbols: Vec<Symbol>,
    /// Indices into `symbols` that later patches of the series may refer to as [`SymbolValue::OtherPatch`]: new globals by their name, new
    /// statics as `unit.c:name`.
    pub exports: Vec<u32>,
    /// Functions whose entry is redirected.
    pub functions: Vec<Function>,
    /// Constants of the target, and functions without relocations, whose contents change in place. Trampolines cannot do that: such a patch
    /// needs a kernel with address-space generations.
    pub constants: Vec<Constant>,
    /// Variables and constants of the target whose contents change for all threads at once. They follow the other fields in the file, and
    /// only if there are any: files without them are as before.
    #[serde(skip)]
    pub data: Vec<DataChange>,
    /// Further code of the target that must not be on a thread's stack when the thread migrates (the ranges of `functions` always count).
    pub off_stack: Vec<OffStack>,
    /// Names from `functions` and `off_stack`: a thread that does not leave one of them keeps the old version while all other threads
    /// migrate. Trampolines cannot do that: a transition that uses them has to complete.
    pub staying: Vec<String>,
    /// Functions of the patch that are called around the transition.
    pub hooks: Hooks,
    /// Types that were compared member by member.
    pub types: Vec<TypeFact>,
    /// Symbols of the patch whose address may be stored in live data and remain there after a revert.
    pub escaping: Vec<String>,
    /// Warnings that the author received.
    pub warnings: Vec<String>,
}

impl Patch {
    /// Returns true if the patch brings all of these diffs or is built upon them; false for none, of which nothing is known.
    pub fn contains<'a>(&self, diffs: impl IntoIterator<Item = &'a DiffFact>) -> bool {
        let own = || self.source.diffs.iter().chain(&self.based_on);
        let mut known = diffs.into_iter().map(|diff| own().any(|other| other.sha256 == diff.sha256)).peekable();
        known.peek().is_some() && known.all(|is_own| is_own)
    }
}

/// Origin of the code of a patch.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// Source package, for instance `redis`.
    pub package: Option<String>,
    /// Version of the source package, for instance `5:7.0.15-1~deb12u10`.
    pub version: Option<String>,
    /// The diffs, in the order applied.
    pub diffs: Vec<DiffFact>,
    /// The translation units that were compiled, relative to the source directory.
    pub units: Vec<UnitFact>,
}

/// One diff that went into a patch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DiffFact {
    /// Its file name.
    pub name: String,
    /// SHA-256 of its text.
    pub sha256: [u8; 32],
}

/// One translation unit that went into a patch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UnitFact {
    /// Path relative to the source directory.
    pub path: String,
    /// Number of functions of the unit found in the shipped text, byte for byte.
    pub functions_placed: u32,
    /// Number of all functions of the unit.
    pub functions_total: u32,
}

/// Tools that compiled a patch.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Toolchain {
    /// First line of `cc --version`.
    pub compiler: String,
    /// Version of stillpoint.
    pub stillpoint: String,
}

/// The ELF file that a patch fits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Target {
    /// Build-id of the file; empty only if the file has none.
    pub build_id: BuildId,
    /// SHA-256 of the bytes of the executable segment, as in the file: identifies the target if there is no build-id.
    pub text_sha256: [u8; 32],
    /// File name, shown to people.
    pub file_name: String,
    /// Kind of ELF file.
    pub kind: TargetKind,
}

/// Kind of ELF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetKind {
    /// `ET_EXEC`: addresses are final.
    Executable,
    /// `ET_DYN` with an interpreter.
    PieExecutable,
    /// `ET_DYN` without one.
    SharedLibrary,
}

/// Set of threads that must change from old to new code together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// Threads may run different versions for a while (the usual text-only fix).
    ThreadLocal,
    /// The threads of a group must change together.
    ThreadGroup,
    /// All threads of the process must change together.
    Process,
}

/// Protection and contents of a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SectionKind {
    /// Executable, one function (or one cold part) each.
    Text,
    /// Read-only after relocation.
    RoData,
    /// Writable, initialised.
    Data,
    /// Writable, zero.
    Bss,
    /// `.eh_frame` of the new code (CIEs and FDEs as the compiler wrote them).
    EhFrame,
    /// `.gcc_except_table`.
    ExceptTable,
}

/// A piece of memory that the patch brings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Section {
    /// Name as in the object, for instance `.text.lookupKey`.
    pub name: String,
    /// Protection and contents of the section.
    pub kind: SectionKind,
    /// Alignment in bytes, a power of two up to 4096.
    pub align: u32,
    /// Size in bytes; equals `bytes.len()` unless `Bss`.
    pub size: u64,
    /// Contents; empty for `Bss`.
    pub bytes: Vec<u8>,
    /// Places in the section that the engine fills in.
    pub relocations: Vec<Relocation>,
}

/// A place in a section that the engine fills in. `S` is the symbol, `A` the addend, `P` the place, as in the x86-64 psABI.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Relocation {
    /// Offset in the section, bytes.
    pub offset: u32,
    /// Formula of the value.
    pub kind: RelocationKind,
    /// Index into [`Patch::symbols`].
    pub symbol: u32,
    /// `A`, the addend.
    pub addend: i64,
}

/// Formula of the value of a relocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RelocationKind {
    /// 64 bits, `S + A`.
    Abs64,
    /// 32 bits unsigned, `S + A` (non-PIE targets).
    Abs32,
    /// 32 bits signed, `S + A` (non-PIE targets).
    Abs32Signed,
    /// 32 bits, `S + A - P`, data or an address taken.
    Pc32,
    /// 64 bits, `S + A - P`.
    Pc64,
    /// 32 bits, `S + A - P`, a call or jump: may go through a stub of the engine when out of reach.
    Branch32,
    /// 32 bits, `G + A - P`, where `G` is a slot made by the engine that holds `S`.
    GotPc32,
    /// 32 bits, offset of a thread-local from the thread pointer, plus `A`.
    TpOff32,
    /// 32 bits, `G + A - P`, where `G` is a slot made by the engine that holds the offset from the thread pointer.
    GotTpOff32,
}

/// A name that relocations refer to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Symbol {
    /// Name as in the source; a static's name is without the compiler's suffix if the suffix is known to be one.
    pub name: String,
    /// Value of the symbol.
    pub value: SymbolValue,
    /// Source of the value, for `patch inspect`.
    pub resolved_by: ResolvedBy,
}

/// Value of a symbol.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum SymbolValue {
    /// An address in a section of this patch.
    Patch {
        /// Index into [`Patch::sections`].
        section: u32,
        /// Bytes from the start of the section.
        offset: u64,
    },
    /// An address in the target (function entry, data, PLT stub).
    Target(Svma),
    /// The value that the target's GOT slot at this address holds at run time (imported data, bound functions). An unbound lazy slot holds
    /// the address of its PLT stub, which is also callable.
    TargetSlot(Svma),
    /// A thread-local of the target: bytes from the start of the target's `PT_TLS` segment.
    TargetTls(u64),
    /// A GOT slot of the target that holds a thread-local's offset from the thread pointer (GOTTPOFF).
    TargetTlsSlot(Svma),
    /// A symbol of another mapped library, in which the engine looks it up.
    Import {
        /// Symbol version, for instance `GLIBC_2.14`; `None` takes the default version.
        version: Option<String>,
    },
    /// A symbol of another live patch in the same process (a global that an earlier patch of the series added).
    OtherPatch,
}

/// Source of the value of a symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResolvedBy {
    /// The patch defines it.
    Patch,
    /// The target's `.symtab`.
    Symtab,
    /// The target's `.dynsym`.
    Dynsym,
    /// Found by masked comparison of the unit's function with the shipped text.
    Placement,
    /// Read back from the shipped text ("reverse relocation").
    ReverseRelocation,
    /// Found at run time.
    Runtime,
}

/// Start and length of a piece of code of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// First byte.
    pub start: Svma,
    /// Length in bytes.
    pub len: u64,
}

/// A function whose entry is redirected.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Function {
    /// Name of the function.
    pub name: String,
    /// The translation unit that defines it.
    pub unit: String,
    /// The old code: entry and size of the hot part.
    pub old: Range,
    /// `.cold` and `.part` children of the old code.
    pub old_parts: Vec<Range>,
    /// Bytes of the old hot part as in the target's file; they are compared with memory before the engine changes anything.
    pub old_bytes: Vec<u8>,
    /// Index into [`Patch::symbols`] of the new code.
    pub new: u32,
    /// Reasons for the redirect, one line each ("instructions differ", "inlines `decodeLen`, which changed").
    pub reasons: Vec<String>,
}

/// A constant of the target, or a function, whose contents change in place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Constant {
    /// Name of the constant or function.
    pub name: String,
    /// The translation unit that defines it.
    pub unit: String,
    /// Its location and length.
    pub old: Range,
    /// Index into [`Patch::symbols`] of the new contents, which have the same length.
    pub new: u32,
}

impl DataChange {
    /// Returns true if new code has a variable of its own in place of this one, which keeps its contents.
    pub fn is_copied(&self) -> bool {
        self.new == self.shipped
    }
}

/// A variable or constant of the target whose contents change for all threads at once, while all are stopped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DataChange {
    /// Name of the variable.
    pub name: String,
    /// The translation unit that defines it.
    pub unit: String,
    /// Its location and length.
    pub old: Range,
    /// Index into [`Patch::symbols`] of its contents as shipped, which have the same length. They are compared with memory before the
    /// engine changes anything.
    pub shipped: u32,
    /// Index into [`Patch::symbols`] of the new contents, which have the same length.
    pub new: u32,
}

/// Code of the target that must not be on a thread's stack when the thread migrates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OffStack {
    /// Name for messages.
    pub name: String,
    /// Location and length of the code.
    pub range: Range,
    /// Reason: "stated by the author", "inlines `f`", ...
    pub reason: String,
}

/// Functions of the patch (indices into [`Patch::symbols`]) that one thread of the target calls at a safe point. Each has the C type `int
/// (*)(void)`; a `pre_*` hook that returns non-zero aborts the operation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Hooks {
    /// Called before the first thread migrates.
    pub pre_apply: Vec<u32>,
    /// Called after the commit.
    pub post_apply: Vec<u32>,
    /// Called before the first thread returns to the old code.
    pub pre_revert: Vec<u32>,
    /// Called after all threads have returned to the old code.
    pub post_revert: Vec<u32>,
}

/// A type that was compared member by member on both sides of the change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TypeFact {
    /// Name of the type, for instance `struct redisServer`.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Number of members compared.
    pub members: u32,
}
