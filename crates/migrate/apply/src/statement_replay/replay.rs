//! The players, and the steps that each of them may send now.

use super::player::{Job, PlayedTransaction, Player, PlayerSettings, Report, StepProgress};
use super::reader::{SourceEvent, Transaction};
use crate::Error;
use crate::throttle::Throttle;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_migrate_postgres::link::{Server, literal};
use stillpoint_migrate_replay::{
    Limits, Mode, Player as PlayerId, Progress, RunningId, Scheduler, Snapshot, Stamp, Statement, Syncset,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Options of a replay of statements.
#[derive(Debug, Clone, Copy)]
pub struct ReplaySettings {
    /// Order of the replay; [`Mode::Rows`] repeats the rows instead.
    pub mode: Mode,
    /// Minimum number of connections; modes that need more open more.
    pub players: usize,
    /// True if each commit waits for the disk.
    pub synchronous: bool,
}

/// A replay of statements. Dropping it ends it.
#[derive(Debug)]
pub struct Replay {
    scheduler: Scheduler<Arc<PlayedTransaction>>,
    target: Server,
    player_settings: PlayerSettings,
    /// Snapshot that the target held in the beginning; `None` if no transaction ran then.
    base: Option<Snapshot>,
    running: HashMap<RunningId, Running>,
    /// Channel of each player, and true while it is at work.
    players: Vec<(mpsc::UnboundedSender<Job>, bool)>,
    tasks: JoinSet<()>,
    report: mpsc::UnboundedSender<Report>,
    reports: mpsc::UnboundedReceiver<Report>,
}

/// A transaction that runs on the source, as far as is known.
#[derive(Debug)]
struct Running {
    snapshot: Option<Snapshot>,
    since: Instant,
    /// True if no commit waits for it any more: it will be repeated by its rows.
    by_rows: bool,
}

impl Replay {
    /// Connects the players to a target that holds the source's state of a moment when no transaction ran, before all events
    /// that are handed in.
    ///
    /// # Errors
    /// The target cannot be reached.
    pub async fn start(settings: ReplaySettings, target: &Server) -> Result<Replay, Error> {
        Replay::connect(settings, target, None, "", Arc::new(Throttle::unlimited())).await
    }

    /// Connects the players for a migration: the target holds what this snapshot saw, and each transaction writes its stamp.
    pub(crate) async fn connect(
        settings: ReplaySettings,
        target: &Server,
        base: Option<Snapshot>,
        search_path: &str,
        pace: Arc<Throttle>,
    ) -> Result<Replay, Error> {
        let limits = if base.is_some() { Limits::default() } else { Limits { bytes: u64::MAX, syncsets: usize::MAX } };
        let (report, reports) = mpsc::unbounded_channel();
        let blind = if search_path.is_empty() {
            String::new()
        } else {
            format!("pg_catalog.set_config('search_path', {}, false)", literal(search_path))
        };
        let stamps = base.is_some();
        let player_settings = PlayerSettings {
            mode: settings.mode,
            synchronous: settings.synchronous,
            stamps,
            blind: blind.into(),
            pace,
        };
        let mut replay = Replay {
            scheduler: Scheduler::new(settings.mode, 0, limits),
            target: target.clone(),
            player_settings,
            base,
            running: HashMap::new(),
            players: Vec::new(),
            tasks: JoinSet::new(),
            report,
            reports,
        };
        for _ in 0..settings.players {
            replay.add_player().await?;
        }
        Ok(replay)
    }

    async fn add_player(&mut self) -> Result<(), Error> {
        let player = Player::connect(&self.target, self.player_settings.clone()).await?;
        let PlayerId(number) = self.scheduler.add_player();
        let (jobs, given) = mpsc::unbounded_channel();
        self.tasks.spawn(player.run(number, given, self.report.clone()));
        self.players.push((jobs, false));
        Ok(())
    }

    /// Number of players.
    pub fn players(&self) -> u32 {
        self.scheduler.players()
    }

    /// Progress of the replay.
    pub fn progress(&self) -> Progress {
        self.scheduler.progress()
    }

    /// Returns true if everything that was handed in is done.
    pub fn is_drained(&self) -> bool {
        self.scheduler.is_drained()
    }

    /// Takes the next event of the source; returns it if there is no room until something is done.
    ///
    /// # Errors
    /// [`Error::Replay`] for an event that the scheduler refuses.
    pub fn hand_in(&mut self, event: SourceEvent) -> Result<Option<SourceEvent>, Error> {
        match event {
            SourceEvent::Begins(running) => {
                self.running.insert(running, Running { snapshot: None, since: Instant::now(), by_rows: false });
                if self.needs_snapshots() {
                    self.scheduler.begins(running);
                }
            }
            SourceEvent::Began(running, snapshot) => self.record_began(running, snapshot),
            SourceEvent::Ended(running) => self.record_ended(running),
            SourceEvent::Committed(transaction) => return self.hand_in_commit(transaction),
        }
        Ok(None)
    }

    fn record_began(&mut self, id: RunningId, snapshot: Snapshot) {
        let straddles = self.base.as_ref().is_some_and(|base| !snapshot.includes(base));
        let Some(running) = self.running.get_mut(&id) else { return };
        running.snapshot = Some(snapshot.clone());
        running.by_rows |= straddles;
        if running.by_rows {
            self.scheduler.record_end(id);
        } else if self.needs_snapshots() {
            self.scheduler.record_snapshot(id, snapshot);
        }
    }

    fn needs_snapshots(&self) -> bool {
        self.player_settings.mode.needs_snapshots()
    }

    fn record_ended(&mut self, id: RunningId) {
        self.running.remove(&id);
        self.scheduler.record_end(id);
    }

    fn hand_in_commit(&mut self, transaction: Arc<Transaction>) -> Result<Option<SourceEvent>, Error> {
        let mode = self.player_settings.mode;
        if !transaction.wrote() && mode != Mode::BAll {
            if let Some(running) = transaction.running {
                self.record_ended(running);
            }
            return Ok(None);
        }
        let known = transaction.running.and_then(|id| self.running.get(&id));
        let by_rows = known.is_some_and(|running| running.by_rows);
        let blind = mode == Mode::Rows || by_rows;
        if let (true, Some(id), Some(snapshot)) =
            (by_rows && self.needs_snapshots(), transaction.running, known.and_then(|known| known.snapshot.clone()))
        {
            // From here on, other transactions have to wait for it again.
            self.scheduler.record_snapshot(id, snapshot);
        }
        let statement = transaction.xid.zip(transaction.running).filter(|_| self.needs_snapshots());
        let syncset = Syncset {
            stamp: Stamp(transaction.stamp),
            tokens: transaction.tokens.clone(),
            statement: statement.map(|(xid, running)| Statement { running, xid }),
            bytes: transaction.bytes,
            payload: Arc::new(PlayedTransaction { transaction: Arc::clone(&transaction), blind }),
        };
        match self.scheduler.push_next(syncset) {
            Ok(()) => {
                if let Some(running) = transaction.running {
                    self.running.remove(&running);
                }
                Ok(None)
            }
            Err(refused) if matches!(refused.error, stillpoint_migrate_replay::Error::Full { .. }) => {
                if let Some(running) = transaction.running.filter(|_| by_rows) {
                    self.scheduler.record_end(running);
                }
                Ok(Some(SourceEvent::Committed(transaction)))
            }
            Err(refused) => Err(Error::Replay(refused.error)),
        }
    }

    /// Gives players the steps that they may send; connects more players if the replay needs them to continue.
    ///
    /// # Errors
    /// A player is gone, or another one cannot reach the target.
    pub async fn feed(&mut self) -> Result<(), Error> {
        loop {
            for number in 0..self.players.len() {
                self.feed_one(number)?;
            }
            if !self.scheduler.is_starved() {
                return Ok(());
            }
            self.add_player().await?;
        }
    }

    fn feed_one(&mut self, number: usize) -> Result<(), Error> {
        let (jobs, busy) = &mut self.players[number];
        if *busy {
            return Ok(());
        }
        let next = self.scheduler.next(PlayerId(number as u32)).map_err(Error::Replay)?;
        let Some(operation) = next else { return Ok(()) };
        let part = Arc::clone(self.scheduler.payload(operation.syncset));
        *busy = true;
        let sent = jobs.send(Job { step: operation.step, awaited: operation.awaited, part });
        sent.map_err(|_| Error::WrongPhase(format!("player {number} has ended")))
    }

    /// Returns true if no step is under way although some are pending: they wait for transactions that run on the source.
    pub(super) fn is_stuck(&self) -> bool {
        let progress = self.scheduler.progress();
        progress.pending > 0 && progress.under_way == 0
    }

    /// Stops waiting for transactions that have run for at least this time.
    pub(super) fn stop_waiting(&mut self, after: Duration) {
        for (id, running) in &mut self.running {
            if !running.by_rows && running.since.elapsed() >= after {
                running.by_rows = true;
                self.scheduler.record_end(*id);
            }
        }
    }

    /// Waits for reports of players and takes them. If the future is dropped early, no report is lost.
    ///
    /// # Errors
    /// An error of a player that a retry does not resolve.
    pub async fn take_reports(&mut self) -> Result<(), Error> {
        let Some(report) = self.reports.recv().await else { return Ok(()) };
        self.take_report(report)?;
        while let Ok(report) = self.reports.try_recv() {
            self.take_report(report)?;
        }
        Ok(())
    }

    fn take_report(&mut self, (number, progress): Report) -> Result<(), Error> {
        let player = PlayerId(number);
        if matches!(progress, Ok(StepProgress::Read)) {
            return self.scheduler.read_done(player).map_err(Error::Replay);
        }
        self.players[number as usize].1 = false;
        match progress {
            Ok(_) => self.scheduler.done(player).map(drop).map_err(Error::Replay),
            Err(error) if crate::apply_worker::can_be_retried(&error) => {
                tracing::debug!(%error, "retrying a replayed transaction");
                self.scheduler.failed(player).map(drop).map_err(Error::Replay)
            }
            Err(error) => Err(error),
        }
    }
}
