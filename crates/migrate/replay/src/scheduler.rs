//! The scheduler: decides which operation each player may send next.

mod statements;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use crate::error::{Error, Refused};
use crate::gates::Gates;
use crate::locks::{Locks, Place, Slot};
use crate::rules::Rules;
use crate::syncset::{Mode, Operation, Player, RunningId, Stamp, Step, Syncset, SyncsetId};
use crate::token::{Access, granules};
use crate::visibility::{Snapshot, Xid};
use statements::Phase;

/// Tries of one syncset before the replay fails: the first freely, the second after all lower stamps, the third alone.
const ATTEMPTS_MAX: u8 = 3;

/// Limits of the pending syncsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum memory of all pending syncsets, in bytes.
    pub bytes: u64,
    /// Maximum number of pending syncsets.
    pub syncsets: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { bytes: 256 << 20, syncsets: 1 << 20 }
    }
}

/// Progress of the replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Number of syncsets handed in and not done.
    pub pending: usize,
    /// Memory that they hold, in bytes.
    pub bytes: u64,
    /// Number of pending syncsets that wait until all lower stamps have been handed in.
    pub unordered: usize,
    /// Operations that players were given and have not reported.
    pub under_way: usize,
    /// Every syncset up to this stamp is done.
    pub applied: Stamp,
    /// The caller hands in no more syncsets up to this stamp.
    pub closed: Stamp,
    /// Number of syncsets done.
    pub done: u64,
    /// Number of failures that were retried.
    pub retries: u64,
}

/// A syncset that is done.
#[derive(Debug, PartialEq, Eq)]
pub struct Done<P> {
    /// Its stamp.
    pub stamp: Stamp,
    /// Payload that was handed in with it.
    pub payload: P,
}

/// Consequence of a failed syncset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// Stamp of the syncset that failed.
    pub stamp: Stamp,
    /// Number of syncsets given to the player behind it; they are given back too, and may be given out again in any order.
    pub given_back: usize,
}

#[derive(Debug)]
struct Entry<P> {
    stamp: Stamp,
    payload: P,
    bytes: u64,
    granules: Box<[(Place, Access)]>,
    /// Granules that are not granted yet.
    waiting: u32,
    /// Position in the line of syncsets by stamp.
    position: u64,
    /// Number of syncsets handed in before it.
    handed_in: u64,
    attempts: u8,
    /// The player that it was given to.
    player: Option<Player>,
    statement: Option<(Xid, Snapshot)>,
}

#[derive(Debug, Default)]
struct PlayerState {
    /// Whole transactions that it was given, in order.
    batch: VecDeque<Slot>,
    /// Syncsets next in line behind those it was given, lowest first. Some may also wait for others, and some for nothing any
    /// more: each is checked when it is first in the heap.
    behind: BinaryHeap<Reverse<(Stamp, Slot)>>,
    /// The transaction of statements that is open on it.
    open: Option<(Slot, Phase)>,
    /// True if a commit that the open transaction must not see is done: its first read cannot be repeated.
    overtaken: bool,
}

/// Orders the replay of syncsets as their mode requires, and no more strictly. See the crate's documentation.
#[derive(Debug)]
pub struct Scheduler<P> {
    mode: Mode,
    limits: Limits,
    rules: Rules,
    closed: Stamp,
    /// Syncsets handed in above the highest closed stamp.
    unordered: BTreeMap<Stamp, (u64, Syncset<P>)>,
    handed_in: u64,
    entries: Vec<Option<Entry<P>>>,
    free: Vec<Slot>,
    locks: Locks,
    gates: Gates,
    /// Admitted syncsets in stamp order; a finished one is `None` until all before it are done.
    line: VecDeque<(Stamp, Option<Slot>)>,
    /// Position of the front of the line.
    front: u64,
    ready: BinaryHeap<Reverse<(Stamp, Slot)>>,
    /// Positions of failed syncsets that wait for all lower stamps.
    held: BTreeSet<u64>,
    /// A syncset that failed twice: it runs alone, and no other is given out until it is done.
    alone: Option<Slot>,
    players: Vec<PlayerState>,
    /// Number of admitted syncsets that wait for granules.
    blocked: usize,
    under_way: usize,
    pending: usize,
    bytes: u64,
    applied: Stamp,
    done: u64,
    retries: u64,
    granted: Vec<Slot>,
}

impl<P> Scheduler<P> {
    /// Makes a scheduler for `players` players, numbered from 0.
    pub fn new(mode: Mode, players: u32, limits: Limits) -> Scheduler<P> {
        Scheduler {
            mode,
            limits,
            rules: Rules::ALL,
            closed: Stamp(0),
            unordered: BTreeMap::new(),
            handed_in: 0,
            entries: Vec::new(),
            free: Vec::new(),
            locks: Locks::default(),
            gates: Gates::default(),
            line: VecDeque::new(),
            front: 0,
            ready: BinaryHeap::new(),
            held: BTreeSet::new(),
            alone: None,
            players: (0..players).map(|_| PlayerState::default()).collect(),
            blocked: 0,
            under_way: 0,
            pending: 0,
            bytes: 0,
            applied: Stamp(0),
            done: 0,
            retries: 0,
            granted: Vec::new(),
        }
    }

    /// Makes a scheduler with some rules left out.
    #[cfg(test)]
    pub(crate) fn with_rules(mode: Mode, players: u32, limits: Limits, rules: Rules) -> Scheduler<P> {
        Scheduler { rules, ..Scheduler::new(mode, players, limits) }
    }

    /// Adds a player.
    pub fn add_player(&mut self) -> Player {
        self.players.push(PlayerState::default());
        Player(self.players.len() as u32 - 1)
    }

    /// Number of players.
    pub fn players(&self) -> u32 {
        self.players.len() as u32
    }

    /// Reports that a transaction of the source is about to send its first read. The caller must call this before it is sent.
    pub fn begins(&mut self, running: RunningId) {
        self.gates.begins(running, self.handed_in);
    }

    /// Reports the snapshot of a transaction of the source.
    pub fn record_snapshot(&mut self, running: RunningId, snapshot: Snapshot) {
        self.gates.record_snapshot(running, snapshot);
    }

    /// Reports that a transaction of the source ended without a syncset: read-only, or rolled back.
    pub fn record_end(&mut self, running: RunningId) {
        self.gates.forget(running);
    }

    /// Takes a syncset, in any order above the highest closed stamp. It is not scheduled before [`Scheduler::close`] reaches
    /// it.
    ///
    /// # Errors
    /// [`Error::Full`] only while the pending syncsets can make progress, so a caller that waits for them never waits for ever.
    pub fn push(&mut self, syncset: Syncset<P>) -> Result<(), Refused<P>> {
        if let Err(error) = self.may_take(&syncset) {
            return Err(Refused { error, syncset });
        }
        self.take(&syncset);
        if self.rules.stamp_order {
            self.unordered.insert(syncset.stamp, (self.handed_in, syncset));
        } else {
            self.admit(self.handed_in, syncset);
        }
        self.handed_in += 1;
        Ok(())
    }

    /// Takes a syncset when no more syncsets with a lower stamp will come: `push` and `close` in one.
    ///
    /// # Errors
    /// The same as [`Scheduler::push`].
    pub fn push_next(&mut self, syncset: Syncset<P>) -> Result<(), Refused<P>> {
        let stamp = syncset.stamp;
        if !self.unordered.is_empty() || !self.rules.stamp_order {
            self.push(syncset)?;
            self.close(stamp);
            return Ok(());
        }
        if let Err(error) = self.may_take(&syncset) {
            return Err(Refused { error, syncset });
        }
        self.take(&syncset);
        self.closed = stamp;
        self.admit(self.handed_in, syncset);
        self.handed_in += 1;
        Ok(())
    }

    fn may_take(&self, syncset: &Syncset<P>) -> Result<(), Error> {
        let stamp = syncset.stamp;
        if stamp <= self.closed {
            return Err(Error::Late { stamp, closed: self.closed });
        }
        if self.unordered.contains_key(&stamp) {
            return Err(Error::Duplicate(stamp));
        }
        if self.mode.needs_snapshots() {
            let Some(statement) = syncset.statement else {
                return Err(Error::NoVisibility { stamp, mode: self.mode.name() });
            };
            if !self.gates.has_snapshot(statement.running) {
                return Err(Error::UnknownSnapshot(statement.running));
            }
        }
        let over = self.bytes + syncset.bytes > self.limits.bytes || self.pending >= self.limits.syncsets;
        if over && self.can_go_on() {
            return Err(Error::Full { stamp, pending: self.pending, bytes: self.bytes });
        }
        Ok(())
    }

    fn take(&mut self, syncset: &Syncset<P>) {
        self.pending += 1;
        self.bytes += syncset.bytes;
    }

    /// Returns true if an operation is under way, or could be, without another syncset.
    fn can_go_on(&self) -> bool {
        self.under_way > 0 || !self.ready.is_empty() || self.alone.is_some() || {
            self.mode.needs_snapshots()
                && (0..self.players()).any(|player| self.statement_step(Player(player)).is_some())
        }
    }

    /// Promises that no more syncsets with this stamp or a lower one will come.
    pub fn close(&mut self, upto: Stamp) {
        if upto <= self.closed {
            return;
        }
        self.closed = upto;
        while let Some(first) = self.unordered.first_entry().filter(|first| *first.key() <= upto) {
            let (handed_in, syncset) = first.remove();
            self.admit(handed_in, syncset);
        }
        if self.line.is_empty() {
            self.applied = self.applied.max(upto);
        }
    }

    fn admit(&mut self, handed_in: u64, syncset: Syncset<P>) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as Slot - 1
        });
        let serial = self.mode.is_serial();
        let held = if serial { Box::default() } else { granules(&syncset.tokens, &self.rules) };
        let mut waiting = 0;
        let ask = |&(granule, access): &(_, Access)| {
            let (place, granted) = self.locks.acquire(granule, access, slot);
            waiting += u32::from(!granted);
            (place, access)
        };
        let held = held.iter().map(ask).collect();
        let statement = syncset.statement.filter(|_| self.mode.needs_snapshots()).and_then(|statement| {
            let snapshot = self.gates.forget(statement.running)?;
            self.gates.admit(slot, statement.xid, &snapshot);
            Some((statement.xid, snapshot))
        });
        let position = self.front + self.line.len() as u64;
        self.line.push_back((syncset.stamp, Some(slot)));
        if waiting > 0 {
            self.blocked += 1;
        } else if statement.is_none() {
            self.ready.push(Reverse((syncset.stamp, slot)));
        }
        self.entries[slot as usize] = Some(Entry {
            stamp: syncset.stamp,
            payload: syncset.payload,
            bytes: syncset.bytes,
            granules: held,
            waiting,
            position,
            handed_in,
            attempts: 0,
            player: None,
            statement,
        });
        if waiting > 0 && self.chains() {
            self.note_arrival(slot);
        }
    }

    /// The operation that this player may send now, if there is one. It counts as under way until it is reported.
    ///
    /// In the modes that hand out whole transactions, a player may ask again before it has reported. It then gets a transaction
    /// that may run behind those it has, on the same connection. The condition is that after a failure the server does not
    /// execute those behind it (one Sync for all). Serial modes give out one at a time.
    ///
    /// # Errors
    /// [`Error::UnknownPlayer`].
    pub fn next(&mut self, player: Player) -> Result<Option<Operation>, Error> {
        self.state(player)?;
        if self.mode.needs_snapshots() {
            let step = self.statement_step(player);
            return Ok(step.map(|(slot, step)| self.begin_step(player, slot, step)));
        }
        if self.mode.is_serial() && self.under_way > 0 {
            return Ok(None);
        }
        if let Some(slot) = self.alone {
            return Ok((self.under_way == 0).then(|| self.hand_out(player, slot)));
        }
        let chained = self.chained(player);
        let ready = self.ready.peek().map(|Reverse(first)| *first);
        Ok(match (chained, ready) {
            (Some((stamp, slot)), first) if first.is_none_or(|first| stamp < first.0) => {
                Some(self.hand_out(player, slot))
            }
            (_, Some((_, slot))) => {
                self.ready.pop();
                Some(self.hand_out(player, slot))
            }
            _ => None,
        })
    }

    /// Returns true if a syncset may run behind those that one player was given, on that player.
    fn chains(&self) -> bool {
        self.blocked > 0 && self.mode == Mode::Rows && self.rules.until_commit
    }

    /// Returns true if, for `player`, a syncset behind `slot` may be given out already.
    fn is_inside(&self, player: Player, slot: Slot) -> bool {
        let of = self.entry(slot).player;
        of == Some(player) || (of.is_some() && !self.rules.chain_on_one_player)
    }

    /// The lowest syncset that waits only for syncsets that this player has been given.
    fn chained(&mut self, player: Player) -> Option<(Stamp, Slot)> {
        if !self.chains() {
            return None;
        }
        while let Some(&Reverse((stamp, slot))) = self.players[player.0 as usize].behind.peek() {
            if self.is_chained(player, stamp, slot) {
                return Some((stamp, slot));
            }
            // It is added again when the last one before it is given to this player.
            self.players[player.0 as usize].behind.pop();
        }
        None
    }

    fn is_chained(&self, player: Player, stamp: Stamp, slot: Slot) -> bool {
        let Some(entry) = self.entries[slot as usize].as_ref().filter(|entry| entry.stamp == stamp) else {
            return false;
        };
        let behind = |granule| self.locks.waits_behind(granule, slot, |other| self.is_inside(player, other));
        entry.player.is_none()
            && entry.waiting > 0
            && entry.attempts == 0
            && entry.granules.iter().filter(|(granule, _)| behind(*granule)).count() == entry.waiting as usize
    }

    /// Records the syncsets next in line behind the one that `player` has just been given. This examines one syncset, not the
    /// whole batch each time, which would make a batch on hot rows take cubic time.
    fn record_queued(&mut self, player: Player, slot: Slot) {
        let granules = std::mem::take(&mut self.entry_mut(slot).granules);
        let exclusive = || granules.iter().filter(|(_, access)| *access == Access::Exclusive);
        let mut locks = std::mem::take(&mut self.locks);
        exclusive().for_each(|(granule, _)| locks.hand_out(*granule, |other| self.is_inside(player, other)));
        self.locks = locks;
        let next = exclusive()
            .filter_map(|(granule, _)| self.locks.first_behind(*granule, |other| self.is_inside(player, other)))
            .map(|slot| Reverse((self.entry(slot).stamp, slot)));
        let next: Vec<_> = next.collect();
        self.entry_mut(slot).granules = granules;
        self.players[player.0 as usize].behind.extend(next);
    }

    /// Records a syncset that arrived after those before it had been given out.
    fn note_arrival(&mut self, slot: Slot) {
        let entry = self.entry(slot);
        let next_in_line = |granule: &Place| {
            let player = self.entry(self.locks.holder(*granule)?).player?;
            let first = self.locks.first_behind(*granule, |other| self.is_inside(player, other));
            (first == Some(slot)).then_some(player)
        };
        let exclusive = entry.granules.iter().filter(|(_, access)| *access == Access::Exclusive);
        let mut players: Vec<Player> = exclusive.filter_map(|(granule, _)| next_in_line(granule)).collect();
        players.dedup();
        let stamp = entry.stamp;
        for player in players {
            self.players[player.0 as usize].behind.push(Reverse((stamp, slot)));
        }
    }

    /// Takes a syncset back from its player, so that any player can be given it again.
    fn take_back(&mut self, slot: Slot) -> &mut Entry<P> {
        let granules = std::mem::take(&mut self.entry_mut(slot).granules);
        granules.iter().for_each(|(granule, _)| self.locks.take_back(*granule));
        let entry = self.entry_mut(slot);
        (entry.granules, entry.player) = (granules, None);
        entry
    }

    fn hand_out(&mut self, player: Player, slot: Slot) -> Operation {
        self.players[player.0 as usize].batch.push_back(slot);
        self.entry_mut(slot).player = Some(player);
        self.under_way += 1;
        let stamp = self.entry(slot).stamp;
        if self.chains() {
            self.record_queued(player, slot);
        }
        if !self.rules.until_commit {
            self.release(slot);
        }
        Operation { syncset: SyncsetId(slot), stamp, step: Step::WHOLE, awaited: false }
    }

    /// Reports that the oldest operation of this player is done. Returns the syncset if that was its last operation.
    ///
    /// # Errors
    /// [`Error::UnknownPlayer`], [`Error::NothingUnderWay`].
    pub fn done(&mut self, player: Player) -> Result<Option<Done<P>>, Error> {
        let state = self.state(player)?;
        if let Some(slot) = state.batch.pop_front() {
            self.under_way -= 1;
            return Ok(self.finish(slot));
        }
        self.statement_done(player)
    }

    fn finish(&mut self, slot: Slot) -> Option<Done<P>> {
        self.release(slot);
        let entry = self.entries[slot as usize].take()?;
        self.free.push(slot);
        self.alone.take_if(|alone| *alone == slot);
        if let Some((xid, _)) = entry.statement {
            self.gates.commit_done(xid);
            self.overtake(xid);
        }
        self.line[(entry.position - self.front) as usize].1 = None;
        while let Some((stamp, None)) = self.line.front() {
            self.applied = self.applied.max(*stamp);
            self.line.pop_front();
            self.front += 1;
        }
        if self.line.is_empty() {
            self.applied = self.applied.max(self.closed);
        }
        self.release_failed_front();
        self.pending -= 1;
        self.bytes -= entry.bytes;
        self.done += 1;
        Some(Done { stamp: entry.stamp, payload: entry.payload })
    }

    fn release(&mut self, slot: Slot) {
        let held = std::mem::take(&mut self.entry_mut(slot).granules);
        let mut granted = std::mem::take(&mut self.granted);
        if self.entry(slot).waiting > 0 {
            self.entry_mut(slot).waiting = 0;
            self.blocked -= 1;
            held.iter().for_each(|(granule, _)| self.locks.leave(*granule, slot, &mut granted));
        } else {
            held.iter().for_each(|(granule, _)| self.locks.release(*granule, &mut granted));
        }
        for slot in granted.drain(..) {
            let Some(entry) = self.entries[slot as usize].as_mut() else { continue };
            entry.waiting -= 1;
            if entry.waiting > 0 {
                continue;
            }
            self.blocked -= 1;
            // A syncset that was given to a player behind another has been handed out already.
            if entry.statement.is_none() && entry.player.is_none() {
                self.ready.push(Reverse((entry.stamp, slot)));
            }
        }
        self.granted = granted;
    }

    /// Reports that the oldest operation of this player failed with an error that a retry can resolve (23505, 23P01, 40P01,
    /// 40001), that the transaction was rolled back, and that those behind it were not executed.
    ///
    /// # Errors
    /// [`Error::GivenUp`] after three tries and [`Error::SnapshotGone`]: the replay cannot continue. Otherwise the same as
    /// [`Scheduler::done`].
    pub fn failed(&mut self, player: Player) -> Result<Retry, Error> {
        let state = self.state(player)?;
        let Some(slot) = state.batch.pop_front() else { return self.statement_failed(player) };
        let behind = std::mem::take(&mut state.batch);
        self.under_way -= 1 + behind.len();
        for &slot in &behind {
            let entry = self.take_back(slot);
            if entry.waiting == 0 {
                let stamp = entry.stamp;
                self.ready.push(Reverse((stamp, slot)));
            }
        }
        let entry = self.take_back(slot);
        entry.attempts += 1;
        let (stamp, attempts, position) = (entry.stamp, entry.attempts, entry.position);
        if attempts >= ATTEMPTS_MAX {
            return Err(Error::GivenUp { stamp, attempts });
        }
        self.retries += 1;
        if self.rules.retry_after_lower {
            self.held.insert(position);
            self.release_failed_front();
        } else {
            self.ready.push(Reverse((stamp, slot)));
        }
        Ok(Retry { stamp, given_back: behind.len() })
    }

    /// Makes a failed syncset available again when it is at the front of the line.
    fn release_failed_front(&mut self) {
        if self.held.first() != Some(&self.front) {
            return;
        }
        self.held.pop_first();
        let Some(&(stamp, Some(slot))) = self.line.front() else { return };
        if self.entry(slot).attempts + 1 < ATTEMPTS_MAX {
            self.ready.push(Reverse((stamp, slot)));
        } else {
            self.alone = Some(slot);
        }
    }

    /// The payload that the player sends for a syncset.
    ///
    /// # Panics
    /// Panics if the syncset is done already: an [`Operation`] is invalid after its last step was reported.
    pub fn payload(&self, syncset: SyncsetId) -> &P {
        &self.entry(syncset.0).payload
    }

    /// Progress of the replay.
    pub fn progress(&self) -> Progress {
        Progress {
            pending: self.pending,
            bytes: self.bytes,
            unordered: self.unordered.len(),
            under_way: self.under_way,
            applied: self.applied,
            closed: self.closed,
            done: self.done,
            retries: self.retries,
        }
    }

    /// Returns true if every syncset that was handed in is done.
    pub fn is_drained(&self) -> bool {
        self.pending == 0
    }

    /// Returns true if another player is needed: all players have a transaction open, and each waits for the first read of a
    /// transaction that no player has begun. At most as many players are needed as transactions ran on the source at the same
    /// time.
    pub fn is_starved(&self) -> bool {
        self.mode.needs_snapshots()
            && self.under_way == 0
            && self.gates.open_read(&self.rules).is_some()
            && self.players.iter().all(|state| state.open.is_some())
            && (0..self.players()).all(|player| self.statement_step(Player(player)).is_none())
    }

    /// Number of things that pending syncsets hold tokens for, ancestors included.
    pub fn tokens_held(&self) -> usize {
        self.locks.len()
    }

    fn state(&mut self, player: Player) -> Result<&mut PlayerState, Error> {
        self.players.get_mut(player.0 as usize).ok_or(Error::UnknownPlayer(player))
    }

    fn entry(&self, slot: Slot) -> &Entry<P> {
        self.entries[slot as usize].as_ref().expect("a slot in use")
    }

    fn entry_mut(&mut self, slot: Slot) -> &mut Entry<P> {
        self.entries[slot as usize].as_mut().expect("a slot in use")
    }
}
