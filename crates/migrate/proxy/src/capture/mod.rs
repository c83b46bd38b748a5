//! Row images of one tenant's committed transactions, in the order of their stamps.
//!
//! ```text
//! session: COMMIT is to be sent ──stamp──▶ open ──its reply──▶ resolved ──all lower ones resolved──▶ follower
//!                                           │ the reply never came
//!                                           └───────────────────────▶ broken off: the follower is told why
//! ```
//!
//! Whoever writes what is not captured breaks the capture off, never the client: see [`Capture::break_off`].

pub(crate) mod facts;

use crate::entry::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use stillpoint_migrate_capture::{Action, Table};
use stillpoint_migrate_replay::Token;
use tokio::sync::Notify;

/// What may wait for a slow follower.
const WAITING_BYTES_MAX: usize = 256 << 20;

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
    pub(crate) bytes: usize,
}

/// What comes next.
#[derive(Debug)]
pub(crate) enum Next {
    /// The transaction of this stamp; empty when it was rolled back after all.
    Written(u64, Written),
    /// Nothing more comes, for this reason.
    Over(String),
}

#[derive(Debug, Default)]
struct State {
    /// The last stamp that was taken.
    last: u64,
    /// Stamps taken and not handed on; with what was written once that is known.
    open: BTreeMap<u64, Option<Written>>,
    bytes: usize,
    over: Option<String>,
    uncovered: BTreeSet<(String, String)>,
}

/// A capture that runs, or ran.
#[derive(Debug)]
pub(crate) struct Capture {
    live: AtomicBool,
    state: Mutex<State>,
    changed: Notify,
}

impl Capture {
    pub(crate) fn new() -> Capture {
        Capture { live: AtomicBool::new(true), state: Mutex::default(), changed: Notify::new() }
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
                if let Some(first) = state.open.first_entry()
                    && first.get().is_some()
                {
                    let (stamp, written) = first.remove_entry();
                    let written = written.unwrap_or_default();
                    state.bytes -= written.bytes;
                    return Next::Written(stamp, written);
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
        let too_much = state.bytes > WAITING_BYTES_MAX;
        drop(state);
        self.capture.changed.notify_one();
        if too_much {
            self.capture.break_off(format!("the follower is {} MiB behind", WAITING_BYTES_MAX >> 20));
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

    fn written(xid: &str) -> Written {
        Written { xid: xid.into(), ..Written::default() }
    }

    #[tokio::test]
    async fn transactions_come_in_the_order_of_their_stamps() {
        let capture = Arc::new(Capture::new());
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
    async fn a_commit_in_doubt_ends_it_and_the_first_reason_is_told() {
        let capture = Arc::new(Capture::new());
        drop(capture.stamp());
        capture.break_off("later".into());
        assert!(!capture.is_live());
        let Next::Over(why) = capture.next().await else { panic!("not over") };
        assert!(why.contains("COMMIT"), "{why}");
    }

    #[tokio::test]
    async fn a_follower_too_far_behind_ends_it() {
        let capture = Arc::new(Capture::new());
        let stamp = capture.stamp();
        stamp.resolve(Written { bytes: WAITING_BYTES_MAX + 1, ..Written::default() });
        assert!(!capture.is_live());
    }
}
