//! The conductor: hands the changes of the stream to apply workers, in the order that the scheduler allows.

use super::apply_worker::{Batch, Outcome, PIPELINE_MIN};
use super::transaction::{Item, Transaction};
use crate::Error;
use crate::pgoutput::Lsn;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use stillpoint_migrate_replay::{Limits, Mode, Player as PlayerId, Scheduler, Snapshot, Stamp, Syncset, Xid};
use tokio::sync::{mpsc, oneshot, watch};

/// Maximum transactions in a batch: enough that one statement writes many rows and a hot row is written once, and few enough
/// that a repetition after a failure is short.
const BATCH_MAX: usize = 1024;
const BATCH_BYTES_MAX: u64 = 1 << 20;
/// Maximum batches of an apply worker that are under way: one that the target executes, and one behind it.
pub(crate) const BATCHES_IN_FLIGHT_MAX: usize = 2;
/// Capacity of a worker's channel: batches behind a failed one may still be in it for the worker to discard, and new ones are
/// sent before that.
pub(crate) const CHANNEL_CAPACITY: usize = 2 * BATCHES_IN_FLIGHT_MAX - 1;
/// Limits of the intake ahead of the apply workers, in transactions and in bytes of the stream; one transaction may be larger
/// than the limit in bytes.
const INTAKE_MAX: usize = 4096;
const INTAKE_BYTES_MAX: u64 = 64 << 20;
/// Number of recent transactions that are remembered after they were handed in, to check if a snapshot of the source sees them.
const RECENT_MAX: usize = 4096;

/// Progress of the replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ReplayStatus {
    /// Transactions applied since the start.
    pub(crate) applied: u64,
    /// Transactions received and not applied.
    pub(crate) pending: u64,
    /// Position up to which everything is applied.
    pub(crate) position: Lsn,
    /// Bytes of the stream that were taken in and may not be applied yet.
    pub(crate) waiting_bytes: u64,
    /// Number of tries that had to be repeated.
    pub(crate) retries: u64,
}

/// Transactions that a snapshot of the source sees: all before its end, except those in progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceSnapshot {
    pub(crate) end: u64,
    pub(crate) in_progress: Vec<u64>,
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
    pub(crate) fn parse(text: &str) -> Result<SourceSnapshot, Error> {
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
    pub(crate) fn contains(&self, earlier: &SourceSnapshot) -> bool {
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

struct WorkerSlot {
    batches: mpsc::Sender<Batch>,
    /// Number of transactions in each batch that was sent and not reported.
    in_flight: VecDeque<usize>,
    /// Transactions given to it and not sent.
    gathered: Vec<Arc<Transaction>>,
    bytes: u64,
    retries: u64,
}

impl WorkerSlot {
    fn new(batches: mpsc::Sender<Batch>) -> WorkerSlot {
        WorkerSlot { batches, in_flight: VecDeque::new(), gathered: Vec::new(), bytes: 0, retries: 0 }
    }

    fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns true if another batch may be made to follow those that it works on.
    fn accepts_another(&self) -> bool {
        !self.is_idle()
            && self.in_flight.len() < BATCHES_IN_FLIGHT_MAX
            && self.in_flight.iter().all(|length| *length >= PIPELINE_MIN)
    }

    fn is_full(&self) -> bool {
        self.gathered.len() >= BATCH_MAX || self.bytes >= BATCH_BYTES_MAX
    }

    fn send(&mut self) {
        let transactions = std::mem::take(&mut self.gathered);
        self.bytes = 0;
        self.in_flight.push_back(transactions.len());
        let sent = self.batches.try_send(Batch { transactions, retries: self.retries });
        // A worker that is gone reports the reason; the channel of a running one has room for all batches that are under way.
        debug_assert!(!matches!(sent, Err(mpsc::error::TrySendError::Full(_))), "a batch found no room");
    }
}

/// The conductor's state; see the module.
pub(crate) struct Conductor {
    scheduler: Scheduler<Arc<Transaction>>,
    workers: Vec<WorkerSlot>,
    intake: VecDeque<Transaction>,
    /// Markers received and not answered yet, with their positions.
    markers: VecDeque<(String, Lsn)>,
    waiting: Option<(String, oneshot::Sender<Lsn>)>,
    intake_bytes: u64,
    snapshot_request: Option<(String, SourceSnapshot, oneshot::Sender<bool>)>,
    on_hold: bool,
    recent: VecDeque<u32>,
    applied: HashSet<Lsn>,
    position: Lsn,
    status: watch::Sender<ReplayStatus>,
}

impl Conductor {
    /// Makes a conductor; `applied` are stamps that were applied before the last end and may arrive again.
    pub(crate) fn new(
        workers: Vec<mpsc::Sender<Batch>>,
        status: watch::Sender<ReplayStatus>,
        applied: Vec<Lsn>,
    ) -> Conductor {
        Conductor {
            scheduler: Scheduler::new(Mode::Rows, workers.len() as u32, Limits::default()),
            workers: workers.into_iter().map(WorkerSlot::new).collect(),
            intake: VecDeque::new(),
            intake_bytes: 0,
            markers: VecDeque::new(),
            waiting: None,
            snapshot_request: None,
            on_hold: false,
            recent: VecDeque::new(),
            applied: applied.into_iter().collect(),
            position: 0,
            status,
        }
    }

    /// Runs until the stream ends with an error, an apply worker fails, or the sender of commands is gone.
    pub(crate) async fn run(
        mut self,
        mut items: mpsc::Receiver<Result<Vec<Item>, Error>>,
        mut reports: mpsc::Receiver<(u32, Outcome)>,
        mut commands: mpsc::Receiver<Command>,
    ) -> Result<(), Error> {
        loop {
            // A limit on the intake makes the source wait instead of filling our memory. A held replay must still receive the
            // marker that ends the hold; what a snapshot sees is not held.
            let room = self.intake_bytes < INTAKE_BYTES_MAX && (self.intake.len() < INTAKE_MAX || self.on_hold);
            tokio::select! {
                biased;
                report = reports.recv() => match report {
                    Some((worker, outcome)) => self.handle_report(worker, outcome)?,
                    None => return Err(Error::WrongPhase("all apply workers have ended".into())),
                },
                command = commands.recv() => match command {
                    Some(command) => self.handle_command(command),
                    None => return Ok(()),
                },
                item = items.recv(), if room => match item {
                    Some(items) => items?.into_iter().for_each(|item| self.receive(item)),
                    None => return Err(Error::WrongPhase("the stream of changes has ended".into())),
                },
            }
            self.hand_in()?;
            self.feed()?;
            self.answer();
            self.publish();
        }
    }

    fn receive(&mut self, item: Item) {
        match item {
            Item::Transaction(again) if self.applied.remove(&again.stamp) => self.advance_position(again.stamp),
            Item::Transaction(transaction) => {
                self.intake_bytes += transaction.bytes;
                self.intake.push_back(transaction);
            }
            // This marker is not waited for by name.
            Item::Marker { text, end } if text == "mark" => self.advance_position(end),
            Item::Marker { text, end } => {
                self.markers.push_back((text, end));
                self.advance_position(end);
            }
            Item::Position(end) => self.advance_position(end),
        }
    }

    /// Moves the position with the stream if nothing is pending.
    fn advance_position(&mut self, end: Lsn) {
        if self.intake.is_empty() && self.scheduler.is_drained() {
            self.position = self.position.max(end);
        }
    }

    fn handle_command(&mut self, command: Command) {
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

    /// Returns true if the next transaction may be handed in.
    fn may_hand_in(&self) -> bool {
        let snapshot_request =
            |snapshot: &SourceSnapshot| self.intake.front().is_some_and(|next| snapshot.sees(next.xid));
        !self.on_hold || self.snapshot_request.as_ref().is_some_and(|(_, snapshot, _)| snapshot_request(snapshot))
    }

    fn hand_in(&mut self) -> Result<(), Error> {
        while self.may_hand_in() {
            let Some(mut transaction) = self.intake.pop_front() else { return Ok(()) };
            self.intake_bytes -= transaction.bytes;
            let syncset = Syncset {
                stamp: Stamp(transaction.stamp),
                tokens: transaction.tokens(),
                statement: None,
                bytes: transaction.bytes,
                payload: Arc::new(transaction),
            };
            let xid = syncset.payload.xid;
            if let Err(refused) = self.scheduler.push_next(syncset) {
                let transaction = Arc::try_unwrap(refused.syncset.payload);
                let full = matches!(refused.error, stillpoint_migrate_replay::Error::Full { .. });
                let Ok(mut transaction) = transaction else { return Err(scheduler_error(refused.error)) };
                transaction.told = Some(refused.syncset.tokens);
                self.intake_bytes += transaction.bytes;
                self.intake.push_front(transaction);
                return if full { Ok(()) } else { Err(scheduler_error(refused.error)) };
            }
            self.recent.push_back(xid);
            if self.recent.len() > RECENT_MAX {
                self.recent.pop_front();
            }
        }
        Ok(())
    }

    /// Gives batches first to idle workers, then to busy ones whose batches may have others behind them.
    fn feed(&mut self) -> Result<(), Error> {
        for number in 0..self.workers.len() {
            if self.workers[number].is_idle() {
                self.gather_batch(number)?;
                if !self.workers[number].gathered.is_empty() {
                    self.workers[number].send();
                }
            }
        }
        for number in 0..self.workers.len() {
            if self.workers[number].accepts_another() {
                self.gather_batch(number)?;
                // A short batch does better to wait for changes that arrive while the target is busy.
                if self.workers[number].is_full() {
                    self.workers[number].send();
                }
            }
        }
        Ok(())
    }

    fn gather_batch(&mut self, number: usize) -> Result<(), Error> {
        let slot = &mut self.workers[number];
        while !slot.is_full() {
            let next = self.scheduler.next(PlayerId(number as u32)).map_err(scheduler_error)?;
            let Some(operation) = next else { break };
            let transaction = Arc::clone(self.scheduler.payload(operation.syncset));
            slot.bytes += transaction.bytes;
            slot.gathered.push(transaction);
        }
        Ok(())
    }

    fn handle_report(&mut self, worker: u32, outcome: Outcome) -> Result<(), Error> {
        let (committed, retry) = match outcome {
            Outcome::Done(committed) => (committed, false),
            Outcome::Retry(committed) => (committed, true),
            Outcome::Fatal(error) => return Err(error),
        };
        for _ in 0..committed {
            self.scheduler.done(PlayerId(worker)).map_err(scheduler_error)?;
        }
        let slot = &mut self.workers[worker as usize];
        slot.in_flight.pop_front();
        if retry {
            // The scheduler takes back what was behind, and the worker discards it.
            self.scheduler.failed(PlayerId(worker)).map_err(scheduler_error)?;
            slot.in_flight.clear();
            slot.gathered.clear();
            (slot.bytes, slot.retries) = (0, slot.retries + 1);
        }
        Ok(())
    }

    /// Answers requests whose condition holds now.
    fn answer(&mut self) {
        self.apply_seen();
        if !self.scheduler.is_drained() || !self.intake.is_empty() {
            return;
        }
        let Some((wanted, _)) = &self.waiting else { return };
        let Some(&(_, end)) = self.markers.iter().find(|(text, _)| text == wanted) else { return };
        self.position = self.position.max(end);
        self.markers.clear();
        if let Some((_, answer)) = self.waiting.take() {
            let _ = answer.send(end);
        }
    }

    fn apply_seen(&mut self) {
        let Some((marker, snapshot, _)) = &self.snapshot_request else { return };
        let all_is_here = self.markers.iter().any(|(text, _)| text == marker);
        let too_much = self.intake_bytes >= INTAKE_BYTES_MAX;
        // If the snapshot sees the front, it is handed in as soon as the scheduler has room.
        if self.may_hand_in() || !(all_is_here || too_much) {
            return;
        }
        let prefix = all_is_here
            && !self.intake.iter().any(|transaction| snapshot.sees(transaction.xid))
            && self.recent.iter().all(|xid| snapshot.sees(*xid));
        if prefix && !self.scheduler.is_drained() {
            return;
        }
        self.markers.clear();
        if let Some((_, _, done)) = self.snapshot_request.take() {
            let _ = done.send(prefix);
        }
    }

    fn publish(&mut self) {
        let progress = self.scheduler.progress();
        self.position = self.position.max(progress.applied.0);
        let status = ReplayStatus {
            applied: progress.done,
            pending: (progress.pending + self.intake.len()) as u64,
            position: self.position,
            waiting_bytes: self.intake_bytes,
            retries: progress.retries,
        };
        self.status.send_if_modified(|current| {
            let changed = *current != status;
            *current = status;
            changed
        });
    }
}

fn scheduler_error(error: stillpoint_migrate_replay::Error) -> Error {
    Error::Replay(error)
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
    fn batches_that_a_player_will_throw_away_leave_room_for_new_ones() {
        let (batches, mut worker) = mpsc::channel(CHANNEL_CAPACITY);
        let mut slot = WorkerSlot::new(batches);
        let send = |slot: &mut WorkerSlot| {
            let of =
                |stamp| Arc::new(Transaction { stamp, xid: 1, writes: Vec::new(), bytes: 1, told: None, early: false });
            slot.gathered = (0..PIPELINE_MIN as u64).map(of).collect();
            slot.send();
        };
        // The worker executes the first; the second is behind it when that fails.
        send(&mut slot);
        worker.try_recv().unwrap();
        send(&mut slot);
        slot.in_flight.clear();
        slot.retries += 1;
        send(&mut slot);
        while slot.accepts_another() {
            send(&mut slot);
        }
        let there: Vec<u64> = std::iter::from_fn(|| worker.try_recv().ok()).map(|batch| batch.retries).collect();
        assert_eq!(there, [0, 1, 1]);
    }

    #[test]
    fn numbers_are_compared_over_the_wrap_around() {
        let snapshot = SourceSnapshot::parse("4294967290:4294967306:").unwrap();
        assert!(snapshot.sees(u32::MAX) && snapshot.sees(5) && !snapshot.sees(10));
    }
}
