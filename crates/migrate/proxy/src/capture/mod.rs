//! Row images of one tenant's committed transactions, in the order of their stamps.
//!
//! ```text
//! session: COMMIT is to be sent ──stamp──▶ open ──its reply──▶ resolved ──all lower ones resolved──▶ follower
//!                                           │ the reply never came
//!                                           └───────────────────────▶ broken off: the follower is told why
//! ```
//!
//! Whoever writes what is not captured breaks the capture off, never the client: see [`Capture::break_off`].
//!
//! Where statements are asked for too, the follower is told of each transaction before its first operation is sent
//! ([`Told::Begins`]) and when its snapshot is known, in one order with what was committed: of what comes after that it
//! is not said whether the snapshot saw it, of what came before it did.

pub(crate) mod facts;

use crate::entry::lock;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use stillpoint_migrate_capture::{Action, Table};
use stillpoint_migrate_replay::Token;
use tokio::sync::Notify;

/// What may wait for a slow follower.
const WAITING_BYTES_MAX: usize = 256 << 20;

/// What one thing told of a running transaction counts among these.
const TOLD_BYTES: usize = 64;

/// One written row.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) table: Arc<Table>,
    /// Positions of the columns that the values are of.
    pub(crate) columns: Arc<Vec<usize>>,
    pub(crate) action: Action,
    pub(crate) values: Vec<Option<String>>,
}

/// What a transaction has written.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// Its number at the server.
    pub(crate) xid: String,
    pub(crate) changes: Vec<Change>,
    pub(crate) tokens: Vec<Token>,
    /// What its client sent, where statements are captured.
    pub(crate) spoken: Option<Spoken>,
    pub(crate) bytes: usize,
}

/// The statements of a transaction, in their order.
#[derive(Debug, Default)]
pub(crate) struct Spoken {
    /// Under which its snapshot was told; none for what could not write.
    pub(crate) running: Option<u64>,
    /// Texts, and whether they write.
    pub(crate) operations: Vec<(bool, String)>,
    pub(crate) meant: Arc<Meant>,
}

/// On what it depends what the texts of a session mean and may do.
#[derive(Debug, Default)]
pub(crate) struct Meant {
    /// What to SELECT so that another session has the same settings.
    pub(crate) settings: String,
    /// The role that it has.
    pub(crate) role: String,
}

/// What is told of a transaction that runs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// Its first operation is sent next.
    Begins(u64),
    /// Its snapshot, as the server writes it.
    Began(u64, String),
    /// It is over without having been committed.
    Ended(u64),
}

/// What comes next.
#[derive(Debug)]
pub(crate) enum Next {
    /// The transaction of this stamp; empty when it was rolled back after all.
    Written(u64, Written),
    /// What transactions do that run.
    Told(Told),
    /// Nothing more comes, for this reason.
    Over(String),
}

#[derive(Debug, Default)]
struct State {
    /// The last stamp that was taken.
    last: u64,
    /// Stamps taken and not ready to be handed on; with what was written once that is known.
    open: BTreeMap<u64, Option<Written>>,
    ready: VecDeque<Next>,
    running: u64,
    bytes: usize,
    over: Option<String>,
    uncovered: BTreeSet<(String, String)>,
}

impl State {
    fn tell(&mut self, told: Told) {
        if self.over.is_none() {
            self.bytes += TOLD_BYTES;
            self.ready.push_back(Next::Told(told));
        }
    }
}

/// A capture that runs, or ran.
#[derive(Debug)]
pub(crate) struct Capture {
    live: AtomicBool,
    statements: bool,
    state: Mutex<State>,
    /// Bytes of changes of transactions that are not committed yet.
    uncommitted: Arc<AtomicUsize>,
    memory: Memory,
    changed: Notify,
}

/// Memory for messages that are looked at whole, of all captured sessions together.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    pub(crate) held: Arc<AtomicUsize>,
    pub(crate) most: usize,
}

/// What something takes of the memory for all of its kind; given back when dropped.
#[derive(Debug, Default)]
pub(crate) struct Held {
    bytes: usize,
    of: Option<Arc<AtomicUsize>>,
}

impl Held {
    /// It holds so much now; an error when all together hold too much.
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
        Err(format!("changes that are not committed yet come to more than {} MiB", WAITING_BYTES_MAX >> 20))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(of) = &self.of {
            of.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

impl Capture {
    /// Of rows, and of `statements` too.
    pub(crate) fn new(statements: bool, memory: Memory) -> Capture {
        Capture {
            live: AtomicBool::new(true),
            statements,
            state: Mutex::default(),
            uncommitted: Arc::default(),
            memory,
            changed: Notify::new(),
        }
    }

    /// Room for a message; none when all together would take more than there is.
    pub(crate) fn room_for(&self, bytes: usize) -> Option<Held> {
        let all = self.memory.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let held = Held { bytes, of: Some(Arc::clone(&self.memory.held)) };
        (all <= self.memory.most).then_some(held)
    }

    /// Whether statements are captured.
    pub(crate) fn of_statements(&self) -> bool {
        self.statements
    }

    /// A transaction is about to send its first operation.
    pub(crate) fn begins(self: &Arc<Self>) -> Running {
        let id = {
            let mut state = lock(&self.state);
            state.running += 1;
            let id = state.running;
            state.tell(Told::Begins(id));
            id
        };
        self.changed.notify_one();
        Running { capture: self.clone(), id, over: false }
    }

    fn tell(&self, told: Told) {
        lock(&self.state).tell(told);
        self.changed.notify_one();
    }

    /// Whether statements are still to be captured.
    pub(crate) fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
    }

    /// Ends it: something is not captured, or nobody wants it any more. The first reason is the one that is told.
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

    /// Tables whose rows cannot be captured whatever the statement; a write to them breaks the capture off.
    pub(crate) fn note_uncovered(&self, tables: impl IntoIterator<Item = (String, String)>) {
        lock(&self.state).uncovered.extend(tables);
    }

    pub(crate) fn uncovered(&self) -> Vec<(String, String)> {
        lock(&self.state).uncovered.iter().cloned().collect()
    }

    /// Why it is over.
    pub(crate) fn over(&self) -> Option<String> {
        lock(&self.state).over.clone()
    }

    /// The last stamp that was taken.
    pub(crate) fn last(&self) -> u64 {
        lock(&self.state).last
    }

    /// Takes the next stamp: COMMIT is sent next, and all replies before it have arrived.
    pub(crate) fn stamp(self: &Arc<Self>) -> Stamped {
        let mut state = lock(&self.state);
        state.last += 1;
        let stamp = state.last;
        state.open.insert(stamp, None);
        Stamped { capture: self.clone(), stamp, resolved: false }
    }

    /// What comes next in the order of stamps. One caller at a time.
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
                        _ => TOLD_BYTES,
                    };
                    return next;
                }
            }
            changed.await;
        }
    }
}

/// The stamp of a COMMIT that is under way. Dropped before its reply is known it breaks the capture off.
#[derive(Debug)]
pub(crate) struct Stamped {
    capture: Arc<Capture>,
    stamp: u64,
    resolved: bool,
}

impl Stamped {
    /// The reply has come: what was written, or nothing when it was rolled back.
    pub(crate) fn resolve(mut self, written: Written) {
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
            self.capture.break_off(format!("the follower is {} MiB behind", WAITING_BYTES_MAX >> 20));
        }
    }
}

/// A transaction of which was told that it begins. Dropped without having been committed it is told to have ended.
#[derive(Debug)]
pub(crate) struct Running {
    capture: Arc<Capture>,
    id: u64,
    over: bool,
}

impl Running {
    /// Its snapshot is known.
    pub(crate) fn began(&self, snapshot: String) {
        self.capture.tell(Told::Began(self.id, snapshot));
    }

    /// It was committed: what is told of it next is what it wrote.
    pub(crate) fn committed(mut self) -> u64 {
        self.over = true;
        self.id
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.over {
            self.capture.tell(Told::Ended(self.id));
        }
    }
}

impl Drop for Stamped {
    fn drop(&mut self) {
        if !self.resolved {
            self.capture.break_off("a COMMIT was sent and its reply never came".into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(statements: bool) -> Capture {
        Capture::new(statements, Memory { held: Arc::default(), most: 100 })
    }

    #[test]
    fn messages_share_a_limit() {
        let capture = new(false);
        let one = capture.room_for(60).unwrap();
        assert!(capture.room_for(41).is_none());
        let other = capture.room_for(40).unwrap();
        drop(one);
        assert!(capture.room_for(60).is_some());
        drop(other);
        assert_eq!(capture.memory.held.load(Ordering::Relaxed), 0);
    }

    fn written(xid: &str) -> Written {
        Written { xid: xid.into(), ..Written::default() }
    }

    #[test]
    fn open_transactions_share_a_limit() {
        let capture = new(false);
        let (mut one, mut other) = (Held::default(), Held::default());
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
        third.resolve(Written::default());
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
        one.began("3:3:".into());
        let stamp = capture.stamp();
        let late = capture.begins();
        let spoken =
            Spoken { running: Some(one.committed()), operations: vec![(true, "w".into())], ..Spoken::default() };
        stamp.resolve(Written { spoken: Some(spoken), ..Written::default() });
        drop(other);
        late.committed();
        let mut seen = Vec::new();
        for _ in 0..6 {
            seen.push(match capture.next().await {
                Next::Told(told) => told,
                Next::Written(1, written) => Told::Began(written.spoken.unwrap().running.unwrap(), "committed".into()),
                other => panic!("{other:?}"),
            });
        }
        let began = |id, text: &str| Told::Began(id, text.into());
        let wanted = [
            Told::Begins(1),
            Told::Begins(2),
            began(1, "3:3:"),
            Told::Begins(3),
            began(1, "committed"),
            Told::Ended(2),
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
        stamp.resolve(Written { bytes: WAITING_BYTES_MAX + 1, ..Written::default() });
        assert!(!capture.is_live());
    }
}
