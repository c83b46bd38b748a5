//! Contents of the records.

use serde::{Deserialize, Serialize};
use std::fmt;
use stillpoint_patch_format::{Avma, BuildId, DiffFact, Scope};

/// A range of bytes in a running process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Span {
    /// First byte.
    pub start: Avma,
    /// Length in bytes.
    pub len: u64,
}

impl Span {
    /// Returns the range of `len` bytes from `start`.
    pub fn new(start: Avma, len: u64) -> Self {
        Span { start, len }
    }

    /// Returns the first address after the range.
    pub fn end(&self) -> Avma {
        Avma(self.start.0.saturating_add(self.len))
    }

    /// Returns true if `address` is inside the range.
    pub fn contains(&self, address: Avma) -> bool {
        self.start <= address && address < self.end()
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end())
    }
}

/// A range of code with its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedSpan {
    /// Name for messages.
    pub name: String,
    /// Its range.
    pub span: Span,
}

/// One record of the ledger.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Record {
    /// The memory of a patch has been filled; patches are numbered in the order of these records, from 0.
    Placed(Box<PlacedPatch>),
    /// A transition begins; holds all data needed to complete it or to roll it back.
    Begin(Box<Transition>),
    /// A transition by generations that can go no further now: it has begun, and is [`Phase::Resting`].
    Rest(Box<Transition>),
    /// The transition reached another phase.
    Phase {
        /// Number of the transition.
        transition: u32,
        /// The phase.
        phase: Phase,
    },
    /// The lookup redirect, by which unwinders find new code, is in memory.
    LookupRedirect(Box<LookupRedirectRecord>),
    /// The changes of data of the patch that was placed last.
    PlacedData(Vec<ConstantRecord>),
    /// Begin of a transition, like [`Record::Begin`], that changes data.
    BeginWithData(Box<Transition>, Box<DataTransition>),
}

/// Progress of a transition; the state byte in the target shows the commit point exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// From here on threads may hold the transition's number.
    Migrating,
    /// Every thread has migrated, and every entry leads to the new code.
    Committed,
    /// Threads are moved back.
    Aborting,
    /// Every thread is back, and every entry is as before.
    Aborted,
    /// All threads are in a generation except those that stay in code that allows it; these and the entries are as before.
    Resting,
}

/// A patch as it is located in the target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlacedPatch {
    /// Name of the patch.
    pub name: String,
    /// SHA-256 of its file's body.
    pub digest: [u8; 32],
    /// Description in one line, for people.
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
    /// Value to add to a stated address of that module.
    pub bias: u64,
    /// Name of the key that signed it.
    pub signer: Option<String>,
    /// Scope of the patch.
    pub scope: Scope,
    /// Wall-clock seconds since 1970 of the placing.
    pub placed_at_s: u64,
    /// Its whole memory.
    pub arena: Span,
    /// State bytes reserved for transitions, one for each.
    pub states: Span,
    /// Dispatchers and displaced code: a thread in one of them has not decided yet.
    pub trampolines: Vec<Span>,
    /// All new code.
    pub text: Vec<NamedSpan>,
    /// Its unwind data.
    pub eh_frame: Span,
    /// Table by which unwinders search the unwind data.
    pub search_table: Span,
    /// Functions redirected.
    pub functions: Vec<FunctionRecord>,
    /// Constants changed in place.
    pub constants: Vec<ConstantRecord>,
    /// Variables and constants changed for all threads at once; [`Record::PlacedData`] has them.
    #[serde(skip)]
    pub data: Vec<ConstantRecord>,
    /// Further code that must not be on the stack.
    pub off_stack: Vec<OffStackRecord>,
    /// Functions in which a thread may stay with the old version.
    pub staying: Vec<String>,
    /// Symbols to which later patches may refer.
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
    /// Name of the function.
    pub name: String,
    /// Translation unit that defines it.
    pub unit: String,
    /// Old hot part; starts at the entry.
    pub old: Span,
    /// Old cold parts.
    pub old_parts: Vec<Span>,
    /// The five bytes of the entry as shipped.
    pub original: [u8; 5],
    /// Number of bytes that a jump displaces.
    pub displaced_len: u8,
    /// Offsets of instructions inside these bytes.
    pub inner_boundaries: Vec<u8>,
    /// True if the old code jumps back to its entry.
    pub loops_to_entry: bool,
    /// Address of the displaced code.
    pub displaced: Avma,
    /// Entry of the new code.
    pub new: Avma,
    /// Section that holds the new entry.
    pub new_span: Span,
    /// Room for dispatchers right before the new code.
    pub dispatchers: Span,
    /// Size of one such room in bytes.
    pub dispatcher_len: u32,
}

/// A constant that a patch changes in place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConstantRecord {
    /// Name of the constant.
    pub name: String,
    /// Its address.
    pub at: Avma,
    /// Its contents as shipped.
    pub original: Vec<u8>,
    /// Its contents from the patch; of the same length.
    pub new: Vec<u8>,
}

/// The lookup redirect: replacement for glibc's `_dl_find_object` while there is code that is unknown to the loader.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupRedirectRecord {
    /// The entry of `_dl_find_object`.
    pub entry: Avma,
    /// Its first bytes as in glibc.
    pub original: [u8; 5],
    /// The same bytes with the jump to the lookup redirect.
    pub jump: [u8; 5],
    /// Offsets inside these bytes at which no thread may be stopped when the jump is written.
    pub inner_boundaries: Vec<u8>,
    /// The lookup redirect's code.
    pub code: Avma,
    /// The displaced first instructions of `_dl_find_object`.
    pub displaced: Avma,
    /// The lookup redirect's table.
    pub table: Span,
}

/// Code that must not be on the stack of a migrating thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffStackRecord {
    /// Name for messages.
    pub name: String,
    /// Its range.
    pub span: Span,
    /// Reason, as the patch states it.
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
    /// Called before the first thread migrates.
    pub pre_apply: Vec<Avma>,
    /// Called after the commit.
    pub post_apply: Vec<Avma>,
    /// Called before the first thread returns to the old code.
    pub pre_revert: Vec<Avma>,
    /// Called after all threads have returned to the old code.
    pub post_revert: Vec<Avma>,
}

/// A name for debuggers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SymbolRecord {
    /// Name of the symbol.
    pub name: String,
    /// Its range.
    pub span: Span,
    /// True if it is code.
    pub code: bool,
}

/// One change of the running code, from the first intent on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Transition {
    /// Its number, from 1, never reused.
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
    /// Constants that change in place.
    pub constants: Vec<Contents>,
    /// Variables and constants that change for all threads at once; [`Record::BeginWithData`] has them.
    #[serde(skip)]
    pub data: Option<Box<DataTransition>>,
    /// Dispatchers and stubs made only for this transition, outside any patch's memory.
    pub trampolines: Vec<Span>,
    /// Code that a thread must have left before it may migrate.
    pub leave: Vec<NamedSpan>,
    /// Code that a thread must have left before it may be moved back.
    pub enter: Vec<NamedSpan>,
    /// Code of `leave` in which a thread may stay.
    pub staying: Vec<NamedSpan>,
    /// Entries to which their old code jumps back: a thread that is stopped at one may be inside a loop.
    pub loop_entries: Vec<Avma>,
}

/// Data that change for all threads at once, and the code by which threads complete the change after the tool's death.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataTransition {
    /// The variables and constants.
    pub changes: Vec<Contents>,
    /// Pages of them that the program maps read-only; they are writable during the transition.
    pub opened: Vec<Span>,
    /// Address of the code that completes the change.
    pub completer: Avma,
}

/// One entry that changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// Name of the function.
    pub name: String,
    /// Address of its entry.
    pub entry: Avma,
    /// State before the transition.
    pub from: Side,
    /// State after the transition.
    pub to: Side,
    /// Dispatcher used during the transition.
    pub dispatcher: Avma,
    /// Bytes of the entry during the transition.
    pub armed: [u8; 5],
    /// Offsets inside the entry at which no thread may be stopped when the jump is written; empty if the entry already holds a jump.
    pub inner_boundaries: Vec<u8>,
}

/// A constant that changes in place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contents {
    /// Name of the constant.
    pub name: String,
    /// Its address.
    pub at: Avma,
    /// Contents before the transition.
    pub from: Vec<u8>,
    /// Contents after the transition; of the same length.
    pub to: Vec<u8>,
}

/// An entry before or after a transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// Bytes of the entry.
    pub bytes: [u8; 5],
    /// Target of a dispatcher for this side.
    pub target: Avma,
    /// Number of the patch with that code; `None` for the code as shipped.
    pub patch: Option<u32>,
}
