//! Row images of one tenant's committed transactions, in the order of their stamps.
//!
//! ```text
//! session: COMMIT is to be sent ──stamp──▶ open ──its reply──▶ resolved ──all lower ones resolved──▶ follower
//!                                           │ the reply never came
//!                                           └───────────────────────▶ broken off: the follower gets the reason
//! ```
//!
//! A write that cannot be captured breaks the capture off, never its client: see [`Capture::break_off`].
//!
//! Where statements are asked for too, the follower gets a report of each transaction before its first operation is
//! sent ([`Reply::Begins`]) and when its snapshot is known, in one order with the commits. The snapshot saw the commits
//! that were reported before it; it may or may not have seen later ones.

use crate::mutex::lock;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use stillpoint_migrate_capture::facts::SessionContext;
use stillpoint_migrate_capture::{Action, Table};
use stillpoint_migrate_control::Reply;
use stillpoint_migrate_control::rows::Operation;
use stillpoint_migrate_replay::Token;
use tokio::sync::Notify;

/// Most bytes that may wait for a slow follower.
const WAITING_BYTES_MAX: usize = 256 << 20;

/// Bytes that one report of a running transaction counts among these.
const REPORT_BYTES: usize = 64;

/// One written row.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) table: Arc<Table>,
    /// Positions of the columns that the values belong to.
    pub(crate) columns: Arc<Vec<usize>>,
    pub(crate) action: Action,
    pub(crate) values: Vec<Option<String>>,
}

/// Changes of one transaction.
#[derive(Debug, Default)]
pub(crate) struct TransactionChanges {
    /// Transaction number (xid) at the server.
    pub(crate) xid: String,
    pub(crate) changes: Vec<Change>,
    pub(crate) tokens: Vec<Token>,
    /// Statements of its client, where statements are captured.
    pub(crate) statements_run: Option<StatementList>,
    pub(crate) bytes: usize,
}

/// The statements of a transaction, in their order.
#[derive(Debug, Default)]
pub(crate) struct StatementList {
    /// Number under which its snapshot was reported; none for a transaction that could not write.
    pub(crate) running: Option<u64>,
    pub(crate) operations: Vec<Operation>,
    pub(crate) context: Arc<SessionContext>,
}

/// Next item for the follower.
#[derive(Debug)]
pub(crate) enum Next {
    /// The transaction of this stamp; empty if it was rolled back after all.
    Written(u64, TransactionChanges),
    /// Report of a running transaction: its first operation is sent next, it has a snapshot, or it ended without a commit.
    RunningReport(Reply),
    /// Nothing more comes, for this reason.
    Over(String),
}

#[derive(Debug, Default)]
struct CaptureState {
    /// The last stamp that was taken.
    last: u64,
    /// Stamps taken and not ready to be handed on, each with its changes once they are known.
    open: BTreeMap<u64, Option<TransactionChanges>>,
    ready: VecDeque<Next>,
    running: u64,
    bytes: usize,
    over: Option<String>,
    uncovered: BTreeSet<(String, String)>,
}

impl CaptureState {
    fn report(&mut self, told: Reply) {
        if self.over.is_none() {
            self.bytes += REPORT_BYTES;
            self.ready.push_back(Next::RunningReport(told));
        }
    }
}

/// A capture that runs, or ran.
#[derive(Debug, Default)]
pub(crate) struct Capture {
    live: AtomicBool,
    statements: bool,
    state: Mutex<CaptureState>,
    /// Bytes of changes of transactions that are not committed yet.
    uncommitted: Arc<AtomicUsize>,
    memory: Memory,
    changed: Notify,
}

/// Memory for messages that are held whole, shared by all captured sessions.
#[derive(Debug, Clone, Default)]
pub(crate) struct Memory {
    pub(crate) held: Arc<AtomicUsize>,
    pub(crate) max_bytes: usize,
}

/// Share of a common amount of memory; given back when dropped.
#[derive(Debug, Default)]
pub(crate) struct MemoryShare {
    bytes: usize,
    of: Option<Arc<AtomicUsize>>,
}

impl MemoryShare {
    /// Sets the share to `bytes`; an error if all shares together are too large.
    pub(crate) fn set(&mut self, capture: &Capture, bytes: usize) -> Result<(), String> {
        let of = self.of.get_or_insert_with(|| Arc::clone(&capture.uncommitted));
        let before = std::mem::replace(&mut self.bytes, bytes);
        let all = match bytes.checked_sub(before) {
            Some(more) => of.fetch_add(more, Ordering::Relaxed) + more,
            None => of.fetch_sub(before - bytes, Ordering::Relaxed) - (before - bytes),
        };
        if all <= WAITING_BYTES_MAX {
            return Ok(());
        }
        Err(format!("uncommitted changes exceed {} MiB", WAITING_BYTES_MAX >> 20))
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        if let Some(of) = &self.of {
            of.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

impl Capture {
    /// Captures rows, and with `statements` the statements too.
    pub(crate) fn new(statements: bool, memory: Memory) -> Capture {
        Capture { live: AtomicBool::new(true), statements, memory, ..Capture::default() }
    }

    /// Reserves room for a message; `None` if all messages together would take too much.
    pub(crate) fn reserve(&self, bytes: usize) -> Option<MemoryShare> {
        let all = self.memory.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let held = MemoryShare { bytes, of: Some(Arc::clone(&self.memory.held)) };
        (all <= self.memory.max_bytes).then_some(held)
    }

    /// Returns true if statements are captured.
    pub(crate) fn of_statements(&self) -> bool {
        self.statements
    }

    /// Records that a transaction is about to send its first operation.
    pub(crate) fn begins(self: &Arc<Self>) -> Running {
        let id = {
            let mut state = lock(&self.state);
            state.running += 1;
            let id = state.running;
            state.report(Reply::Begins { running: id });
            id
        };
        self.changed.notify_one();
        Running { capture: self.clone(), id, over: false }
    }

    fn report(&self, told: Reply) {
        lock(&self.state).report(told);
        self.changed.notify_one();
    }

    /// Returns true until the capture ends.
    pub(crate) fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
    }

    /// Ends the capture: something cannot be captured, or no follower wants it any more. The first reason is reported.
    pub(crate) fn break_off(&self, why: String) {
        let mut state = lock(&self.state);
        if state.over.is_none() {
            tracing::info!(why, "capture ends");
            state.over = Some(why);
            state.open.clear();
            state.ready.clear();
            self.live.store(false, Ordering::Release);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Records tables of which not all writes can be captured, and the reasons; such a write breaks the capture off.
    pub(crate) fn note_uncovered(&self, tables: impl IntoIterator<Item = (String, String)>) {
        lock(&self.state).uncovered.extend(tables);
    }

    pub(crate) fn uncovered(&self) -> Vec<(String, String)> {
        lock(&self.state).uncovered.iter().cloned().collect()
    }

    /// Reason why the capture is over.
    pub(crate) fn end_reason(&self) -> Option<String> {
        lock(&self.state).over.clone()
    }

    /// The last stamp that was taken.
    pub(crate) fn last(&self) -> u64 {
        lock(&self.state).last
    }

    /// Takes the next stamp. The caller must send COMMIT next, and all replies before it must have arrived.
    pub(crate) fn stamp(self: &Arc<Self>) -> PendingCommit {
        let mut state = lock(&self.state);
        state.last += 1;
        let stamp = state.last;
        state.open.insert(stamp, None);
        PendingCommit { capture: self.clone(), stamp, resolved: false }
    }

    /// Next item in the order of stamps. Only one caller at a time.
    pub(crate) async fn next(&self) -> Next {
        loop {
            let changed = self.changed.notified();
            {
                let mut state = lock(&self.state);
                if let Some(why) = &state.over {
                    return Next::Over(why.clone());
                }
                if let Some(next) = state.ready.pop_front() {
                    state.bytes -= match &next {
                        Next::Written(_, written) => written.bytes,
                        _ => REPORT_BYTES,
                    };
                    return next;
                }
            }
            changed.await;
        }
    }
}

/// The stamp of a COMMIT that is under way. If it is dropped before the reply is known, it breaks the capture off.
#[derive(Debug)]
pub(crate) struct PendingCommit {
    capture: Arc<Capture>,
    stamp: u64,
    resolved: bool,
}

impl PendingCommit {
    /// Records the reply: the changes, or nothing if the transaction was rolled back.
    pub(crate) fn resolve(mut self, written: TransactionChanges) {
        self.resolved = true;
        let mut state = lock(&self.capture.state);
        if state.over.is_some() {
            return;
        }
        state.bytes += written.bytes;
        state.open.insert(self.stamp, Some(written));
        while let Some(first) = state.open.first_entry()
            && first.get().is_some()
        {
            let (stamp, written) = first.remove_entry();
            state.ready.push_back(Next::Written(stamp, written.unwrap_or_default()));
        }
        let too_much = state.bytes > WAITING_BYTES_MAX;
        drop(state);
        self.capture.changed.notify_one();
        if too_much {
            self.capture.break_off(format!("the follower's backlog exceeds {} MiB", WAITING_BYTES_MAX >> 20));
        }
    }
}

/// A transaction whose begin was reported. If it is dropped without a commit, its end is reported.
#[derive(Debug)]
pub(crate) struct Running {
    capture: Arc<Capture>,
    id: u64,
    over: bool,
}

impl Running {
    /// Reports its snapshot.
    pub(crate) fn report_snapshot(&self, snapshot: String) {
        self.capture.report(Reply::Began { running: self.id, snapshot });
    }

    /// Ends it with a commit: the next report of it is its changes.
    pub(crate) fn committed(mut self) -> u64 {
        self.over = true;
        self.id
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.over {
            self.capture.report(Reply::Ended { running: self.id });
        }
    }
}

impl Drop for PendingCommit {
    fn drop(&mut self) {
        if !self.resolved {
            self.capture.break_off("a COMMIT was sent, and no reply arrived".into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(statements: bool) -> Capture {
        Capture::new(statements, Memory { held: Arc::default(), max_bytes: 100 })
    }

    #[test]
    fn messages_share_a_limit() {
        let capture = new(false);
        let one = capture.reserve(60).unwrap();
        assert!(capture.reserve(41).is_none());
        let other = capture.reserve(40).unwrap();
        drop(one);
        assert!(capture.reserve(60).is_some());
        drop(other);
        assert_eq!(capture.memory.held.load(Ordering::Relaxed), 0);
    }

    fn written(xid: &str) -> TransactionChanges {
        TransactionChanges { xid: xid.into(), ..TransactionChanges::default() }
    }

    #[test]
    fn open_transactions_share_a_limit() {
        let capture = new(false);
        let (mut one, mut other) = (MemoryShare::default(), MemoryShare::default());
        one.set(&capture, WAITING_BYTES_MAX - 10).unwrap();
        other.set(&capture, 10).unwrap();
        assert!(other.set(&capture, 11).unwrap_err().contains("256 MiB"));
        one.set(&capture, 5).unwrap();
        other.set(&capture, 100).unwrap();
        drop(one);
        assert_eq!(capture.uncommitted.load(Ordering::Relaxed), 100);
        drop(other);
        assert_eq!(capture.uncommitted.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn transactions_come_in_the_order_of_their_stamps() {
        let capture = Arc::new(new(false));
        let (first, second, third) = (capture.stamp(), capture.stamp(), capture.stamp());
        second.resolve(written("b"));
        third.resolve(TransactionChanges::default());
        first.resolve(written("a"));
        for (stamp, xid) in [(1, "a"), (2, "b"), (3, "")] {
            let Next::Written(at, written) = capture.next().await else { panic!("over") };
            assert_eq!((at, written.xid.as_str()), (stamp, xid));
        }
        assert_eq!(capture.last(), 3);
    }

    #[tokio::test]
    async fn what_transactions_do_comes_in_one_order_with_what_was_committed() {
        let capture = Arc::new(new(true));
        let (one, other) = (capture.begins(), capture.begins());
        one.report_snapshot("3:3:".into());
        let stamp = capture.stamp();
        let late = capture.begins();
        let statements_run = StatementList {
            running: Some(one.committed()),
            operations: vec![Operation { writes: true, text: "w".into() }],
            ..StatementList::default()
        };
        stamp.resolve(TransactionChanges { statements_run: Some(statements_run), ..TransactionChanges::default() });
        drop(other);
        late.committed();
        let began = |running, text: &str| Reply::Began { running, snapshot: text.into() };
        let mut seen = Vec::new();
        for _ in 0..6 {
            seen.push(match capture.next().await {
                Next::RunningReport(told) => told,
                Next::Written(1, written) => began(written.statements_run.unwrap().running.unwrap(), "committed"),
                other => panic!("{other:?}"),
            });
        }
        let wanted = [
            Reply::Begins { running: 1 },
            Reply::Begins { running: 2 },
            began(1, "3:3:"),
            Reply::Begins { running: 3 },
            began(1, "committed"),
            Reply::Ended { running: 2 },
        ];
        assert_eq!(seen, wanted);
    }

    #[tokio::test]
    async fn a_commit_in_doubt_ends_it_and_the_first_reason_is_told() {
        let capture = Arc::new(new(false));
        drop(capture.stamp());
        capture.break_off("later".into());
        assert!(!capture.is_live());
        let Next::Over(why) = capture.next().await else { panic!("not over") };
        assert!(why.contains("COMMIT"), "{why}");
    }

    #[tokio::test]
    async fn a_follower_too_far_behind_ends_it() {
        let capture = Arc::new(new(false));
        let stamp = capture.stamp();
        stamp.resolve(TransactionChanges { bytes: WAITING_BYTES_MAX + 1, ..TransactionChanges::default() });
        assert!(!capture.is_live());
    }
}
