//! Metrics in Prometheus' text format, with the little HTTP that they need.

use crate::counters::Counters;
use crate::proxy::Proxy;
use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use stillpoint_migrate_control::Activity;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

/// Most bytes of a request's head, which must arrive within `SCRAPE_TIMEOUT`.
const HEAD_BYTES_MAX: usize = 8 << 10;
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most scrapers at a time; at the limit the oldest one makes way.
const SCRAPERS_MAX: usize = 16;

/// Answers each scraper in a task of its own: a silent one does not block the others.
pub(crate) async fn serve(listener: TcpListener, proxy: Arc<Proxy>) {
    let (mut tasks, mut scrapers) = (JoinSet::new(), VecDeque::<AbortHandle>::new());
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                scrapers.retain(|scraper| !scraper.is_finished());
                if scrapers.len() >= SCRAPERS_MAX
                    && let Some(longest) = scrapers.pop_front()
                {
                    longest.abort();
                }
                let proxy = proxy.clone();
                scrapers.push_back(tasks.spawn(async move {
                    let _ = tokio::time::timeout(SCRAPE_TIMEOUT, answer(stream, &proxy)).await;
                }));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
        while tasks.try_join_next().is_some() {}
    }
}

async fn answer(mut stream: TcpStream, proxy: &Proxy) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if head.len() > HEAD_BYTES_MAX || stream.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let (status, body) = match head.split(|b| *b == b' ').nth(1) {
        Some(b"/metrics") => ("200 OK", text(proxy)),
        _ => ("404 Not Found", "see /metrics\n".into()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: \
         close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await
}

/// Text of all metrics.
fn text(proxy: &Proxy) -> String {
    let sum = proxy.sum();
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let Counters { statements, bytes_up, bytes_down } = &sum;
    let mut text = String::new();
    let metrics = [
        ("statements_total", "counter", "Answers of ReadyForQuery.", load(statements)),
        ("bytes_from_clients_total", "counter", "Bytes received from clients.", load(bytes_up)),
        ("bytes_to_clients_total", "counter", "Bytes received for clients.", load(bytes_down)),
        (
            "unnamed_turned_away_total",
            "counter",
            "Connections closed before login to admit other clients.",
            proxy.unnamed.evictions(),
        ),
        (
            "logins_turned_away_total",
            "counter",
            "Logins ended to admit other clients, because their clients did not answer.",
            proxy.logins.evictions(),
        ),
        ("logins", "gauge", "Unauthenticated clients that have named their user.", proxy.logins.count() as u64),
        ("unnamed", "gauge", "Connections that have not named their user.", proxy.unnamed.count() as u64),
        ("standby", "gauge", "1 if another proxy is on standby, else 0.", proxy.standby.taken_by().is_some().into()),
    ];
    for (name, kind, help, value) in metrics {
        let _ = write!(text, "# HELP stillpoint_proxy_{name} {help}\n# TYPE stillpoint_proxy_{name} {kind}\n");
        let _ = writeln!(text, "stillpoint_proxy_{name} {value}");
    }
    let entries = proxy.directory.all();
    text +=
        "# HELP stillpoint_proxy_sessions Sessions by tenant and activity.\n# TYPE stillpoint_proxy_sessions gauge\n";
    for tenant in proxy.tenants() {
        for (name, activity) in [
            ("starting", Activity::Starting),
            ("idle", Activity::Idle),
            ("active", Activity::Active),
            ("in_transaction", Activity::InTransaction),
            ("parked", Activity::Parked),
        ] {
            let count =
                entries.iter().filter(|entry| entry.tenant == tenant.name && entry.activity() == activity).count();
            let _ = writeln!(
                text,
                "stillpoint_proxy_sessions{{tenant=\"{}\",state=\"{name}\"}} {count}",
                tenant.name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
            );
        }
    }
    text
}
