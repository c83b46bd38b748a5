//! What the records say.

use serde::{Deserialize, Serialize};
use std::fmt;
use stillpoint_patch_format::{Avma, BuildId, DiffFact, Scope};

/// Some bytes of a running process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Span {
    /// First byte.
    pub start: Avma,
    /// Bytes.
    pub len: u64,
}

impl Span {
    /// `len` bytes from `start`.
    pub fn new(start: Avma, len: u64) -> Self {
        Span { start, len }
    }

    /// The first byte behind.
    pub fn end(&self) -> Avma {
        Avma(self.start.0.saturating_add(self.len))
    }

    /// Whether `address` is one of the bytes.
    pub fn contains(&self, address: Avma) -> bool {
        self.start <= address && address < self.end()
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end())
    }
}

/// Some code with its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedSpan {
    /// For messages.
    pub name: String,
    /// Where.
    pub span: Span,
}

/// One record of the ledger.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Record {
    /// The memory of a patch is in place; patches are numbered in the order of these records, from 0.
    Placed(Box<PlacedPatch>),
    /// A transition begins: everything needed to complete or undo it.
    Begin(Box<Transition>),
    /// A transition by generations that has come as far as it can: begun, and [`Phase::Resting`].
    Rest(Box<Transition>),
    /// It reached another phase.
    Phase {
        /// Number of the transition.
        transition: u32,
        /// The phase.
        phase: Phase,
    },
    /// The guide is in place, by which unwinders find new code.
    Guide(Box<GuideRecord>),
}

/// How far a transition got; the state byte in the target tells the commit point exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// From here on threads may hold the transition's number.
    Migrating,
    /// Every thread is over and every entry says so.
    Committed,
    /// Threads are being taken back.
    Aborting,
    /// Every thread is back and every entry says so.
    Aborted,
    /// All threads are in a generation but for those that stay in code that allows it: they and entries are as before.
    Resting,
}

/// A patch as it lies in the target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlacedPatch {
    /// Name of the patch.
    pub name: String,
    /// SHA-256 of its file's body.
    pub digest: [u8; 32],
    /// One line for people.
    pub description: String,
    /// CVE identifiers.
    pub cves: Vec<String>,
    /// Diffs that it brings.
    pub diffs: Vec<DiffFact>,
    /// Diffs that it builds upon.
    pub based_on: Vec<DiffFact>,
    /// Build-id of the module it fits.
    pub build_id: BuildId,
    /// File name of that module, for people.
    pub module: String,
    /// What has to be added to a stated address of that module.
    pub bias: u64,
    /// Name of the key that signed it.
    pub signer: Option<String>,
    /// Scope of the patch.
    pub scope: Scope,
    /// Wall-clock seconds since 1970 of the placing.
    pub placed_at_s: u64,
    /// All its memory.
    pub arena: Span,
    /// State bytes set aside for transitions, one each.
    pub states: Span,
    /// Dispatchers and displaced code: a thread there has a decision pending.
    pub trampolines: Vec<Span>,
    /// All new code.
    pub text: Vec<NamedSpan>,
    /// Its unwind data.
    pub eh_frame: Span,
    /// The table by which unwinders search it.
    pub search_table: Span,
    /// Functions redirected.
    pub functions: Vec<FunctionRecord>,
    /// Constants changed where they lie.
    pub constants: Vec<ConstantRecord>,
    /// Further code that must be off the stack.
    pub off_stack: Vec<OffStackRecord>,
    /// Functions in which a thread may stay with the old version.
    pub staying: Vec<String>,
    /// What later patches may refer to.
    pub exports: Vec<ExportRecord>,
    /// Names whose addresses may be stored in live data.
    pub escaping: Vec<String>,
    /// Hooks.
    pub hooks: HookRecord,
    /// Names for debuggers.
    pub symbols: Vec<SymbolRecord>,
}

/// A function that a patch redirects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionRecord {
    /// Its name.
    pub name: String,
    /// Its translation unit.
    pub unit: String,
    /// Old hot part; starts at the entry.
    pub old: Span,
    /// Old cold parts.
    pub old_parts: Vec<Span>,
    /// The five bytes of the entry as shipped.
    pub original: [u8; 5],
    /// Bytes that a jump displaces.
    pub displaced_len: u8,
    /// Offsets of instructions inside of them.
    pub inner_boundaries: Vec<u8>,
    /// Whether the old code jumps back to its entry.
    pub loops_to_entry: bool,
    /// The displaced code.
    pub displaced: Avma,
    /// The new code's entry.
    pub new: Avma,
    /// The section that the new entry lies in.
    pub new_span: Span,
    /// Room for dispatchers right before the new code.
    pub dispatchers: Span,
    /// The size of one such room.
    pub dispatcher_len: u32,
}

/// A constant that a patch changes where it lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConstantRecord {
    /// Its name.
    pub name: String,
    /// Where it lies.
    pub at: Avma,
    /// What it holds as shipped.
    pub original: Vec<u8>,
    /// What the patch makes it hold; as long.
    pub new: Vec<u8>,
}

/// The guide: what stands in for glibc's `_dl_find_object` while there is code that no loader knows of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuideRecord {
    /// The entry of `_dl_find_object`.
    pub entry: Avma,
    /// Its first bytes as glibc has them.
    pub original: [u8; 5],
    /// The same bytes with the jump to the guide.
    pub jump: [u8; 5],
    /// Offsets inside of them where no thread may stand when the jump is written.
    pub inner_boundaries: Vec<u8>,
    /// The guide's code.
    pub code: Avma,
    /// The displaced first instructions of `_dl_find_object`.
    pub displaced: Avma,
    /// The guide's table.
    pub table: Span,
}

/// Code that must be on no stack when a thread migrates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffStackRecord {
    /// Its name.
    pub name: String,
    /// Where.
    pub span: Span,
    /// Why.
    pub reason: String,
}

/// A symbol of a patch that later patches may refer to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportRecord {
    /// `name`, or `unit.c:name`.
    pub name: String,
    /// Its address.
    pub address: Avma,
}

/// Addresses of hooks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookRecord {
    /// Before the first thread migrates.
    pub pre_apply: Vec<Avma>,
    /// After the commit.
    pub post_apply: Vec<Avma>,
    /// Before the first thread goes back.
    pub pre_revert: Vec<Avma>,
    /// After all have gone back.
    pub post_revert: Vec<Avma>,
}

/// A name for debuggers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SymbolRecord {
    /// The name.
    pub name: String,
    /// Where.
    pub span: Span,
    /// Whether it is code.
    pub code: bool,
}

/// One change of which code runs, from the first intent on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Transition {
    /// Its number, from 1, never used again.
    pub number: u32,
    /// `apply`, `revert`, `replace`.
    pub operation: String,
    /// The state byte that its dispatchers obey.
    pub state: Avma,
    /// Patches active before, oldest first.
    pub before: Vec<u32>,
    /// Patches active after.
    pub after: Vec<u32>,
    /// Entries that change.
    pub sites: Vec<Site>,
    /// Constants that change where they lie.
    pub constants: Vec<Contents>,
    /// Dispatchers and stubs made for this transition alone, outside of any patch's memory.
    pub trampolines: Vec<Span>,
    /// Code that a thread must have left before it may go over.
    pub leave: Vec<NamedSpan>,
    /// Code that a thread must have left before it may be taken back.
    pub enter: Vec<NamedSpan>,
    /// What of `leave` a thread may stay in.
    pub staying: Vec<NamedSpan>,
    /// Entries whose old code jumps back to them: a thread that stands at one may be inside of a loop.
    pub loop_entries: Vec<Avma>,
}

/// One entry that changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// Name of the function.
    pub name: String,
    /// Its entry.
    pub entry: Avma,
    /// Before.
    pub from: Side,
    /// After.
    pub to: Side,
    /// The dispatcher between.
    pub dispatcher: Avma,
    /// The entry's bytes while the transition lasts.
    pub armed: [u8; 5],
    /// Offsets inside the entry where no thread may stand when the jump is written; empty when a jump stands there.
    pub inner_boundaries: Vec<u8>,
}

/// A constant that changes where it lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contents {
    /// Its name.
    pub name: String,
    /// Where it lies.
    pub at: Avma,
    /// Before.
    pub from: Vec<u8>,
    /// After; as long.
    pub to: Vec<u8>,
}

/// An entry before or after a transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// Its bytes.
    pub bytes: [u8; 5],
    /// Where a dispatcher goes for this side.
    pub target: Avma,
    /// The patch whose code that is; `None` for the code as shipped.
    pub patch: Option<u32>,
}
