//! Replay of statements: the part of a transaction that a player may send now, and the effect of its result.
//!
//! The paper's players wait for the answer to each operation before they send the next one. Here a player sends everything at
//! once that need not wait any more: the transaction's own first read precedes its commit on the same connection. So a
//! transaction that ran without any other beside it costs the same as in a serial replay. If other transactions may wait for
//! the first read, the player reports it before it reports the rest; so no transaction waits longer than it would if the parts
//! were sent one by one.

use super::{ATTEMPTS_MAX, Done, Entry, PlayerState, Retry, Scheduler};
use crate::error::Error;
use crate::locks::Slot;
use crate::syncset::{Mode, Operation, Part, Player, Step, SyncsetId};
use crate::visibility::Xid;

/// Progress of a transaction on its player.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// This step has been sent and is not done.
    UnderWay(Step),
    /// Its first read is done: it has its snapshot.
    Read,
    /// Its writes are done; only the commit is left.
    Written,
}

impl<P> Scheduler<P> {
    /// The step that this player may send now.
    pub(super) fn statement_step(&self, player: Player) -> Option<(Slot, Step)> {
        let (slot, first) = match self.players[player.0 as usize].open {
            None => (self.gates.open_read(&self.rules)?, Part::FirstRead),
            Some((slot, Phase::Read)) => (slot, Part::Writes),
            Some((slot, Phase::Written)) => (slot, Part::Commit),
            Some((_, Phase::UnderWay(_))) => return None,
        };
        let writes = self.entry(slot).waiting == 0 || (first == Part::Writes && self.conflicts_are_coarse(slot));
        let last = if writes && self.commit_open(slot) {
            Part::Commit
        } else if writes {
            Part::Writes
        } else {
            Part::FirstRead
        };
        (first <= last).then_some((slot, Step { first, last }))
    }

    /// Tokens may conflict even if the transactions did not (whole indexes, equal hashes). Then the order of the stamps says
    /// nothing about the order of the commits. In a real conflict, a snapshot that saw the later transaction also saw the
    /// earlier one. So a snapshot that waits for this commit, and for none with a lower stamp, proves that all conflicts this
    /// commit waits for are coarse. Without this rule the snapshot and the tokens would wait for each other.
    fn conflicts_are_coarse(&self, slot: Slot) -> bool {
        let (Some(snapshot), Some((xid, _))) =
            (self.gates.lowest_unread(slot, &self.rules), &self.entry(slot).statement)
        else {
            return false;
        };
        let seen = |slot: Slot| self.entry(slot).statement.as_ref().is_some_and(|(xid, _)| snapshot.sees(*xid));
        let stamp = self.entry(slot).stamp;
        let mut lower = self.line.iter().take_while(|(other, _)| *other < stamp).filter_map(|(_, slot)| *slot);
        self.rules.visibility_first && snapshot.sees(*xid) && !lower.any(seen)
    }

    /// Returns true if other transactions allow this commit to be sent.
    fn commit_open(&self, slot: Slot) -> bool {
        let entry = self.entry(slot);
        let Some((xid, _)) = entry.statement else { return true };
        self.gates.commit_open(slot, xid, entry.handed_in, &self.rules)
            && (self.mode == Mode::Lsir || self.is_next_to_commit(slot))
    }

    /// B-CON: returns true if this commit is the next one. Stamps are taken when a commit is sent, so of two commits that
    /// overlapped on the source, either may have been first. A snapshot that saw only one of them decides, and takes precedence
    /// over the stamps.
    fn is_next_to_commit(&self, slot: Slot) -> bool {
        let commits =
            |state: &PlayerState| matches!(state.open, Some((_, Phase::UnderWay(step))) if step.has(Part::Commit));
        let first = self.gates.lowest_unread(slot, &self.rules);
        let seen = |slot: &Slot| match (first, &self.entry(*slot).statement) {
            (Some(snapshot), Some((xid, _))) => snapshot.sees(*xid),
            _ => true,
        };
        !self.players.iter().any(commits) && self.line.iter().filter_map(|(_, slot)| *slot).find(seen) == Some(slot)
    }

    pub(super) fn begin_step(&mut self, player: Player, slot: Slot, step: Step) -> Operation {
        let mut awaited = false;
        if step.has(Part::FirstRead) {
            if let Some((_, snapshot)) = &self.entries[slot as usize].as_ref().and_then(|e| e.statement.as_ref()) {
                self.gates.claim(slot, snapshot);
            }
            self.players[player.0 as usize].overtaken = false;
            // If the commit is sent too, every other first read that is left sees it: a transaction that waits can already go
            // on.
            awaited = match step.last {
                Part::FirstRead => false,
                Part::Writes => true,
                Part::Commit => self.players.iter().any(|state| state.open.is_some()),
            };
        }
        self.entry_mut(slot).player = Some(player);
        self.players[player.0 as usize].open = Some((slot, Phase::UnderWay(step)));
        self.under_way += 1;
        Operation { syncset: SyncsetId(slot), stamp: self.entry(slot).stamp, step, awaited }
    }

    /// Reports that the first read of this player's operation is done, and the rest of it is not.
    ///
    /// # Errors
    /// [`Error::UnknownPlayer`]; [`Error::NothingUnderWay`] if no operation of a first read and more is under way.
    pub fn read_done(&mut self, player: Player) -> Result<(), Error> {
        match self.state(player)?.open {
            Some((slot, Phase::UnderWay(Step { first: Part::FirstRead, last }))) if last > Part::FirstRead => {
                let rest = Step { first: Part::Writes, last };
                self.players[player.0 as usize].open = Some((slot, Phase::UnderWay(rest)));
                self.report_read(slot);
                Ok(())
            }
            _ => Err(Error::NothingUnderWay(player)),
        }
    }

    fn report_read(&mut self, slot: Slot) {
        if let Some(Entry { statement: Some((_, snapshot)), .. }) = &self.entries[slot as usize] {
            self.gates.read_done(slot, snapshot);
        }
    }

    pub(super) fn statement_done(&mut self, player: Player) -> Result<Option<Done<P>>, Error> {
        let Some((slot, Phase::UnderWay(step))) = self.state(player)?.open else {
            return Err(Error::NothingUnderWay(player));
        };
        self.under_way -= 1;
        if step.has(Part::FirstRead) {
            self.report_read(slot);
        }
        self.players[player.0 as usize].open = match step.last {
            Part::FirstRead => Some((slot, Phase::Read)),
            Part::Writes => Some((slot, Phase::Written)),
            Part::Commit => None,
        };
        Ok(if step.has(Part::Commit) { self.finish(slot) } else { None })
    }

    pub(super) fn statement_failed(&mut self, player: Player) -> Result<Retry, Error> {
        let state = self.state(player)?;
        let (Some((slot, Phase::UnderWay(_))), overtaken) = (state.open, state.overtaken) else {
            return Err(Error::NothingUnderWay(player));
        };
        state.open = None;
        self.under_way -= 1;
        let entry = self.entry_mut(slot);
        entry.player = None;
        entry.attempts += 1;
        let (stamp, attempts) = (entry.stamp, entry.attempts);
        if overtaken {
            return Err(Error::SnapshotGone(stamp));
        }
        if attempts >= ATTEMPTS_MAX {
            return Err(Error::GivenUp { stamp, attempts });
        }
        self.retries += 1;
        if let Some(Entry { statement: Some((_, snapshot)), .. }) = &self.entries[slot as usize] {
            self.gates.read_done(slot, snapshot);
            self.gates.reopen(slot, snapshot);
        }
        Ok(Retry { stamp, given_back: 0 })
    }

    /// Marks open transactions that did not see this finished commit: they cannot take their snapshot again.
    pub(super) fn overtake(&mut self, xid: Xid) {
        for state in &mut self.players {
            let Some((slot, _)) = state.open else { continue };
            let statement = self.entries[slot as usize].as_ref().and_then(|entry| entry.statement.as_ref());
            state.overtaken |= statement.is_some_and(|(_, snapshot)| !snapshot.sees(xid));
        }
    }
}
