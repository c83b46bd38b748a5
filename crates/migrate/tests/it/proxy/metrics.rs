//! Metrics for Prometheus.

use crate::proxy::support;
use crate::proxy::support::{Proxy, server};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use stillpoint_testing::{
    port::free_port,
    postgresql::{Cluster, available},
    wait::until,
};
use tokio_postgres::NoTls;

fn get(port: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("connect");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: here\r\n\r\n").expect("ask");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    text
}

/// The value of one line.
fn value(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[test]
fn scrapers_that_say_nothing_keep_none_of_the_others() {
    // The test needs no server, and there is none.
    let (port, server) = (free_port(), free_port());
    let tables = format!("[servers.a]\nhost = \"127.0.0.1\"\nport = {server}\n[tenants.postgres]\nserver = \"a\"\n");
    let _proxy = Proxy::start(&format!("metrics = \"127.0.0.1:{port}\""), &tables);
    let begun = Instant::now();
    let mut silent = Vec::new();
    for _ in 0..40 {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("connect");
        stream.write_all(b"GET /metrics HTTP/1.1\r\n").expect("ask for half of it");
        silent.push(stream);
    }
    let text = get(port, "/metrics");
    assert_eq!(value(&text, "stillpoint_proxy_unnamed"), Some(0), "{text}");
    // One after the other, the proxy would wait 5 s for each.
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
}

#[test]
fn statements_bytes_and_sessions_are_told() {
    if !available() {
        return;
    }
    let cluster = Cluster::start(&[]);
    let port = free_port();
    let top = format!("metrics = \"127.0.0.1:{port}\"");
    let proxy = Proxy::start(&top, &format!("{}[tenants.postgres]\nserver = \"a\"\n", server("a", &cluster)));
    assert!(get(port, "/").starts_with("HTTP/1.1 404 "));
    let before = get(port, "/metrics");
    assert!(before.starts_with("HTTP/1.1 200 OK\r\n"), "{before}");
    assert_eq!(value(&before, "stillpoint_proxy_statements_total"), Some(0));
    support::runtime().block_on(async {
        let (client, connection) = tokio_postgres::connect(&proxy.conninfo("postgres"), NoTls).await.expect("connect");
        tokio::spawn(connection);
        for _ in 0..10 {
            client.batch_execute("SELECT 1").await.expect("a statement");
        }
        client.batch_execute("BEGIN").await.expect("a transaction");
        let counted = move || {
            until("the statements and the transaction to be counted", || {
                let text = get(port, "/metrics");
                let sessions = "stillpoint_proxy_sessions{tenant=\"postgres\",state=\"in_transaction\"}";
                let counted = value(&text, "stillpoint_proxy_statements_total") == Some(11);
                (counted && value(&text, sessions) == Some(1)).then_some(text)
            })
        };
        let text = tokio::task::spawn_blocking(counted).await.expect("an answer");
        assert!(value(&text, "stillpoint_proxy_bytes_to_clients_total").is_some_and(|bytes| bytes > 100), "{text}");
    });
    // Counts of an ended session stay in the totals.
    until("the session to end", || {
        let text = get(port, "/metrics");
        let sessions = "stillpoint_proxy_sessions{tenant=\"postgres\",state=\"in_transaction\"}";
        (value(&text, sessions) == Some(0) && value(&text, "stillpoint_proxy_statements_total") == Some(11))
            .then_some(())
    });
}
