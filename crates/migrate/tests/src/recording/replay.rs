//! Replaying a recording in one of the scheduler's modes: as fast as it goes, with everything known from the beginning, as in
//! a catch-up from far behind.

use super::record::{Recording, SUMS};
use std::time::{Duration, Instant};
use stillpoint_migrate_engine::spoken::{Replay, Way};
use stillpoint_migrate_engine::{Error, Server};
use stillpoint_testing::{postgresql::Cluster, wait::until};

/// A replay that reports nothing for so long hangs.
const PATIENCE: Duration = Duration::from_secs(120);

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
        let target = Server::parse("target", &cluster.conninfo("replayed"), None).expect("a connection string");
        let before = self.flushes();
        let (replay, seconds) = run(recording, way, &target).await.unwrap_or_else(|error| panic!("{way:?}: {error:?}"));
        let (progress, players) = (replay.progress(), replay.players());
        drop(replay);
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

/// Repeats all of it; the replay that has come to its end.
async fn run(recording: &Recording, way: Way, target: &Server) -> Result<(Replay, f64), Error> {
    let mut replay = Replay::start(way, target).await?;
    for happened in &recording.happened {
        replay.hand_in(happened.clone())?;
    }
    let begun = Instant::now();
    loop {
        replay.feed().await?;
        if replay.is_drained() {
            return Ok((replay, begun.elapsed().as_secs_f64()));
        }
        let reported = tokio::time::timeout(PATIENCE, replay.reported()).await;
        reported.unwrap_or_else(|_| panic!("{way:?} hangs: {:?}", replay.progress()))?;
    }
}
