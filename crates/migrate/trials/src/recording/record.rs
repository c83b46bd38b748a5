//! Recording: what a proxy captures of a load, from a moment at which nobody is at work.

use super::front::Front;
use super::load::Shop;
use std::collections::{BTreeSet, HashMap};
use std::process::Stdio;
use std::time::Duration;
use stillpoint_migrate_proxy::control::rows::{Did, Operation, Row, Syncset, TableShape};
use stillpoint_migrate_proxy::control::{Client, Reply, Request};
use stillpoint_migrate_replay::{RunningId, Snapshot, Stamp, Token, Xid};

/// How long a request to the proxy may take, and the rest of a capture to come.
const PATIENCE: Duration = Duration::from_secs(300);

/// A committed transaction, both ways to repeat it.
#[derive(Debug)]
pub(super) struct Transaction {
    pub(super) stamp: Stamp,
    /// None where it wrote nothing.
    pub(super) xid: Option<Xid>,
    pub(super) running: Option<RunningId>,
    pub(super) tokens: Vec<Token>,
    /// What its client sent.
    pub(super) operations: Vec<Operation>,
    /// Blind statements that write its rows.
    pub(super) rows: Vec<String>,
}

/// What happened, in the order in which it was told.
#[derive(Debug)]
pub(super) enum Happened {
    Begins(RunningId),
    Began(RunningId, Snapshot),
    Ended(RunningId),
    Committed(std::sync::Arc<Transaction>),
}

/// What a load did.
#[derive(Debug)]
pub struct Recording {
    pub(super) happened: Vec<Happened>,
    /// What the source's tables hold after it.
    pub(super) sums: String,
    /// Transactions that were committed, as clients and the proxy agree.
    pub transactions: u64,
    /// Those that wrote.
    pub writing: u64,
    /// How long the load ran.
    pub seconds: f64,
}

/// Sums over all tables; equal where they hold the same.
pub(super) const SUMS: &str = "SELECT string_agg(s, ' ') FROM (\
    SELECT 'c' || count(*) || ':' || sum(hashtextextended(x::text, 0)) AS s FROM customer x UNION ALL \
    SELECT 'i' || count(*) || ':' || sum(hashtextextended(x::text, 0)) FROM item x UNION ALL \
    SELECT 'o' || count(*) || ':' || coalesce(sum(hashtextextended(x::text, 0)), 0) FROM orders x UNION ALL \
    SELECT 'l' || count(*) || ':' || coalesce(sum(hashtextextended(x::text, 0)), 0) FROM line x) t";

/// Copies the shop to the target as the database `base`, and records so many clients for so long.
pub async fn record(front: &Front, clients: usize, think: Duration, seconds: f64) -> Recording {
    let shop = Shop::connect(&front.conninfo(), clients, think).await;
    let mut capture = Client::connect(&front.control()).await.expect("reach the proxy");
    let request = Request::Capture { tenant: "shop".into(), limit_ms: PATIENCE.as_millis() as u64, statements: true };
    let begun = capture.ask(&request).await.expect("a capture");
    assert!(matches!(begun, Reply::Capturing { .. }), "{begun:?}");
    // Nobody has begun.
    copy(front);
    let (last, mut wanted) = tokio::sync::watch::channel(None::<u64>);
    let reading = tokio::spawn(async move {
        let mut reader = Reader::default();
        loop {
            if wanted.borrow().is_some_and(|last| reader.stamp >= last) && reader.running.is_empty() {
                return reader.happened;
            }
            tokio::select! {
                line = capture.next() => reader.take(line.expect("a line of the capture")),
                _ = wanted.changed(), if wanted.borrow().is_none() => {}
            }
        }
    });
    shop.begin().await;
    let begun = std::time::Instant::now();
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    let (ordered, transactions) = shop.end().await;
    let seconds = begun.elapsed().as_secs_f64();
    let mut control = Client::connect(&front.control()).await.expect("reach the proxy");
    let reply = control.ask(&Request::Captured { tenant: "shop".into() }).await.expect("an answer");
    let Reply::Captured { stamp, over: None } = reply else { panic!("{reply:?}") };
    last.send_replace(Some(stamp));
    let happened =
        tokio::time::timeout(PATIENCE, reading).await.expect("the capture comes to its end").expect("a reader");
    let committed = || {
        happened.iter().filter_map(|happened| match happened {
            Happened::Committed(transaction) => Some(transaction),
            _ => None,
        })
    };
    let writing = committed().filter(|transaction| transaction.xid.is_some()).count() as u64;
    let all = committed().count() as u64;
    assert_eq!((writing, all), (ordered, transactions), "every transaction is captured once");
    Recording { sums: front.source.sql("shop", SUMS), happened, transactions, writing, seconds }
}

fn copy(front: &Front) {
    front.target.sql("postgres", "DROP DATABASE IF EXISTS base");
    front.target.sql("postgres", "CREATE DATABASE base");
    let mut dump =
        front.source.client("pg_dump").args(["-d", "shop"]).stdout(Stdio::piped()).spawn().expect("run pg_dump");
    let out = dump.stdout.take().expect("a pipe");
    let restored = front
        .target
        .client("psql")
        .args(["-Xq", "-v", "ON_ERROR_STOP=1", "-d", "base"])
        .stdin(out)
        .stdout(Stdio::null())
        .status();
    assert!(restored.expect("run psql").success() && dump.wait().expect("pg_dump ends").success());
    front.target.sql("base", "ANALYZE");
}

#[derive(Default)]
pub(super) struct Reader {
    tables: HashMap<u32, TableShape>,
    running: BTreeSet<u64>,
    /// Of the last transaction that came.
    pub(super) stamp: u64,
    /// Not taken yet.
    pub(super) happened: Vec<Happened>,
}

impl Reader {
    pub(super) fn take(&mut self, line: Reply) {
        match line {
            Reply::Table(shape) => drop(self.tables.insert(shape.table, shape)),
            Reply::Begins { running } => {
                self.running.insert(running);
                self.happened.push(Happened::Begins(RunningId(running)));
            }
            Reply::Began { running, snapshot } => {
                let snapshot = snapshot.parse().unwrap_or_else(|why| panic!("{why}"));
                self.happened.push(Happened::Began(RunningId(running), snapshot));
            }
            Reply::Ended { running } => {
                self.running.remove(&running);
                self.happened.push(Happened::Ended(RunningId(running)));
            }
            Reply::Syncset(set) => self.committed(set),
            other => panic!("the capture ended: {other:?}"),
        }
    }

    fn committed(&mut self, set: Syncset) {
        assert!(set.stamp > self.stamp, "stamps rise");
        self.stamp = set.stamp;
        // Its COMMIT was sent, and it was rolled back.
        let Some(statements) = set.statements else { return };
        self.running.retain(|running| Some(*running) != statements.running);
        let rows: Vec<String> = set.rows.iter().map(|row| blind(row, &self.tables[&row.table])).collect();
        let xid = (!rows.is_empty()).then(|| Xid(set.xid.parse().expect("what writes has a number")));
        self.happened.push(Happened::Committed(std::sync::Arc::new(Transaction {
            stamp: Stamp(set.stamp),
            xid,
            running: statements.running.map(RunningId),
            tokens: set.tokens.into_iter().map(Token::from).collect(),
            operations: statements.operations,
            rows,
        })));
    }
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn literal(value: Option<&String>) -> String {
    value.map_or("NULL".into(), |value| format!("'{}'", value.replace('\'', "''")))
}

/// The statement that writes a row whatever was there.
fn blind(row: &Row, shape: &TableShape) -> String {
    let table = format!("{}.{}", quoted(&shape.schema), quoted(&shape.name));
    let values: Vec<String> = row.values.iter().map(|value| literal(value.as_ref())).collect();
    let columns: Vec<String> = shape.columns.iter().map(|name| quoted(name)).collect();
    let pair = |at: usize| format!("{} = {}", columns[at], values[at]);
    let sets = (0..columns.len()).filter(|at| !shape.key.contains(at)).map(pair).collect::<Vec<_>>().join(", ");
    let place = shape.key.iter().copied().map(pair).collect::<Vec<_>>().join(" AND ");
    match row.did {
        Did::Insert => format!("INSERT INTO {table} ({}) VALUES ({})", columns.join(", "), values.join(", ")),
        Did::Update => format!("UPDATE {table} SET {sets} WHERE {place}"),
        Did::Delete => format!("DELETE FROM {table} WHERE {place}"),
        Did::Upsert => panic!("the shop has no ON CONFLICT"),
    }
}
