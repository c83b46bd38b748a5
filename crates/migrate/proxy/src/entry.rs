//! What others may see of a session, and how they reach it.

use crate::capture::Capture;
use crate::config::Server;
use crate::target::Target;
use crate::waits::Waits;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use stillpoint_migrate_wire::frontend::CancelKey;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Locks; what a thread that panicked left is as good as any other state here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a session does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// Its client logs in.
    Starting,
    /// Nothing is under way.
    Idle,
    /// A statement runs.
    Active,
    /// A transaction is open.
    InTransaction,
    /// It waits for a switch-over.
    Parked,
}

impl Activity {
    const ALL: [Activity; 5] =
        [Activity::Starting, Activity::Idle, Activity::Active, Activity::InTransaction, Activity::Parked];

    /// Why others wait for a session that does this.
    pub(crate) fn holds_up_by(self) -> &'static str {
        match self {
            Activity::Starting => "is logging in",
            Activity::InTransaction => "its client holds a transaction open",
            _ => "its statement runs",
        }
    }
}

/// Who reports what to whoever asked all sessions of a tenant for something. Dropping it says that the session is gone.
#[derive(Debug)]
pub(crate) struct Reporter {
    pub(crate) id: u32,
    pub(crate) to: UnboundedSender<(u32, Result<(), String>)>,
}

impl Reporter {
    pub(crate) fn report(self, result: Result<(), String>) {
        // Nobody listens any more: the request has reached its limit.
        let _ = self.to.send((self.id, result));
    }
}

/// What a session is asked to do.
#[derive(Debug)]
pub(crate) enum Command {
    /// Open a session at the target and keep it like the one here.
    Prepare(Arc<Target>, Option<Reporter>),
    /// The same, unless there is one already with which nothing is wrong.
    PrepareAgain(Arc<Target>, Reporter),
    /// Forget the one at the target.
    Abandon,
    /// Capture what is written from the next boundary on.
    Capture(Arc<Capture>, Option<Reporter>),
    /// Begin no new transaction; report once none is open.
    Pause(Reporter),
    /// Go on where you are.
    Resume,
    /// Go on at the target.
    Switch(Reporter),
    /// End when no transaction is open.
    End,
}

/// Counters of one session or of all.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) statements: AtomicU64,
    pub(crate) bytes_up: AtomicU64,
    pub(crate) bytes_down: AtomicU64,
}

impl Counters {
    /// Adds to a counter that one thread alone writes.
    #[inline]
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
    }

    pub(crate) fn absorb(&self, other: &Counters) {
        for (mine, theirs) in [
            (&self.statements, &other.statements),
            (&self.bytes_up, &other.bytes_up),
            (&self.bytes_down, &other.bytes_down),
        ] {
            mine.fetch_add(theirs.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// A session as others see it.
pub(crate) struct Entry {
    pub(crate) id: u32,
    pub(crate) tenant: String,
    pub(crate) user: String,
    pub(crate) database: String,
    pub(crate) origin: String,
    pub(crate) counters: Counters,
    pub(crate) prepared: AtomicBool,
    /// Its tenant's.
    waits: Arc<Waits>,
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

static BEGINNING: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Microseconds since the proxy began.
pub(crate) fn now_us() -> u64 {
    BEGINNING.elapsed().as_micros() as u64
}

/// Who a session belongs to.
#[derive(Debug, Clone)]
pub(crate) struct Who {
    pub(crate) tenant: String,
    pub(crate) user: String,
    pub(crate) database: String,
    pub(crate) origin: String,
}

impl Entry {
    pub(crate) fn new(id: u32, who: Who, secret: Vec<u8>, waits: Arc<Waits>) -> (Entry, UnboundedReceiver<Command>) {
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
        // A session that has ended needs no commands; its reporter is dropped with the command, and that says so.
        let _ = self.commands.send(command);
    }

    #[inline]
    pub(crate) fn set(&self, activity: Activity) {
        self.activity.store(activity as u8, Ordering::Relaxed);
    }

    /// Something begins after nothing was under way.
    #[inline]
    pub(crate) fn begin(&self, now_us: u64) {
        self.busy_since_us.store(now_us, Ordering::Relaxed);
        self.set(Activity::Active);
    }

    /// A statement that was passed on at this time has been answered.
    #[inline]
    pub(crate) fn answered(&self, asked_us: u64) {
        self.waits.count(now_us().saturating_sub(asked_us));
    }

    pub(crate) fn activity(&self) -> Activity {
        Activity::ALL[usize::from(self.activity.load(Ordering::Relaxed)).min(4)]
    }

    /// For how long it has been doing what it does, if that is something.
    pub(crate) fn busy_for(&self) -> Option<Duration> {
        let busy = !matches!(self.activity(), Activity::Idle | Activity::Parked);
        let since = self.busy_since_us.load(Ordering::Relaxed);
        busy.then(|| Duration::from_micros(now_us().saturating_sub(since)))
    }

    /// Whether it has a counterpart at the target that carries the same.
    pub(crate) fn is_prepared(&self) -> bool {
        self.prepared.load(Ordering::Relaxed)
    }

    pub(crate) fn pinned(&self) -> Option<String> {
        lock(&self.pinned).clone()
    }

    pub(crate) fn set_pinned(&self, why: Option<String>) {
        *lock(&self.pinned) = why;
    }

    /// The key that its client has.
    pub(crate) fn key(&self) -> CancelKey {
        CancelKey { pid: self.id, secret: self.secret.clone() }
    }

    /// Where a request to cancel goes.
    pub(crate) fn cancel_at(&self, server: Arc<Server>, key: CancelKey) {
        *lock(&self.cancel) = Some((server, key));
    }

    /// The process that serves it at the server, once it has logged in there.
    pub(crate) fn backend(&self) -> Option<u32> {
        lock(&self.cancel).as_ref().map(|(_, key)| key.pid)
    }

    /// Where a request to cancel goes, for whoever has the key.
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
    /// A session whose number no other has; `None` when there are as many as there may be.
    pub(crate) fn enter(
        &self,
        who: Who,
        secret_len: usize,
        most: usize,
        waits: Arc<Waits>,
    ) -> Option<(Arc<Entry>, UnboundedReceiver<Command>)> {
        let mut secret = vec![0; secret_len];
        crate::secret::random(&mut secret);
        let mut entries = lock(&self.entries);
        if entries.1.len() >= most {
            return None;
        }
        // Numbers are positive for clients that take them for signed ones.
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

    fn who() -> Who {
        let text = || "x".to_owned();
        Who { tenant: text(), user: text(), database: text(), origin: text() }
    }

    #[test]
    fn only_the_whole_key_leads_to_the_server() {
        let directory = Directory::default();
        let (entry, _commands) = directory.enter(who(), 32, 10, Arc::default()).unwrap();
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
        let (first, _a) = directory.enter(who(), 4, 2, Arc::default()).unwrap();
        lock(&directory.entries).0 = i32::MAX as u32;
        let (second, _b) = directory.enter(who(), 4, 2, Arc::default()).unwrap();
        assert_eq!((first.id, second.id), (1, 2));
        assert!(directory.enter(who(), 4, 2, Arc::default()).is_none());
        directory.leave(first.id);
        assert_eq!(directory.all().len(), 1);
    }
}
