//! Replaying a recording in one of the scheduler's modes: as fast as it goes, with everything known from the beginning, as in
//! a catch-up from far behind.

use super::player::{self, Job, Report};
use super::record::{Happened, Recording, SUMS, Transaction};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_migrate_replay::{Limits, Mode, Player, Scheduler, Statement, Syncset};
use stillpoint_migrate_testbed::{Cluster, until};
use tokio::sync::mpsc;

/// A replay that reports nothing for so long hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a recording is replayed.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    /// In which order.
    pub mode: Mode,
    /// By how many connections at least; modes that need more get more.
    pub players: u32,
    /// Whether each commit waits for the disk.
    pub synchronous: bool,
}

/// What came of it.
#[derive(Debug, Clone, Copy)]
pub struct Replayed {
    /// From the first operation to the last commit.
    pub seconds: f64,
    /// Flushes of the target's log meanwhile.
    pub flushes: u64,
    /// Transactions that were tried again.
    pub retries: u64,
    /// Players there were at the end.
    pub players: u32,
    /// Transactions that were sent.
    pub transactions: u64,
}

/// The server that repeats.
pub struct Target<'a> {
    cluster: &'a Cluster,
}

pub(super) struct Conductor {
    pub(super) scheduler: Scheduler<Arc<Transaction>>,
    way: Way,
    conninfo: String,
    players: Vec<(mpsc::UnboundedSender<Job>, bool)>,
    report: mpsc::UnboundedSender<Report>,
    pub(super) reports: mpsc::UnboundedReceiver<Report>,
}

impl<'a> Target<'a> {
    /// One with a database `base` ([`super::record()`]), which stays as it is.
    pub fn new(cluster: &'a Cluster) -> Target<'a> {
        Target { cluster }
    }

    /// From now on each flush of the log takes so much longer: `commit_delay` sleeps that long before it, with the lock in
    /// hand that other flushes wait for, and `commit_siblings = 0` has it do so even for one commit alone.
    pub fn delay_flushes(&self, delay: Duration) {
        self.cluster.sql("postgres", &format!("ALTER SYSTEM SET commit_delay = {}", delay.as_micros()));
        self.cluster.sql("postgres", "ALTER SYSTEM SET commit_siblings = 0");
        self.cluster.sql("postgres", "SELECT pg_reload_conf()");
        let wanted = delay.as_micros().to_string();
        until("the delay to be in force", || {
            let shown = self.cluster.sql("postgres", "SELECT setting FROM pg_settings WHERE name = 'commit_delay'");
            (shown == wanted).then_some(())
        });
    }

    /// Replays a recording on a copy of `base`, and panics unless that ends in what the source holds.
    pub async fn replay(&self, recording: &Recording, way: Way) -> Replayed {
        let cluster = self.cluster;
        cluster.sql("postgres", "DROP DATABASE IF EXISTS replayed");
        cluster.sql("postgres", "CREATE DATABASE replayed TEMPLATE base");
        cluster.sql("replayed", "CHECKPOINT");
        let mut conductor = Conductor::prepare(recording, way, cluster.conninfo("replayed")).await;
        let before = self.flushes();
        let begun = Instant::now();
        conductor.run().await;
        let seconds = begun.elapsed().as_secs_f64();
        let (progress, players) = (conductor.scheduler.progress(), conductor.players.len() as u32);
        drop(conductor);
        until("players to be gone", || {
            let there = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'replayed' AND pid <> pg_backend_pid()";
            (cluster.sql("postgres", there) == "0").then_some(())
        });
        let flushes = self.flushes().saturating_sub(before);
        assert_eq!(cluster.sql("replayed", SUMS), recording.sums, "{way:?} ends in another state");
        cluster.sql("postgres", "DROP DATABASE replayed");
        Replayed { seconds, flushes, retries: progress.retries, players, transactions: progress.done }
    }

    fn flushes(&self) -> u64 {
        self.cluster.sql("postgres", "SELECT wal_sync FROM pg_stat_wal").parse().expect("a number")
    }
}

impl Conductor {
    async fn prepare(recording: &Recording, way: Way, conninfo: String) -> Conductor {
        let mut conductor = Conductor::start(way, conninfo).await;
        for happened in &recording.happened {
            conductor.hand_in(happened);
        }
        conductor
    }

    /// Connects the players.
    pub(super) async fn start(way: Way, conninfo: String) -> Conductor {
        let limits = Limits { bytes: u64::MAX, syncsets: usize::MAX };
        let (report, reports) = mpsc::unbounded_channel();
        let scheduler = Scheduler::new(way.mode, 0, limits);
        let mut conductor = Conductor { scheduler, way, conninfo, players: Vec::new(), report, reports };
        for _ in 0..way.players {
            conductor.add_player().await;
        }
        conductor
    }

    async fn add_player(&mut self) {
        let synchronous = if self.way.synchronous { "on" } else { "off" };
        // As the product's players: keys that refer to others were checked on the source.
        let settings = format!("SET session_replication_role = replica; SET synchronous_commit = {synchronous}");
        let Player(number) = self.scheduler.add_player();
        let jobs = player::start(&self.conninfo, &settings, self.way.mode, number, self.report.clone()).await;
        self.players.push((jobs, false));
    }

    pub(super) fn hand_in(&mut self, happened: &Happened) {
        let by_snapshot = self.way.mode.needs_snapshots();
        match happened {
            Happened::Begins(running) if by_snapshot => self.scheduler.begins(*running),
            Happened::Began(running, snapshot) if by_snapshot => self.scheduler.began(*running, snapshot.clone()),
            Happened::Ended(running) if by_snapshot => self.scheduler.ended(*running),
            Happened::Committed(transaction) if transaction.xid.is_none() && self.way.mode != Mode::BAll => {
                if let (Some(running), true) = (transaction.running, by_snapshot) {
                    self.scheduler.ended(running);
                }
            }
            Happened::Committed(transaction) => {
                let of = |(xid, running)| Statement { running, xid };
                let syncset = Syncset {
                    stamp: transaction.stamp,
                    tokens: transaction.tokens.clone(),
                    statement: transaction.xid.zip(transaction.running).map(of),
                    bytes: 1,
                    payload: Arc::clone(transaction),
                };
                self.scheduler.push_next(syncset).unwrap_or_else(|refused| panic!("{}", refused.error));
            }
            _ => {}
        }
    }

    /// Gives all players what there is for them.
    pub(super) async fn feed_all(&mut self) {
        loop {
            for number in 0..self.players.len() {
                self.feed(number);
            }
            if !self.scheduler.is_starved() {
                return;
            }
            self.add_player().await;
        }
    }

    async fn run(&mut self) {
        loop {
            self.feed_all().await;
            if self.scheduler.is_drained() {
                return;
            }
            let report = tokio::time::timeout(PATIENCE, self.reports.recv()).await;
            let progress = self.scheduler.progress();
            let Ok(Some(report)) = report else { panic!("{:?} hangs: {progress:?}", self.way) };
            self.take(report);
            while let Ok(report) = self.reports.try_recv() {
                self.take(report);
            }
        }
    }

    fn feed(&mut self, number: usize) {
        let (jobs, busy) = &mut self.players[number];
        if *busy {
            return;
        }
        let next = self.scheduler.next(Player(number as u32)).expect("a player that there is");
        let Some(operation) = next else { return };
        let transaction = Arc::clone(self.scheduler.payload(operation.syncset));
        jobs.send(Job { step: operation.step, transaction }).unwrap_or_else(|_| panic!("player {number} is gone"));
        *busy = true;
    }

    pub(super) fn take(&mut self, (number, done): Report) {
        self.players[number as usize].1 = false;
        let reported = match done {
            Ok(()) => self.scheduler.done(Player(number)).map(drop),
            Err(code) if ["23505", "23P01", "40P01", "40001"].contains(&code.as_str()) => {
                self.scheduler.failed(Player(number)).map(drop)
            }
            Err(code) => panic!("{:?}: a player met error {code}", self.way),
        };
        reported.unwrap_or_else(|error| panic!("{:?}: {error}", self.way));
    }
}
