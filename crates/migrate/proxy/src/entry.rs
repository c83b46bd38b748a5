//! Shared view of a session.

use crate::clock::now_us;
use crate::command::Command;
use crate::counters::Counters;
use crate::latency_histogram::LatencyHistogram;
use crate::mutex::lock;
use crate::server_process::ServerProcess;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
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
    /// Reason why it shares no server connection, although its tenant has a pool.
    kept: Mutex<Option<String>>,
    /// Key that its client has, once it has logged in.
    key: OnceLock<CancelKey>,
    process: Mutex<Option<ServerProcess>>,
}

/// A request to cancel on its way to a server process: until this is dropped, no other session gets the process.
#[derive(Debug)]
pub(crate) struct Cancelling {
    pub(crate) server: Arc<Server>,
    pub(crate) key: CancelKey,
    cancels: Arc<AtomicUsize>,
}

impl Cancelling {
    /// Records that the request may reach the process at any time from now on: no other session may ever get it.
    pub(crate) fn never_ends(&self) {
        self.cancels.fetch_add(1, Ordering::AcqRel);
    }
}

impl Drop for Cancelling {
    fn drop(&mut self) {
        self.cancels.fetch_sub(1, Ordering::AcqRel);
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "session {} ({}@{})", self.id, self.user, self.database)
    }
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
            kept: Mutex::new(None),
            key: OnceLock::new(),
            process: Mutex::new(None),
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

    /// Reason why it keeps its server connection, if it does and its tenant has a pool.
    pub(crate) fn kept(&self) -> Option<String> {
        lock(&self.kept).clone()
    }

    pub(crate) fn set_kept(&self, why: Option<String>) {
        *lock(&self.kept) = why;
    }

    /// Process id that its client has, once it has logged in.
    pub(crate) fn client_process(&self) -> Option<u32> {
        self.key.get().map(|key| key.pid)
    }

    /// Process id of its server process, once it has logged in there.
    pub(crate) fn backend(&self) -> Option<u32> {
        lock(&self.process).as_ref().map(|process| process.key.pid)
    }

    /// Records the server process that the session has from now on; its client keeps its id.
    pub(crate) fn move_to(&self, process: ServerProcess) {
        if let Some(client) = self.client_process() {
            process.ids.enter(process.key.pid, client);
        }
        *lock(&self.process) = Some(process);
    }

    /// Records that the session has no server process any more. Returns true if no request to cancel is on its way to
    /// the one that it had, so that another session may have it.
    pub(crate) fn take_process(&self) -> bool {
        let process = lock(&self.process).take();
        process.is_none_or(|process| process.cancels.load(Ordering::Acquire) == 0)
    }

    /// Returns true if this is the session's server process.
    fn has_process(&self, process: &ServerProcess) -> bool {
        lock(&self.process)
            .as_ref()
            .is_some_and(|own| Arc::ptr_eq(&own.ids, &process.ids) && own.key.pid == process.key.pid)
    }

    /// Returns true if the secret is that of its client's key. The time does not depend on where two secrets differ.
    fn has_secret(&self, secret: &[u8]) -> bool {
        let own = self.key.get().map_or(&[][..], |key| &key.secret);
        let differences = own.iter().zip(secret).fold(0, |all, (a, b)| std::hint::black_box(all | (a ^ b)));
        !own.is_empty() && own.len() == secret.len() && differences == 0
    }
}

/// Process ids for clients whose server's id cannot be used: Linux gives no process an id from here on, and ids stay
/// positive as signed 32-bit numbers, since some clients read them so.
const SUBSTITUTE_IDS: u32 = 1 << 30;

#[derive(Debug, Default)]
struct Entries {
    last: u32,
    by_number: HashMap<u32, Arc<Entry>>,
    /// Logged-in sessions by their clients' process ids. Sessions at different servers may have the same one.
    by_process: HashMap<u32, Vec<Arc<Entry>>>,
}

/// All sessions, by their numbers and by the process ids that their clients have.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    entries: Mutex<Entries>,
}

impl Directory {
    /// Enters a session under a number that no other has; `None` at the limit of sessions.
    pub(crate) fn enter(
        &self,
        who: SessionIdentity,
        most: usize,
        waits: Arc<LatencyHistogram>,
    ) -> Option<(Arc<Entry>, UnboundedReceiver<Command>)> {
        let mut entries = lock(&self.entries);
        if entries.by_number.len() >= most {
            return None;
        }
        let next = |id: u32| if id >= i32::MAX as u32 { 1 } else { id + 1 };
        let mut id = next(entries.last);
        while entries.by_number.contains_key(&id) {
            id = next(id);
        }
        let (entry, commands) = Entry::new(id, who, waits);
        let entry = Arc::new(entry);
        entries.last = id;
        entries.by_number.insert(id, entry.clone());
        Some((entry, commands))
    }

    /// Gives a session's client its cancel key: with the server's own process id, unless another client of the tenant
    /// has this id since before a switch.
    pub(crate) fn announce(&self, entry: &Arc<Entry>, process: ServerProcess, secret_len: usize) -> CancelKey {
        let mut entries = lock(&self.entries);
        let pid = process.key.pid;
        let others = entries.by_process.get(&pid).map_or(&[][..], Vec::as_slice);
        let is_taken = others.iter().any(|other| other.tenant == entry.tenant && !other.has_process(&process));
        let is_own = pid != 0 && !is_taken && !process.ids.is_taken(pid);
        let pid = if is_own { pid } else { SUBSTITUTE_IDS | (entry.id & (SUBSTITUTE_IDS - 1)) };
        let others = entries.by_process.entry(pid).or_default();
        let mut secret = vec![0; secret_len];
        loop {
            fill_random(&mut secret);
            if !others.iter().any(|other| other.has_secret(&secret)) {
                break;
            }
        }
        let key = entry.key.get_or_init(|| CancelKey { pid, secret }).clone();
        others.push(entry.clone());
        entry.move_to(process);
        key
    }

    /// Server and key for a request to cancel; `None` if no session has this key. Of the sessions with the same process
    /// id, the secret finds one.
    pub(crate) fn canceller(&self, key: &CancelKey) -> Option<Cancelling> {
        let entries = lock(&self.entries);
        let mut found = None;
        for entry in entries.by_process.get(&key.pid).map_or(&[][..], Vec::as_slice) {
            if entry.has_secret(&key.secret) {
                found = Some(entry);
            }
        }
        let process = lock(&found?.process);
        process.as_ref().map(|process| {
            // The lock is held: the session cannot give its process away meanwhile.
            process.cancels.fetch_add(1, Ordering::AcqRel);
            Cancelling { server: process.server.clone(), key: process.key.clone(), cancels: process.cancels.clone() }
        })
    }

    pub(crate) fn leave(&self, id: u32) {
        let mut entries = lock(&self.entries);
        let Some(entry) = entries.by_number.remove(&id) else { return };
        let Some(client) = entry.client_process() else { return };
        if let Some(same) = entries.by_process.get_mut(&client) {
            same.retain(|other| other.id != id);
            if same.is_empty() {
                entries.by_process.remove(&client);
            }
        }
        if let Some(process) = lock(&entry.process).as_ref() {
            process.ids.end(process.key.pid, client);
        }
    }

    pub(crate) fn all(&self) -> Vec<Arc<Entry>> {
        let mut all: Vec<_> = lock(&self.entries).by_number.values().cloned().collect();
        all.sort_by_key(|entry| entry.id);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_ids::ProcessIds;

    fn identity(tenant: &str) -> SessionIdentity {
        let text = || "x".to_owned();
        SessionIdentity { tenant: tenant.to_owned(), user: text(), database: text(), origin: text() }
    }

    fn server() -> Arc<Server> {
        Arc::new(toml::from_str("host = 'h'").unwrap())
    }

    fn process(ids: &Arc<ProcessIds>, pid: u32) -> ServerProcess {
        let key = CancelKey { pid, secret: pid.to_be_bytes().to_vec() };
        ServerProcess { server: server(), key, ids: ids.clone(), cancels: Arc::default() }
    }

    /// A session that has logged in, and its client's key.
    fn session(directory: &Directory, tenant: &str, process: ServerProcess) -> (Arc<Entry>, CancelKey) {
        let (entry, _commands) = directory.enter(identity(tenant), 100, Arc::default()).unwrap();
        let key = directory.announce(&entry, process, 32);
        (entry, key)
    }

    #[test]
    fn only_the_whole_key_leads_to_the_server() {
        let directory = Directory::default();
        let (waiting, _commands) = directory.enter(identity("t"), 10, Arc::default()).unwrap();
        let (_entry, key) = session(&directory, "t", process(&Arc::default(), 99));
        assert_eq!((key.pid, key.secret.len()), (99, 32));
        assert_eq!(directory.canceller(&key).unwrap().key, process(&Arc::default(), 99).key);
        for secret in [vec![], key.secret[..4].to_vec(), vec![0; 32], [&key.secret[..], &[0]].concat()] {
            assert!(directory.canceller(&CancelKey { pid: key.pid, secret }).is_none());
        }
        // A session that has no key yet is found by none, and the number of a session is no process id.
        for pid in [0, 1, 2, waiting.id] {
            for secret in [vec![], key.secret.clone()] {
                assert!(directory.canceller(&CancelKey { pid, secret }).is_none());
            }
        }
    }

    #[test]
    fn sessions_of_several_servers_with_the_same_id_are_found_by_their_secrets() {
        let directory = Directory::default();
        let ids: Vec<Arc<ProcessIds>> = (0..3).map(|_| Arc::default()).collect();
        let tenant = |at: usize| format!("t{at}");
        let sessions: Vec<_> =
            ids.iter().enumerate().map(|(at, ids)| session(&directory, &tenant(at), process(ids, 7))).collect();
        for (entry, key) in &sessions {
            assert_eq!(key.pid, 7, "each client has its server's own id");
            assert!(Arc::ptr_eq(
                &directory.canceller(key).unwrap().server,
                &lock(&entry.process).as_ref().unwrap().server
            ));
        }
        directory.leave(sessions[1].0.id);
        assert!(directory.canceller(&sessions[1].1).is_none());
        assert!(directory.canceller(&sessions[0].1).is_some() && directory.canceller(&sessions[2].1).is_some());
    }

    #[test]
    fn a_client_keeps_its_id_after_a_move_and_no_newcomer_of_the_tenant_gets_it() {
        let directory = Directory::default();
        let [source, target]: [Arc<ProcessIds>; 2] = Default::default();
        let (moved, key) = session(&directory, "t", process(&source, 7));
        moved.move_to(process(&target, 8));
        assert_eq!((moved.client_process(), moved.backend()), (Some(7), Some(8)));
        assert_eq!(directory.canceller(&key).unwrap().key.pid, 8);
        assert_eq!(target.of_clients(8), 7);
        // The target gives the id to another process, of this tenant and of another one.
        let (newcomer, other) = session(&directory, "t", process(&target, 7));
        assert_eq!((newcomer.backend(), other.pid), (Some(7), SUBSTITUTE_IDS | newcomer.id));
        assert_eq!((target.of_clients(7), target.of_clients(8)), (other.pid, 7));
        assert_eq!(session(&directory, "u", process(&Arc::default(), 7)).1.pid, 7);
        // The source's process has ended, and the source uses the id again: nothing differs there.
        assert_eq!(source.of_clients(7), 7);
        // A session whose entry is still there although its server process has ended does not keep the id.
        let (_late, first) = session(&directory, "v", process(&source, 9));
        let (_next, second) = session(&directory, "v", process(&source, 9));
        assert_eq!((first.pid, second.pid), (9, 9));
        assert_ne!(first.secret, second.secret);
    }

    #[test]
    fn a_session_that_has_not_moved_yet_keeps_its_id_too() {
        let directory = Directory::default();
        let [source, target]: [Arc<ProcessIds>; 2] = Default::default();
        let (_staying, key) = session(&directory, "t", process(&source, 7));
        let (_newcomer, other) = session(&directory, "t", process(&target, 7));
        assert_eq!(key.pid, 7);
        assert!(other.pid >= SUBSTITUTE_IDS && other.pid <= i32::MAX as u32, "{}", other.pid);
        // A server that reports no id.
        let (silent, none) = session(&directory, "t", process(&target, 0));
        assert_eq!(none.pid, SUBSTITUTE_IDS | silent.id);
    }

    #[test]
    fn numbers_are_used_again_only_when_free_and_the_limit_holds() {
        let directory = Directory::default();
        let (first, _a) = directory.enter(identity("t"), 2, Arc::default()).unwrap();
        lock(&directory.entries).last = i32::MAX as u32;
        let (second, _b) = directory.enter(identity("t"), 2, Arc::default()).unwrap();
        assert_eq!((first.id, second.id), (1, 2));
        assert!(directory.enter(identity("t"), 2, Arc::default()).is_none());
        directory.leave(first.id);
        assert_eq!(directory.all().len(), 1);
    }
}
