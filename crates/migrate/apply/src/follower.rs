//! Following: the commits of one server are repeated on the other, by several apply workers (`Player`) at the same time.
//!
//! ```text
//!  source --pgoutput--> stream --transactions--> conductor --batches--> players --> target
//!     ^     proxy --rows--^                          |                                |
//!     +-------- confirmed <-- keeper <-- position ---+    stamp in each transaction --+
//! ```
//!
//! Every repeated transaction writes its stamp in itself. A position is confirmed to the source only when the target has
//! flushed it, so a crash of either side or of this process loses and repeats nothing: a transaction that arrives again above
//! the confirmed position is skipped if its stamp is present.

#[cfg(test)]
mod tests;

use crate::apply_worker::{ApplyWorker, wait_for_earlier_workers};
use crate::conductor::{CHANNEL_CAPACITY, Conductor};
use crate::intake::{Command, ReplayStatus, SourceSnapshot};
use crate::inventory::Inventory;
use crate::partial_tables::PartialTables;
use crate::pgoutput::Lsn;
use crate::recording::{Recording, Stamps};
use crate::rows::{self, Markers, Reader};
use crate::statement_replay::{self, Replay, ReplaySettings};
use crate::stream::{self, StreamParameters};
use crate::throttle::Throttle;
use crate::transaction::{Item, MARKER_PREFIX};
use crate::{Error, replication_objects};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use stillpoint_migrate_postgres::link::{Link, Purpose, Server, literal, number};
use stillpoint_migrate_replay::Mode;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

/// Interval at which the position on the target is flushed and reported to the source.
const CONFIRM_INTERVAL: Duration = Duration::from_millis(500);
const BEGIN: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
/// Maximum time until a barrier is reached.
pub const BARRIER_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum chunks of items received ahead of the conductor.
const CHUNKS_MAX: usize = 4;

/// Source, target and resources of a replay.
pub struct Plan<'a> {
    /// Server whose changes are applied.
    pub source: &'a Server,
    /// Server on which they are applied.
    pub target: &'a Server,
    /// Source of the changes.
    pub feed: Feed<'a>,
    /// Tables of the source.
    pub inventory: &'a Inventory,
    /// Number of connections that apply changes.
    pub players: usize,
    /// Limit of transactions a second for all apply workers together.
    pub pace: Arc<Throttle>,
}

/// Source of the changes.
pub enum Feed<'a> {
    /// The source's log.
    Log {
        /// The slot on the source.
        slot: &'a str,
        /// Publications of the tables and of the stamps.
        publications: &'a [&'a str],
        /// Position before which no changes are read.
        from: Lsn,
        /// Position up to which commits may change rows that were not copied, because they had changed them before the rows
        /// were read.
        horizon: Lsn,
    },
    /// Changes after a snapshot that the proxy captures: rows, or statements that are repeated in this schedule. Stamps are
    /// used as positions.
    Proxy(Recording, SourceSnapshot, Option<Mode>),
}

/// Setup for apply workers that repeat rows.
struct RowWorkers<'a> {
    target: &'a Server,
    search_path: &'a str,
    players: usize,
    pace: &'a Arc<Throttle>,
    /// Stamps that were applied before.
    applied: Vec<Lsn>,
}

impl RowWorkers<'_> {
    /// Connects the apply workers, and starts their conductor.
    async fn start(
        self,
        items: mpsc::Receiver<Result<Vec<Item>, Error>>,
        commands: mpsc::Receiver<Command>,
        publisher: watch::Sender<ReplayStatus>,
        others: &mut Vec<JoinHandle<()>>,
    ) -> Result<JoinHandle<Result<(), Error>>, Error> {
        let (report, reports) = mpsc::channel(self.players);
        let mut batches = Vec::new();
        for number in 0..self.players {
            let player = ApplyWorker::connect(self.target, self.search_path).await?;
            let (sender, receiver) = mpsc::channel(CHANNEL_CAPACITY);
            batches.push(sender);
            others.push(tokio::spawn(player.run(number as u32, receiver, report.clone(), Arc::clone(self.pace))));
        }
        Ok(tokio::spawn(Conductor::new(batches, publisher, self.applied).run(items, reports, commands)))
    }
}

/// Method to mark a position in the order of changes, and to read it.
enum PositionMarks {
    /// Messages in the log.
    Log(Link),
    /// Stamps of the proxy.
    Proxy { recording: Recording, stamps: Stamps, markers: Arc<Markers> },
}

/// A running replay. Dropping it ends it; what was confirmed stays confirmed.
pub struct Follower {
    commands: mpsc::Sender<Command>,
    status: watch::Receiver<ReplayStatus>,
    conductor: JoinHandle<Result<(), Error>>,
    others: Vec<JoinHandle<()>>,
    confirmer: JoinHandle<Result<(), Error>>,
    marks: PositionMarks,
    /// Number of markers made so far.
    markers: u64,
    /// True if its end has been reported.
    end_reported: bool,
}

impl Follower {
    /// Connects to both servers and starts the replay.
    ///
    /// # Errors
    ///
    /// An error that ended the replay, or [`Error::TimedOut`].
    pub async fn start(plan: Plan<'_>) -> Result<Follower, Error> {
        let search_path = search_path(plan.source).await?;
        let mut confirmer = PositionConfirmer::connect(plan.target).await?;
        wait_for_earlier_workers(&mut confirmer.link).await?;
        let (confirmed, applied) = confirmer.restore().await?;
        let shared = Arc::new(AtomicU64::new(confirmed));
        let (command, commands) = mpsc::channel(4);
        let (publisher, status) = watch::channel(ReplayStatus::default());
        let Plan { source, target, feed, inventory, players, pace } = plan;
        let mut others = Vec::new();
        let row_workers = RowWorkers { target, search_path: &search_path, players, pace: &pace, applied };
        let (marks, conductor) = match feed {
            Feed::Log { slot, publications, from, horizon } => {
                let from = from.max(confirmed);
                shared.store(from, Ordering::Release);
                let parameters = StreamParameters {
                    source: source.clone(),
                    slot: slot.to_owned(),
                    publications: publications.iter().map(ToString::to_string).collect(),
                    inventory: inventory.clone(),
                    partial: PartialTables::read(&mut Link::connect(target, Purpose::Statements, &[]).await?).await?,
                    from,
                    horizon,
                    confirmed: Arc::clone(&shared),
                    pace: Arc::clone(&pace),
                };
                let (item, items) = mpsc::channel(CHUNKS_MAX);
                stream::start(parameters, item).await?;
                let marks = PositionMarks::Log(
                    Link::connect(source, Purpose::Statements, &[("synchronous_commit", "on")]).await?,
                );
                (marks, row_workers.start(items, commands, publisher, &mut others).await?)
            }
            Feed::Proxy(recording, seen, schedule) => {
                let (stamps, markers) = (recording.stamps().await?, Arc::<Markers>::default());
                let (spool, marked) = (recording.spool(), Arc::clone(&markers));
                let conductor = if let Some(mode) = schedule {
                    let settings = ReplaySettings { mode, players, synchronous: false };
                    let replay = Replay::connect(settings, target, Some(seen.whole()), &search_path, pace).await?;
                    let (item, items) = mpsc::channel(CHUNKS_MAX);
                    let translator = statement_replay::Translator::new(seen.whole(), inventory);
                    others.push(tokio::spawn(Reader::new(spool, translator, marked).run(item)));
                    tokio::spawn(statement_replay::Conductor::new(replay, publisher).run(items, commands))
                } else {
                    let (item, items) = mpsc::channel(CHUNKS_MAX);
                    let translator = rows::Translator::new(seen, inventory);
                    others.push(tokio::spawn(Reader::new(spool, translator, marked).run(item)));
                    row_workers.start(items, commands, publisher, &mut others).await?
                };
                (PositionMarks::Proxy { recording, stamps, markers }, conductor)
            }
        };
        let confirmer = tokio::spawn(confirmer.run(status.clone(), shared));
        Ok(Follower { commands: command, status, conductor, others, confirmer, marks, markers: 0, end_reported: false })
    }

    /// Returns true if it repeats only what passes through the proxy.
    pub fn is_by_proxy(&self) -> bool {
        matches!(self.marks, PositionMarks::Proxy { .. })
    }

    /// Bytes of changes committed on `source` and not repeated.
    ///
    /// # Errors
    ///
    /// An error that ended the replay, or [`Error::TimedOut`].
    pub async fn lag_bytes(&self, source: &mut Link) -> Result<u64, Error> {
        let status = self.status();
        match &self.marks {
            PositionMarks::Log(_) => {
                let now = replication_objects::lsn(&source.text("SELECT pg_current_wal_lsn()").await?);
                Ok(now.saturating_sub(status.position))
            }
            PositionMarks::Proxy { recording, .. } => Ok(recording.unread() + status.waiting_bytes),
        }
    }

    /// Progress of the replay.
    pub fn status(&self) -> ReplayStatus {
        *self.status.borrow()
    }

    /// A receiver of progress as it changes.
    pub fn watch(&self) -> watch::Receiver<ReplayStatus> {
        self.status.clone()
    }

    /// The error that ended the replay, if it has ended.
    pub async fn failure(&mut self) -> Option<Error> {
        if self.end_reported || self.conductor.is_finished() || self.confirmer.is_finished() {
            Some(self.end_reason().await)
        } else {
            None
        }
    }

    /// Returns true if it has ended and reported why.
    pub fn has_ended(&self) -> bool {
        self.end_reported
    }

    /// Marks the present commits and returns the position: when the replay reaches it, every commit before it is applied.
    ///
    /// # Errors
    ///
    /// An error that ended the replay, or [`Error::TimedOut`].
    pub async fn mark(&mut self) -> Result<Lsn, Error> {
        self.put("mark".into()).await
    }

    /// Marks the present commits, and waits until every commit before the mark is applied.
    ///
    /// # Errors
    ///
    /// An error that ended the replay, or [`Error::TimedOut`].
    pub async fn drain(&mut self, limit: Duration) -> Result<Lsn, Error> {
        let marker = self.emit("drain").await?;
        let (answer, answered) = oneshot::channel();
        self.send(Command::AwaitMarker(marker, answer)).await?;
        self.await_answer(limit, "applying the last changes", answered).await
    }

    /// Brings the target to exactly the state that one snapshot of the source sees, and gives the caller snapshots of both:
    /// when this returns, both links have their snapshots, and the replay continues. Another snapshot is taken if one falls
    /// between two commits that became visible in the other order, or if more was committed directly after it than may wait in
    /// memory.
    ///
    /// # Errors
    ///
    /// An error that ended the replay, or [`Error::TimedOut`].
    pub async fn snapshot_both(&mut self, source: &mut Link, target: &mut Link, limit: Duration) -> Result<(), Error> {
        let result = async {
            self.pause_at_snapshot(source, limit).await?;
            target.query(&format!("{BEGIN}; SELECT 1")).await?;
            Ok(())
        };
        let result = result.await;
        let released = self.resume().await;
        result.and(released)
    }

    /// Does the same for a caller that works at that position, and then calls [`resume`](Follower::resume).
    ///
    /// # Errors
    ///
    /// An error that ended the replay, or [`Error::TimedOut`].
    pub async fn pause_at_snapshot(&mut self, source: &mut Link, limit: Duration) -> Result<(), Error> {
        let (answer, answered) = oneshot::channel();
        self.send(Command::Hold(answer)).await?;
        self.await_answer(limit, "pausing the replay", answered).await?;
        for _ in 0..50 {
            source.query(BEGIN).await?;
            let snapshot = SourceSnapshot::parse(&source.text("SELECT pg_current_snapshot()").await?)?;
            let marker = self.emit("barrier").await?;
            let (done, answered) = oneshot::channel();
            self.send(Command::ApplySeen { marker, snapshot, done }).await?;
            if self.await_answer(limit, "bringing the target to a snapshot of the source", answered).await? {
                return Ok(());
            }
            source.query("ROLLBACK").await?;
        }
        let (what, who) = ("finding a common snapshot".into(), Vec::new());
        Err(Error::TimedOut { what, limit, who })
    }

    /// Undoes [`Follower::pause_at_snapshot`].
    ///
    /// # Errors
    ///
    /// An error that ended the replay, or [`Error::TimedOut`].
    pub async fn resume(&mut self) -> Result<(), Error> {
        self.send(Command::Release).await
    }

    async fn emit(&mut self, kind: &str) -> Result<String, Error> {
        self.markers += 1;
        // The log may hold markers of an earlier command.
        let who = if let PositionMarks::Log(link) = &self.marks { link.pid } else { 0 };
        let marker = format!("{kind} {who} {}", self.markers);
        self.put(marker.clone()).await?;
        Ok(marker)
    }

    /// Puts a marker after all present commits.
    async fn put(&mut self, marker: String) -> Result<Lsn, Error> {
        match &mut self.marks {
            PositionMarks::Log(source) => {
                let (prefix, marker) = (literal(MARKER_PREFIX), literal(&marker));
                let sql = format!("SELECT pg_logical_emit_message(true, {prefix}, {marker})");
                Ok(replication_objects::lsn(&source.text(&sql).await?))
            }
            PositionMarks::Proxy { stamps, markers, .. } => {
                let last = stamps.last().await?;
                markers.put(last, marker);
                Ok(last)
            }
        }
    }

    async fn send(&mut self, command: Command) -> Result<(), Error> {
        if self.commands.send(command).await.is_err() {
            return Err(self.end_reason().await);
        }
        Ok(())
    }

    async fn await_answer<T>(&mut self, limit: Duration, what: &str, answer: oneshot::Receiver<T>) -> Result<T, Error> {
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(self.end_reason().await),
            Err(_) => Err(Error::TimedOut { what: what.into(), limit, who: Vec::new() }),
        }
    }

    /// Reason of the end; reported only once.
    async fn end_reason(&mut self) -> Error {
        let ended = || Error::WrongPhase("the replay has ended".into());
        if std::mem::replace(&mut self.end_reported, true) {
            return ended();
        }
        let outcome =
            if self.confirmer.is_finished() { (&mut self.confirmer).await } else { (&mut self.conductor).await };
        match outcome {
            Ok(Err(error)) => error,
            Ok(Ok(())) => ended(),
            Err(panic) => Error::WrongPhase(format!("the replay ended: {panic}")),
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.conductor.abort();
        self.confirmer.abort();
        for task in &self.others {
            task.abort();
        }
    }
}

/// Schemas that may hold operators of the user's types.
async fn search_path(source: &Server) -> Result<String, Error> {
    let mut link = Link::connect(source, Purpose::Statements, &[]).await?;
    let schemas = link
        .text(&format!(
            "SELECT concat_ws(', ', 'pg_catalog', string_agg(quote_ident(n.nspname), ', ' ORDER BY n.nspname)) \
             FROM pg_namespace n WHERE {}",
            crate::inventory::USER_SCHEMA
        ))
        .await?;
    Ok(schemas)
}

/// Flushes positions: only what the target has flushed is confirmed to the source.
struct PositionConfirmer {
    link: Link,
}

impl PositionConfirmer {
    async fn connect(target: &Server) -> Result<PositionConfirmer, Error> {
        let settings = [("synchronous_commit", "on")];
        Ok(PositionConfirmer { link: Link::connect(target, Purpose::Statements, &settings).await? })
    }

    /// Returns the position that was flushed when the replay last ran, and the stamps applied above it.
    async fn restore(&mut self) -> Result<(Lsn, Vec<Lsn>), Error> {
        let position = self.link.text("SELECT coalesce(max(position), 0) FROM stillpoint.position").await?;
        let position = position.parse().unwrap_or(0);
        let stamps = "SELECT stamp FROM stillpoint.applied, unnest(stamps) AS stamp";
        let stamps = self.link.query(&format!("{stamps} WHERE stamp > {position}")).await?;
        let stamps = stamps.iter().map(|row| number(row, 0)).collect();
        Ok((position, stamps))
    }

    async fn run(mut self, mut status: watch::Receiver<ReplayStatus>, confirmed: Arc<AtomicU64>) -> Result<(), Error> {
        let mut tick = tokio::time::interval(CONFIRM_INTERVAL);
        loop {
            tick.tick().await;
            let position = status.borrow_and_update().position;
            if position <= confirmed.load(Ordering::Acquire) {
                continue;
            }
            // Its commit flushes the log, and with it every earlier commit of an apply worker.
            self.link
                .query(&format!(
                    "DELETE FROM stillpoint.applied WHERE {position} >= ALL (stamps); \
                     UPDATE stillpoint.position SET position = {position}"
                ))
                .await?;
            confirmed.store(position, Ordering::Release);
        }
    }
}
