//! Input of the scheduler, and the names of its output.

use crate::token::Token;
use crate::visibility::Xid;

/// The place of a transaction in the order of commits on the source: a counter of the proxy, or the LSN of the commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Stamp(pub u64);

/// A transaction while it runs on the source; the caller chooses the number and uses it only once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunningId(pub u64);

/// A connection to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Player(pub u32);

/// The data needed to replay the commit of one transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Syncset<P> {
    /// Its place in the order of commits.
    pub stamp: Stamp,
    /// Tokens of everything that it touched.
    pub tokens: Vec<Token>,
    /// Its position among first reads and commits; [`Mode::BCon`] and [`Mode::Lsir`] need it.
    pub statement: Option<Statement>,
    /// Memory that it holds, in bytes.
    pub bytes: u64,
    /// Data that the player sends; the scheduler does not read it.
    pub payload: P,
}

/// A transaction that is replayed by its statements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statement {
    /// Number under which its snapshot was reported ([`crate::Scheduler::record_snapshot`]).
    pub running: RunningId,
    /// Its transaction number; the snapshots of other transactions show by it if they saw this one.
    pub xid: Xid,
}

/// Rules for the order of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The paper's baseline: all operations, one transaction after another in the order of commits.
    BAll,
    /// The same with the minimal set of operations ([`crate::mapping`]).
    BMin,
    /// First reads and writes concurrently, commits one after another.
    BCon,
    /// The paper's rule: order only between first reads and commits; commits run concurrently.
    Lsir,
    /// Captured row images: order only between transactions whose tokens conflict.
    Rows,
}

impl Mode {
    /// All modes, from the most serial to the most concurrent.
    pub const ALL: [Mode; 5] = [Mode::BAll, Mode::BMin, Mode::BCon, Mode::Lsir, Mode::Rows];

    /// Name of the mode on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Mode::BAll => "b-all",
            Mode::BMin => "b-min",
            Mode::BCon => "b-con",
            Mode::Lsir => "lsir",
            Mode::Rows => "rows",
        }
    }

    /// Returns true if the caller must report snapshots.
    pub fn needs_snapshots(self) -> bool {
        matches!(self, Mode::BCon | Mode::Lsir)
    }

    pub(crate) fn is_serial(self) -> bool {
        matches!(self, Mode::BAll | Mode::BMin)
    }
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Mode, String> {
        let found = Mode::ALL.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| format!("`{text}` is not a mode: b-all, b-min, b-con, lsir, rows"))
    }
}

/// The next operation that a player sends. A player sends its operations in the order in which it got them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// The transaction it belongs to.
    pub syncset: SyncsetId,
    /// Stamp of the transaction.
    pub stamp: Stamp,
    /// Part of the transaction to send.
    pub step: Step,
    /// True if other transactions may wait for its first read before the rest is done: the player reports it with
    /// [`crate::Scheduler::read_done`].
    pub awaited: bool,
}

/// A syncset in the scheduler, valid until it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SyncsetId(pub(crate) u32);

/// A part of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Begin (REPEATABLE READ) and the statement that takes the snapshot.
    FirstRead,
    /// All writes in their order.
    Writes,
    /// The commit.
    Commit,
}

/// Parts of a transaction that are sent together, from `first` to `last` inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Step {
    /// First part.
    pub first: Part,
    /// Last part.
    pub last: Part,
}

impl Step {
    /// A whole transaction, from its beginning to its commit.
    pub const WHOLE: Step = Step { first: Part::FirstRead, last: Part::Commit };

    /// Returns true if the step includes `part`.
    pub fn has(self, part: Part) -> bool {
        (self.first..=self.last).contains(&part)
    }
}
