//! The conductor of statements: hands the events of the source to the replay, and executes the manager's commands, like
//! [`super::super::conductor`] for rows.

use super::super::conductor::{Command, ReplayStatus, SourceSnapshot};
use super::super::transaction::Item;
use super::reader::SourceEvent;
use super::replay::Replay;
use crate::Error;
use crate::pgoutput::Lsn;
use std::collections::VecDeque;
use std::time::Duration;
use stillpoint_migrate_replay::Xid;
use tokio::sync::{mpsc, oneshot, watch};

/// Limits of the intake ahead of the players, in events and in bytes.
const INTAKE_MAX: usize = 4096;
const INTAKE_BYTES_MAX: u64 = 64 << 20;
/// Number of recent transactions that are remembered after they were handed in, to check if a snapshot of the source sees them.
const RECENT_MAX: usize = 4096;
/// Maximum time that commits wait for the first read of a transaction that still runs on the source.
const FIRST_READ_TIMEOUT: Duration = Duration::from_millis(50);
/// Interval of the check for such waits.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The conductor's state; see the module.
pub(in super::super) struct Conductor {
    replay: Replay,
    intake: VecDeque<SourceEvent>,
    intake_bytes: u64,
    /// Markers received and not answered yet, with their positions.
    markers: VecDeque<(String, Lsn)>,
    waiting: Option<(String, oneshot::Sender<Lsn>)>,
    snapshot_request: Option<(String, SourceSnapshot, oneshot::Sender<bool>)>,
    on_hold: bool,
    recent: VecDeque<Xid>,
    /// Position up to which everything has arrived.
    received: Lsn,
    position: Lsn,
    status: watch::Sender<ReplayStatus>,
}

impl Conductor {
    pub(in super::super) fn new(replay: Replay, status: watch::Sender<ReplayStatus>) -> Conductor {
        Conductor {
            replay,
            intake: VecDeque::new(),
            intake_bytes: 0,
            markers: VecDeque::new(),
            waiting: None,
            snapshot_request: None,
            on_hold: false,
            recent: VecDeque::new(),
            received: 0,
            position: 0,
            status,
        }
    }

    /// Runs until the capture ends with an error, a player fails, or the sender of commands is gone.
    pub(in super::super) async fn run(
        mut self,
        mut items: mpsc::Receiver<Result<Vec<Item<SourceEvent>>, Error>>,
        mut commands: mpsc::Receiver<Command>,
    ) -> Result<(), Error> {
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            // A held replay must still receive the marker that ends the hold.
            let room = self.intake_bytes < INTAKE_BYTES_MAX && (self.intake.len() < INTAKE_MAX || self.on_hold);
            let stuck = self.replay.is_stuck();
            tokio::select! {
                biased;
                reported = self.replay.take_reports() => reported?,
                command = commands.recv() => match command {
                    Some(command) => self.handle_command(command),
                    None => return Ok(()),
                },
                item = items.recv(), if room => match item {
                    Some(items) => items?.into_iter().for_each(|item| self.receive(item)),
                    None => return Err(Error::WrongPhase("the capture has ended".into())),
                },
                _ = poll.tick(), if stuck => {
                    self.replay.stop_waiting(if self.on_hold { Duration::ZERO } else { FIRST_READ_TIMEOUT });
                }
            }
            self.hand_in()?;
            self.replay.feed().await?;
            self.answer();
            self.publish();
        }
    }

    fn receive(&mut self, item: Item<SourceEvent>) {
        match item {
            Item::Transaction(event) => {
                if let SourceEvent::Committed(transaction) = &event {
                    self.received = self.received.max(transaction.stamp);
                    self.intake_bytes += transaction.bytes;
                }
                self.intake.push_back(event);
            }
            Item::Marker { text, end } => {
                self.received = self.received.max(end);
                // A mark is not waited for by name.
                if text != "mark" {
                    self.markers.push_back((text, end));
                }
            }
            Item::Position(end) => self.received = self.received.max(end),
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

    /// Returns true if a transaction may be repeated while the replay is held.
    fn is_seen(&self, xid: Xid) -> bool {
        self.snapshot_request.as_ref().is_some_and(|(_, snapshot, _)| snapshot.sees(xid.0 as u32))
    }

    /// Returns true if the next event may be handed in.
    fn may_hand_in(&self) -> bool {
        match self.intake.front() {
            Some(SourceEvent::Committed(next)) => !self.on_hold || next.xid.is_none_or(|xid| self.is_seen(xid)),
            next => next.is_some(),
        }
    }

    fn hand_in(&mut self) -> Result<(), Error> {
        while self.may_hand_in() {
            let Some(event) = self.intake.pop_front() else { return Ok(()) };
            let (bytes, xid) = match &event {
                SourceEvent::Committed(transaction) => (transaction.bytes, transaction.xid),
                _ => (0, None),
            };
            if let Some(back) = self.replay.hand_in(event)? {
                self.intake.push_front(back);
                return Ok(());
            }
            self.intake_bytes -= bytes;
            self.recent.extend(xid);
            if self.recent.len() > RECENT_MAX {
                self.recent.pop_front();
            }
        }
        Ok(())
    }

    /// Answers requests whose condition holds now.
    fn answer(&mut self) {
        self.apply_seen();
        if !self.replay.is_drained() || !self.intake.is_empty() {
            return;
        }
        self.position = self.position.max(self.received);
        let Some((wanted, _)) = &self.waiting else { return };
        let Some(&(_, end)) = self.markers.iter().find(|(text, _)| text == wanted) else { return };
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
        let sees = |xid: &Xid| snapshot.sees(xid.0 as u32);
        let left = self.intake.iter().filter_map(|event| match event {
            SourceEvent::Committed(transaction) => transaction.xid,
            _ => None,
        });
        let prefix = all_is_here && !left.into_iter().any(|xid| sees(&xid)) && self.recent.iter().all(sees);
        if prefix && !self.replay.is_drained() {
            return;
        }
        self.markers.clear();
        if let Some((_, _, done)) = self.snapshot_request.take() {
            let _ = done.send(prefix);
        }
    }

    fn publish(&mut self) {
        let progress = self.replay.progress();
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
