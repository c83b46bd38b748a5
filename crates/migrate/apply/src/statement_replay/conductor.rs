//! The conductor of statements: hands the events of the source to the replay, and executes the manager's commands, like
//! [`crate::conductor`] for rows.

use super::reader::SourceEvent;
use super::replay::Replay;
use crate::Error;
use crate::intake::{Arrival, Command, Intake, ReplayStatus};
use crate::pgoutput::Lsn;
use crate::transaction::Item;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Maximum time that commits wait for the first read of a transaction that still runs on the source.
const FIRST_READ_TIMEOUT: Duration = Duration::from_millis(50);
/// Interval of the check for such waits.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The conductor's state; see the module.
pub(crate) struct Conductor {
    replay: Replay,
    intake: Intake<SourceEvent>,
    /// Position up to which everything has arrived.
    received: Lsn,
}

impl Conductor {
    pub(crate) fn new(replay: Replay, status: watch::Sender<ReplayStatus>) -> Conductor {
        Conductor { replay, intake: Intake::new(status), received: 0 }
    }

    /// Runs until the capture ends with an error, a player fails, or the sender of commands is gone.
    pub(crate) async fn run(
        mut self,
        mut items: mpsc::Receiver<Result<Vec<Item<SourceEvent>>, Error>>,
        mut commands: mpsc::Receiver<Command>,
    ) -> Result<(), Error> {
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let stuck = self.replay.is_stuck();
            tokio::select! {
                biased;
                reported = self.replay.take_reports() => reported?,
                command = commands.recv() => match command {
                    Some(command) => self.intake.handle_command(command),
                    None => return Ok(()),
                },
                item = items.recv(), if self.intake.has_room() => match item {
                    Some(items) => items?.into_iter().for_each(|item| self.receive(item)),
                    None => return Err(Error::WrongPhase("the capture has ended".into())),
                },
                _ = poll.tick(), if stuck => {
                    self.replay.stop_waiting(if self.intake.is_on_hold() { Duration::ZERO } else { FIRST_READ_TIMEOUT });
                }
            }
            self.hand_in()?;
            self.replay.feed().await?;
            let is_drained = self.replay.is_drained();
            if is_drained && self.intake.is_empty() {
                self.intake.advance(self.received);
            }
            self.intake.answer(is_drained);
            self.intake.publish(&self.replay.progress());
        }
    }

    fn receive(&mut self, item: Item<SourceEvent>) {
        match item {
            Item::Transaction(event) => {
                if let SourceEvent::Committed(transaction) = &event {
                    self.received = self.received.max(transaction.stamp);
                }
                self.intake.push(event);
            }
            Item::Marker { text, end } => {
                self.received = self.received.max(end);
                self.intake.push_marker(text, end);
            }
            Item::Position(end) => self.received = self.received.max(end),
        }
    }

    fn hand_in(&mut self) -> Result<(), Error> {
        while let Some(event) = self.intake.pop() {
            let xid = event.xid();
            if let Some(back) = self.replay.hand_in(event)? {
                self.intake.put_back(back);
                return Ok(());
            }
            self.intake.remember(xid);
        }
        Ok(())
    }
}

impl Arrival for SourceEvent {
    fn bytes(&self) -> u64 {
        match self {
            SourceEvent::Committed(transaction) => transaction.bytes,
            _ => 0,
        }
    }

    fn xid(&self) -> Option<u32> {
        match self {
            SourceEvent::Committed(transaction) => transaction.xid.map(|xid| xid.0 as u32),
            _ => None,
        }
    }
}
