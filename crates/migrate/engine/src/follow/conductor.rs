//! The conductor: hands what the stream brings to players, in the order that the scheduler allows.

use super::player::{Batch, LONG, Outcome};
use super::transaction::{Item, Transaction};
use crate::Error;
use crate::pgoutput::Lsn;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use stillpoint_migrate_replay::{Limits, Mode, Player as PlayerId, Scheduler, Snapshot, Stamp, Syncset, Xid};
use tokio::sync::{mpsc, oneshot, watch};

/// Transactions of a batch: enough that many rows go out in one statement and hot ones once, few enough that what has to be
/// repeated after a failure is soon done.
const BATCH_MAX: usize = 1024;
const BATCH_BYTES_MAX: u64 = 1 << 20;
/// Batches of a player that are under way: one that the target works at, and one behind it.
pub(crate) const BATCHES: usize = 2;
/// Room in a player's channel: behind a batch that failed others may lie there that it will throw away, and it is sent new
/// ones before it has.
pub(crate) const ROOM: usize = 2 * BATCHES - 1;
/// What is taken in ahead of the players, in transactions and in bytes of the stream, beside one transaction that may be
/// larger than all of it.
const INTAKE_MAX: usize = 4096;
const INTAKE_BYTES_MAX: u64 = 64 << 20;
/// Transactions that are remembered after they were handed in, to tell whether a snapshot of the source has them.
const RECENT: usize = 4096;

/// Where the replay stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Standing {
    /// Transactions applied since the start.
    pub(crate) applied: u64,
    /// Received and not applied yet.
    pub(crate) pending: u64,
    /// Everything up to here is applied.
    pub(crate) position: Lsn,
    /// Bytes of the stream that are taken in and that nobody may apply yet.
    pub(crate) waiting_bytes: u64,
    /// Tries that had to be repeated.
    pub(crate) retries: u64,
}

/// Which transactions a snapshot of the source sees: none from its end on, and none that was in progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceSnapshot {
    pub(crate) end: u64,
    pub(crate) in_progress: Vec<u64>,
}

/// What the manager asks of the conductor.
pub(crate) enum Command {
    /// Answers once everything before the marker is applied.
    AwaitMarker(String, oneshot::Sender<Lsn>),
    /// Hands nothing more to players, and answers at once.
    Hold(oneshot::Sender<()>),
    /// Applies what the snapshot sees as it comes, up to the first that it does not, and answers when the marker, which was
    /// written behind the snapshot, has come and all that is done; `false` when the snapshot is no prefix of the order
    /// of commits, or when more comes before the marker than may wait in memory: a later one may do.
    ApplySeen { marker: String, snapshot: SourceSnapshot, done: oneshot::Sender<bool> },
    /// Takes [`Command::Hold`] back.
    Release,
}

impl SourceSnapshot {
    /// From the text of `pg_current_snapshot()`: `xmin:xmax:in,progress`.
    ///
    /// A snapshot sees all below its `xmin`, and in one that a slot exports that may be the larger one: it is the oldest
    /// transaction that still ran when the slot was ready, and `xmax` stays behind what committed in the first of the slot's
    /// two waits, which is not kept count of (`SnapBuildFindSnapshot` in snapbuild.c, `xact_decode` in decode.c).
    pub(crate) fn parse(text: &str) -> Result<SourceSnapshot, Error> {
        let parts = || {
            let mut parts = text.split(':');
            let xmin: u64 = parts.next()?.parse().ok()?;
            let end = xmin.max(parts.next()?.parse().ok()?);
            let in_progress = parts.next()?.split(',').filter(|xid| !xid.is_empty()).map(str::parse);
            Some(SourceSnapshot { end, in_progress: in_progress.collect::<Result<_, _>>().ok()? })
        };
        parts().ok_or_else(|| Error::Pgoutput(format!("`{text}` is no snapshot")))
    }

    /// Whether it sees all that an earlier one saw.
    pub(crate) fn contains(&self, earlier: &SourceSnapshot) -> bool {
        let hidden = |xid: &u64| *xid < earlier.end && !earlier.in_progress.contains(xid);
        self.end >= earlier.end && !self.in_progress.iter().any(hidden)
    }

    /// The same for the scheduler.
    pub(super) fn whole(&self) -> Snapshot {
        Snapshot::new(Xid(self.end), self.in_progress.iter().copied().map(Xid))
    }

    /// Whether it sees a transaction that committed; numbers of the stream have no epoch, so they are compared as the
    /// server does, by half the circle.
    pub(super) fn sees(&self, xid: u32) -> bool {
        let before_end = (xid.wrapping_sub(self.end as u32) as i32) < 0;
        before_end && !self.in_progress.iter().any(|running| *running as u32 == xid)
    }
}

struct PlayerSlot {
    batches: mpsc::Sender<Batch>,
    /// Transactions of each batch that it was sent and has not reported.
    under_way: VecDeque<usize>,
    /// Given to it, and not sent yet.
    gathered: Vec<Arc<Transaction>>,
    bytes: u64,
    retries: u64,
}

impl PlayerSlot {
    fn new(batches: mpsc::Sender<Batch>) -> PlayerSlot {
        PlayerSlot { batches, under_way: VecDeque::new(), gathered: Vec::new(), bytes: 0, retries: 0 }
    }

    fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Whether another batch may be put together behind what it works at.
    fn may_follow(&self) -> bool {
        !self.is_idle() && self.under_way.len() < BATCHES && self.under_way.iter().all(|length| *length >= LONG)
    }

    fn is_full(&self) -> bool {
        self.gathered.len() >= BATCH_MAX || self.bytes >= BATCH_BYTES_MAX
    }

    fn send(&mut self) {
        let transactions = std::mem::take(&mut self.gathered);
        self.bytes = 0;
        self.under_way.push_back(transactions.len());
        let sent = self.batches.try_send(Batch { transactions, retries: self.retries });
        // One that is gone reports why; one that is not has room for all batches that are under way.
        debug_assert!(!matches!(sent, Err(mpsc::error::TrySendError::Full(_))), "a batch found no room");
    }
}

/// See the module.
pub(crate) struct Conductor {
    scheduler: Scheduler<Arc<Transaction>>,
    players: Vec<PlayerSlot>,
    intake: VecDeque<Transaction>,
    /// Markers received, and waited for: the position is that of the marker.
    markers: VecDeque<(String, Lsn)>,
    waiting: Option<(String, oneshot::Sender<Lsn>)>,
    intake_bytes: u64,
    seen: Option<(String, SourceSnapshot, oneshot::Sender<bool>)>,
    held: bool,
    recent: VecDeque<u32>,
    applied: HashSet<Lsn>,
    position: Lsn,
    standing: watch::Sender<Standing>,
}

impl Conductor {
    /// `applied` are stamps that were applied before the last end and may come again.
    pub(crate) fn new(
        players: Vec<mpsc::Sender<Batch>>,
        standing: watch::Sender<Standing>,
        applied: Vec<Lsn>,
    ) -> Conductor {
        Conductor {
            scheduler: Scheduler::new(Mode::Rows, players.len() as u32, Limits::default()),
            players: players.into_iter().map(PlayerSlot::new).collect(),
            intake: VecDeque::new(),
            intake_bytes: 0,
            markers: VecDeque::new(),
            waiting: None,
            seen: None,
            held: false,
            recent: VecDeque::new(),
            applied: applied.into_iter().collect(),
            position: 0,
            standing,
        }
    }

    /// Runs until the stream ends with an error, a player fails, or nobody commands any more.
    pub(crate) async fn run(
        mut self,
        mut items: mpsc::Receiver<Result<Vec<Item>, Error>>,
        mut reports: mpsc::Receiver<(u32, Outcome)>,
        mut commands: mpsc::Receiver<Command>,
    ) -> Result<(), Error> {
        loop {
            // A limit on what is taken in keeps the source waiting instead of filling our memory. A held replay must see
            // the marker that ends the hold, but what a snapshot sees is not held.
            let room = self.intake_bytes < INTAKE_BYTES_MAX && (self.intake.len() < INTAKE_MAX || self.held);
            tokio::select! {
                biased;
                report = reports.recv() => match report {
                    Some((player, outcome)) => self.reported(player, outcome)?,
                    None => return Err(Error::WrongPhase("all players are gone".into())),
                },
                command = commands.recv() => match command {
                    Some(command) => self.command(command),
                    None => return Ok(()),
                },
                item = items.recv(), if room => match item {
                    Some(items) => items?.into_iter().for_each(|item| self.received(item)),
                    None => return Err(Error::WrongPhase("the stream is gone".into())),
                },
            }
            self.hand_in()?;
            self.feed()?;
            self.answer();
            self.publish();
        }
    }

    fn received(&mut self, item: Item) {
        match item {
            Item::Transaction(again) if self.applied.remove(&again.stamp) => self.rested(again.stamp),
            Item::Transaction(transaction) => {
                self.intake_bytes += transaction.bytes;
                self.intake.push_back(transaction);
            }
            // Nobody waits for it by name.
            Item::Marker { text, end } if text == "mark" => self.rested(end),
            Item::Marker { text, end } => {
                self.markers.push_back((text, end));
                self.rested(end);
            }
            Item::Position(end) => self.rested(end),
        }
    }

    /// With nothing pending, the position moves with the stream.
    fn rested(&mut self, end: Lsn) {
        if self.intake.is_empty() && self.scheduler.is_drained() {
            self.position = self.position.max(end);
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::AwaitMarker(text, answer) => self.waiting = Some((text, answer)),
            Command::Hold(answer) => {
                self.held = true;
                let _ = answer.send(());
            }
            Command::ApplySeen { marker, snapshot, done } => self.seen = Some((marker, snapshot, done)),
            Command::Release => (self.held, self.seen) = (false, None),
        }
    }

    /// Whether the next transaction may be handed in.
    fn may_go(&self) -> bool {
        let seen = |snapshot: &SourceSnapshot| self.intake.front().is_some_and(|next| snapshot.sees(next.xid));
        !self.held || self.seen.as_ref().is_some_and(|(_, snapshot, _)| seen(snapshot))
    }

    fn hand_in(&mut self) -> Result<(), Error> {
        while self.may_go() {
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
            if self.recent.len() > RECENT {
                self.recent.pop_front();
            }
        }
        Ok(())
    }

    /// Gives idle players a batch first, then busy ones what may be sent behind theirs.
    fn feed(&mut self) -> Result<(), Error> {
        for number in 0..self.players.len() {
            if self.players[number].is_idle() {
                self.gather(number)?;
                if !self.players[number].gathered.is_empty() {
                    self.players[number].send();
                }
            }
        }
        for number in 0..self.players.len() {
            if self.players[number].may_follow() {
                self.gather(number)?;
                // Short ones are better off with what comes while the target is busy.
                if self.players[number].is_full() {
                    self.players[number].send();
                }
            }
        }
        Ok(())
    }

    fn gather(&mut self, number: usize) -> Result<(), Error> {
        let slot = &mut self.players[number];
        while !slot.is_full() {
            let next = self.scheduler.next(PlayerId(number as u32)).map_err(scheduler_error)?;
            let Some(operation) = next else { break };
            let transaction = Arc::clone(self.scheduler.payload(operation.syncset));
            slot.bytes += transaction.bytes;
            slot.gathered.push(transaction);
        }
        Ok(())
    }

    fn reported(&mut self, player: u32, outcome: Outcome) -> Result<(), Error> {
        let (committed, retry) = match outcome {
            Outcome::Done(committed) => (committed, false),
            Outcome::Retry(committed) => (committed, true),
            Outcome::Fatal(error) => return Err(error),
        };
        for _ in 0..committed {
            self.scheduler.done(PlayerId(player)).map_err(scheduler_error)?;
        }
        let slot = &mut self.players[player as usize];
        slot.under_way.pop_front();
        if retry {
            // What was behind is given back by the scheduler, and thrown away by the player.
            self.scheduler.failed(PlayerId(player)).map_err(scheduler_error)?;
            slot.under_way.clear();
            slot.gathered.clear();
            (slot.bytes, slot.retries) = (0, slot.retries + 1);
        }
        Ok(())
    }

    /// Answers what is waited for, when it is so.
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
        let Some((marker, snapshot, _)) = &self.seen else { return };
        let all_is_here = self.markers.iter().any(|(text, _)| text == marker);
        let too_much = self.intake_bytes >= INTAKE_BYTES_MAX;
        // What it sees at the front is handed in as soon as the scheduler has room for it.
        if self.may_go() || !(all_is_here || too_much) {
            return;
        }
        let prefix = all_is_here
            && !self.intake.iter().any(|transaction| snapshot.sees(transaction.xid))
            && self.recent.iter().all(|xid| snapshot.sees(*xid));
        if prefix && !self.scheduler.is_drained() {
            return;
        }
        self.markers.clear();
        if let Some((_, _, done)) = self.seen.take() {
            let _ = done.send(prefix);
        }
    }

    fn publish(&mut self) {
        let progress = self.scheduler.progress();
        self.position = self.position.max(progress.applied.0);
        let standing = Standing {
            applied: progress.done,
            pending: (progress.pending + self.intake.len()) as u64,
            position: self.position,
            waiting_bytes: self.intake_bytes,
            retries: progress.retries,
        };
        self.standing.send_if_modified(|current| {
            let changed = *current != standing;
            *current = standing;
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
        for (xid, seen) in [(9, true), (12, false), (13, true), (15, false), (19, true), (20, false), (21, false)] {
            assert_eq!(snapshot.sees(xid), seen, "{xid}");
        }
        assert!(SourceSnapshot::parse("10:20:").unwrap().sees(12));
        let exported = SourceSnapshot::parse("20:19:").unwrap();
        assert!(exported.sees(19) && !exported.sees(20), "all below its `xmin`");
        for wrong in ["", "1:2", "a:b:c"] {
            assert!(SourceSnapshot::parse(wrong).is_err(), "{wrong}");
        }
    }

    /// A commit that waits for a standby is in the log, and seen by nobody.
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
        let (batches, mut player) = mpsc::channel(ROOM);
        let mut slot = PlayerSlot::new(batches);
        let send = |slot: &mut PlayerSlot| {
            let of =
                |stamp| Arc::new(Transaction { stamp, xid: 1, writes: Vec::new(), bytes: 1, told: None, early: false });
            slot.gathered = (0..LONG as u64).map(of).collect();
            slot.send();
        };
        // It works at the first, and the second lies behind it when that fails.
        send(&mut slot);
        player.try_recv().unwrap();
        send(&mut slot);
        slot.under_way.clear();
        slot.retries += 1;
        send(&mut slot);
        while slot.may_follow() {
            send(&mut slot);
        }
        let there: Vec<u64> = std::iter::from_fn(|| player.try_recv().ok()).map(|batch| batch.retries).collect();
        assert_eq!(there, [0, 1, 1]);
    }

    #[test]
    fn numbers_are_compared_over_the_wrap_around() {
        let snapshot = SourceSnapshot::parse("4294967290:4294967306:").unwrap();
        assert!(snapshot.sees(u32::MAX) && snapshot.sees(5) && !snapshot.sees(10));
    }
}
