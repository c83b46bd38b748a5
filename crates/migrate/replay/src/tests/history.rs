//! Random histories: client sessions on the model, and the events that a proxy in front of it sees.

use std::collections::BTreeSet;

use super::database::{Database, ITEMS, Image, Isolation, Key, Outcome, PARENTS, Row, State, Statement, apply};
use crate::mapping::Kind;
use crate::{RunningId, Snapshot, Stamp, Token, Xid};
use stillpoint_base::Random;

/// Contents of a history.
#[derive(Debug, Clone, Copy)]
pub(super) struct Profile {
    /// Includes READ COMMITTED, in addition to the two levels that take one snapshot.
    pub(super) read_committed: bool,
    /// Includes TRUNCATE and DDL.
    pub(super) whole: bool,
    /// Includes statements whose effect depends on more than the rows they write: reads of other rows, and writes that find no
    /// row (otherwise left out of the replay, because the command tag shows them).
    pub(super) skew: bool,
    /// Every nth transaction is a long one.
    pub(super) long_every: usize,
    pub(super) transactions: usize,
}

impl Profile {
    /// Everything that row images can replay.
    pub(super) const ROWS: Profile =
        Profile { read_committed: true, whole: true, skew: true, long_every: 8, transactions: 16 };
    /// Everything that the LSIR can replay.
    pub(super) const SNAPSHOTS: Profile = Profile { read_committed: false, whole: false, ..Profile::ROWS };
    /// Everything that a serial replay of statements can replay.
    pub(super) const SERIAL: Profile = Profile { skew: false, ..Profile::SNAPSHOTS };
}

/// A committed transaction.
#[derive(Debug, Clone)]
pub(super) struct Committed {
    pub(super) stamp: Stamp,
    pub(super) running: RunningId,
    pub(super) xid: Option<Xid>,
    pub(super) statements: Vec<(Kind, Statement)>,
    pub(super) images: Vec<Image>,
}

/// An event that the proxy sees, in the order in which it sees them.
#[derive(Debug, Clone)]
pub(super) enum Event {
    Begins(RunningId),
    Began(RunningId, Snapshot),
    Ended(RunningId),
    Committed(Committed),
    /// No more stamps up to this one will come.
    Closed(Stamp),
}

#[derive(Debug)]
pub(super) struct History {
    pub(super) initial: State,
    pub(super) last: State,
    pub(super) events: Vec<Event>,
}

#[derive(Debug)]
enum Stage {
    Idle,
    Announced,
    Running {
        told: bool,
    },
    /// COMMIT was sent.
    Sent(Stamp),
    /// COMMIT was executed; its answer is on the way.
    Answered(Stamp),
}

struct Client {
    stage: Stage,
    running: RunningId,
    isolation: Isolation,
    plan: Vec<Statement>,
    at: usize,
    xid: Option<Xid>,
    statements: Vec<(Kind, Statement)>,
    images: Vec<Image>,
}

/// Runs a random history.
pub(super) struct Source<'a> {
    random: &'a mut Random,
    profile: Profile,
    keys: usize,
    uniques: usize,
    database: Database,
    clients: Vec<Client>,
    started: usize,
    last_stamp: u64,
    outstanding: BTreeSet<Stamp>,
    events: Vec<Event>,
}

pub(super) fn random_history(random: &mut Random, profile: Profile) -> History {
    let (sessions, keys, uniques) = (2 + random.index(5), 2 + random.index(4), 2 + random.index(3));
    let mut initial = State::new();
    for key in 0..keys as u8 {
        if !random.one_in(3) {
            initial.insert((PARENTS, key), Row { value: i64::from(key), unique: None, parent: None });
        }
        if !random.one_in(3) {
            let unique = Some(key).filter(|key| usize::from(*key) < uniques);
            let parent = Some(key).filter(|key| initial.contains_key(&(PARENTS, *key)));
            initial.insert((ITEMS, key), Row { value: 10 * i64::from(key), unique, parent });
        }
    }
    let clients = (0..sessions).map(|_| Client {
        stage: Stage::Idle,
        running: RunningId(0),
        isolation: Isolation::RepeatableRead,
        plan: Vec::new(),
        at: 0,
        xid: None,
        statements: Vec::new(),
        images: Vec::new(),
    });
    let source = Source {
        random,
        profile,
        keys,
        uniques,
        database: Database::new(&initial, sessions, true),
        clients: clients.collect(),
        started: 0,
        last_stamp: 0,
        outstanding: BTreeSet::new(),
        events: Vec::new(),
    };
    source.play(initial)
}

impl Source<'_> {
    fn play(mut self, initial: State) -> History {
        let mut steps = 0;
        loop {
            let busy = self.clients.iter().any(|client| !matches!(client.stage, Stage::Idle));
            if !busy && self.started >= self.profile.transactions {
                break;
            }
            let client = self.random.index(self.clients.len());
            self.step(client);
            steps += 1;
            assert!(steps < 200_000, "the model does not come to an end");
        }
        let last = self.database.state();
        let mut serial = initial.clone();
        let mut committed: Vec<&Committed> = self.events.iter().filter_map(Event::committed).collect();
        committed.sort_by_key(|committed| committed.stamp);
        committed.iter().for_each(|committed| apply(&mut serial, &committed.images));
        assert_eq!(serial, last, "the lemma: images in the order of stamps are what the source holds");
        History { initial, last, events: self.events }
    }

    fn step(&mut self, at: usize) {
        match self.clients[at].stage {
            Stage::Idle => self.start(at),
            Stage::Announced => self.execute(at),
            Stage::Running { told: false } => {
                let (running, snapshot) = (self.clients[at].running, self.database.snapshot(at));
                self.events.push(Event::Began(running, snapshot.expect("the first statement took it")));
                self.clients[at].stage = Stage::Running { told: true };
            }
            Stage::Running { told: true } if self.clients[at].at < self.clients[at].plan.len() => self.execute(at),
            Stage::Running { told: true } if self.random.one_in(12) => self.give_up(at),
            Stage::Running { told: true } => {
                self.last_stamp += 1;
                self.outstanding.insert(Stamp(self.last_stamp));
                self.clients[at].stage = Stage::Sent(Stamp(self.last_stamp));
            }
            Stage::Sent(stamp) => {
                self.clients[at].xid = self.database.xid(at);
                match self.database.commit(at) {
                    Ok(()) => self.clients[at].stage = Stage::Answered(stamp),
                    Err(_) => {
                        self.events.push(Event::Ended(self.clients[at].running));
                        self.settle(at, stamp);
                    }
                }
            }
            Stage::Answered(stamp) => {
                let client = &mut self.clients[at];
                let (statements, images) = (std::mem::take(&mut client.statements), std::mem::take(&mut client.images));
                let committed = Committed { stamp, running: client.running, xid: client.xid, statements, images };
                self.events.push(Event::Committed(committed));
                self.settle(at, stamp);
            }
        }
    }

    fn settle(&mut self, at: usize, stamp: Stamp) {
        self.clients[at].stage = Stage::Idle;
        self.outstanding.remove(&stamp);
        let upto = self.outstanding.first().map_or(self.last_stamp, |first| first.0 - 1);
        self.events.push(Event::Closed(Stamp(upto)));
    }

    fn give_up(&mut self, at: usize) {
        self.database.rollback(at);
        self.events.push(Event::Ended(self.clients[at].running));
        self.clients[at].stage = Stage::Idle;
    }

    fn start(&mut self, at: usize) {
        if self.started >= self.profile.transactions {
            return;
        }
        self.started += 1;
        let plan = self.plan();
        let isolation = match self.random.index(if self.profile.read_committed { 4 } else { 2 }) {
            0 => Isolation::RepeatableRead,
            1 => Isolation::Serializable,
            _ => Isolation::ReadCommitted,
        };
        let client = &mut self.clients[at];
        client.running = RunningId(self.started as u64);
        client.isolation = isolation;
        client.plan = plan;
        client.at = 0;
        client.statements.clear();
        client.images.clear();
        client.stage = Stage::Announced;
        self.events.push(Event::Begins(client.running));
        self.database.begin(at, isolation);
    }

    fn execute(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let statement = client.plan[client.at].clone();
        match self.database.execute(at, &statement) {
            Ok(Outcome::Blocked) => {}
            Ok(Outcome::Done(images)) => {
                let kind = if matches!(statement, Statement::Read(_)) { Kind::Read } else { Kind::Write };
                if kind == Kind::Read || self.profile.skew || !images.is_empty() {
                    client.statements.push((kind, statement));
                }
                client.images.extend(images);
                client.at += 1;
                if matches!(client.stage, Stage::Announced) {
                    client.stage = Stage::Running { told: false };
                }
            }
            Err(_) => self.give_up(at),
        }
    }

    fn key(&mut self, table: u8) -> Key {
        (table, self.random.index(self.keys) as u8)
    }

    fn any_key(&mut self) -> Key {
        let table = if self.random.one_in(3) { PARENTS } else { ITEMS };
        self.key(table)
    }

    fn unique(&mut self) -> Option<u8> {
        let unique = self.random.index(self.uniques) as u8;
        Some(unique).filter(|_| !self.random.one_in(4))
    }

    fn row(&mut self, table: u8) -> Row {
        let value = self.random.index(1000) as i64;
        if table == PARENTS {
            return Row { value, unique: None, parent: None };
        }
        let parent = Some(self.random.index(self.keys) as u8).filter(|_| self.random.one_in(2));
        Row { value, unique: self.unique(), parent }
    }

    fn plan(&mut self) -> Vec<Statement> {
        let long = self.random.one_in(self.profile.long_every);
        let length = 1 + self.random.index(if long { 10 } else { 4 });
        let first = Statement::Read(self.any_key());
        std::iter::once(first).chain((0..length).map(|_| self.statement()).collect::<Vec<_>>()).collect()
    }

    fn statement(&mut self) -> Statement {
        let key = self.any_key();
        match self.random.index(if self.profile.whole { 40 } else { 38 }) {
            0..8 => Statement::Add(key, 1 + self.random.index(9) as i64),
            8..13 => Statement::Insert(key, self.row(key.0)),
            13..18 => Statement::Delete(key),
            18..23 => Statement::SetUnique(self.key(ITEMS), self.unique()),
            23..27 if key.0 == ITEMS => Statement::Set(key, self.row(ITEMS)),
            27..31 if self.profile.skew => Statement::Copy { to: key, from: self.any_key() },
            31..33 => Statement::Move { from: self.key(ITEMS), to: self.key(ITEMS) },
            38 => Statement::Truncate(ITEMS),
            39 => Statement::Rewrite,
            _ => Statement::Read(key),
        }
    }
}

impl Event {
    pub(super) fn snapshot(&self) -> Option<(RunningId, &Snapshot)> {
        match self {
            Event::Began(running, snapshot) => Some((*running, snapshot)),
            _ => None,
        }
    }

    pub(super) fn committed(&self) -> Option<&Committed> {
        match self {
            Event::Committed(committed) => Some(committed),
            _ => None,
        }
    }
}

const UNIQUE_INDEX: u32 = 11;
const PARENT_KEY: u32 = 10;

/// The tokens of a transaction. The log of logical decoding (`logical`) has no old values of secondary unique columns.
pub(super) fn tokens(images: &[Image], logical: bool) -> Vec<Token> {
    let mut tokens = Vec::new();
    for image in images {
        match image {
            Image::Insert(key, row) => existence_token(&mut tokens, *key, row),
            Image::Delete(key, row) => {
                existence_token(&mut tokens, *key, row);
                forgotten(&mut tokens, *key, logical);
            }
            Image::Update(key, old, new) => {
                tokens.push(row_token(*key));
                if old.unique != new.unique && !logical {
                    let values = [old.unique, new.unique].into_iter().flatten();
                    tokens.extend(values.map(unique_token));
                }
                if old.parent != new.parent {
                    tokens.extend([old.parent, new.parent].into_iter().flatten().map(parent_token));
                }
                forgotten(&mut tokens, *key, logical);
            }
            Image::Truncate(table) => {
                tokens.push(Token::Table(u32::from(*table)));
                // Its rows referred to parents, and the images do not show which.
                tokens.push(Token::Index(PARENTS.into(), PARENT_KEY));
            }
            Image::Rewrite => tokens.push(Token::Everything),
        }
    }
    tokens
}

fn row_token(key: Key) -> Token {
    Token::Row(key.0.into(), key.1.into())
}

fn unique_token(value: u8) -> Token {
    Token::Unique(ITEMS.into(), UNIQUE_INDEX, value.into())
}

fn parent_token(parent: u8) -> Token {
    Token::Parent(PARENTS.into(), PARENT_KEY, parent.into())
}

fn existence_token(tokens: &mut Vec<Token>, key: Key, row: &Row) {
    tokens.push(row_token(key));
    if key.0 == PARENTS {
        tokens.push(Token::Unique(PARENTS.into(), PARENT_KEY, key.1.into()));
    }
    tokens.extend(row.unique.map(unique_token));
    tokens.extend(row.parent.map(parent_token));
}

fn forgotten(tokens: &mut Vec<Token>, key: Key, logical: bool) {
    if logical && key.0 == ITEMS {
        tokens.push(Token::Index(ITEMS.into(), UNIQUE_INDEX));
    }
}
