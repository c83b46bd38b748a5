//! Players on a second model, in random interleavings, driven by the scheduler.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::database::{Database, Image, Isolation, Outcome, Statement};
use super::history::{Committed, Event, History, tokens};
use crate::mapping::map;
use crate::rules::Rules;
use crate::{Error, Limits, Mode, Operation, Part, Player, Scheduler, Stamp, Syncset};
use stillpoint_base::Random;

/// Settings of a replay.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setting {
    pub(super) mode: Mode,
    pub(super) rules: Rules,
    pub(super) foreign_keys: bool,
    pub(super) logical: bool,
    /// Every nth whole transaction fails once for a reason that the tokens do not show. It succeeds only when all lower ones
    /// are done, or (every other one) when it is alone; 0: none fails.
    pub(super) faults: usize,
}

impl Setting {
    pub(super) fn new(mode: Mode) -> Setting {
        Setting { mode, rules: Rules::ALL, foreign_keys: true, logical: false, faults: 0 }
    }
}

/// An event on the target, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum TargetEvent {
    ReadSent(Stamp),
    ReadDone(Stamp),
    /// The nth write of a transaction.
    Write(Stamp, usize),
    CommitSent(Stamp),
    CommitDone(Stamp),
}

/// Result of a replay.
#[derive(Debug, Default)]
pub(super) struct ReplayResult {
    pub(super) happened: Vec<TargetEvent>,
    /// Number of statements that waited for a lock.
    pub(super) waits: usize,
    pub(super) retries: u64,
    pub(super) players_added: usize,
    /// Transactions whose first read was reported before the rest of the same operation was done.
    pub(super) told_early: usize,
    /// Highest number of transactions open at the same time.
    pub(super) concurrency: usize,
}

struct PlayerWork {
    operation: Operation,
    /// Statements of this operation that are not executed.
    left: VecDeque<Statement>,
    written: usize,
    begun: bool,
    has_read: bool,
    /// The first read has been executed, and has not been reported.
    untold: bool,
    /// The operation has been executed, and the report is on the way.
    executed: bool,
}

struct Target<'a> {
    random: &'a mut Random,
    setting: Setting,
    database: Database,
    scheduler: Scheduler<Committed>,
    players: Vec<VecDeque<PlayerWork>>,
    open: Vec<bool>,
    depth: usize,
    /// Stamps that fail until they may succeed; true if that is when they are alone.
    faulty: BTreeMap<Stamp, bool>,
    /// First reads that have failed once.
    unread: BTreeSet<Stamp>,
    /// Syncsets handed in and not done.
    pending: BTreeSet<Stamp>,
    result: ReplayResult,
}

/// Replays a history; returns an error that describes the first problem.
pub(super) fn replay(history: &History, random: &mut Random, setting: Setting) -> Result<ReplayResult, String> {
    let count = 1 + random.index(5);
    let limits = match random.index(3) {
        0 => Limits { bytes: 500, syncsets: 4 },
        _ => Limits::default(),
    };
    let faulty = history.events.iter().filter_map(Event::committed).map(|committed| committed.stamp);
    let faulty: Vec<Stamp> = faulty.filter(|_| setting.faults > 0 && random.one_in(setting.faults)).collect();
    let faulty = faulty.into_iter().map(|stamp| (stamp, random.one_in(2))).collect();
    let mut target = Target {
        database: Database::new(&history.initial, count, setting.foreign_keys),
        scheduler: Scheduler::with_rules(setting.mode, count as u32, limits, setting.rules),
        players: (0..count).map(|_| VecDeque::new()).collect(),
        open: vec![false; count],
        depth: if setting.mode == Mode::Rows { 1 + random.index(4) } else { 1 },
        faulty,
        unread: BTreeSet::new(),
        pending: BTreeSet::new(),
        result: ReplayResult::default(),
        random,
        setting,
    };
    target.run(&history.events)?;
    let state = target.database.state();
    if state != history.last {
        return Err(format!("the target holds {state:?}, the source {:?}", history.last));
    }
    let progress = target.scheduler.progress();
    if target.scheduler.tokens_held() > 0 || progress.bytes > 0 || progress.applied != progress.closed {
        return Err(format!("something is left behind: {progress:?}"));
    }
    target.result.retries = progress.retries;
    Ok(target.result)
}

impl Target<'_> {
    fn run(&mut self, events: &[Event]) -> Result<(), String> {
        let (mut at, mut idle) = (0, 0);
        let eager = 1 + self.random.index(12);
        while at < events.len() || !self.scheduler.is_drained() {
            // A round over all players without a step is the end, whichever player is chosen.
            let chosen = self.random.index(self.players.len() + eager);
            let moved = if chosen < self.players.len() {
                self.play(chosen)?
            } else if at < events.len() {
                let taken = self.feed(&events[at])?;
                at += usize::from(taken);
                taken
            } else {
                false
            };
            idle = if moved { 0 } else { idle + 1 };
            if idle < 40 {
                continue;
            }
            idle = 0;
            let mut any = false;
            for player in 0..self.players.len() {
                any |= self.play(player)?;
            }
            if !any && at < events.len() && self.feed(&events[at])? {
                (any, at) = (true, at + 1);
            }
            if !any && self.scheduler.is_starved() {
                any = true;
                self.scheduler.add_player();
                self.database.add_session();
                self.players.push(VecDeque::new());
                self.open.push(false);
                self.result.players_added += 1;
            }
            if !any {
                return Err(format!("nothing goes on: {:?}", self.scheduler.progress()));
            }
        }
        Ok(())
    }

    /// Hands an event to the scheduler; returns false if the scheduler has no room.
    fn feed(&mut self, event: &Event) -> Result<bool, String> {
        match event {
            Event::Begins(running) => self.scheduler.begins(*running),
            Event::Began(running, snapshot) => self.scheduler.record_snapshot(*running, snapshot.clone()),
            Event::Ended(running) => self.scheduler.record_end(*running),
            Event::Closed(stamp) => self.scheduler.close(*stamp),
            Event::Committed(committed) => return self.push(committed),
        }
        Ok(true)
    }

    fn push(&mut self, committed: &Committed) -> Result<bool, String> {
        let minimal = self.setting.mode != Mode::BAll;
        let statements = map(committed.statements.clone(), minimal);
        let nothing = match self.setting.mode {
            Mode::Rows => committed.images.is_empty(),
            _ => statements.is_empty() || (minimal && committed.images.is_empty()),
        };
        if nothing {
            self.scheduler.record_end(committed.running);
            return Ok(true);
        }
        let statement = committed.xid.map(|xid| crate::Statement { running: committed.running, xid });
        let syncset = Syncset {
            stamp: committed.stamp,
            tokens: tokens(&committed.images, self.setting.logical),
            statement,
            bytes: 100,
            payload: Committed { statements, ..committed.clone() },
        };
        match self.scheduler.push(syncset) {
            Ok(()) => {
                self.pending.insert(committed.stamp);
                Ok(true)
            }
            Err(refused) if matches!(refused.error, Error::Full { .. }) => Ok(false),
            Err(refused) => Err(refused.to_string()),
        }
    }

    /// Does one small step of one player; returns true if there was one.
    fn play(&mut self, player: usize) -> Result<bool, String> {
        let own = Player(player as u32);
        let asks =
            self.players[player].is_empty() || (self.players[player].len() < self.depth && self.random.one_in(2));
        let given = if asks { self.scheduler.next(own).map_err(|error| error.to_string())? } else { None };
        if let Some(operation) = given {
            let playing = self.begin(operation);
            self.players[player].push_back(playing);
            return Ok(true);
        }
        let Some(playing) = self.players[player].front() else { return Ok(false) };
        if playing.executed {
            let (Operation { stamp, step, .. }, untold) = (playing.operation, playing.untold);
            self.players[player].pop_front();
            let done = self.scheduler.done(own).map_err(|error| error.to_string())?;
            if untold {
                self.result.happened.push(TargetEvent::ReadDone(stamp));
            }
            if step.has(Part::Commit) {
                self.result.happened.push(TargetEvent::CommitDone(stamp));
            }
            if let Some(done) = done {
                self.pending.remove(&done.stamp);
            }
            return Ok(true);
        }
        self.execute(player)
    }

    fn begin(&mut self, operation: Operation) -> PlayerWork {
        let committed = self.scheduler.payload(operation.syncset);
        let step = operation.step;
        let mut left: VecDeque<Statement> = match self.setting.mode {
            Mode::Rows => committed.images.iter().map(blind).collect(),
            _ => committed.statements.iter().map(|(_, statement)| statement.clone()).collect(),
        };
        match (step.has(Part::FirstRead), step.has(Part::Writes)) {
            (true, true) => {}
            (true, false) => left.truncate(1),
            (false, true) => drop(left.pop_front()),
            (false, false) => left.clear(),
        }
        PlayerWork { operation, left, written: 0, begun: false, has_read: false, untold: false, executed: false }
    }

    fn execute(&mut self, player: usize) -> Result<bool, String> {
        let playing = self.players[player].front_mut().expect("an operation is under way");
        let Operation { stamp, step, .. } = playing.operation;
        let reads = step.has(Part::FirstRead) && self.setting.mode.needs_snapshots();
        if !playing.begun {
            playing.begun = true;
            if step.has(Part::FirstRead) {
                let rows = self.setting.mode == Mode::Rows;
                let isolation = if rows { Isolation::ReadCommitted } else { Isolation::RepeatableRead };
                self.database.begin(player, isolation);
                self.open[player] = true;
                let open = self.open.iter().filter(|open| **open).count();
                self.result.concurrency = self.result.concurrency.max(open);
            }
            // Parts that are sent together count as sent when the operation begins.
            if step.has(Part::Commit) {
                self.result.happened.push(TargetEvent::CommitSent(stamp));
            }
            if reads {
                self.result.happened.push(TargetEvent::ReadSent(stamp));
                if self.setting.faults > 0 && self.random.one_in(self.setting.faults) && self.unread.insert(stamp) {
                    return self.fail(player).map(|()| true);
                }
            }
            return Ok(true);
        }
        if playing.untold && step.last > Part::FirstRead && self.random.one_in(2) {
            playing.untold = false;
            self.scheduler.read_done(Player(player as u32)).map_err(|error| error.to_string())?;
            self.result.happened.push(TargetEvent::ReadDone(stamp));
            self.result.told_early += 1;
            return Ok(true);
        }
        if let Some(statement) = playing.left.front() {
            let outcome = self.database.execute(player, statement);
            if let Ok(Outcome::Blocked) = outcome {
                self.result.waits += 1;
                return Ok(false);
            }
            if outcome.is_err() {
                return self.fail(player).map(|()| true);
            }
            playing.left.pop_front();
            if reads && !playing.has_read {
                (playing.has_read, playing.untold) = (true, true);
            } else if step.has(Part::Writes) {
                self.result.happened.push(TargetEvent::Write(stamp, playing.written));
                playing.written += 1;
            }
            return Ok(true);
        }
        if self.setting.mode == Mode::Rows && self.must_fail(stamp) {
            return self.fail(player).map(|()| true);
        }
        if step.has(Part::Commit) {
            self.database.commit(player).map_err(|fault| format!("commit {} failed: {fault:?}", stamp.0))?;
            self.open[player] = false;
        }
        self.players[player].front_mut().expect("an operation is under way").executed = true;
        Ok(true)
    }

    /// Simulates dependencies that no token shows: the transaction fails while lower stamps are missing, or another one runs
    /// beside it.
    fn must_fail(&mut self, stamp: Stamp) -> bool {
        let Some(&alone) = self.faulty.get(&stamp) else { return false };
        let missing = self.pending.first().is_some_and(|first| *first < stamp);
        missing || (alone && self.scheduler.progress().under_way > 1)
    }

    fn fail(&mut self, player: usize) -> Result<(), String> {
        self.database.rollback(player);
        self.open[player] = false;
        let retry = self.scheduler.failed(Player(player as u32)).map_err(|error| error.to_string())?;
        let dropped = self.players[player].len() - 1;
        assert_eq!(retry.given_back, dropped, "what stood behind a failure was not run");
        self.players[player].clear();
        Ok(())
    }
}

/// A row image as a statement that depends only on captured values.
fn blind(image: &Image) -> Statement {
    match image {
        Image::Insert(key, row) => Statement::Insert(*key, row.clone()),
        Image::Update(key, _, row) => Statement::Set(*key, row.clone()),
        Image::Delete(key, _) => Statement::Delete(*key),
        Image::Truncate(table) => Statement::Truncate(*table),
        Image::Rewrite => Statement::Rewrite,
    }
}
