//! Recording: a load as the proxy captures it, from a moment without running transactions.

use super::load::Shop;
use super::servers::ProxiedServers;
use std::process::Stdio;
use std::time::Duration;
use stillpoint_migrate_control::{Client, Reply, Request};
use stillpoint_migrate_engine::Server;
use stillpoint_migrate_engine::statement_replay::{Reader, SourceEvent};

/// Limit for a request to the proxy, and for the rest of a capture to arrive.
const REPLY_TIMEOUT: Duration = Duration::from_secs(300);

/// A recorded load.
#[derive(Debug)]
pub struct Recording {
    pub(super) events: Vec<SourceEvent>,
    /// Checksums of the source's tables after it.
    pub(super) sums: String,
    /// Number of transactions that were committed, as clients and the proxy agree.
    pub transactions: u64,
    /// Number of transactions that wrote.
    pub writing: u64,
    /// Duration of the load, in seconds.
    pub seconds: f64,
}

/// Checksums of all tables; they are equal if the tables hold the same.
pub(super) const SUMS: &str = "SELECT string_agg(s, ' ' ORDER BY s) FROM (\
    SELECT 'c' || count(*) || ':' || sum(hashtextextended(x::text, 0)) AS s FROM customer x UNION ALL \
    SELECT 'i' || count(*) || ':' || sum(hashtextextended(x::text, 0)) FROM item x UNION ALL \
    SELECT 'o' || count(*) || ':' || coalesce(sum(hashtextextended(x::text, 0)), 0) FROM orders x UNION ALL \
    SELECT 'l' || count(*) || ':' || coalesce(sum(hashtextextended(x::text, 0)), 0) FROM line x) t";

/// Copies the shop to the target as the database `base`, and records this many clients for this time.
pub async fn record(servers: &ProxiedServers, clients: usize, think: Duration, seconds: f64) -> Recording {
    let shop = Shop::connect(&servers.conninfo(), clients, think).await;
    let mut capture = Client::connect(&servers.control()).await.expect("reach the proxy");
    let request =
        Request::Capture { tenant: "shop".into(), limit_ms: REPLY_TIMEOUT.as_millis() as u64, statements: true };
    let begun = capture.ask(&request).await.expect("a capture");
    assert!(matches!(begun, Reply::Capturing { .. }), "{begun:?}");
    // No client has begun.
    copy(servers);
    let (last, mut wanted) = tokio::sync::watch::channel(None::<u64>);
    let source = Server::parse("source", &servers.source.conninfo("shop"), None).expect("a connection string");
    let mut reader = Reader::of(&source).await.expect("read the tables");
    let reading = tokio::spawn(async move {
        let mut events = Vec::new();
        loop {
            if wanted.borrow().is_some_and(|last| reader.stamp() >= last) && reader.is_quiet() {
                return events;
            }
            tokio::select! {
                line = capture.next() => {
                    let line = line.expect("a line of the capture");
                    events.extend(reader.take(line).unwrap_or_else(|error| panic!("the capture ended: {error}")));
                }
                _ = wanted.changed(), if wanted.borrow().is_none() => {}
            }
        }
    });
    shop.begin().await;
    let begun = std::time::Instant::now();
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    let (ordered, transactions) = shop.end().await;
    let seconds = begun.elapsed().as_secs_f64();
    let mut control = Client::connect(&servers.control()).await.expect("reach the proxy");
    let reply = control.ask(&Request::Captured { tenant: "shop".into() }).await.expect("an answer");
    let Reply::Captured { stamp, over: None } = reply else { panic!("{reply:?}") };
    last.send_replace(Some(stamp));
    let events =
        tokio::time::timeout(REPLY_TIMEOUT, reading).await.expect("the capture comes to its end").expect("a reader");
    let committed = || {
        events.iter().filter_map(|events| match events {
            SourceEvent::Committed(transaction) => Some(transaction),
            _ => None,
        })
    };
    let writing = committed().filter(|transaction| transaction.wrote()).count() as u64;
    let all = committed().count() as u64;
    assert_eq!((writing, all), (ordered, transactions), "every transaction is captured once");
    Recording { sums: servers.source.sql("shop", SUMS), events, transactions, writing, seconds }
}

fn copy(servers: &ProxiedServers) {
    servers.target.sql("postgres", "DROP DATABASE IF EXISTS base");
    servers.target.sql("postgres", "CREATE DATABASE base");
    let mut dump =
        servers.source.client("pg_dump").args(["-d", "shop"]).stdout(Stdio::piped()).spawn().expect("run pg_dump");
    let out = dump.stdout.take().expect("a pipe");
    let restored = servers
        .target
        .client("psql")
        .args(["-Xq", "-v", "ON_ERROR_STOP=1", "-d", "base"])
        .stdin(out)
        .stdout(Stdio::null())
        .status();
    assert!(restored.expect("run psql").success() && dump.wait().expect("pg_dump ends").success());
    servers.target.sql("base", "ANALYZE");
}
