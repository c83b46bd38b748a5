//! The conductor: hands the changes of the stream to apply workers, in the order that the scheduler allows.

use super::apply_worker::{Batch, Outcome, PIPELINE_MIN};
use super::intake::{Arrival, Command, Intake, ReplayStatus};
use super::transaction::{Item, Transaction};
use crate::Error;
use crate::pgoutput::Lsn;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use stillpoint_migrate_replay::{Limits, Mode, Player as PlayerId, Scheduler, Stamp, Syncset};
use tokio::sync::{mpsc, watch};

/// Maximum transactions in a batch: enough that one statement writes many rows and a hot row is written once, and few enough
/// that a repetition after a failure is short.
const BATCH_MAX: usize = 1024;
const BATCH_BYTES_MAX: u64 = 1 << 20;
/// Maximum batches of an apply worker that are under way: one that the target executes, and one behind it.
pub(crate) const BATCHES_IN_FLIGHT_MAX: usize = 2;
/// Capacity of a worker's channel: batches behind a failed one may still be in it for the worker to discard, and new ones are
/// sent before that.
pub(crate) const CHANNEL_CAPACITY: usize = 2 * BATCHES_IN_FLIGHT_MAX - 1;

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
    intake: Intake<Transaction>,
    applied: HashSet<Lsn>,
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
            intake: Intake::new(status),
            applied: applied.into_iter().collect(),
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
            tokio::select! {
                biased;
                report = reports.recv() => match report {
                    Some((worker, outcome)) => self.handle_report(worker, outcome)?,
                    None => return Err(Error::WrongPhase("all apply workers have ended".into())),
                },
                command = commands.recv() => match command {
                    Some(command) => self.intake.handle_command(command),
                    None => return Ok(()),
                },
                item = items.recv(), if self.intake.has_room() => match item {
                    Some(items) => items?.into_iter().for_each(|item| self.receive(item)),
                    None => return Err(Error::WrongPhase("the stream of changes has ended".into())),
                },
            }
            self.hand_in()?;
            self.feed()?;
            self.intake.answer(self.scheduler.is_drained());
            self.intake.publish(&self.scheduler.progress());
        }
    }

    fn receive(&mut self, item: Item) {
        match item {
            Item::Transaction(again) if self.applied.remove(&again.stamp) => self.advance_position(again.stamp),
            Item::Transaction(transaction) => self.intake.push(transaction),
            Item::Marker { text, end } => {
                self.intake.push_marker(text, end);
                self.advance_position(end);
            }
            Item::Position(end) => self.advance_position(end),
        }
    }

    /// Moves the position with the stream if nothing is pending.
    fn advance_position(&mut self, end: Lsn) {
        if self.intake.is_empty() && self.scheduler.is_drained() {
            self.intake.advance(end);
        }
    }

    fn hand_in(&mut self) -> Result<(), Error> {
        while let Some(mut transaction) = self.intake.pop() {
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
                self.intake.put_back(transaction);
                return if full { Ok(()) } else { Err(scheduler_error(refused.error)) };
            }
            self.intake.remember(Some(xid));
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
}

impl Arrival for Transaction {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn xid(&self) -> Option<u32> {
        Some(self.xid)
    }
}

fn scheduler_error(error: stillpoint_migrate_replay::Error) -> Error {
    Error::Replay(error)
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
