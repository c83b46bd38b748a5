//! Shared view of a session.

use crate::command::Command;
use crate::counters::Counters;
use crate::latency_histogram::LatencyHistogram;
use crate::mutex::lock;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};
use stillpoint_migrate_control::Activity;
use stillpoint_migrate_postgres::{Server, fill_random};
use stillpoint_migrate_wire::frontend::CancelKey;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// A session as other threads see it.
pub(crate) struct Entry {
    pub(crate) id: u32,
    pub(crate) tenant: String,
    pub(crate) user: String,
    pub(crate) database: String,
    pub(crate) origin: String,
    pub(crate) counters: Counters,
    pub(crate) prepared: AtomicBool,
    /// Shared with its tenant.
    waits: Arc<LatencyHistogram>,
    commands: UnboundedSender<Command>,
    activity: AtomicU8,
    busy_since_us: AtomicU64,
    pinned: Mutex<Option<String>>,
    secret: Vec<u8>,
    cancel: Mutex<Option<(Arc<Server>, CancelKey)>>,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "session {} ({}@{})", self.id, self.user, self.database)
    }
}

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Microseconds since the proxy began.
pub(crate) fn now_us() -> u64 {
    START.elapsed().as_micros() as u64
}

/// Names that a session belongs to.
#[derive(Debug, Clone)]
pub(crate) struct SessionIdentity {
    pub(crate) tenant: String,
    pub(crate) user: String,
    pub(crate) database: String,
    pub(crate) origin: String,
}

impl Entry {
    pub(crate) fn new(
        id: u32,
        who: SessionIdentity,
        secret: Vec<u8>,
        waits: Arc<LatencyHistogram>,
    ) -> (Entry, UnboundedReceiver<Command>) {
        let (commands, receiver) = unbounded_channel();
        let entry = Entry {
            id,
            tenant: who.tenant,
            user: who.user,
            database: who.database,
            origin: who.origin,
            counters: Counters::default(),
            prepared: AtomicBool::new(false),
            waits,
            commands,
            activity: AtomicU8::new(Activity::Starting as u8),
            busy_since_us: AtomicU64::new(now_us()),
            pinned: Mutex::new(None),
            secret,
            cancel: Mutex::new(None),
        };
        (entry, receiver)
    }

    pub(crate) fn send(&self, command: Command) {
        // A session that has ended needs no commands; its reporter is dropped with the command, which reports the end.
        let _ = self.commands.send(command);
    }

    #[inline]
    pub(crate) fn set(&self, activity: Activity) {
        self.activity.store(activity as u8, Ordering::Relaxed);
    }

    /// Records that something begins after nothing was under way.
    #[inline]
    pub(crate) fn begin(&self, now_us: u64) {
        self.busy_since_us.store(now_us, Ordering::Relaxed);
        self.set(Activity::Active);
    }

    /// Records the answer to a statement that was passed on at `asked_us`.
    #[inline]
    pub(crate) fn answered(&self, asked_us: u64) {
        self.waits.count(now_us().saturating_sub(asked_us));
    }

    pub(crate) fn activity(&self) -> Activity {
        Activity::ALL[usize::from(self.activity.load(Ordering::Relaxed)).min(4)]
    }

    /// Time of the present activity; `None` if the session is idle or parked.
    pub(crate) fn busy_for(&self) -> Option<Duration> {
        let busy = !matches!(self.activity(), Activity::Idle | Activity::Parked);
        let since = self.busy_since_us.load(Ordering::Relaxed);
        busy.then(|| Duration::from_micros(now_us().saturating_sub(since)))
    }

    /// Returns true if it has a counterpart at the target that carries the same state.
    pub(crate) fn is_prepared(&self) -> bool {
        self.prepared.load(Ordering::Relaxed)
    }

    pub(crate) fn pinned(&self) -> Option<String> {
        lock(&self.pinned).clone()
    }

    pub(crate) fn set_pinned(&self, why: Option<String>) {
        *lock(&self.pinned) = why;
    }

    /// Cancel key of its client.
    pub(crate) fn key(&self) -> CancelKey {
        CancelKey { pid: self.id, secret: self.secret.clone() }
    }

    /// Sets the server and the key for requests to cancel.
    pub(crate) fn cancel_at(&self, server: Arc<Server>, key: CancelKey) {
        *lock(&self.cancel) = Some((server, key));
    }

    /// Process number of its server process, once it has logged in there.
    pub(crate) fn backend(&self) -> Option<u32> {
        lock(&self.cancel).as_ref().map(|(_, key)| key.pid)
    }

    /// Server and key for a request to cancel; `None` if `key` is not this session's.
    pub(crate) fn canceller(&self, key: &CancelKey) -> Option<(Arc<Server>, CancelKey)> {
        let differs = key.secret.len() != self.secret.len()
            || key.secret.iter().zip(&self.secret).fold(0, |all, (a, b)| all | (a ^ b)) != 0;
        if differs { None } else { lock(&self.cancel).clone() }
    }
}

/// All sessions by their numbers, which are also their process numbers for clients.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    entries: Mutex<(u32, HashMap<u32, Arc<Entry>>)>,
}

impl Directory {
    /// Enters a session under a number that no other has; `None` at the limit of sessions.
    pub(crate) fn enter(
        &self,
        who: SessionIdentity,
        secret_len: usize,
        most: usize,
        waits: Arc<LatencyHistogram>,
    ) -> Option<(Arc<Entry>, UnboundedReceiver<Command>)> {
        let mut secret = vec![0; secret_len];
        fill_random(&mut secret);
        let mut entries = lock(&self.entries);
        if entries.1.len() >= most {
            return None;
        }
        // Numbers stay positive as signed 32-bit numbers, since some clients read them so.
        let next = |id: u32| if id >= i32::MAX as u32 { 1 } else { id + 1 };
        let mut id = next(entries.0);
        while entries.1.contains_key(&id) {
            id = next(id);
        }
        let (entry, commands) = Entry::new(id, who, secret, waits);
        let entry = Arc::new(entry);
        entries.0 = id;
        entries.1.insert(id, entry.clone());
        Some((entry, commands))
    }

    pub(crate) fn leave(&self, id: u32) {
        lock(&self.entries).1.remove(&id);
    }

    pub(crate) fn get(&self, id: u32) -> Option<Arc<Entry>> {
        lock(&self.entries).1.get(&id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Entry>> {
        let mut all: Vec<_> = lock(&self.entries).1.values().cloned().collect();
        all.sort_by_key(|entry| entry.id);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> SessionIdentity {
        let text = || "x".to_owned();
        SessionIdentity { tenant: text(), user: text(), database: text(), origin: text() }
    }

    #[test]
    fn only_the_whole_key_leads_to_the_server() {
        let directory = Directory::default();
        let (entry, _commands) = directory.enter(identity(), 32, 10, Arc::default()).unwrap();
        let server: Server = toml::from_str("host = 'h'").unwrap();
        let theirs = CancelKey { pid: 99, secret: vec![1; 4] };
        entry.cancel_at(Arc::new(server), theirs.clone());
        let key = entry.key();
        assert_eq!(entry.canceller(&key).unwrap().1, theirs);
        for secret in [vec![], key.secret[..4].to_vec(), vec![0; 32]] {
            assert!(entry.canceller(&CancelKey { pid: key.pid, secret }).is_none());
        }
    }

    #[test]
    fn numbers_are_used_again_only_when_free_and_the_limit_holds() {
        let directory = Directory::default();
        let (first, _a) = directory.enter(identity(), 4, 2, Arc::default()).unwrap();
        lock(&directory.entries).0 = i32::MAX as u32;
        let (second, _b) = directory.enter(identity(), 4, 2, Arc::default()).unwrap();
        assert_eq!((first.id, second.id), (1, 2));
        assert!(directory.enter(identity(), 4, 2, Arc::default()).is_none());
        directory.leave(first.id);
        assert_eq!(directory.all().len(), 1);
    }
}
