//! The LSIR by visibility: decides from which moment a first read may be sent, and from which moment a commit.
//!
//! Algorithm 4 of the paper takes the smallest start stamp of the *committed* transactions, so it replays the first read of a
//! long transaction after commits that the transaction did not see. Here transactions that still run on the source count as
//! well. Two watermarks replace the barriers: the lowest commit that is not replayed, and the lowest first read that is not.

use std::collections::{BTreeMap, BTreeSet};

use crate::locks::Slot;
use crate::rules::Rules;
use crate::syncset::RunningId;
use crate::visibility::{Rank, Snapshot, Xid};

/// A transaction that still runs on the source.
#[derive(Debug)]
enum Running {
    /// Its first read is under way; it sees the commits that were handed in before that.
    Beginning { handed_in: u64 },
    /// It has this snapshot.
    Began(Snapshot),
}

/// A first read that is not replayed, or that belongs to a transaction still running on the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reader {
    Running(RunningId),
    Admitted(Slot),
}

/// First reads and commits that are not done, and the order in which they open.
#[derive(Debug, Default)]
pub(crate) struct Gates {
    running: BTreeMap<RunningId, Running>,
    /// Transactions that begin, by the number of syncsets handed in before.
    beginnings: BTreeSet<(u64, RunningId)>,
    /// All first reads that are not done, lowest snapshot first.
    unread: BTreeMap<(Rank, Reader), Snapshot>,
    /// First reads that a player may take, lowest first.
    unclaimed: BTreeSet<(Rank, Slot)>,
    /// Commits that are not done.
    uncommitted: BTreeSet<Xid>,
}

impl Gates {
    pub(crate) fn begins(&mut self, running: RunningId, handed_in: u64) {
        self.running.insert(running, Running::Beginning { handed_in });
        self.beginnings.insert((handed_in, running));
    }

    pub(crate) fn record_snapshot(&mut self, running: RunningId, snapshot: Snapshot) {
        self.forget(running);
        self.unread.insert((snapshot.rank(), Reader::Running(running)), snapshot.clone());
        self.running.insert(running, Running::Began(snapshot));
    }

    pub(crate) fn has_snapshot(&self, running: RunningId) -> bool {
        matches!(self.running.get(&running), Some(Running::Began(_)))
    }

    /// Removes a transaction that ended without a syncset, or whose syncset is admitted now; returns its snapshot.
    pub(crate) fn forget(&mut self, running: RunningId) -> Option<Snapshot> {
        match self.running.remove(&running)? {
            Running::Beginning { handed_in } => {
                self.beginnings.remove(&(handed_in, running));
                None
            }
            Running::Began(snapshot) => {
                self.unread.remove(&(snapshot.rank(), Reader::Running(running)));
                Some(snapshot)
            }
        }
    }

    pub(crate) fn admit(&mut self, slot: Slot, xid: Xid, snapshot: &Snapshot) {
        self.uncommitted.insert(xid);
        self.reopen(slot, snapshot);
    }

    /// Makes its first read available, at admission and again after a failure.
    pub(crate) fn reopen(&mut self, slot: Slot, snapshot: &Snapshot) {
        self.unread.insert((snapshot.rank(), Reader::Admitted(slot)), snapshot.clone());
        self.unclaimed.insert((snapshot.rank(), slot));
    }

    /// The lowest first read that no player has taken, if every commit that it saw is done. Higher ones see more, so they are
    /// closed while the lowest is.
    pub(crate) fn open_read(&self, rules: &Rules) -> Option<Slot> {
        let &(rank, slot) = self.unclaimed.first()?;
        let snapshot = self.unread.get(&(rank, Reader::Admitted(slot)))?;
        let seen = self.uncommitted.range(..snapshot.xmax()).any(|xid| snapshot.sees(*xid));
        (!seen || !rules.reads_after_commits).then_some(slot)
    }

    pub(crate) fn claim(&mut self, slot: Slot, snapshot: &Snapshot) {
        self.unclaimed.remove(&(snapshot.rank(), slot));
    }

    pub(crate) fn read_done(&mut self, slot: Slot, snapshot: &Snapshot) {
        self.unread.remove(&(snapshot.rank(), Reader::Admitted(slot)));
    }

    pub(crate) fn commit_done(&mut self, xid: Xid) {
        self.uncommitted.remove(&xid);
    }

    /// The lowest first read that is not done, without that of `own`.
    pub(crate) fn lowest_unread(&self, own: Slot, rules: &Rules) -> Option<&Snapshot> {
        let counts = |reader: &Reader| match reader {
            Reader::Running(_) => rules.running_counts,
            Reader::Admitted(slot) => *slot != own,
        };
        self.unread.iter().find(|((_, reader), _)| counts(reader)).map(|(_, snapshot)| snapshot)
    }

    /// Returns true if all first reads of other transactions that did not see this commit of `own` are done.
    pub(crate) fn commit_open(&self, own: Slot, xid: Xid, handed_in: u64, rules: &Rules) -> bool {
        if !rules.commits_after_reads {
            return true;
        }
        let begun_before = rules.running_counts && self.beginnings.first().is_some_and(|(at, _)| *at <= handed_in);
        !begun_before && self.lowest_unread(own, rules).is_none_or(|snapshot| snapshot.sees(xid))
    }
}
