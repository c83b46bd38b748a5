//! Servers that accept only encrypted connections: all connections of the manager are encrypted, and verified if that
//! is requested.

use crate::engine::support::{Bench, observer};
use std::path::Path;
use stillpoint_migrate_engine::{Options, Outcome, Server, check, fallback, run};
use stillpoint_testing::postgresql::{Cluster, available};

fn server(side: &str, cluster: &Cluster, tls: &str) -> Server {
    Server::parse(side, &format!("{} {tls}", cluster.conninfo("shop")), None).unwrap()
}

fn verified(root: &Path) -> String {
    // The data directory is for postgres only; the reader is root, the user of these tests.
    format!("sslmode=verify-full sslrootcert={}", root.display())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_moves_over_encrypted_connections_and_back() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.pgbench("shop", &["-i", "-s", "1", "-q"]);
    let plain = Options { share: 0.0, ..bench.options("shop") };
    let without = Options { source: server("source", &bench.source, "sslmode=require"), ..plain.clone() };
    let error = check(&without).await.unwrap_err().to_string();
    assert!(error.contains("source") && error.contains("does not offer TLS"), "{error}");

    let (root, other) = (bench.source.encrypt(), bench.target.encrypt());
    let error = check(&plain).await.unwrap_err().to_string();
    assert!(error.contains("no encryption"), "{error}");
    let wrong = Options { source: server("source", &bench.source, &verified(&other)), ..plain.clone() };
    let error = check(&wrong).await.unwrap_err().to_string();
    assert!(error.starts_with("encrypt the connection to source"), "{error}");

    let options = Options {
        source: server("source", &bench.source, &verified(&root)),
        target: server("target", &bench.target, "sslmode=require"),
        ..plain
    };
    let outcome = run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    bench.target.sql("shop", "INSERT INTO pgbench_history (tid) VALUES (1)");
    fallback(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(bench.source.sql("shop", "SELECT count(*) FROM pgbench_history"), "1");
    bench.assert_clean("shop");
}
