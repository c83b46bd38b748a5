//! Server connections that idle sessions of a tenant share.
//!
//! A session that is outside of a transaction, and whose server process keeps nothing that could not be made again,
//! gives its connection back. It gets one with its next message. The process of the connection must then be like the
//! one that the session left: the same user, database and startup packet, the same settings and prepared statements.
//!
//! ```text
//!  log in ──▶ settle: ask what it keeps ──▶ vacant ──▶ message ──▶ a free connection, or wait ──▶ make alike ──▶ serve
//!                 │  ▲                        ▲                                                               │
//!   keeps its ◀───┘  ╰──── may have changed ──┼──────────────────────── no transaction is open ◀──────────────╯
//!   connection                                ╰──── nothing has changed ────╯
//! ```
//!
//! A connection that a session keeps does not count: the others always have theirs. What a statement may have changed is
//! judged by its words and by the functions of the database ([`catalog`]); where that is not enough, the server is asked.

pub(crate) mod catalog;
pub(crate) mod connection;
pub(crate) mod effect;
mod functions;
pub(crate) mod seat;
pub(crate) mod waiter;
mod words;

use crate::mutex::lock;
use catalog::Catalog;
use connection::{Backends, Connection, Slot};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use stillpoint_migrate_control::PoolConfig;
use waiter::{Grant, Waiter, Wish};

/// Time after which the session that waits longest gets the next connection, even if that connection fits another one
/// and must be replaced.
const FAIR_WAIT: Duration = Duration::from_millis(100);

/// All pools of a tenant at one server.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    by_user: Mutex<BTreeMap<String, Arc<Pool>>>,
    pub(crate) catalog: Catalog,
    pub(crate) backends: Arc<Backends>,
}

impl Pools {
    /// The pool of a user, with these limits from now on.
    pub(crate) fn of_user(&self, user: &str, config: &PoolConfig) -> Arc<Pool> {
        let mut pools = lock(&self.by_user);
        // Any number of roles may come and go.
        pools.retain(|name, pool| name == user || Arc::strong_count(pool) > 1 || lock(&pool.state).open > 0);
        let pool = pools.entry(user.to_owned()).or_insert_with(|| Arc::new(Pool::new(config.clone()))).clone();
        lock(&pool.state).config = config.clone();
        pool
    }

    pub(crate) fn all(&self) -> Vec<Arc<Pool>> {
        lock(&self.by_user).values().cloned().collect()
    }

    /// Ends what has waited, or was unused, for too long.
    pub(crate) fn tick(&self) {
        self.all().iter().for_each(Pool::tick);
    }

    /// Takes all unused connections out: the tenant has moved. Connections that come back are closed.
    pub(crate) fn retire(&self) -> Vec<Connection> {
        self.all().iter().flat_map(Pool::retire).collect()
    }
}

/// Numbers of a pool.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PoolCounts {
    /// Connections that are open, or are being opened.
    pub(crate) open: usize,
    /// Connections without a session.
    pub(crate) idle: usize,
    /// Sessions that wait for one.
    pub(crate) waiting: usize,
}

/// Connections of one user to one database.
#[derive(Debug)]
pub(crate) struct Pool {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    config: PoolConfig,
    /// Connections that count: with a session, without one, or being opened.
    open: usize,
    /// Connections without a session; the one that came back last is last.
    idle: Vec<Connection>,
    waiting: VecDeque<Waiter>,
    is_retired: bool,
}

/// Answer to a session that wants a connection.
#[derive(Debug)]
pub(crate) enum Acquired {
    /// This one.
    Connection(Connection),
    /// It may open one.
    Open(Slot),
    /// It waits.
    Queued,
    /// Too many wait already: the limit.
    Full(usize),
}

impl Pool {
    fn new(config: PoolConfig) -> Pool {
        let state = State { config, open: 0, idle: Vec::new(), waiting: VecDeque::new(), is_retired: false };
        Pool { state: Mutex::new(state) }
    }

    /// Finds a connection for a session, or lets it wait.
    pub(crate) fn acquire(self: &Arc<Pool>, wish: &Wish<'_>, waiter: impl FnOnce() -> Waiter) -> Acquired {
        loop {
            let connection = {
                let mut state = lock(&self.state);
                match state.best_for(wish) {
                    Some(at) => state.idle.remove(at),
                    None if state.open < state.config.servers => {
                        state.open += 1;
                        return Acquired::Open(Slot::new(self));
                    }
                    // One that fits no present wish makes room.
                    None if !state.idle.is_empty() => {
                        let unfit = state.idle.remove(0);
                        drop(state);
                        drop(unfit);
                        return Acquired::Open(Slot::new(self));
                    }
                    None if state.waiting.len() >= state.config.waiting => return Acquired::Full(state.config.waiting),
                    None => {
                        state.waiting.push_back(waiter());
                        return Acquired::Queued;
                    }
                }
            };
            if connection.stream.is_quiet() {
                return Acquired::Connection(connection.with_slot(Slot::new(self)));
            }
            // The server has ended it, or has said something that no client should get.
            self.close(connection);
        }
    }

    /// Takes a connection back. Returns the session that gets it, if one waits.
    #[must_use]
    pub(crate) fn release(self: &Arc<Pool>, mut connection: Connection) -> Option<(Waiter, Grant)> {
        let Some(slot) = connection.take_slot() else { return self.adopt(connection) };
        let mut state = lock(&self.state);
        if state.is_retired || state.open > state.config.servers {
            drop(state);
            drop(slot);
            return None;
        }
        let Some(at) = state.next_for(&connection) else {
            slot.keep();
            connection.rest();
            state.idle.push(connection);
            return None;
        };
        let waiter = state.waiting.remove(at)?;
        drop(state);
        // The server may have ended it in this moment.
        let is_good = waiter.fits(&connection) && connection.stream.is_quiet();
        let grant = match is_good {
            true => Grant::Connection(connection.with_slot(slot)),
            false => Grant::Open(slot),
        };
        Some((waiter, grant))
    }

    /// Takes a connection that a session has had for itself, if there is room.
    fn adopt(self: &Arc<Pool>, connection: Connection) -> Option<(Waiter, Grant)> {
        {
            let mut state = lock(&self.state);
            if state.is_retired || state.open >= state.config.servers {
                return None;
            }
            state.open += 1;
        }
        self.release(connection.with_slot(Slot::new(self)))
    }

    /// A place for one more connection, if there is room.
    pub(crate) fn place(self: &Arc<Pool>) -> Option<Slot> {
        let mut state = lock(&self.state);
        let has_room = state.open < state.config.servers && !state.is_retired;
        state.open += usize::from(has_room);
        has_room.then(|| Slot::new(self))
    }

    /// Ends the wait of a session.
    pub(crate) fn withdraw(&self, session: u32) {
        lock(&self.state).waiting.retain(|waiter| waiter.session != session);
    }

    /// Frees the place of a connection that is gone: a session that waits may open another one.
    fn free(self: &Arc<Pool>) {
        let waiter = {
            let mut state = lock(&self.state);
            let waiter =
                if state.open > state.config.servers || state.is_retired { None } else { state.waiting.pop_front() };
            if waiter.is_none() {
                state.open -= 1;
            }
            waiter
        };
        if let Some(waiter) = waiter {
            waiter.deliver(Grant::Open(Slot::new(self)));
        }
    }

    fn close(self: &Arc<Pool>, connection: Connection) {
        drop(connection);
        self.free();
    }

    fn tick(self: &Arc<Pool>) {
        let (late, unused) = {
            let mut state = lock(&self.state);
            let wait = Duration::from_millis(state.config.wait_ms);
            let idle = Duration::from_millis(state.config.idle_ms);
            let count = state.waiting.iter().take_while(|waiter| waiter.since.elapsed() >= wait).count();
            let late: Vec<Waiter> = state.waiting.drain(..count).collect();
            let (kept, unused): (Vec<_>, Vec<_>) = std::mem::take(&mut state.idle)
                .into_iter()
                .partition(|connection| connection.idle_for() < idle && connection.stream.is_quiet());
            state.idle = kept;
            (late, unused)
        };
        late.into_iter().for_each(|waiter| waiter.deliver(Grant::TimedOut));
        unused.into_iter().for_each(|connection| self.close(connection));
    }

    fn retire(self: &Arc<Pool>) -> Vec<Connection> {
        let mut state = lock(&self.state);
        state.is_retired = true;
        let idle = std::mem::take(&mut state.idle);
        state.open -= idle.len();
        idle
    }

    pub(crate) fn counts(&self) -> PoolCounts {
        let state = lock(&self.state);
        PoolCounts { open: state.open, idle: state.idle.len(), waiting: state.waiting.len() }
    }

    /// Longest wait, in milliseconds.
    pub(crate) fn wait_ms(&self) -> u64 {
        lock(&self.state).config.wait_ms
    }

    /// Its limits.
    pub(crate) fn config(&self) -> PoolConfig {
        lock(&self.state).config.clone()
    }

    /// Words of statements after which a session keeps its connection.
    pub(crate) fn keep(&self) -> Vec<String> {
        lock(&self.state).config.keep.clone()
    }
}

impl State {
    /// The unused connection that needs the least work.
    fn best_for(&self, wish: &Wish<'_>) -> Option<usize> {
        let fitting = self.idle.iter().enumerate().rev().filter(|(_, connection)| wish.fits(connection));
        fitting.max_by_key(|(at, connection)| (wish.is_alike(connection), *at)).map(|(at, _)| at)
    }

    /// The waiting session that gets this connection, or its place.
    fn next_for(&self, connection: &Connection) -> Option<usize> {
        let first = self.waiting.front()?;
        if first.fits(connection) || first.since.elapsed() >= FAIR_WAIT {
            return Some(0);
        }
        Some(self.waiting.iter().position(|waiter| waiter.fits(connection)).unwrap_or(0))
    }
}

/// Moment from which a wait is measured.
pub(crate) fn now() -> Instant {
    Instant::now()
}
