//! A reference model of PostgreSQL: versions, row locks, unique values, a foreign key, three isolation levels.
//!
//! Table 0 holds parents, table 1 items with a unique value and a reference to a parent. A statement either executes
//! immediately, or waits for one other transaction and is then tried again.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Snapshot, Xid};

pub(super) const PARENTS: u8 = 0;
pub(super) const ITEMS: u8 = 1;

/// Table and primary key.
pub(super) type Key = (u8, u8);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) value: i64,
    pub(super) unique: Option<u8>,
    pub(super) parent: Option<u8>,
}

pub(super) type State = BTreeMap<Key, Row>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Isolation {
    ReadCommitted,
    RepeatableRead,
    Serializable,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Statement {
    Read(Key),
    Insert(Key, Row),
    /// Sets all columns.
    Set(Key, Row),
    Add(Key, i64),
    /// Reads one row and writes another; two of these can cause write skew.
    Copy {
        to: Key,
        from: Key,
    },
    SetUnique(Key, Option<u8>),
    /// Changes the primary key.
    Move {
        from: Key,
        to: Key,
    },
    Delete(Key),
    Truncate(u8),
    /// DDL: changes every row of every table with a function that does not commute.
    Rewrite,
}

/// Effect of a statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Image {
    Insert(Key, Row),
    Update(Key, Row, Row),
    Delete(Key, Row),
    Truncate(u8),
    Rewrite,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Serialization,
    Unique,
    ForeignKey,
    Deadlock,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Done(Vec<Image>),
    Blocked,
}

/// Reason why a statement did not execute.
enum Stop {
    WaitsFor(usize),
    Fails(Fault),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Stop {
        Stop::Fails(fault)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum TableLock {
    No,
    Shared,
    Exclusive,
}

#[derive(Debug)]
struct Transaction {
    isolation: Isolation,
    snapshot: Option<(u64, Snapshot)>,
    xid: Option<u64>,
    own: BTreeMap<Key, Option<Row>>,
    parents: BTreeSet<u8>,
    /// Parents that it deleted, even if it has inserted them again.
    gone: BTreeSet<u8>,
    uniques: BTreeSet<u8>,
    tables: [TableLock; 2],
    reads: BTreeSet<Key>,
    waits_for: Option<usize>,
}

/// Reads and writes of a committed transaction, for SERIALIZABLE.
#[derive(Debug)]
struct VersionHistory {
    began: u64,
    committed: u64,
    reads: BTreeSet<Key>,
    writes: BTreeSet<Key>,
}

#[derive(Debug)]
pub(super) struct Database {
    versions: BTreeMap<Key, Vec<(u64, Option<Row>)>>,
    committed: u64,
    next_xid: u64,
    sessions: Vec<Option<Transaction>>,
    foreign_keys: bool,
    past: Vec<VersionHistory>,
}

impl Database {
    pub(super) fn new(state: &State, sessions: usize, foreign_keys: bool) -> Database {
        Database {
            versions: state.iter().map(|(key, row)| (*key, vec![(0, Some(row.clone()))])).collect(),
            committed: 0,
            next_xid: 100,
            sessions: (0..sessions).map(|_| None).collect(),
            foreign_keys,
            past: Vec::new(),
        }
    }

    pub(super) fn add_session(&mut self) {
        self.sessions.push(None);
    }

    /// The committed state.
    pub(super) fn state(&self) -> State {
        self.versions.keys().filter_map(|key| Some((*key, self.latest(*key)?.clone()))).collect()
    }

    pub(super) fn begin(&mut self, session: usize, isolation: Isolation) {
        assert!(self.sessions[session].is_none(), "a transaction is open");
        self.sessions[session] = Some(Transaction {
            isolation,
            snapshot: None,
            xid: None,
            own: BTreeMap::new(),
            parents: BTreeSet::new(),
            gone: BTreeSet::new(),
            uniques: BTreeSet::new(),
            tables: [TableLock::No; 2],
            reads: BTreeSet::new(),
            waits_for: None,
        });
    }

    pub(super) fn rollback(&mut self, session: usize) {
        self.sessions[session] = None;
    }

    pub(super) fn snapshot(&self, session: usize) -> Option<Snapshot> {
        self.transaction(session).snapshot.as_ref().map(|(_, snapshot)| snapshot.clone())
    }

    pub(super) fn xid(&self, session: usize) -> Option<Xid> {
        self.transaction(session).xid.map(Xid)
    }

    pub(super) fn commit(&mut self, session: usize) -> Result<(), Fault> {
        let transaction = self.sessions[session].take().expect("a transaction is open");
        let began = transaction.snapshot.as_ref().map_or(self.committed, |(began, _)| *began);
        let writes: BTreeSet<Key> = transaction.own.keys().copied().collect();
        if transaction.isolation == Isolation::Serializable {
            let beside = |past: &&VersionHistory| past.committed > began;
            let reads_what_others_wrote =
                self.past.iter().filter(beside).any(|past| !past.writes.is_disjoint(&transaction.reads));
            let reads_of_others = self.sessions.iter().flatten().map(|other| &other.reads);
            let reads_of_others = reads_of_others.chain(self.past.iter().filter(beside).map(|past| &past.reads));
            if reads_what_others_wrote && reads_of_others.into_iter().any(|reads| !reads.is_disjoint(&writes)) {
                return Err(Fault::Serialization);
            }
        }
        self.committed += 1;
        for (key, row) in transaction.own {
            self.versions.entry(key).or_default().push((self.committed, row));
        }
        self.past.push(VersionHistory { began, committed: self.committed, reads: transaction.reads, writes });
        let oldest = self.past.iter().map(|past| past.began).min().unwrap_or(0);
        self.past.retain(|past| past.committed >= oldest);
        Ok(())
    }

    pub(super) fn execute(&mut self, session: usize, statement: &Statement) -> Result<Outcome, Fault> {
        self.take_snapshot(session);
        self.sessions[session].as_mut().expect("a transaction is open").waits_for = None;
        match self.try_execute(session, statement) {
            Ok(images) => Ok(Outcome::Done(images)),
            Err(Stop::Fails(fault)) => Err(fault),
            Err(Stop::WaitsFor(other)) => {
                self.sessions[session].as_mut().expect("a transaction is open").waits_for = Some(other);
                if self.waits_in_a_circle(session) { Err(Fault::Deadlock) } else { Ok(Outcome::Blocked) }
            }
        }
    }

    fn waits_in_a_circle(&self, session: usize) -> bool {
        let mut at = session;
        for _ in 0..=self.sessions.len() {
            match self.sessions[at].as_ref().and_then(|transaction| transaction.waits_for) {
                Some(next) if next == session => return true,
                Some(next) => at = next,
                None => return false,
            }
        }
        false
    }

    fn take_snapshot(&mut self, session: usize) {
        let running = self.sessions.iter().flatten().filter_map(|transaction| transaction.xid);
        let snapshot = Snapshot::new(Xid(self.next_xid), running.map(Xid));
        let now = self.committed;
        let transaction = self.sessions[session].as_mut().expect("a transaction is open");
        if transaction.snapshot.is_none() || transaction.isolation == Isolation::ReadCommitted {
            transaction.snapshot = Some((now, snapshot));
        }
    }

    fn try_execute(&mut self, session: usize, statement: &Statement) -> Result<Vec<Image>, Stop> {
        match statement {
            Statement::Read(key) => {
                self.open_mut(session).reads.insert(*key);
                Ok(Vec::new())
            }
            Statement::Insert(key, row) => self.insert(session, *key, row),
            Statement::Set(key, row) => self.update(session, *key, |_| row.clone()),
            Statement::Add(key, amount) => {
                self.update(session, *key, |old| Row { value: old.value + amount, ..old.clone() })
            }
            Statement::Copy { to, from } => {
                let from_value = self.seen(session, *from).map_or(-1, |row| row.value);
                self.open_mut(session).reads.insert(*from);
                self.update(session, *to, |old| Row { value: from_value + 1, ..old.clone() })
            }
            Statement::SetUnique(key, unique) => {
                self.update(session, *key, |old| Row { unique: *unique, ..old.clone() })
            }
            Statement::Move { from, to } => {
                let Some(row) = self.seen(session, *from).cloned() else { return Ok(Vec::new()) };
                self.may_insert(session, *to, &row, Some(*from))?;
                let mut images = self.delete(session, *from)?;
                if !images.is_empty() {
                    images.extend(self.insert(session, *to, &row)?);
                }
                Ok(images)
            }
            Statement::Delete(key) => self.delete(session, *key),
            Statement::Truncate(table) => {
                self.lock_tables(session, &[*table], TableLock::Exclusive)?;
                for key in self.all_keys(session).into_iter().filter(|(of, _)| of == table) {
                    self.open_mut(session).own.insert(key, None);
                }
                Ok(vec![Image::Truncate(*table)])
            }
            Statement::Rewrite => {
                self.lock_tables(session, &[PARENTS, ITEMS], TableLock::Exclusive)?;
                for key in self.all_keys(session) {
                    if let Some(row) = self.current(session, key).cloned() {
                        let row = Row { value: row.value.wrapping_mul(3).wrapping_add(1) % 1_000_003, ..row };
                        self.open_mut(session).own.insert(key, Some(row));
                    }
                }
                Ok(vec![Image::Rewrite])
            }
        }
    }

    fn insert(&mut self, session: usize, key: Key, row: &Row) -> Result<Vec<Image>, Stop> {
        self.may_insert(session, key, row, None)?;
        self.lock_tables(session, tables(key, row), TableLock::Shared)?;
        self.write(session, key, None, Some(row.clone()));
        Ok(vec![Image::Insert(key, row.clone())])
    }

    /// `moved` is the old key of the row, which no longer counts.
    fn may_insert(&self, session: usize, key: Key, row: &Row, moved: Option<Key>) -> Result<(), Stop> {
        self.wait_for_tables(session, tables(key, row), TableLock::Shared)?;
        self.wait_for_writers(session, key)?;
        if self.current(session, key).is_some() && moved != Some(key) {
            return Err(Fault::Unique.into());
        }
        self.may_take_unique(session, moved.unwrap_or(key), row.unique)?;
        self.may_refer(session, row.parent)
    }

    fn update(&mut self, session: usize, key: Key, change: impl Fn(&Row) -> Row) -> Result<Vec<Image>, Stop> {
        if self.seen(session, key).is_none() {
            return Ok(Vec::new());
        }
        self.lock_row(session, key)?;
        let Some(old) = self.current(session, key).cloned() else { return Ok(Vec::new()) };
        let new = change(&old);
        if new.unique != old.unique {
            self.may_take_unique(session, key, new.unique)?;
        }
        if new.parent != old.parent {
            self.may_refer(session, new.parent)?;
        }
        let refers = if new.parent == old.parent { &[key.0] } else { tables(key, &new) };
        self.lock_tables(session, refers, TableLock::Shared)?;
        self.write(session, key, Some(&old), Some(new.clone()));
        Ok(vec![Image::Update(key, old, new)])
    }

    fn delete(&mut self, session: usize, key: Key) -> Result<Vec<Image>, Stop> {
        if self.seen(session, key).is_none() {
            return Ok(Vec::new());
        }
        self.lock_row(session, key)?;
        let Some(old) = self.current(session, key).cloned() else { return Ok(Vec::new()) };
        if key.0 == PARENTS && self.foreign_keys {
            self.wait_for(session, |other| other.parents.contains(&key.1))?;
            let children = self.all_keys(session).into_iter().filter_map(|child| self.current(session, child));
            if children.into_iter().any(|child| child.parent == Some(key.1)) {
                return Err(Fault::ForeignKey.into());
            }
        }
        self.lock_tables(session, &[key.0], TableLock::Shared)?;
        self.write(session, key, Some(&old), None);
        if key.0 == PARENTS {
            self.open_mut(session).gone.insert(key.1);
        }
        Ok(vec![Image::Delete(key, old)])
    }

    fn write(&mut self, session: usize, key: Key, old: Option<&Row>, new: Option<Row>) {
        let xid = self.next_xid;
        let open = self.open_mut(session);
        for row in old.into_iter().chain(new.as_ref()) {
            open.uniques.extend(row.unique);
            open.parents.extend(row.parent);
        }
        open.own.insert(key, new);
        if open.xid.is_none() {
            open.xid = Some(xid);
            self.next_xid += 1;
        }
    }

    /// Waits for writers of the row; under snapshots only the first updater succeeds.
    fn lock_row(&self, session: usize, key: Key) -> Result<(), Stop> {
        self.wait_for_tables(session, &[key.0], TableLock::Shared)?;
        self.wait_for_writers(session, key)?;
        let open = self.transaction(session);
        let changed = self.versions.get(&key).and_then(|versions| versions.last()).map_or(0, |version| version.0);
        let before = open.snapshot.as_ref().map_or(0, |(at, _)| *at);
        if open.isolation != Isolation::ReadCommitted && changed > before {
            return Err(Fault::Serialization.into());
        }
        Ok(())
    }

    fn may_take_unique(&self, session: usize, key: Key, unique: Option<u8>) -> Result<(), Stop> {
        let Some(unique) = unique else { return Ok(()) };
        self.wait_for(session, |other| other.uniques.contains(&unique))?;
        let mut others = self.all_keys(session).into_iter().filter(|other| *other != key);
        let taken = others.any(|other| self.current(session, other).is_some_and(|row| row.unique == Some(unique)));
        if taken { Err(Fault::Unique.into()) } else { Ok(()) }
    }

    fn may_refer(&self, session: usize, parent: Option<u8>) -> Result<(), Stop> {
        let Some(parent) = parent.filter(|_| self.foreign_keys) else { return Ok(()) };
        let key = (PARENTS, parent);
        self.wait_for(session, |other| other.gone.contains(&parent))?;
        let there = self.current(session, key).is_some() && self.seen(session, key).is_some();
        if there { Ok(()) } else { Err(Fault::ForeignKey.into()) }
    }

    fn wait_for_writers(&self, session: usize, key: Key) -> Result<(), Stop> {
        self.wait_for(session, |other| other.own.contains_key(&key))
    }

    fn wait_for_tables(&self, session: usize, tables: &[u8], lock: TableLock) -> Result<(), Stop> {
        self.wait_for(session, |other| {
            tables.iter().any(|&table| {
                let held = other.tables[usize::from(table)];
                held == TableLock::Exclusive || (lock == TableLock::Exclusive && held == TableLock::Shared)
            })
        })
    }

    fn wait_for(&self, session: usize, stands_in_the_way: impl Fn(&Transaction) -> bool) -> Result<(), Stop> {
        let mut others = self.sessions.iter().enumerate().filter(|(other, _)| *other != session);
        match others.find(|(_, other)| other.as_ref().is_some_and(&stands_in_the_way)) {
            Some((other, _)) => Err(Stop::WaitsFor(other)),
            None => Ok(()),
        }
    }

    fn lock_tables(&mut self, session: usize, tables: &[u8], lock: TableLock) -> Result<(), Stop> {
        self.wait_for_tables(session, tables, lock)?;
        let xid = self.next_xid;
        let open = self.open_mut(session);
        for &table in tables {
            let held = &mut open.tables[usize::from(table)];
            *held = (*held).max(lock);
        }
        if open.xid.is_none() {
            open.xid = Some(xid);
            self.next_xid += 1;
        }
        Ok(())
    }

    fn all_keys(&self, session: usize) -> Vec<Key> {
        let mut keys: BTreeSet<Key> = self.versions.keys().copied().collect();
        keys.extend(self.transaction(session).own.keys());
        keys.into_iter().collect()
    }

    fn latest(&self, key: Key) -> Option<&Row> {
        self.versions.get(&key)?.last()?.1.as_ref()
    }

    /// The newest version that is committed or written by the session itself.
    fn current(&self, session: usize, key: Key) -> Option<&Row> {
        match self.transaction(session).own.get(&key) {
            Some(own) => own.as_ref(),
            None => self.latest(key),
        }
    }

    /// The version that its snapshot shows, or its own version.
    fn seen(&self, session: usize, key: Key) -> Option<&Row> {
        let open = self.transaction(session);
        if let Some(own) = open.own.get(&key) {
            return own.as_ref();
        }
        let at = open.snapshot.as_ref().map_or(0, |(at, _)| *at);
        let versions = self.versions.get(&key)?;
        versions.iter().rev().find(|(committed, _)| *committed <= at)?.1.as_ref()
    }

    fn transaction(&self, session: usize) -> &Transaction {
        self.sessions[session].as_ref().expect("a transaction is open")
    }

    fn open_mut(&mut self, session: usize) -> &mut Transaction {
        self.sessions[session].as_mut().expect("a transaction is open")
    }
}

/// The tables that a write of the row locks.
fn tables(key: Key, row: &Row) -> &'static [u8] {
    match (key.0, row.parent) {
        (PARENTS, _) => &[PARENTS],
        (_, None) => &[ITEMS],
        (_, Some(_)) => &[PARENTS, ITEMS],
    }
}

/// Applies images to a plain map, one transaction after another: every replay must reach this state.
pub(super) fn apply(state: &mut State, images: &[Image]) {
    for image in images {
        match image {
            Image::Insert(key, row) | Image::Update(key, _, row) => {
                state.insert(*key, row.clone());
            }
            Image::Delete(key, _) => {
                state.remove(key);
            }
            Image::Truncate(table) => state.retain(|(of, _), _| of != table),
            Image::Rewrite => {
                for row in state.values_mut() {
                    row.value = row.value.wrapping_mul(3).wrapping_add(1) % 1_000_003;
                }
            }
        }
    }
}
