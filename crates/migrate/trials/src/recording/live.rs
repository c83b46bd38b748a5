//! The paper's migration (section 4.3) under a load that goes on, in each of its modes: snapshot, creation of the slave,
//! propagation of what the proxy captures meanwhile, and the moment at which clients could change over.
//!
//! ```text
//!  capture on --> nobody at work: snapshot --> dump | restore --> propagate ... behind by little --> nobody at work,
//!                 (step 1)                     (step 2)           (step 3)                           drained (step 4)
//! ```
//!
//! Clients are not sent over in the end: they go on where they were, and what both sides hold is compared while they stand.

use super::front::Front;
use super::load::Shop;
use super::record::{Happened, Reader, SUMS};
use super::replay::{Conductor, Way};
use std::process::Stdio;
use std::time::{Duration, Instant};
use stillpoint_migrate_proxy::control::{Client, Reply, Request};
use stillpoint_migrate_replay::Mode;
use tokio::sync::mpsc;
use tokio_postgres::NoTls;

/// How long a request to the proxy may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// Behind by no more transactions than this many for each client, it has caught up.
const BEHIND: usize = 1;

/// Clients at work.
pub struct Busy<'f> {
    front: &'f Front,
    shop: Shop,
    clients: usize,
    begun: Instant,
}

/// How long a migration took.
#[derive(Debug, Clone, Copy)]
pub struct Migrated {
    /// Until the snapshot was there.
    pub snapshot_s: f64,
    /// Until the slave held it.
    pub create_s: f64,
    /// Until it was behind by little; or given up.
    pub propagate_s: f64,
    /// In which clients stood.
    pub switch_s: f64,
    /// Whether it caught up before it was given up.
    pub caught_up: bool,
    /// Transactions that were repeated.
    pub repeated: u64,
}

impl Migrated {
    /// From beginning to end.
    pub fn whole_s(&self) -> f64 {
        self.snapshot_s + self.create_s + self.propagate_s + self.switch_s
    }
}

/// Starts so many clients, each of which thinks so long between two transactions.
pub async fn busy(front: &Front, clients: usize, think: Duration) -> Busy<'_> {
    let shop = Shop::connect(&front.conninfo(), clients, think).await;
    shop.begin().await;
    Busy { front, shop, clients, begun: Instant::now() }
}

impl Busy<'_> {
    /// Lets clients end. Transactions a second that they committed.
    pub async fn end(self) -> f64 {
        let seconds = self.begun.elapsed().as_secs_f64();
        self.shop.end().await.1 as f64 / seconds
    }

    /// Migrates the shop in a mode; what does not catch up in `limit` is given up. Panics when both sides differ.
    pub async fn migrate(&self, mode: Mode, limit: Duration) -> Migrated {
        let (front, begun) = (self.front, Instant::now());
        let (told, mut happened) = mpsc::unbounded_channel();
        let mut capture = connect(front).await;
        let request =
            Request::Capture { tenant: "shop".into(), limit_ms: PATIENCE.as_millis() as u64, statements: true };
        let reply = capture.ask(&request).await.expect("a capture");
        assert!(matches!(reply, Reply::Capturing { .. }), "{reply:?}");
        let reading = tokio::spawn(read(capture, told));

        let mut control = connect(front).await;
        pause(&mut control).await;
        let first = captured(front).await;
        let (holder, connection) =
            tokio_postgres::connect(&front.source.conninfo("shop"), NoTls).await.expect("reach the source");
        tokio::spawn(connection);
        holder.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await.expect("a snapshot");
        let exported = holder.query_one("SELECT pg_export_snapshot()", &[]).await.expect("a snapshot");
        let snapshot: String = exported.get(0);
        resume(&mut control).await;
        let snapshot_s = begun.elapsed().as_secs_f64();

        let creating = Instant::now();
        create(front, &snapshot).await;
        drop(holder);
        let create_s = creating.elapsed().as_secs_f64();

        let propagating = Instant::now();
        let way = Way { mode, players: self.clients as u32, synchronous: true };
        let mut conductor = Conductor::start(way, front.target.conninfo("slave")).await;
        let mut propagated = Propagated { first, seen: first };
        let mut caught_up = false;
        while !caught_up && begun.elapsed() < limit {
            propagated.go_on(&mut conductor, &mut happened, propagating + limit).await;
            let pending = conductor.scheduler.progress().pending;
            caught_up = happened.is_empty() && pending <= BEHIND * self.clients;
        }
        let propagate_s = propagating.elapsed().as_secs_f64();

        let standing = Instant::now();
        let mut switch_s = 0.0;
        if caught_up {
            pause(&mut control).await;
            let last = captured(front).await;
            while propagated.seen < last || !conductor.scheduler.is_drained() {
                let until = standing + PATIENCE;
                assert!(
                    Instant::now() < until,
                    "{mode:?} does not come to its end: {:?}",
                    conductor.scheduler.progress()
                );
                propagated.go_on(&mut conductor, &mut happened, until).await;
            }
            switch_s = standing.elapsed().as_secs_f64();
            assert_eq!(front.target.sql("slave", SUMS), front.source.sql("shop", SUMS), "{mode:?}: the sides differ");
            resume(&mut control).await;
        }
        let repeated = conductor.scheduler.progress().done;
        reading.abort();
        Migrated { snapshot_s, create_s, propagate_s, switch_s, caught_up, repeated }
    }
}

/// How far the propagation is.
struct Propagated {
    /// What the snapshot holds.
    first: u64,
    /// The last that was handed in.
    seen: u64,
}

impl Propagated {
    /// Takes what has been captured and what players report; returns when there was something, or at the end of time.
    async fn go_on(&mut self, conductor: &mut Conductor, happened: &mut mpsc::UnboundedReceiver<Line>, until: Instant) {
        conductor.feed_all().await;
        let mut news = Vec::new();
        tokio::select! {
            biased;
            Some(report) = conductor.reports.recv() => conductor.take(report),
            count = happened.recv_many(&mut news, 256) => assert!(count > 0, "the capture ended"),
            () = tokio::time::sleep_until(until.into()) => return,
        }
        while let Ok(report) = conductor.reports.try_recv() {
            conductor.take(report);
        }
        for Line { stamp, happened } in news {
            self.seen = self.seen.max(stamp);
            match happened {
                // Nobody was at work when the snapshot was taken.
                Some(Happened::Committed(_)) if stamp <= self.first => {}
                Some(_) if stamp < self.first => {}
                Some(happened) => conductor.hand_in(&happened),
                None => {}
            }
        }
    }
}

/// A line of the capture.
struct Line {
    /// The last stamp that has come with it or before.
    stamp: u64,
    happened: Option<Happened>,
}

/// Hands on what is captured.
async fn read(mut capture: Client, told: mpsc::UnboundedSender<Line>) {
    let mut reader = Reader::default();
    while let Ok(line) = capture.next().await {
        reader.take(line);
        let happened = reader.happened.pop();
        if told.send(Line { stamp: reader.stamp, happened }).is_err() {
            return;
        }
    }
}

async fn connect(front: &Front) -> Client {
    Client::connect(&front.control()).await.expect("reach the proxy")
}

async fn pause(control: &mut Client) {
    let request = Request::Pause { tenant: "shop".into(), limit_ms: PATIENCE.as_millis() as u64 };
    let reply = control.ask(&request).await.expect("a pause");
    assert!(matches!(reply, Reply::Drained { .. }), "{reply:?}");
}

async fn resume(control: &mut Client) {
    control.ask(&Request::Resume { tenant: "shop".into() }).await.expect("clients go on");
}

/// The last stamp.
async fn captured(front: &Front) -> u64 {
    let reply = connect(front).await.ask(&Request::Captured { tenant: "shop".into() }).await.expect("an answer");
    let Reply::Captured { stamp, over: None } = reply else { panic!("{reply:?}") };
    stamp
}

/// Step 2: the slave is made from the snapshot.
async fn create(front: &Front, snapshot: &str) {
    front.target.sql("postgres", "DROP DATABASE IF EXISTS slave WITH (FORCE)");
    front.target.sql("postgres", "CREATE DATABASE slave");
    let mut dump = front.source.client("pg_dump");
    dump.args(["-d", "shop", "--snapshot", snapshot]).stdout(Stdio::piped());
    let mut restore = front.target.client("psql");
    restore.args(["-Xq", "-v", "ON_ERROR_STOP=1", "-d", "slave"]).stdout(Stdio::null());
    let creating = tokio::task::spawn_blocking(move || {
        let mut dump = dump.spawn().expect("run pg_dump");
        let restored = restore.stdin(dump.stdout.take().expect("a pipe")).status().expect("run psql");
        assert!(restored.success() && dump.wait().expect("pg_dump ends").success());
    });
    creating.await.expect("the slave is made");
    front.target.sql("slave", "ANALYZE");
}
