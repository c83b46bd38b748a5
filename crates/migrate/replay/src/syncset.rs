//! What goes into the scheduler, and the names of what comes out.

use std::fmt;

use crate::token::Token;
use crate::visibility::Xid;

/// The place of a transaction in the order of commits on the source: a counter of the proxy, or the LSN of the commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Stamp(pub u64);

/// A transaction while it runs on the source; the caller chooses the number and uses it once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunningId(pub u64);

/// A connection to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Player(pub u32);

/// What is needed to replay the commit of one transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Syncset<P> {
    /// Its place in the order of commits.
    pub stamp: Stamp,
    /// What it touched.
    pub tokens: Vec<Token>,
    /// Where it stands among first reads and commits; [`Mode::BCon`] and [`Mode::Lsir`] need it.
    pub statement: Option<Statement>,
    /// What it holds in memory.
    pub bytes: u64,
    /// What the player sends; the scheduler does not look at it.
    pub payload: P,
}

/// A transaction that is replayed by its statements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statement {
    /// Under which its snapshot was told ([`crate::Scheduler::began`]).
    pub running: RunningId,
    /// Its number, by which the snapshots of others tell whether they saw it.
    pub xid: Xid,
}

/// Which schedules are allowed.
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
    /// All of them.
    pub const ALL: [Mode; 5] = [Mode::BAll, Mode::BMin, Mode::BCon, Mode::Lsir, Mode::Rows];

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Mode::BAll => "b-all",
            Mode::BMin => "b-min",
            Mode::BCon => "b-con",
            Mode::Lsir => "lsir",
            Mode::Rows => "rows",
        }
    }

    /// Whether snapshots must be told.
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
        found.ok_or_else(|| format!("`{text}` is no mode: b-all, b-min, b-con, lsir, rows"))
    }
}

/// What a player sends next. Operations of one player are sent in the order in which it was given them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// Of which transaction.
    pub syncset: SyncsetId,
    /// Its stamp.
    pub stamp: Stamp,
    /// What of it.
    pub step: Step,
    /// Others may wait for its first read before the rest of it is done: [`crate::Scheduler::read_done`] tells them.
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

/// What is sent in one go: one part of a transaction or several, the last of them included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Step {
    /// It begins with this.
    pub first: Part,
    /// It ends with this.
    pub last: Part,
}

impl Step {
    /// From the beginning to the commit.
    pub const WHOLE: Step = Step { first: Part::FirstRead, last: Part::Commit };

    /// Whether a part is among it.
    pub fn has(self, part: Part) -> bool {
        (self.first..=self.last).contains(&part)
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for RunningId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Player {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
