//! A follower of a capture: brings a second server to a snapshot of the first, and repeats later commits there, by
//! several players, in the order that the scheduler of the replay allows.

use super::{Proxy, runtime};
use std::collections::HashMap;
use std::process::Stdio;
use stillpoint_migrate_capture::Action;
use stillpoint_migrate_control::rows::{Row, Syncset as Rows, TableShape};
use stillpoint_migrate_control::{Client, Reply, Request};
use stillpoint_migrate_replay::{Limits, Mode, Player, Scheduler, Stamp, Syncset};
use stillpoint_testing::postgresql::Cluster;
use tokio::sync::mpsc;
use tokio_postgres::{NoTls, SimpleQueryMessage};

const PLAYERS: u32 = 3;

/// Result of a follower.
#[derive(Debug, Default)]
pub(crate) struct Followed {
    /// Number of transactions that were repeated.
    pub(crate) applied: usize,
    /// Most transactions that were under way at once.
    pub(crate) at_once: usize,
    /// Reason for an end of the capture before the wanted stamp.
    pub(crate) over: Option<String>,
}

/// A follower in a thread.
pub(crate) struct Follower {
    thread: std::thread::JoinHandle<Followed>,
    upto: tokio::sync::watch::Sender<Option<u64>>,
}

/// Transactions that the source's snapshot sees.
struct Snapshot {
    end: u64,
    running: Vec<u64>,
}

impl Snapshot {
    fn sees(&self, xid: u64) -> bool {
        xid < self.end && !self.running.contains(&xid)
    }
}

impl Follower {
    /// Begins the capture, copies, and follows from there on.
    pub(crate) fn start(proxy: &Proxy, database: &str, source: &Cluster, target: &Cluster) -> Follower {
        let (upto, wanted) = tokio::sync::watch::channel(None);
        let (begun, copied) = std::sync::mpsc::channel();
        let (control, tenant) = (proxy.control.clone(), database.to_owned());
        let (from, to) = (source.conninfo(database), target.conninfo(database));
        let (mut dump, mut restore) = (source.client("pg_dump"), target.client("psql"));
        let thread = std::thread::spawn(move || {
            runtime().block_on(async move {
                let mut client = Client::connect(&control).await.expect("reach the proxy");
                let request = Request::Capture { tenant: tenant.clone(), limit_ms: 30_000, statements: false };
                let Ok(Reply::Capturing { .. }) = client.ask(&request).await else { panic!("no capture") };
                let (source, connection) = tokio_postgres::connect(&from, NoTls).await.expect("the source");
                tokio::spawn(connection);
                source.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await.expect("a snapshot");
                let sql = "SELECT pg_export_snapshot(), pg_current_snapshot()::text";
                let row = source.query_one(sql, &[]).await.expect("a snapshot");
                let snapshot = snapshot(row.get(1));
                let mut dump = dump
                    .args(["-d", &tenant, "--snapshot", row.get(0)])
                    .stdout(Stdio::piped())
                    .spawn()
                    .expect("start pg_dump");
                let out = dump.stdout.take().expect("a pipe");
                let restored = restore.args(["-Xq", "-d", &tenant]).stdin(out).stdout(Stdio::null()).status();
                assert!(restored.expect("run psql").success() && dump.wait().expect("pg_dump").success());
                source.batch_execute("COMMIT").await.expect("the end of the snapshot");
                begun.send(()).expect("the test waits");
                follow(client, &to, &snapshot, wanted).await
            })
        });
        copied.recv().expect("the copy is made");
        Follower { thread, upto }
    }

    /// Repeats everything up to this stamp, and ends.
    pub(crate) fn finish(self, stamp: u64) -> Followed {
        self.upto.send_replace(Some(stamp));
        self.thread.join().expect("the follower works")
    }
}

fn snapshot(text: &str) -> Snapshot {
    let parts: Vec<&str> = text.split(':').collect();
    let running = parts[2].split(',').filter(|xid| !xid.is_empty()).map(|xid| xid.parse().expect("a number"));
    Snapshot { end: parts[1].parse().expect("a number"), running: running.collect() }
}

async fn follow(
    mut client: Client,
    to: &str,
    snapshot: &Snapshot,
    mut wanted: tokio::sync::watch::Receiver<Option<u64>>,
) -> Followed {
    let (report, mut reports) = mpsc::unbounded_channel();
    let mut players = Vec::new();
    for number in 0..PLAYERS {
        let (sender, mut texts) = mpsc::unbounded_channel::<(String, usize)>();
        players.push((sender, false));
        let (player, connection) = tokio_postgres::connect(to, NoTls).await.expect("the target");
        tokio::spawn(connection);
        player.batch_execute("SET session_replication_role = replica").await.expect("a superuser");
        let report = report.clone();
        tokio::spawn(async move {
            while let Some((text, rows)) = texts.recv().await {
                let answers = player.simple_query(&text).await.unwrap_or_else(|error| panic!("{text}: {error:?}"));
                let written: u64 = answers
                    .iter()
                    .map(|answer| match answer {
                        SimpleQueryMessage::CommandComplete(rows) => *rows,
                        _ => 0,
                    })
                    .sum();
                assert_eq!(written, rows as u64, "every repeated write finds its row: {text}");
                report.send(number).expect("the follower waits");
            }
        });
    }
    let mut scheduler: Scheduler<(String, usize)> =
        Scheduler::new(Mode::Rows, PLAYERS, Limits { bytes: u64::MAX, ..Limits::default() });
    let (mut tables, mut followed, mut received) = (HashMap::new(), Followed::default(), 0);
    loop {
        for (number, (texts, busy)) in players.iter_mut().enumerate() {
            if *busy {
                continue;
            }
            let Some(given) = scheduler.next(Player(number as u32)).expect("a schedule") else { continue };
            texts.send(scheduler.payload(given.syncset).clone()).expect("a player");
            *busy = true;
        }
        followed.at_once = followed.at_once.max(players.iter().filter(|(_, busy)| *busy).count());
        let reached = wanted.borrow().is_some_and(|stamp| received >= stamp);
        if scheduler.is_drained() && (reached || followed.over.is_some()) {
            return followed;
        }
        tokio::select! {
            biased;
            Some(number) = reports.recv() => {
                scheduler.done(Player(number)).expect("it was given");
                players[number as usize].1 = false;
                followed.applied += 1;
            }
            _ = wanted.changed(), if wanted.borrow().is_none() => {}
            line = client.next(), if followed.over.is_none() && !reached => match line.expect("a line") {
                Reply::Table(shape) => drop(tables.insert(shape.table, shape)),
                Reply::CaptureOver { why } => followed.over = Some(why),
                Reply::Syncset(rows) => {
                    assert!(rows.stamp > received, "stamps rise");
                    received = rows.stamp;
                    let seen = rows.xid.parse().is_ok_and(|xid| snapshot.sees(xid));
                    if !seen && !rows.rows.is_empty() {
                        scheduler.push_next(syncset(&rows, &tables)).unwrap_or_else(|refused| panic!("{}", refused.error));
                    }
                }
                other => panic!("{other:?}"),
            },
        }
    }
}

fn syncset(rows: &Rows, tables: &HashMap<u32, TableShape>) -> Syncset<(String, usize)> {
    let texts: Vec<String> = rows.rows.iter().map(|row| statement(row, &tables[&row.table])).collect();
    Syncset {
        stamp: Stamp(rows.stamp),
        tokens: rows.tokens.to_vec(),
        statement: None,
        bytes: 1,
        payload: (format!("BEGIN; SET CONSTRAINTS ALL DEFERRED; {}; COMMIT", texts.join("; ")), texts.len()),
    }
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn literal(value: Option<&String>) -> String {
    value.map_or("NULL".into(), |value| format!("'{}'", value.replace('\'', "''")))
}

/// The blind statement that repeats a write.
fn statement(row: &Row, shape: &TableShape) -> String {
    let table = format!("{}.{}", quoted(&shape.schema), quoted(&shape.name));
    let values: Vec<String> = row.values.iter().map(|value| literal(value.as_ref())).collect();
    let columns: Vec<String> = shape.columns.iter().map(|name| quoted(name)).collect();
    let pair = |at: usize| format!("{} = {}", columns[at], values[at]);
    let sets = (0..columns.len()).filter(|at| !shape.key.contains(at) && !shape.insert_only.contains(at));
    let sets = sets.map(pair).collect::<Vec<_>>().join(", ");
    // A table with only key columns is updated to its present values.
    let sets = if sets.is_empty() { pair(shape.key.first().copied().unwrap_or(0)) } else { sets };
    let place = shape.key.iter().copied().map(pair).collect::<Vec<_>>().join(" AND ");
    let insert =
        format!("INSERT INTO {table} ({}) OVERRIDING SYSTEM VALUE VALUES ({})", columns.join(", "), values.join(", "));
    let key: Vec<&str> = shape.key.iter().map(|at| columns[*at].as_str()).collect();
    match row.did {
        Action::Insert => insert,
        Action::Upsert => format!("{insert} ON CONFLICT ({}) DO UPDATE SET {sets}", key.join(", ")),
        Action::Update => format!("UPDATE {table} SET {sets} WHERE {place}"),
        Action::Delete => format!("DELETE FROM {table} WHERE {place}"),
    }
}
