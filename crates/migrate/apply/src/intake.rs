//! Intake of a conductor: what has arrived and is not handed in to the scheduler, and the requests of the manager that wait for it.

use crate::Error;
use crate::pgoutput::Lsn;
use std::collections::VecDeque;
use stillpoint_migrate_replay::{Progress, Snapshot, Xid};
use tokio::sync::{oneshot, watch};

/// Limits of the intake, in entries and in bytes of the stream; one transaction may be larger than the limit in bytes.
const LENGTH_MAX: usize = 4096;
const BYTES_MAX: u64 = 64 << 20;
/// Number of recent transactions that are remembered after they were handed in, to check if a snapshot of the source sees them.
const RECENT_MAX: usize = 4096;

/// Progress of the replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplayStatus {
    /// Transactions applied since the start.
    pub applied: u64,
    /// Transactions received and not applied.
    pub pending: u64,
    /// Position up to which everything is applied.
    pub position: Lsn,
    /// Bytes of the stream that were taken in and may not be applied yet.
    pub waiting_bytes: u64,
    /// Number of tries that had to be repeated.
    pub retries: u64,
}

/// Transactions that a snapshot of the source sees: all before its end, except those in progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceSnapshot {
    /// Number from which on it sees no transaction.
    pub end: u64,
    /// Numbers below `end` that it does not see.
    pub in_progress: Vec<u64>,
}

impl std::fmt::Display for SourceSnapshot {
    /// The text that [`SourceSnapshot::parse`] reads.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let running: Vec<String> = self.in_progress.iter().map(u64::to_string).collect();
        write!(f, "{0}:{0}:{1}", self.end, running.join(","))
    }
}

/// Commands of the manager to the conductor.
pub(crate) enum Command {
    /// Answers when everything before the marker is applied.
    AwaitMarker(String, oneshot::Sender<Lsn>),
    /// Hands nothing more to apply workers, and answers immediately.
    Hold(oneshot::Sender<()>),
    /// Applies what the snapshot sees, up to the first transaction that it does not see. The marker was written after the
    /// snapshot; the answer comes when the marker has arrived and all that is applied. The answer is `false` if the snapshot is
    /// not a prefix of the order of commits, or if more arrives before the marker than may wait in memory: a later snapshot may
    /// succeed.
    ApplySeen { marker: String, snapshot: SourceSnapshot, done: oneshot::Sender<bool> },
    /// Ends [`Command::Hold`].
    Release,
}

impl SourceSnapshot {
    /// Parses the text of `pg_current_snapshot()`: `xmin:xmax:in,progress`.
    ///
    /// A snapshot sees everything below its `xmin`, and in a snapshot that a slot exports, `xmin` may be larger than `xmax`.
    /// `xmin` is the oldest transaction that still ran when the slot was ready. `xmax` does not count commits in the first of
    /// the slot's two waits (`SnapBuildFindSnapshot` in snapbuild.c, `xact_decode` in decode.c).
    ///
    /// # Errors
    ///
    /// [`Error::Pgoutput`] if the text is not a snapshot.
    pub fn parse(text: &str) -> Result<SourceSnapshot, Error> {
        let parts = || {
            let mut parts = text.split(':');
            let xmin: u64 = parts.next()?.parse().ok()?;
            let end = xmin.max(parts.next()?.parse().ok()?);
            let in_progress = parts.next()?.split(',').filter(|xid| !xid.is_empty()).map(str::parse);
            Some(SourceSnapshot { end, in_progress: in_progress.collect::<Result<_, _>>().ok()? })
        };
        parts().ok_or_else(|| Error::Pgoutput(format!("`{text}` is not a snapshot")))
    }

    /// Returns true if it sees everything that an earlier one saw.
    pub fn contains(&self, earlier: &SourceSnapshot) -> bool {
        let hidden = |xid: &u64| *xid < earlier.end && !earlier.in_progress.contains(xid);
        self.end >= earlier.end && !self.in_progress.iter().any(hidden)
    }

    /// The same snapshot as a type of the scheduler.
    pub(super) fn whole(&self) -> Snapshot {
        Snapshot::new(Xid(self.end), self.in_progress.iter().copied().map(Xid))
    }

    /// Returns true if it sees a committed transaction. Numbers in the stream have no epoch, so they are compared as the server
    /// does, modulo 2^32.
    pub(super) fn sees(&self, xid: u32) -> bool {
        let before_end = (xid.wrapping_sub(self.end as u32) as i32) < 0;
        before_end && !self.in_progress.iter().any(|running| *running as u32 == xid)
    }
}

/// Entry of an intake.
pub(super) trait Arrival {
    /// Length in bytes; 0 for what is no transaction.
    fn bytes(&self) -> u64;

    /// Number of the transaction at the source; `None` for an entry that is never held.
    fn xid(&self) -> Option<u32>;
}

/// The intake; see the module.
pub(super) struct Intake<T> {
    queue: VecDeque<T>,
    bytes: u64,
    /// Markers received and not answered yet, with their positions.
    markers: VecDeque<(String, Lsn)>,
    waiting: Option<(String, oneshot::Sender<Lsn>)>,
    snapshot_request: Option<(String, SourceSnapshot, oneshot::Sender<bool>)>,
    on_hold: bool,
    recent: VecDeque<u32>,
    position: Lsn,
    status: watch::Sender<ReplayStatus>,
}

impl<T: Arrival> Intake<T> {
    pub(super) fn new(status: watch::Sender<ReplayStatus>) -> Intake<T> {
        Intake {
            queue: VecDeque::new(),
            bytes: 0,
            markers: VecDeque::new(),
            waiting: None,
            snapshot_request: None,
            on_hold: false,
            recent: VecDeque::new(),
            position: 0,
            status,
        }
    }

    /// Returns true if more may arrive: the limit makes the source wait instead of filling our memory. A held replay must still
    /// receive the marker that ends the hold; what a snapshot sees is not held.
    pub(super) fn has_room(&self) -> bool {
        self.bytes < BYTES_MAX && (self.queue.len() < LENGTH_MAX || self.on_hold)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn is_on_hold(&self) -> bool {
        self.on_hold
    }

    pub(super) fn push(&mut self, arrival: T) {
        self.bytes += arrival.bytes();
        self.queue.push_back(arrival);
    }

    /// Remembers a marker that is waited for by name.
    pub(super) fn push_marker(&mut self, text: String, end: Lsn) {
        // a mark of the slot is not waited for by name
        if text != "mark" {
            self.markers.push_back((text, end));
        }
    }

    /// Takes the next entry that may be handed in.
    pub(super) fn pop(&mut self) -> Option<T> {
        if !self.may_pop() {
            return None;
        }
        let next = self.queue.pop_front()?;
        self.bytes -= next.bytes();
        Some(next)
    }

    /// Puts back an entry for which the scheduler has no room.
    pub(super) fn put_back(&mut self, refused: T) {
        self.bytes += refused.bytes();
        self.queue.push_front(refused);
    }

    /// Remembers a transaction that was handed in.
    pub(super) fn remember(&mut self, xid: Option<u32>) {
        self.recent.extend(xid);
        if self.recent.len() > RECENT_MAX {
            self.recent.pop_front();
        }
    }

    /// Moves the position up to which everything is applied.
    pub(super) fn advance(&mut self, position: Lsn) {
        self.position = self.position.max(position);
    }

    pub(super) fn handle_command(&mut self, command: Command) {
        match command {
            Command::AwaitMarker(text, answer) => self.waiting = Some((text, answer)),
            Command::Hold(answer) => {
                self.on_hold = true;
                let _ = answer.send(());
            }
            Command::ApplySeen { marker, snapshot, done } => self.snapshot_request = Some((marker, snapshot, done)),
            Command::Release => (self.on_hold, self.snapshot_request) = (false, None),
        }
    }

    fn may_pop(&self) -> bool {
        let is_seen = |xid| self.snapshot_request.as_ref().is_some_and(|(_, snapshot, _)| snapshot.sees(xid));
        self.queue.front().is_some_and(|next| !self.on_hold || next.xid().is_none_or(is_seen))
    }

    /// Answers requests whose condition holds now; `is_drained` is true if everything that was handed in is done.
    pub(super) fn answer(&mut self, is_drained: bool) {
        self.apply_seen(is_drained);
        if !is_drained || !self.queue.is_empty() {
            return;
        }
        let Some((wanted, _)) = &self.waiting else { return };
        let Some(&(_, end)) = self.markers.iter().find(|(text, _)| text == wanted) else { return };
        self.advance(end);
        self.markers.clear();
        if let Some((_, answer)) = self.waiting.take() {
            let _ = answer.send(end);
        }
    }

    fn apply_seen(&mut self, is_drained: bool) {
        let Some((marker, snapshot, _)) = &self.snapshot_request else { return };
        let all_is_here = self.markers.iter().any(|(text, _)| text == marker);
        let too_much = self.bytes >= BYTES_MAX;
        // If the snapshot sees the front, it is handed in as soon as the scheduler has room.
        if self.may_pop() || !(all_is_here || too_much) {
            return;
        }
        let prefix = all_is_here
            && !self.queue.iter().filter_map(T::xid).any(|xid| snapshot.sees(xid))
            && self.recent.iter().all(|xid| snapshot.sees(*xid));
        if prefix && !is_drained {
            return;
        }
        self.markers.clear();
        if let Some((_, _, done)) = self.snapshot_request.take() {
            let _ = done.send(prefix);
        }
    }

    pub(super) fn publish(&mut self, progress: &Progress) {
        self.advance(progress.applied.0);
        let status = ReplayStatus {
            applied: progress.done,
            pending: (progress.pending + self.queue.len()) as u64,
            position: self.position,
            waiting_bytes: self.bytes,
            retries: progress.retries,
        };
        self.status.send_if_modified(|current| {
            let changed = *current != status;
            *current = status;
            changed
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_sees_what_ended_before_it() {
        let snapshot = SourceSnapshot::parse("10:20:12,15").unwrap();
        for (xid, snapshot_request) in
            [(9, true), (12, false), (13, true), (15, false), (19, true), (20, false), (21, false)]
        {
            assert_eq!(snapshot.sees(xid), snapshot_request, "{xid}");
        }
        assert!(SourceSnapshot::parse("10:20:").unwrap().sees(12));
        let exported = SourceSnapshot::parse("20:19:").unwrap();
        assert!(exported.sees(19) && !exported.sees(20), "all below its `xmin`");
        for wrong in ["", "1:2", "a:b:c"] {
            assert!(SourceSnapshot::parse(wrong).is_err(), "{wrong}");
        }
    }

    /// A commit that waits for a standby is in the log, and no snapshot sees it.
    #[test]
    fn a_later_snapshot_may_not_see_yet_what_the_log_tells() {
        let snapshot = |text| SourceSnapshot::parse(text).unwrap();
        let earlier = snapshot("10:20:12,15");
        for (later, contains) in [
            ("12:20:12,15", true),
            ("15:30:15,25", true),
            ("30:30:", true),
            ("12:20:12,13", false),
            ("9:30:9", false),
            ("19:19:", false),
        ] {
            assert_eq!(snapshot(later).contains(&earlier), contains, "{later}");
        }
    }

    #[test]
    fn numbers_are_compared_over_the_wrap_around() {
        let snapshot = SourceSnapshot::parse("4294967290:4294967306:").unwrap();
        assert!(snapshot.sees(u32::MAX) && snapshot.sees(5) && !snapshot.sees(10));
    }
}
