//! A replay between two real servers.

use super::*;
use crate::replication_objects::{self, PUBLICATIONS};
use stillpoint_testing::{
    postgresql::{Cluster, available},
    wait::until,
};

const LIMIT: Duration = Duration::from_secs(300);
/// Bytes of a row in the stream; the log holds much less, because the row is compressed there.
const ROW_BYTES: u64 = 1 << 20;
const ROWS: u64 = 200;
/// The conductor's limit, and bytes that are on their way to it.
const HELD_BYTES_MAX: u64 = (64 + 32) << 20;

struct Pair {
    source: Cluster,
    target: Cluster,
    from: Server,
    to: Server,
}

/// Makes two servers with a table, and a slot on the first.
async fn pair() -> Pair {
    let (source, target) = (Cluster::start(&["wal_level=logical"]), Cluster::start(&[]));
    let server = |cluster: &Cluster, side: &str| Server::parse(side, &cluster.conninfo("shop"), None).unwrap();
    let (from, to) = (server(&source, "source"), server(&target, "target"));
    for (cluster, server) in [(&source, &from), (&target, &to)] {
        cluster.sql("postgres", "CREATE DATABASE shop");
        cluster.sql("shop", "CREATE TABLE wide (id int PRIMARY KEY, v text)");
        let mut link = Link::connect(server, Purpose::Statements, &[]).await.unwrap();
        replication_objects::install(&mut link, 0).await.unwrap();
    }
    let mut link = Link::connect(&from, Purpose::Statements, &[]).await.unwrap();
    let inventory = Inventory::read(&mut link).await.unwrap();
    replication_objects::publish(&mut link, &inventory).await.unwrap();
    replication_objects::create_slot(&from, "stillpoint_test", false, LIMIT).await.unwrap();
    Pair { source, target, from, to }
}

async fn follower(pair: &Pair) -> Follower {
    let mut link = Link::connect(&pair.from, Purpose::Statements, &[]).await.unwrap();
    let inventory = Inventory::read(&mut link).await.unwrap();
    Follower::start(Plan {
        source: &pair.from,
        target: &pair.to,
        feed: Feed::Log { slot: "stillpoint_test", publications: &PUBLICATIONS, from: 0, horizon: 0 },
        inventory: &inventory,
        players: 2,
        pace: Arc::new(Throttle::unlimited()),
    })
    .await
    .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_replay_keeps_the_source_waiting_and_not_all_in_memory() {
    if !available() {
        return;
    }
    let pair = pair().await;
    let mut follower = follower(&pair).await;
    let (answer, answered) = oneshot::channel();
    follower.send(Command::Hold(answer)).await.unwrap();
    follower.await_answer(LIMIT, "pausing the replay", answered).await.unwrap();
    let each = format!("INSERT INTO wide VALUES (i, repeat('x', {ROW_BYTES})); COMMIT");
    pair.source.sql("shop", &format!("DO $$ BEGIN FOR i IN 1 .. {ROWS} LOOP {each}; END LOOP; END $$"));
    let mut looks = 0;
    until("the source to wait for us", || {
        assert!(follower.status().waiting_bytes <= HELD_BYTES_MAX, "{:?}", follower.status());
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'WalSenderWriteData'";
        looks = if pair.source.sql("shop", waits) == "1" { looks + 1 } else { 0 };
        (looks == 5).then_some(())
    });
    assert!(follower.status().waiting_bytes > 0, "{:?}", follower.status());
    assert_eq!(follower.status().applied, 0, "nothing is applied while it is held");
    // The snapshot sees what was committed before it, so that is applied and makes room.
    let mut source = Link::connect(&pair.from, Purpose::Statements, &[]).await.unwrap();
    let mut target = Link::connect(&pair.to, Purpose::Statements, &[]).await.unwrap();
    follower.snapshot_both(&mut source, &mut target, LIMIT).await.unwrap();
    pair.source.sql("shop", "INSERT INTO wide VALUES (-1, 'later')");
    let sums = "SELECT count(*) || ' ' || sum(length(v)) FROM public.wide";
    let seen = (source.text(sums).await.unwrap(), target.text(sums).await.unwrap());
    let all = format!("{ROWS} {}", ROWS * ROW_BYTES);
    assert_eq!(seen, (all.clone(), all));
    drop((source, target));
    follower.drain(LIMIT).await.unwrap();
    assert_eq!(pair.target.sql("shop", "SELECT v FROM wide WHERE id = -1"), "later");
}
