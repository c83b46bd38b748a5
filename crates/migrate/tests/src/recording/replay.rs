//! Replay of a recording in one of the scheduler's modes: at full speed, with everything known from the beginning, as
//! in a catch-up from far behind.

use super::record::{Recording, SUMS};
use std::time::{Duration, Instant};
use stillpoint_migrate_engine::statement_replay::{Replay, ReplaySettings};
use stillpoint_migrate_engine::{Error, Server};
use stillpoint_testing::{postgresql::Cluster, wait::until};

/// Time without a report after which a replay counts as hung.
const REPLY_TIMEOUT: Duration = Duration::from_secs(120);

/// Result of a replay.
#[derive(Debug, Clone, Copy)]
pub struct ReplayResult {
    /// Time from the first operation to the last commit, in seconds.
    pub seconds: f64,
    /// Number of flushes of the target's log meanwhile.
    pub flushes: u64,
    /// Number of transactions that were retried.
    pub retries: u64,
    /// Number of players at the end.
    pub players: u32,
    /// Number of transactions that were sent.
    pub transactions: u64,
}

/// The server that repeats.
pub struct Target<'a> {
    cluster: &'a Cluster,
}

impl<'a> Target<'a> {
    /// A target with a database `base` ([`super::record()`]), which stays unchanged.
    pub fn new(cluster: &'a Cluster) -> Target<'a> {
        Target { cluster }
    }

    /// Makes each flush of the log take this much longer from now on: `commit_delay` sleeps that long before it, and
    /// holds the lock that other flushes wait for. With `commit_siblings = 0` it does so even for a single commit.
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

    /// Replays a recording on a copy of `base`, and panics unless that ends with the rows of the source.
    pub async fn replay(&self, recording: &Recording, settings: ReplaySettings) -> ReplayResult {
        let cluster = self.cluster;
        cluster.sql("postgres", "DROP DATABASE IF EXISTS replayed");
        cluster.sql("postgres", "CREATE DATABASE replayed TEMPLATE base");
        cluster.sql("replayed", "CHECKPOINT");
        let target = Server::parse("target", &cluster.conninfo("replayed"), None).expect("a connection string");
        let before = self.flushes();
        let (replay, seconds) =
            run(recording, settings, &target).await.unwrap_or_else(|error| panic!("{settings:?}: {error:?}"));
        let (progress, players) = (replay.progress(), replay.players());
        drop(replay);
        until("players to be gone", || {
            let there = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'replayed' AND pid <> pg_backend_pid()";
            (cluster.sql("postgres", there) == "0").then_some(())
        });
        let flushes = self.flushes().saturating_sub(before);
        assert_eq!(cluster.sql("replayed", SUMS), recording.sums, "{settings:?} ends in another state");
        cluster.sql("postgres", "DROP DATABASE replayed");
        ReplayResult { seconds, flushes, retries: progress.retries, players, transactions: progress.done }
    }

    fn flushes(&self) -> u64 {
        self.cluster.sql("postgres", "SELECT wal_sync FROM pg_stat_wal").parse().expect("a number")
    }
}

/// Repeats the whole recording; returns the replay at its end.
async fn run(recording: &Recording, settings: ReplaySettings, target: &Server) -> Result<(Replay, f64), Error> {
    let mut replay = Replay::start(settings, target).await?;
    for events in &recording.events {
        replay.hand_in(events.clone())?;
    }
    let begun = Instant::now();
    loop {
        replay.feed().await?;
        if replay.is_drained() {
            return Ok((replay, begun.elapsed().as_secs_f64()));
        }
        let reported = tokio::time::timeout(REPLY_TIMEOUT, replay.take_reports()).await;
        reported.unwrap_or_else(|_| panic!("{settings:?} hangs: {:?}", replay.progress()))?;
    }
}
