//! A shared connection, and its place in the pool.

use super::Pool;
use crate::mutex::lock;
use crate::polled_stream::PolledStream;
use crate::server_process::ServerProcess;
use crate::session::session_state::SessionState;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A connection's place in its pool; dropping it frees the place.
#[derive(Debug)]
pub(crate) struct Slot {
    pool: Option<Arc<Pool>>,
}

impl Slot {
    pub(super) fn new(pool: &Arc<Pool>) -> Slot {
        Slot { pool: Some(pool.clone()) }
    }

    /// Leaves the place taken.
    pub(super) fn keep(mut self) {
        self.pool = None;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.free();
        }
    }
}

/// Server processes of a tenant's shared connections.
#[derive(Debug, Default)]
pub(crate) struct Backends {
    pids: Mutex<BTreeSet<u32>>,
}

impl Backends {
    /// Process ids.
    pub(crate) fn pids(&self) -> Vec<u32> {
        lock(&self.pids).iter().copied().collect()
    }
}

/// Entry of a server process among those of its tenant, for as long as the connection exists.
#[derive(Debug)]
struct Registration {
    backends: Arc<Backends>,
    pid: u32,
}

impl Drop for Registration {
    fn drop(&mut self) {
        lock(&self.backends.pids).remove(&self.pid);
    }
}

/// Facts about a connection's server process.
#[derive(Debug)]
pub(crate) struct Facts {
    /// Packet that began it.
    pub(crate) startup: Arc<[u8]>,
    pub(crate) process: ServerProcess,
    /// Parameters that the server has reported, with their present values.
    pub(crate) parameters: Arc<BTreeMap<String, Vec<u8>>>,
    /// Settings that the server gave it.
    pub(crate) inherited: Arc<BTreeMap<Vec<u8>, Vec<u8>>>,
    /// State at its beginning, which DISCARD ALL brings back.
    pub(crate) first: Arc<SessionState>,
    /// Present state; `None` if it is not known.
    pub(crate) state: Option<Arc<SessionState>>,
    /// Custom settings that it has had: their names stay known to the process.
    pub(crate) customs: Arc<BTreeSet<Vec<u8>>>,
    /// Session that had it last.
    pub(crate) session: u32,
    /// Session whose values of sequences it may have.
    pub(crate) sequences: Option<u32>,
    /// Its place, if it counts.
    slot: Option<Slot>,
    idle_since: Instant,
    _registration: Registration,
}

/// A connection without a session.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: PolledStream,
    pub(crate) facts: Box<Facts>,
}

impl Facts {
    /// Facts about a process that has just begun.
    pub(crate) fn new(
        startup: Arc<[u8]>,
        process: ServerProcess,
        parameters: Arc<BTreeMap<String, Vec<u8>>>,
        slot: Option<Slot>,
        backends: &Arc<Backends>,
    ) -> Box<Facts> {
        let pid = process.key.pid;
        lock(&backends.pids).insert(pid);
        Box::new(Facts {
            _registration: Registration { backends: backends.clone(), pid },
            startup,
            process,
            parameters,
            inherited: Arc::default(),
            first: Arc::default(),
            state: None,
            customs: Arc::default(),
            session: 0,
            sequences: None,
            slot,
            idle_since: Instant::now(),
        })
    }

    /// Pool that its place is in, if it counts.
    pub(crate) fn pool(&self) -> Option<Arc<Pool>> {
        self.slot.as_ref()?.pool.clone()
    }

    /// The session keeps it from now on: it does not count.
    pub(crate) fn keep(&mut self) {
        self.slot = None;
    }

    /// Takes the state that the server has told.
    pub(crate) fn learn(&mut self, state: &Arc<SessionState>) {
        let new: Vec<_> = state.custom_names().filter(|name| !self.customs.contains(*name)).cloned().collect();
        if !new.is_empty() {
            Arc::make_mut(&mut self.customs).extend(new);
        }
        self.state = Some(state.clone());
    }
}

impl Connection {
    pub(super) fn with_slot(mut self, slot: Slot) -> Connection {
        self.facts.slot = Some(slot);
        self
    }

    pub(super) fn take_slot(&mut self) -> Option<Slot> {
        self.facts.slot.take()
    }

    pub(super) fn rest(&mut self) {
        self.facts.idle_since = Instant::now();
    }

    pub(super) fn idle_for(&self) -> Duration {
        self.facts.idle_since.elapsed()
    }
}
