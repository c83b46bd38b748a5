//! Settings that are meant for clients, and that the command's own sessions inherit, change nothing for a migration.

use crate::engine::support::{Bench, observer};
use stillpoint_migrate_engine::{Outcome, fallback, run};
use stillpoint_testing::postgresql::available;

/// Settings of the manager's role on both servers. Each alone ends a migration, or changes what it does.
const INHERITED: [&str; 13] = [
    "idle_session_timeout = '200ms'",
    "idle_in_transaction_session_timeout = '200ms'",
    "statement_timeout = '20ms'",
    "lock_timeout = '1ms'",
    "default_transaction_isolation = serializable",
    "default_transaction_read_only = on",
    "default_transaction_deferrable = on",
    "role = guest",
    "quote_all_identifiers = on",
    "session_replication_role = replica",
    "exit_on_error = on",
    "temp_file_limit = 0",
    "array_nulls = off",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_our_sessions_would_inherit_is_of_no_effect() {
    if !available() {
        return;
    }
    let bench = Bench::start();
    bench.source.sql("postgres", "CREATE DATABASE shop");
    bench.source.pgbench("shop", &["-i", "-s", "3", "-q"]);
    bench
        .source
        .sql("shop", "CREATE TABLE lists (id serial PRIMARY KEY, l text[]); INSERT INTO lists (l) VALUES ('{a,NULL}')");
    for cluster in [&bench.source, &bench.target] {
        cluster.sql("postgres", "CREATE ROLE guest; CREATE ROLE mover SUPERUSER LOGIN");
        for setting in INHERITED {
            cluster.sql("postgres", &format!("ALTER ROLE mover SET {setting}"));
        }
    }
    bench.source.sql("postgres", "ALTER DATABASE shop SET idle_session_timeout = '300ms'");
    let options = bench.options_as("user=mover dbname=shop", None);
    let outcome = run(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(outcome, Outcome::Switched { .. }), "{outcome:?}");
    let (source, target) = bench.sums("shop");
    assert_eq!(source, target);
    bench.target.sql("shop", "INSERT INTO lists (l) VALUES ('{NULL,b}')");
    fallback(&options, observer().0).await.unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(bench.source.sql("shop", "SELECT l[1] IS NULL FROM lists WHERE id = 2"), "t");
    bench.assert_clean("shop");
}
